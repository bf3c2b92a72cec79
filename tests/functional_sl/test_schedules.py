"""Schedules against the same rules in Python's own arithmetic."""

from __future__ import annotations

import math

import pytest
import torch

from functional_sl import schedules

BIG = 2**40


def count(value: int) -> torch.Tensor:
    return torch.tensor(value, dtype=torch.int64)


def cosine_rule(s: int, init: float, peak: float, end: float, warmup: int, decay: int) -> float:
    if s < warmup:
        return init + (peak - init) * s / warmup
    if s < decay:
        return end + (peak - end) * (1 + math.cos(math.pi * (s - warmup) / (decay - warmup))) / 2
    return end


@pytest.mark.parametrize(
    "numbers",
    [(0.0, 3e-4, 1.5e-4, 10, 100), (1e-5, 1e-3, 0.0, 0, 7), (0.1, 0.2, 0.3, 5, 5), (0.0, 1.0, 0.0, 0, 0)],
)
def test_warmup_cosine_follows_the_rule(numbers: tuple) -> None:
    schedule = schedules.warmup_cosine(*numbers)
    for s in [*range(105), 2**24 + 1, 2**31 + 1, BIG]:
        value = schedule(count(s))
        assert value.dtype == torch.float64
        assert value.shape == ()
        # One rounding of the cosine, which is at most 1, times the peak.
        assert value.item() == pytest.approx(cosine_rule(s, *numbers), rel=1e-15, abs=1e-16)


def test_named_points_are_exact() -> None:
    schedule = schedules.warmup_cosine(0.0, 1.0, 0.5, warmup_steps=4, decay_steps=12)
    values = [schedule(count(s)).item() for s in (0, 1, 4, 12, 13, BIG)]
    assert values == [0.0, 0.25, 1.0, 0.5, 0.5, 0.5]
    # Half way down the cosine: (1 + 0.5) / 2, one rounding of cos(pi / 2) away.
    assert schedule(count(8)).item() == pytest.approx(0.75, abs=1e-16)


def test_linear_and_constant() -> None:
    ramp = schedules.linear(1.0, 0.1, transition_steps=4)
    assert [ramp(count(s)).item() for s in (0, 2, 4, 5, BIG)] == [1.0, 0.55, 0.1, 0.1, 0.1]
    flat = schedules.constant(0.3)(count(BIG))
    assert flat.item() == 0.3
    assert flat.dtype == torch.float64
    assert flat.shape == ()


def test_long_schedules_tell_neighbours_apart() -> None:
    ramp = schedules.linear(0.0, 1.0, transition_steps=BIG)
    cosine = schedules.warmup_cosine(0.0, 1.0, 0.0, warmup_steps=BIG, decay_steps=BIG + 1)
    for s in (2**24, 2**31, BIG - 2):
        for schedule in (ramp, cosine):
            assert (schedule(count(s + 1)) - schedule(count(s))).item() == 1 / BIG


MAKERS = {
    "constant": schedules.constant(0.3),
    "linear": schedules.linear(0.0, 3e-4, 50),
    "warmup_cosine": schedules.warmup_cosine(0.0, 3e-4, 1e-4, 20, 60),
}


@pytest.mark.parametrize("name", MAKERS)
def test_vmap_and_compile_agree_with_a_loop(name: str) -> None:
    schedule = MAKERS[name]
    counts = torch.tensor([0, 1, 19, 20, 41, 60, BIG], dtype=torch.int64)
    loop = torch.stack([schedule(c) for c in counts])
    # A vectorised cosine may differ from the scalar one in its last place, times a peak of 3e-4.
    torch.testing.assert_close(torch.func.vmap(schedule)(counts), loop, rtol=0, atol=1e-19)
    compiled = torch.compile(schedule, fullgraph=True, backend="aot_eager")
    assert torch.equal(torch.stack([compiled(c) for c in counts]), loop)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: schedules.constant(math.inf), "value=inf must be finite"),
        (lambda: schedules.constant(-1.0), "value=-1.0 must be finite and not negative"),
        (lambda: schedules.linear(0.0, math.nan, 5), "end_value=nan must be finite"),
        (lambda: schedules.linear(0.0, 1.0, 0), "transition_steps=0 must be at least 1"),
        (lambda: schedules.warmup_cosine(0.0, 1.0, 0.0, -1, 5), "warmup_steps=-1 must be finite and not negative"),
        (lambda: schedules.warmup_cosine(0.0, 1.0, 0.0, 6, 5), "warmup_steps=6 exceeds decay_steps=5"),
    ],
)
def test_inconsistent_numbers_are_named(make, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()
