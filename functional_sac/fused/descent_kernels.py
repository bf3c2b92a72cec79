"""The Triton kernel of `descent`: a program takes some rows of one leaf through the whole of it.

A row's norm needs the row alone, so everything is read once and written once. Which program takes what is static: each
leaf has a branch of its own, with its lengths and places as constants. Nothing is added atomically.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

import triton
import triton.language as tl
from torch import Tensor

from functional_sac.networks import NORM_EPS
from functional_sl.kernels import launch
from functional_sl.optim import B1, B2, EPS

TILE = 1024  # elements that a program holds at a time, unless its row is longer
# A kernel reads such constants alone. Rows may be free, have norm one, or norm sqrt(F), alone or with a bias.
_FREE, _UNIT, _SCALE, _PAIR = (tl.constexpr(kind) for kind in range(4))
_B1, _B2, _EPS, _NORM_EPS = (tl.constexpr(number) for number in (B1, B2, EPS, NORM_EPS))


@triton.jit
def _adam(param, vectors, new_vectors, place, start, inside, is_open, step, inverse_root):
    """Moves a tile's moments; returns its parameters before and after, not projected."""
    flat = start + place
    old = tl.load(param + place, mask=inside, other=0.0)
    slope = tl.load(vectors[0] + flat, mask=inside, other=0.0)
    mean = tl.load(vectors[1] + flat, mask=inside, other=0.0)
    square = tl.load(vectors[2] + flat, mask=inside, other=0.0)
    new_mean = mean + (1 - _B1) * (slope - mean)
    new_square = square * _B2 + (1 - _B2) * slope * slope
    tl.store(new_vectors[0] + flat, tl.where(is_open, new_mean, mean), mask=inside)
    tl.store(new_vectors[1] + flat, tl.where(is_open, new_square, square), mask=inside)
    return old, old + new_mean * step / (tl.sqrt(new_square) * inverse_root + _EPS)


@triton.jit
def _settle(new, target, new_target, old, value, place, inside, is_open, AVERAGE: tl.constexpr, TAU: tl.constexpr):
    """Selects a tile of a leaf and moves its target."""
    value = tl.where(is_open, value, old)
    tl.store(new + place, value, mask=inside)
    if AVERAGE:
        behind = tl.load(target + place, mask=inside, other=0.0)
        tl.store(new_target + place, tl.where(is_open, behind + TAU * (value - behind), behind), mask=inside)


@triton.jit
def _rows(
    params, targets, vectors, new, new_targets, new_vectors, row, is_open, step, inverse_root,
    i: tl.constexpr, KIND: tl.constexpr, START: tl.constexpr, ROWS: tl.constexpr, LENGTH: tl.constexpr,
    R: tl.constexpr, C: tl.constexpr, AVERAGE: tl.constexpr, TAU: tl.constexpr,
):  # fmt: skip
    """Takes R rows of leaf i through the update."""
    row += tl.arange(0, R)
    column = tl.arange(0, C)
    place = row[:, None] * LENGTH + column[None, :]
    inside = (row < ROWS)[:, None] & (column < LENGTH)[None, :]
    old, value = _adam(params[i], vectors, new_vectors, place, START, inside, is_open, step, inverse_root)
    square = tl.sum(value * value, 1)
    if KIND == _PAIR:
        start = START + ROWS * LENGTH
        old_bias, bias = _adam(params[i + 1], vectors, new_vectors, place, start, inside, is_open, step, inverse_root)
        square += tl.sum(bias * bias, 1)
    if KIND == _UNIT:
        # NaN must stay, as it does in clamp_min.
        value *= (1.0 / tl.maximum(tl.sqrt(square), _NORM_EPS, propagate_nan=tl.PropagateNan.ALL))[:, None]
    elif KIND != _FREE:
        factor = tl.sqrt(LENGTH / (square + _NORM_EPS))[:, None]
        value *= factor
        if KIND == _PAIR:
            bias *= factor
            _settle(
                new[i + 1], targets[i + 1], new_targets[i + 1], old_bias, bias, place, inside, is_open, AVERAGE, TAU
            )
    _settle(new[i], targets[i], new_targets[i], old, value, place, inside, is_open, AVERAGE, TAU)


# Triton keeps the name `params` of an argument to itself.
@triton.jit
def _descend(
    leaves, targets, vectors, ok, steps, roots, new, new_targets, new_vectors,
    PLAN: tl.constexpr, COUNT: tl.constexpr, AVERAGE: tl.constexpr, TAU: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    is_open = tl.load(ok)
    step = tl.load(steps).to(vectors[1].dtype.element_ty)
    inverse_root = 1.0 / tl.load(roots).to(vectors[1].dtype.element_ty)
    for n in tl.static_range(COUNT):
        if (program >= PLAN[n][0]) & (program < PLAN[n][1]):
            _rows(
                leaves, targets, vectors, new, new_targets, new_vectors, (program - PLAN[n][0]) * PLAN[n][7], is_open,
                step, inverse_root, PLAN[n][2], PLAN[n][3], PLAN[n][4], PLAN[n][5], PLAN[n][6], PLAN[n][7], PLAN[n][8],
                AVERAGE, TAU,
            )  # fmt: skip


def descend(
    names: tuple[str, ...],
    params: Sequence[Tensor],
    target: Sequence[Tensor],
    vectors: tuple[Tensor, Tensor, Tensor],
    numbers: tuple[Tensor, Tensor, Tensor],
    tau: float,
    new: list[Tensor],
) -> list[Tensor]:
    """Launches `descent.descend`.

    Args:
      names: of the leaves, which tell what becomes of them.
      params: the leaves.
      target: likewise, or none.
      vectors: gradient and moments [P].
      numbers: the gate's answer, the step size and the root of the mean square's correction, 0-d.
      tau: weight of the new parameters in the target.
      new: contiguous, take the leaves of the parameters, then those of the target, then both moments.

    Returns:
      `new`.
    """
    vectors = tuple(vector.contiguous() for vector in vectors)
    leaves = [leaf.contiguous() for leaf in (*params, *target)]
    own, plan = len(params), _plan(names, tuple(tuple(leaf.shape) for leaf in params))
    # Without a target the last leaves are those of the parameters, which nobody then reads or writes.
    launch(
        _descend, (plan[-1][1],), tuple(leaves[:own]), tuple(leaves[-own:]), vectors, *numbers, tuple(new[:own]),
        tuple(new[-own - 2 : -2]), tuple(new[-2:]), PLAN=plan, COUNT=len(plan), AVERAGE=bool(target), TAU=tau,
    )  # fmt: skip
    return new


@functools.cache
def _plan(names: tuple[str, ...], shapes: tuple[tuple[int, ...], ...]) -> tuple[tuple[int, ...], ...]:
    """Returns (first program, the one behind the last, leaf, kind, place in [P], rows, length, R, C) of each branch."""
    plan, first, start = [], 0, 0
    for i, (name, shape) in enumerate(zip(names, shapes, strict=True)):
        rows, length = math.prod(shape[:-1]), shape[-1]
        columns = triton.next_power_of_2(length)
        height = max(1, TILE // columns)
        # A bias goes with the scale before it.
        if not name.endswith("/bias"):
            last = first + triton.cdiv(rows, height)
            plan.append((first, last, i, _kind(name).value, start, rows, length, height, columns))
            first = last
        start += rows * length
    return tuple(plan)


def _kind(name: str) -> tl.constexpr:
    field = name.rsplit("/", 1)[-1]
    if field in ("scale", "post_scale"):
        return _PAIR if field == "scale" else _SCALE
    return _UNIT if field.endswith(("w", "w1", "w2")) else _FREE
