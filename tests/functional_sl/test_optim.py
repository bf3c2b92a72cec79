"""Transforms against torch.optim: bit for bit where the docstrings say so, else within a stated tolerance."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from functional_sl import optim, schedules, tree

STEPS = 200
SHAPES = {"b": (7,), "w": (5, 3), "x": (33,)}


def draw(seed: int, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator).to(dtype) for name, shape in SHAPES.items()}


def gradients(params: dict[str, Tensor], step: int) -> dict[str, Tensor]:
    """Noise of four magnitudes, some clipped and some not, plus a pull to the origin."""
    dtype = params["b"].dtype
    return tree.map(lambda n, p: n * 10.0 ** (step % 4 - 3) + 0.01 * p, draw(1000 + step, dtype), params)


def cosine_rate(peak: float, s: int) -> float:
    if s < 20:
        return peak * s / 20
    return peak * (1 + math.cos(math.pi * (s - 20) / 130)) / 2 if s < 150 else 0.0


class Torch:
    """A torch optimiser over the leaves of a tree, with optional clipping and schedule."""

    def __init__(self, make: type, params: Any, lr: float, scheduled: bool, max_norm: float | None, **options: Any):
        self.params = [x.clone().requires_grad_() for x in tree.leaves(params)]
        self.optimizer = make(self.params, lr=1.0 if scheduled else lr, foreach=False, **options)
        rate = (lambda s: cosine_rate(lr, s)) if scheduled else (lambda s: 1.0)
        self.schedule = torch.optim.lr_scheduler.LambdaLR(self.optimizer, rate)
        self.max_norm = max_norm

    def step(self, grads: Any) -> list[Tensor]:
        for p, g in zip(self.params, tree.leaves(grads), strict=True):
            p.grad = g.clone()
        if self.max_norm:
            torch.nn.utils.clip_grad_norm_(self.params, self.max_norm)
        self.optimizer.step()
        self.schedule.step()
        return [p.detach().clone() for p in self.params]

    def moments(self) -> list[list[Tensor]]:
        return [[self.optimizer.state[p][name] for p in self.params] for name in ("exp_avg", "exp_avg_sq")]


def chained(make, lr: float, scheduled: bool, max_norm: float | None, **options: Any) -> optim.Transform:
    rate = schedules.warmup_cosine(0.0, lr, 0.0, 20, 150) if scheduled else lr
    clips = [optim.clip_by_global_norm(max_norm)] if max_norm else []
    return optim.chain(*clips, make(rate, **options))


@pytest.mark.parametrize(("scheduled", "max_norm"), [(False, None), (False, 0.5), (True, None), (True, 0.5)])
@pytest.mark.parametrize("lr", [3e-4, 0.1])
@pytest.mark.parametrize(("b1", "b2", "eps"), [(0.9, 0.999, 1e-8), (0.5, 0.95, 1e-3), (0.0, 0.99, 1e-8)])
def test_adam_is_torchs_bit_for_bit(lr, b1, b2, eps, scheduled, max_norm) -> None:
    params = draw(0)
    torchs = Torch(torch.optim.Adam, params, lr, scheduled, max_norm, betas=(b1, b2), eps=eps)
    transform = chained(optim.adam, lr, scheduled, max_norm, b1=b1, b2=b2, eps=eps)
    state = transform.init(params)
    for step in range(STEPS):
        grads = gradients(params, step)
        expected = torchs.step(grads)
        updates, state = transform.update(grads, state)
        params = optim.apply_updates(params, updates)
        assert tree.bits_equal(tree.leaves(params), expected), f"step {step}"
    assert tree.bits_equal([tree.leaves(state[-1].mu), tree.leaves(state[-1].nu)], torchs.moments())
    assert state[-1].count.item() == STEPS


@pytest.mark.parametrize(("scheduled", "max_norm"), [(False, None), (False, 0.5), (True, None), (True, 0.5)])
@pytest.mark.parametrize(("lr", "weight_decay"), [(3e-4, 1e-2), (0.1, 0.3), (3e-3, 0.0)])
def test_adamw_is_torchs_within_a_unit_in_the_last_place(lr, weight_decay, scheduled, max_norm) -> None:
    params = draw(0)
    torchs = Torch(torch.optim.AdamW, params, lr, scheduled, max_norm, weight_decay=weight_decay)
    transform = chained(optim.adamw, lr, scheduled, max_norm, weight_decay=weight_decay)
    state = transform.init(params)
    different = 0
    for step in range(STEPS):
        grads = gradients(params, step)
        expected = torchs.step(grads)
        updates, state = transform.update(grads, state, params)
        old, new = (
            torch.cat([x.flatten() for x in tree.leaves(t)]) for t in (params, optim.apply_updates(params, updates))
        )
        oracle = torch.cat([x.flatten() for x in expected])
        # The update itself is rounded: at most half a unit of it, then the sum rounds once more.
        unit = torch.finfo(torch.float32).eps * torch.maximum(old.abs(), oracle.abs())
        assert ((new - oracle).abs() <= unit).all(), f"step {step}"
        different += int((new != oracle).sum())
        params = tree.unflatten(tree.flatten(params)[1], expected)
    assert different <= (0 if weight_decay == 0 else 0.02 * STEPS * old.numel())
    assert tree.bits_equal([tree.leaves(state[-1].mu), tree.leaves(state[-1].nu)], torchs.moments())


def test_adamw_mask_leaves_a_leaf_to_plain_adam() -> None:
    params, grads = draw(0), draw(1)
    masked = optim.adamw(0.1, weight_decay=0.5, mask=lambda p: {name: name == "w" for name in p})
    updates, _ = masked.update(grads, masked.init(params), params)
    plain, _ = optim.adam(0.1).update(grads, optim.adam(0.1).init(params))
    decayed, _ = optim.adamw(0.1, weight_decay=0.5).update(grads, masked.init(params), params)
    assert tree.bits_equal(updates, {"b": plain["b"], "w": decayed["w"], "x": plain["x"]})
    # 1 - 0.1 * 0.5 = 0.95 of each parameter remains beside Adam's own step.
    torch.testing.assert_close(decayed["w"], plain["w"] - 0.05 * params["w"], rtol=0, atol=1e-6)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_sgd_is_torchs_within_rounding(momentum: float) -> None:
    params = draw(0)
    torchs = Torch(torch.optim.SGD, params, 0.05, True, None, momentum=momentum)
    transform = chained(optim.sgd, 0.05, True, None, momentum=momentum)
    state = transform.init(params)
    for step in range(STEPS):
        grads = gradients(params, step)
        expected = torchs.step(grads)
        updates, state = transform.update(grads, state)
        params = optim.apply_updates(params, updates)
        # torch rounds product and sum at once, we one after the other: 200 units of 6e-8 at parameters near 1.
        torch.testing.assert_close(tree.leaves(params), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("scale", "max_norm"), [(1e-3, 1.0), (1.0, 1.0), (1e3, 0.3), (1e-6, 1e-6)])
def test_clipping_is_torchs_bit_for_bit(scale: float, max_norm: float) -> None:
    grads = tree.map(lambda g: g * scale, draw(2))
    holders = [torch.zeros_like(g).requires_grad_() for g in tree.leaves(grads)]
    for holder, g in zip(holders, tree.leaves(grads), strict=True):
        holder.grad = g.clone()
    torch.nn.utils.clip_grad_norm_(holders, max_norm)
    clip = optim.clip_by_global_norm(max_norm)
    clipped, _ = clip.update(grads, clip.init(grads))
    assert tree.bits_equal(tree.leaves(clipped), [h.grad for h in holders])


def test_clipping_worked_by_hand() -> None:
    clip = optim.clip_by_global_norm(1.0)
    # A norm of 5 shrinks to max_norm * 5 / (5 + 1e-6).
    vector, _ = clip.update(torch.tensor([3.0, 4.0]), clip.init(None))
    torch.testing.assert_close(vector, torch.tensor([0.6, 0.8]), rtol=1e-6, atol=0)
    broken, _ = clip.update(torch.tensor([1.0, math.nan]), clip.init(None))
    assert broken.isnan().all()


TRANSFORMS = {
    "adam": optim.adam(schedules.warmup_cosine(0.0, 1e-2, 0.0, 3, 8)),
    "adamw": optim.chain(optim.clip_by_global_norm(1.0), optim.adamw(1e-2, weight_decay=0.1)),
    "sgd": optim.sgd(schedules.linear(1e-2, 0.0, 5), momentum=0.9),
}


def run(transform: optim.Transform, update, params: Any, steps: int) -> tuple[Any, Any]:
    state = transform.init(params)
    for step in range(steps):
        updates, state = update(gradients(params, step), state, params)
        params = optim.apply_updates(params, updates)
    return params, state


@pytest.mark.parametrize("name", TRANSFORMS)
def test_vmap_is_a_loop_bit_for_bit(name: str) -> None:
    transform = TRANSFORMS[name]
    lanes = [draw(seed) for seed in range(3)]
    states, params = [transform.init(p) for p in lanes], tree.stack(lanes)
    state = tree.stack(states)
    for step in range(10):
        grads = [gradients(p, 10 * step + i) for i, p in enumerate(lanes)]
        for i, g in enumerate(grads):
            updates, states[i] = transform.update(g, states[i], lanes[i])
            lanes[i] = optim.apply_updates(lanes[i], updates)
        updates, state = torch.func.vmap(transform.update)(tree.stack(grads), state, params)
        params = optim.apply_updates(params, updates)
        assert tree.bits_equal((params, state), (tree.stack(lanes), tree.stack(states)))


@pytest.mark.parametrize("name", TRANSFORMS)
def test_compiles_as_one_graph(name: str) -> None:
    transform = TRANSFORMS[name]
    compiled = torch.compile(transform.update, fullgraph=True, backend="aot_eager")
    assert tree.bits_equal(run(transform, compiled, draw(0), 5), run(transform, transform.update, draw(0), 5))


@pytest.mark.parametrize("name", TRANSFORMS)
def test_update_is_pure_and_keeps_dtypes(name: str) -> None:
    transform = TRANSFORMS[name]
    params = draw(0, torch.float64)
    state = transform.init(params)
    assert tree.overlapping((params, state)) is None
    before = tree.clone((params, state))
    updates, new = transform.update(draw(1, torch.float64), state, params)
    assert tree.bits_equal((params, state), before)
    assert {x.dtype for x in tree.leaves(updates)} == {torch.float64}
    assert [x.dtype for x in tree.leaves(new)] == [x.dtype for x in tree.leaves(state)]


@pytest.mark.parametrize("count", [2**24, 2**31 - 1])
def test_counts_beyond_float32_and_int32_go_on(count: int) -> None:
    transform = optim.adam(schedules.linear(0.0, 1.0, 2**32))
    g = torch.tensor([1.0, -1.0])
    state = optim.AdamState(count=torch.tensor(count), mu=g, nu=g * g)
    for _ in range(3):
        updates, state = transform.update(g, state)
    assert state.count.item() == count + 3
    assert state.count.dtype == torch.int64
    # Both bias corrections are 1 by now: the step is the rate after two steps, count + 2 of 2^32.
    torch.testing.assert_close(updates, -g * (count + 2) / 2**32, rtol=1e-6, atol=0)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: optim.adam(-1.0), "value=-1.0 must be finite and not negative"),
        (lambda: optim.adam(0.1, b2=1.0), r"adam: b2=1.0 must lie in \[0, 1\)"),
        (lambda: optim.adamw(0.1, weight_decay=-0.1), "adamw: weight_decay=-0.1"),
        (lambda: optim.sgd(0.1, momentum=1.0), "sgd: momentum=1.0"),
        (lambda: optim.clip_by_global_norm(0.0), "max_norm=0.0 must be positive"),
        (lambda: optim.adamw(0.1).update(draw(0), optim.adamw(0.1).init(draw(0))), "adamw: update needs the param"),
    ],
)
def test_bad_numbers_are_named(make, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize(
    "transform", [optim.adam(0.1), optim.adamw(0.1), optim.sgd(0.1, momentum=0.9), optim.sgd(0.1)],
    ids=["adam", "adamw", "momentum", "sgd"],
)  # fmt: skip
def test_a_scalar_keeps_its_type(transform: optim.Transform) -> None:
    """A 0-d float64 rate would promote a 0-d float32 leaf; the update is that of a leaf [1]."""
    params = {"scalar": torch.tensor(2.0), "vector": torch.tensor([2.0])}
    state = transform.init(params)
    for _ in range(3):
        updates, state = transform.update(tree.map(torch.sin, params), state, params)
        params = optim.apply_updates(params, updates)
    assert {leaf.dtype for leaf in tree.leaves((params, updates, state))} == {torch.float32, torch.int64}
    torch.testing.assert_close(params["scalar"], params["vector"][0], rtol=1e-6, atol=0)
