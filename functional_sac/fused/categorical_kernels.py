"""The Triton kernels of `categorical`: a program takes a few whole rows through everything.

The atoms of a row move by one affine map, so that a bin gets mass from a few neighbours alone; what is clipped goes to
the first and the last bin as a sum. Nothing is added atomically.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from functional_sac.fused import row_parts
from functional_sl.kernels import launch


@triton.jit
def _softmax(logits, bias, row, column, rows, bins, W: tl.constexpr):
    """Returns a tile of logits less the largest of their row, their exponentials, and those' sum [R]."""
    # Whole rows, which are loaded in wide words, where the number of bins would break them up.
    mask = (row < rows)[:, None] & (column < W)[None, :]
    value = tl.load(logits + row[:, None] * W + column[None, :], mask=mask, other=0.0).to(tl.float32)
    value += tl.load(bias + column, mask=column < bins, other=0.0)[None, :]
    value = tl.where((column < bins)[None, :], value, float("-inf"))
    value -= tl.max(value, 1)[:, None]
    weight = tl.exp(value)
    return value, weight, tl.sum(weight, 1)


@triton.jit
def _target(
    logits, bias, reward, terminated, entropy_term, row, column, rows, bins, minimum, maximum, width, discount,
    W: tl.constexpr, NEAR: tl.constexpr,
):  # fmt: skip
    """Returns a tile of projected targets of the lower one of the two target critics."""
    exists, bin = row < rows, column.to(tl.float32)[None, :]
    _, first, first_sum = _softmax(logits, bias, row, column, rows, bins, W)
    _, second, second_sum = _softmax(logits + rows * W, bias + bins, row, column, rows, bins, W)
    atoms = minimum + bin * width
    other = tl.sum(second * atoms, 1) / second_sum < tl.sum(first * atoms, 1) / first_sum
    scale = (1.0 / tl.where(other, second_sum, first_sum))[:, None]
    probs = tl.where(other[:, None], second, first) * scale
    gained = tl.load(reward + row, mask=exists, other=0.0).to(tl.float32)[:, None]
    soft = tl.load(entropy_term + row, mask=exists, other=0.0).to(tl.float32)[:, None]
    terminal = (tl.load(terminated + row, mask=exists, other=0) != 0)[:, None]
    # Atom j lands at `origin + discount * j`, counted in bins, before it is clipped. A bin has NEAR atoms around it,
    # the first of which lands less than one bin below; what lands further out goes to the first and the last bin.
    origin, last, rate = (gained - discount * soft + (discount - 1.0) * minimum) / width, bins - 1.0, 1.0 / discount
    index = tl.floor((bin - 1.0 - origin) * rate) + 1.0
    below = tl.where(bin < tl.floor((-1.0 - origin) * rate) + 1.0, probs, 0.0)
    above = tl.where(bin > tl.floor((last - 1.0 - origin) * rate) + NEAR, probs, 0.0)
    mass = tl.where(bin == 0.0, tl.sum(below, 1)[:, None], 0.0)
    mass += tl.where(bin == last, tl.sum(above, 1)[:, None], 0.0)
    for _ in tl.range(0, NEAR, loop_unroll_factor=4):
        there = (index >= 0.0) & (index <= last)
        near = tl.gather(probs, tl.where(there, index, 0.0).to(tl.int32), 1)
        landed = tl.minimum(tl.maximum(origin + discount * index, 0.0), last)
        mass += tl.where(there, near * tl.maximum(1.0 - tl.abs(landed - bin), 0.0), 0.0)
        index += 1.0
    landed = (tl.minimum(tl.maximum(gained, minimum), maximum) - minimum) / width
    mass = tl.where(terminal, tl.maximum(1.0 - tl.abs(landed - bin), 0.0), mass)
    # What is not finite must reach every bin: it closes the gate.
    return tl.where(bin <= last, mass + 0.0 * (gained + soft + scale), 0.0)


@triton.jit
def _over_rows(x, scratch, column, R: tl.constexpr, K: tl.constexpr):
    """Returns the sums [K] over a tile's rows through memory: rows of several warps would share a bank otherwise."""
    tl.store(scratch + tl.arange(0, R)[:, None] * K + column[None, :], x)
    tl.debug_barrier()
    sums = tl.load(scratch + column)
    for row in tl.static_range(1, R):
        sums += tl.load(scratch + row * K + column)
    return sums


@triton.jit
def _loss(
    logits, bias, target_bias, reward, terminated, entropy_term, part, dlogits, scratch, dbias, rows, bins,
    minimum, maximum, width, discount, factor, W: tl.constexpr, NEAR: tl.constexpr, R: tl.constexpr, K: tl.constexpr,
):  # fmt: skip
    row, column = tl.program_id(0) * R + tl.arange(0, R), tl.arange(0, K)
    exists, inside = (row < rows)[:, None], (column < bins)[None, :]
    probs = _target(
        logits + 2 * rows * W, target_bias, reward, terminated, entropy_term, row, column, rows, bins,
        minimum, maximum, width, discount, W, NEAR,
    )  # fmt: skip
    total = tl.sum(probs, 1)
    found = tl.zeros((R,), tl.float32)
    for member in tl.static_range(2):
        value, weight, weights = _softmax(logits + member * rows * W, bias + member * bins, row, column, rows, bins, W)
        found += total * tl.log(weights) - tl.sum(tl.where(inside, probs * value, 0.0), 1)
        change = tl.where(inside & exists, (weight * (total / weights)[:, None] - probs) * factor, 0.0)
        place = dlogits + ((member * rows + row) * W)[:, None] + column[None, :]
        tl.store(place, change.to(dlogits.dtype.element_ty), mask=exists & (column < W)[None, :])
        number = tl.program_id(0) * 2 + member
        sums = _over_rows(change, scratch + number * R * K, column, R, K)
        tl.store(dbias + number * bins + column, sums, mask=column < bins)
    tl.store(part + tl.program_id(0), tl.sum(tl.where(row < rows, found, 0.0), 0) * factor)


@triton.jit
def _lower_value(
    logits, bias, lower, dlogits, rows, bins, minimum, width, W: tl.constexpr, R: tl.constexpr, K: tl.constexpr
):  # fmt: skip
    row, column = tl.program_id(0) * R + tl.arange(0, R), tl.arange(0, K)
    atoms = (minimum + column * width)[None, :]
    _, first, first_sum = _softmax(logits, bias, row, column, rows, bins, W)
    _, second, second_sum = _softmax(logits + rows * W, bias + bins, row, column, rows, bins, W)
    one, two = tl.sum(first * atoms, 1) / first_sum, tl.sum(second * atoms, 1) / second_sum
    # NaN of one is NaN of both: value and derivative.
    least = tl.minimum(one, two, propagate_nan=tl.PropagateNan.ALL)
    ones, twos = tl.where(one == least, 1.0, 0.0), tl.where(two == least, 1.0, 0.0)
    share = 1.0 / (ones + twos) + 0.0 * least
    tl.store(lower + row, least, mask=row < rows)
    mask = (row < rows)[:, None] & (column < W)[None, :]
    place = dlogits + (row * W)[:, None] + column[None, :]
    # Behind the bins the exponentials are zero, and NaN where the row has one.
    inside = (column < bins)[None, :]
    change = (ones * share / first_sum)[:, None] * first * (atoms - one[:, None])
    tl.store(place, tl.where(inside, change, 0.0).to(dlogits.dtype.element_ty), mask=mask)
    change = (twos * share / second_sum)[:, None] * second * (atoms - two[:, None])
    tl.store(place + rows * W, tl.where(inside, change, 0.0).to(dlogits.dtype.element_ty), mask=mask)


def loss(
    tensors: tuple[Tensor, ...], minimum: float, maximum: float, discount: float, size: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Launches `categorical.loss` on its six tensors, with parts of `size` rows, a power of two."""
    logits, bias, target_bias, reward, terminated, entropy_term = tensors
    (_, rows, width), bins = logits.shape, bias.shape[-1]
    count, columns = row_parts.count(rows, size), triton.next_power_of_2(width)
    shapes = ((), (2, size, columns), bias.shape)
    part, scratch, dbias = (torch.empty(count, *s, dtype=torch.float32, device=bias.device) for s in shapes)
    dlogits = torch.empty(2, rows, width, dtype=logits.dtype, device=logits.device)
    given = (t.contiguous() for t in (logits, bias, target_bias, reward, terminated.view(torch.uint8), entropy_term))
    step = (maximum - minimum) / (bins - 1)
    launch(
        _loss, (count,), *given, part, dlogits, scratch, dbias, rows, bins, minimum, maximum, step, discount,
        1 / (2 * rows), W=width, NEAR=math.ceil(2 / discount) + 1, R=size, K=columns, num_warps=8,
    )  # fmt: skip
    return part, dlogits, dbias


def lower_value(logits: Tensor, bias: Tensor, minimum: float, maximum: float) -> tuple[Tensor, Tensor]:
    """Launches `categorical.lower_value`."""
    (_, rows, width), bins, size = logits.shape, bias.shape[-1], 8
    lower = torch.empty(rows, dtype=torch.float32, device=bias.device)
    dlogits = torch.empty(logits.shape, dtype=logits.dtype, device=logits.device)
    launch(
        _lower_value, (triton.cdiv(rows, size),), logits.contiguous(), bias.contiguous(), lower, dlogits, rows, bins,
        minimum, (maximum - minimum) / (bins - 1), W=width, R=size, K=triton.next_power_of_2(width), num_warps=8,
    )  # fmt: skip
    return lower, dlogits
