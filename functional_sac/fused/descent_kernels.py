"""The Triton kernel of `descent`: a program takes some rows of one leaf through the whole of it.

A row's norm needs the row alone, so everything is read once and written once. Which program takes what is static: each
leaf has a branch of its own, with its lengths and places as constants. Nothing is added atomically.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from functional_sac.networks import NORM_EPS
from functional_sl.kernels import launch, matrices
from functional_sl.optim import B1, B2, EPS

TILE = 1024  # elements that a program holds at a time, unless its row is longer
# A kernel reads such constants alone. Rows may be free, have norm one, or norm sqrt(F), alone or with a bias.
_FREE, _UNIT, _SCALE, _PAIR = (tl.constexpr(kind) for kind in range(4))
_B1, _B2, _EPS, _NORM_EPS = (tl.constexpr(number) for number in (B1, B2, EPS, NORM_EPS))


@triton.jit
def _adam(
    param, gradient, vectors, new_vectors, place, start, inside, is_open, step, inverse_root, RANKS: tl.constexpr
):  # fmt: skip
    """Moves a tile's moments; returns its parameters before and after, not projected."""
    flat = start + place
    old = tl.load(param + place, mask=inside, other=0.0)
    slope = tl.load(gradient, mask=inside, other=0.0).to(old.dtype)
    if RANKS > 1:
        slope = slope / RANKS
    mean = tl.load(vectors[0] + flat, mask=inside, other=0.0)
    square = tl.load(vectors[1] + flat, mask=inside, other=0.0)
    new_mean = mean + (1 - _B1) * (slope - mean)
    new_square = square * _B2 + (1 - _B2) * slope * slope
    tl.store(new_vectors[0] + flat, tl.where(is_open, new_mean, mean), mask=inside)
    tl.store(new_vectors[1] + flat, tl.where(is_open, new_square, square), mask=inside)
    return old, old + new_mean * step / (tl.sqrt(new_square) * inverse_root + _EPS)


@triton.jit
def _copy(copy, value, row, column, inside, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """Stores a tile in the type of the copy, with zeros up to its width."""
    wanted = (row < ROWS)[:, None] & (column < WIDTH)[None, :]
    value = tl.where(inside, value, 0.0).to(copy.dtype.element_ty)
    tl.store(copy + row[:, None] * WIDTH + column[None, :], value, mask=wanted)


@triton.jit
def _settle(
    new, target, new_target, copy, old, value, row, slot, column, is_open, ROWS: tl.constexpr, LENGTH: tl.constexpr,
    SLOTS: tl.constexpr, WIDTH: tl.constexpr, AVERAGE: tl.constexpr, TAU: tl.constexpr,
):  # fmt: skip
    """Selects a tile of a leaf and moves its target; copies both where they have a width."""
    place = row[:, None] * LENGTH + column[None, :]
    inside = (row < ROWS)[:, None] & (column < LENGTH)[None, :]
    value = tl.where(is_open, value, old)
    tl.store(new + place, value, mask=inside)
    if WIDTH > 0:
        _copy(copy, value, slot, column, inside, SLOTS, WIDTH)
    if AVERAGE:
        behind = tl.load(target + place, mask=inside, other=0.0)
        behind = tl.where(is_open, behind + TAU * (value - behind), behind)
        tl.store(new_target + place, behind, mask=inside)
        if WIDTH > 0:
            _copy(copy + SLOTS * WIDTH, behind, slot, column, inside, SLOTS, WIDTH)


@triton.jit
def _rows(
    params, targets, gradients, vectors, new, new_targets, new_vectors, copies, slot, is_open, step, inverse_root,
    i: tl.constexpr, KIND: tl.constexpr, START: tl.constexpr, ROWS: tl.constexpr, LENGTH: tl.constexpr,
    WIDTH: tl.constexpr, HEIGHT: tl.constexpr, MATRIX: tl.constexpr, ROW: tl.constexpr, COLUMN: tl.constexpr,
    R: tl.constexpr, C: tl.constexpr, PADDED: tl.constexpr, AVERAGE: tl.constexpr, TAU: tl.constexpr,
    RANKS: tl.constexpr,
):  # fmt: skip
    """Takes R rows of leaf i through the update, by their slots in the copy, of which some may stay empty."""
    slot += tl.arange(0, R)
    within = slot % PADDED
    row = tl.where(within < HEIGHT, slot // PADDED * HEIGHT + within, ROWS) if PADDED > HEIGHT else slot
    SLOTS: tl.constexpr = ROWS // HEIGHT * PADDED
    column = tl.arange(0, C)
    place = row[:, None] * LENGTH + column[None, :]
    inside = (row < ROWS)[:, None] & (column < LENGTH)[None, :]
    source = ((row // HEIGHT) * MATRIX + (row % HEIGHT) * ROW)[:, None] + (column * COLUMN)[None, :]
    old, value = _adam(
        params[i], gradients[i] + source, vectors, new_vectors, place, START, inside, is_open, step, inverse_root, RANKS
    )
    square = tl.sum(value * value, 1)
    if KIND == _PAIR:
        start = START + ROWS * LENGTH
        old_bias, bias = _adam(
            params[i + 1], gradients[i + 1] + place, vectors, new_vectors, place, start, inside, is_open, step,
            inverse_root, RANKS,
        )  # fmt: skip
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
                new[i + 1], targets[i + 1], new_targets[i + 1], copies[i + 1], old_bias, bias, row, slot,
                column, is_open, ROWS, LENGTH, SLOTS, WIDTH, AVERAGE, TAU,
            )  # fmt: skip
    _settle(
        new[i], targets[i], new_targets[i], copies[i], old, value, row, slot, column, is_open, ROWS, LENGTH, SLOTS,
        WIDTH, AVERAGE, TAU,
    )  # fmt: skip


# Triton keeps the name `params` of an argument to itself.
@triton.jit
def _descend(
    leaves, targets, gradients, vectors, ok, steps, roots, new, new_targets, new_vectors, copies,
    PLAN: tl.constexpr, COUNT: tl.constexpr, AVERAGE: tl.constexpr, TAU: tl.constexpr, RANKS: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    is_open = tl.load(ok)
    step = tl.load(steps).to(vectors[0].dtype.element_ty)
    inverse_root = 1.0 / tl.load(roots).to(vectors[0].dtype.element_ty)
    for n in tl.static_range(COUNT):
        if (program >= PLAN[n][0]) & (program < PLAN[n][1]):
            _rows(
                leaves, targets, gradients, vectors, new, new_targets, new_vectors, copies,
                (program - PLAN[n][0]) * PLAN[n][12], is_open, step, inverse_root, PLAN[n][2], PLAN[n][3], PLAN[n][4],
                PLAN[n][5], PLAN[n][6], PLAN[n][7], PLAN[n][8], PLAN[n][9], PLAN[n][10], PLAN[n][11], PLAN[n][12],
                PLAN[n][13], PLAN[n][14], AVERAGE, TAU, RANKS,
            )  # fmt: skip


def descend(
    names: tuple[str, ...],
    params: Sequence[Tensor],
    target: Sequence[Tensor],
    gradients: Sequence[Tensor],
    moments: tuple[Tensor, Tensor],
    numbers: Sequence[Tensor],
    copies: list[Tensor],
    tau: float,
    ranks: int,
) -> list[Tensor]:
    """Launches `descent.descend`.

    Args:
      names: of the leaves, which tell what becomes of them.
      params: the leaves.
      target: likewise, or none.
      gradients: likewise, in types and places of their own, summed over ranks.
      moments: [P].
      numbers: the gate's answer, the step size and the root of the mean square's correction, 0-d.
      copies: take leaves of the parameters, then of the target, see `alignment.aligned`; or none.
      tau: weight of the new parameters in the target.
      ranks: how many the gradients are summed over.

    Returns:
      Both moments, then the leaves of the parameters, those of the target and the copies.
    """
    moments, leaves = ([tensor.contiguous() for tensor in tensors] for tensors in (moments, (*params, *target)))
    new_moments, new = ([torch.empty_like(tensor) for tensor in tensors] for tensors in (moments, leaves))
    gradients = [_slope(name, leaf) for name, leaf in zip(names, gradients, strict=True)]
    own, places = len(params), tuple((leaf.shape[1], *leaf.stride()) for leaf in gradients)
    # Without a target the last leaves are those of the parameters, which nobody then reads or writes; so with copies.
    rooms, sizes = zip(*_rooms(names, new[:own], copies), strict=True)
    plan = _plan(names, tuple(tuple(leaf.shape) for leaf in params), sizes, places)
    launch(
        _descend, (plan[-1][1],), tuple(leaves[:own]), tuple(leaves[-own:]), tuple(gradients), tuple(moments), *numbers,
        tuple(new[:own]), tuple(new[-own:]), tuple(new_moments), rooms, PLAN=plan, COUNT=len(plan),
        AVERAGE=bool(target), TAU=tau, RANKS=ranks,
    )  # fmt: skip
    return [*new_moments, *new, *copies]


def _slope(name: str, gradient: Tensor) -> Tensor:
    """Returns a leaf's gradient as [N, rows, length], where it lies; a scale and its bias must lie alike."""
    alike = _kind(name).value == _PAIR.value or name.endswith("/bias")
    return matrices(gradient.contiguous() if alike else gradient)


def _rooms(
    names: tuple[str, ...], leaves: Sequence[Tensor], copies: list[Tensor]
) -> list[tuple[Tensor, tuple[int, int]]]:
    """Returns what takes each leaf's copy, its width, and as how many rows a matrix lies there if they are more.

    Heads share the last copy, with the padding behind the last of them. Without a copy the width is 0.
    """
    rooms = [(leaf, (0, 0)) for leaf in leaves]
    if copies:
        *others, free = copies
        rooms[: len(others)] = [(copy, (copy.shape[-1], 0)) for copy in others]
        heads = [i for i, name in enumerate(names) if "/" not in name and name.endswith("w")]
        for i in heads:
            rows = free.shape[1] if i == heads[-1] else leaves[i].shape[-2]
            rooms[i], free = (free, (free.shape[-1], rows)), free[:, rows:]
    return rooms


@functools.cache
def _plan(
    names: tuple[str, ...],
    shapes: tuple[tuple[int, ...], ...],
    sizes: tuple[tuple[int, int], ...],
    places: tuple[tuple[int, ...], ...],
) -> tuple[tuple[int, ...], ...]:
    """Returns what each branch takes, as tuples of constants.

    They are the first program and the one behind the last, leaf, kind, place in [P], rows, length, width of the copy or
    0, rows of a matrix of the gradient and its strides, the rows and columns of a tile, and rows of a matrix there.
    """
    plan, first, start = [], 0, 0
    for i, (name, shape) in enumerate(zip(names, shapes, strict=True)):
        rows, length = math.prod(shape[:-1]), shape[-1]
        width, padded = sizes[i][0], sizes[i][1] or places[i][0]
        columns = triton.next_power_of_2(max(length, width))
        height = max(1, TILE // columns)
        # A bias goes with the scale before it.
        if not name.endswith("/bias"):
            last = first + triton.cdiv(rows // places[i][0] * padded, height)
            at = (first, last, i, _kind(name).value, start)
            plan.append((*at, rows, length, width, *places[i], height, columns, padded))
            first = last
        start += rows * length
    return tuple(plan)


def _kind(name: str) -> tl.constexpr:
    field = name.rsplit("/", 1)[-1]
    if field in ("scale", "post_scale"):
        return _PAIR if field == "scale" else _SCALE
    return _UNIT if field.endswith(("w", "w1", "w2")) else _FREE
