"""The dynamic loss scale against torch's own update rule."""

from __future__ import annotations

import pytest
import torch

from functional_sl import loss_scale, tree

FINITE, OVERFLOW = torch.tensor(True), torch.tensor(False)


def random_series(length: int, probability: float) -> torch.Tensor:
    return torch.rand(length, generator=torch.Generator().manual_seed(3)) < probability


@pytest.mark.parametrize("factors", [(2.0, 0.5), (1.7, 0.3)])
@pytest.mark.parametrize("interval", [1, 3, 7])
def test_follows_torch_within_the_bounds(factors: tuple[float, float], interval: int) -> None:
    growth, backoff = factors
    scaler = loss_scale.dynamic(1024.0, growth, backoff, interval, min_scale=1e-20, max_scale=1e30)
    state = scaler.init()
    oracle, tracker = torch.tensor(1024.0), torch.tensor(0, dtype=torch.int32)
    for finite in random_series(100, 0.8):
        torch._amp_update_scale_(oracle, tracker, (~finite).float(), growth, backoff, interval)
        state = scaler.update(state, finite)
        assert torch.equal(state.scale, oracle)
        assert state.growth == tracker
    assert state.scale.dtype == torch.float32
    assert state.growth.dtype == torch.int64


def test_never_leaves_its_bounds() -> None:
    scaler = loss_scale.dynamic(8.0, growth_interval=1, min_scale=2.0, max_scale=16.0)
    state, seen = scaler.init(), []
    for finite in [FINITE, FINITE, FINITE, OVERFLOW, OVERFLOW, OVERFLOW, OVERFLOW, FINITE]:
        state = scaler.update(state, finite)
        seen.append(state.scale.item())
    assert seen == [16.0, 16.0, 16.0, 8.0, 4.0, 2.0, 2.0, 4.0]


def test_an_overflow_starts_the_row_anew() -> None:
    scaler = loss_scale.dynamic(8.0, growth_interval=3)
    state, seen = scaler.init(), []
    for finite in [FINITE, FINITE, OVERFLOW, FINITE, FINITE, FINITE, FINITE]:
        state = scaler.update(state, finite)
        seen.append((state.scale.item(), state.growth.item()))
    assert seen == [(8.0, 1), (8.0, 2), (4.0, 0), (4.0, 1), (4.0, 2), (8.0, 0), (8.0, 1)]


def test_vmap_and_compile_agree_with_a_loop() -> None:
    scaler = loss_scale.dynamic(64.0, growth_interval=2, max_scale=128.0)
    series = random_series(60, 0.7).reshape(20, 3)
    lanes = [scaler.init() for _ in range(3)]
    batched = compiled_state = tree.stack(lanes)
    mapped = torch.func.vmap(scaler.update)
    compiled = torch.compile(mapped, fullgraph=True, backend="aot_eager")
    for finite in series:
        lanes = [scaler.update(lane, ok) for lane, ok in zip(lanes, finite, strict=True)]
        batched, compiled_state = mapped(batched, finite), compiled(compiled_state, finite)
        assert tree.bits_equal(batched, tree.stack(lanes))
        assert tree.bits_equal(compiled_state, batched)


@pytest.mark.parametrize(
    ("numbers", "message"),
    [
        ({"init_scale": 0.5}, "min_scale=1.0, init_scale=0.5"),
        ({"max_scale": float("inf")}, "max_scale=inf"),
        ({"growth_factor": 1.0}, "growth_factor=1.0"),
        ({"backoff_factor": 1.0}, "backoff_factor=1.0"),
        ({"growth_interval": 0}, "growth_interval=0"),
    ],
)
def test_bad_numbers_are_named(numbers: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        loss_scale.dynamic(**numbers)
