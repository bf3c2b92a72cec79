"""The Triton kernels of `categorical`: a program takes a few whole rows through everything.

The atoms of a row move by one affine map, so that a bin gets mass from a few neighbours alone, which the logits are
read anew for; what is clipped goes to the first and the last bin as a sum. Nothing is added atomically.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from functional_sac import row_parts


@triton.jit
def _log_probs(logits, bias, row, column, rows, bins, W: tl.constexpr):
    """Returns a tile of log-probabilities, minus infinity behind the bins, and what was subtracted [R]."""
    inside = column < bins
    mask = (row < rows)[:, None] & inside[None, :]
    value = tl.load(logits + row[:, None] * W + column[None, :], mask=mask, other=0.0).to(tl.float32)
    value += tl.load(bias + column, mask=inside, other=0.0)[None, :]
    value = tl.where(inside[None, :], value, float("-inf"))
    peak = tl.max(value, 1)
    shift = peak + tl.log(tl.sum(tl.exp(value - peak[:, None]), 1))
    return value - shift[:, None], shift


@triton.jit
def _mean(log_probs, atoms):
    return tl.sum(tl.exp(log_probs) * atoms[None, :], 1)


@triton.jit
def _position(index, reward, going, entropy_term, minimum, maximum, width):
    """Returns where atom `index` moves to, in bins, clipped; `going` is the discount, or zero in a terminal row."""
    moved = reward + tl.where(going > 0.0, going * (minimum + index * width - entropy_term), 0.0)
    return (tl.minimum(tl.maximum(moved, minimum), maximum) - minimum) * (1.0 / width)


@triton.jit
def _target(
    logits, bias, reward, terminated, entropy_term, row, column, rows, bins, minimum, maximum, width, discount,
    W: tl.constexpr, NEAR: tl.constexpr,
):  # fmt: skip
    """Returns a tile of projected targets of the lower one of the two target critics."""
    exists, inside = row < rows, column < bins
    atoms = minimum + column * width
    first, first_shift = _log_probs(logits, bias, row, column, rows, bins, W)
    second, second_shift = _log_probs(logits + rows * W, bias + bins, row, column, rows, bins, W)
    other = _mean(second, atoms) < _mean(first, atoms)
    probs = tl.exp(tl.where(other[:, None], second, first))
    shift = tl.where(other, second_shift, first_shift)[:, None]
    member = tl.where(other, 1, 0)
    source = logits + (member * rows + row)[:, None] * W
    gained = tl.load(reward + row, mask=exists, other=0.0).to(tl.float32)[:, None]
    soft = tl.load(entropy_term + row, mask=exists, other=0.0).to(tl.float32)[:, None]
    going = tl.where(tl.load(terminated + row, mask=exists, other=0) != 0, 0.0, discount)[:, None]
    # Atom j lands on `origin + discount * j` before it is clipped; below `low` it lands under bin 0 by one or more.
    origin = (gained - discount * soft + (discount - 1.0) * minimum) * (1.0 / width)
    rate = 1.0 / discount
    low = tl.floor((-1.0 - origin) * rate) + 1.0
    high = tl.floor((bins - 2.0 - origin) * rate) + (1.0 + NEAR)
    total = tl.sum(probs, 1)[:, None]
    below = tl.sum(tl.where(column[None, :] < low, probs, 0.0), 1)[:, None]
    above = tl.sum(tl.where(column[None, :] >= high, probs, 0.0), 1)[:, None]
    begin = tl.floor((column[None, :] - 1.0 - origin) * rate) + 1.0
    mass = tl.where(column[None, :] == 0, below, 0.0) + tl.where(column[None, :] == bins - 1, above, 0.0)
    for i in range(NEAR):
        index = begin + i
        there = exists[:, None] & (index >= 0.0) & (index < bins)
        place = tl.where(there, index, 0.0).to(tl.int32)
        near = tl.load(source + place, mask=there, other=0.0).to(tl.float32)
        near = tl.exp(near + tl.load(bias + member[:, None] * bins + place, mask=there, other=0.0) - shift)
        distance = tl.abs(_position(index, gained, going, soft, minimum, maximum, width) - column[None, :])
        mass += tl.where(there, near * tl.maximum(1.0 - distance, 0.0), 0.0)
    distance = tl.abs(_position(0.0, gained, going, soft, minimum, maximum, width) - column[None, :])
    mass = tl.where(going > 0.0, mass, total * tl.maximum(1.0 - distance, 0.0))
    # What is not finite must reach every bin: it closes the gate.
    return tl.where(inside[None, :], mass + 0.0 * (gained + soft + total), 0.0)


@triton.jit
def _loss(
    logits, bias, target_bias, reward, terminated, entropy_term, part, dlogits, dbias, rows, bins,
    minimum, maximum, width, discount, factor, W: tl.constexpr, NEAR: tl.constexpr, R: tl.constexpr, K: tl.constexpr,
):  # fmt: skip
    row, column = tl.program_id(0) * R + tl.arange(0, R), tl.arange(0, K)
    mask = (row < rows)[:, None] & (column < bins)[None, :]
    probs = _target(
        logits + 2 * rows * W, target_bias, reward, terminated, entropy_term, row, column, rows, bins,
        minimum, maximum, width, discount, W, NEAR,
    )  # fmt: skip
    total = tl.sum(probs, 1)[:, None]
    found = tl.zeros((R,), tl.float32)
    for member in tl.static_range(2):
        log_probs, _ = _log_probs(logits + member * rows * W, bias + member * bins, row, column, rows, bins, W)
        found += tl.sum(tl.where(mask, probs * log_probs, 0.0), 1)
        change = tl.where(mask, (tl.exp(log_probs) * total - probs) * factor, 0.0)
        place = dlogits + (member * rows + row)[:, None] * W + column[None, :]
        tl.store(place, change.to(dlogits.dtype.element_ty), mask=(row < rows)[:, None] & (column < W)[None, :])
        place = dbias + (tl.program_id(0) * 2 + member) * bins + column
        tl.store(place, tl.sum(change, 0), mask=column < bins)
    tl.store(part + tl.program_id(0), -tl.sum(found, 0) * factor)


@triton.jit
def _lower_value(
    logits, bias, lower, dlogits, rows, bins, minimum, width, W: tl.constexpr, R: tl.constexpr, K: tl.constexpr
):  # fmt: skip
    row, column = tl.program_id(0) * R + tl.arange(0, R), tl.arange(0, K)
    atoms = minimum + column * width
    first, _ = _log_probs(logits, bias, row, column, rows, bins, W)
    second, _ = _log_probs(logits + rows * W, bias + bins, row, column, rows, bins, W)
    one, two = _mean(first, atoms), _mean(second, atoms)
    # NaN takes part in both ways, and with it the value and its derivative are NaN.
    least = tl.minimum(one, two, propagate_nan=tl.PropagateNan.ALL)
    ones, twos = tl.where(one == least, 1.0, 0.0), tl.where(two == least, 1.0, 0.0)
    share = 1.0 / (ones + twos) + 0.0 * least
    tl.store(lower + row, least, mask=row < rows)
    mask = (row < rows)[:, None] & (column < W)[None, :]
    place = dlogits + row[:, None] * W + column[None, :]
    kind = dlogits.dtype.element_ty
    change = (ones * share)[:, None] * tl.exp(first) * (atoms[None, :] - one[:, None])
    tl.store(place, tl.where(column[None, :] < bins, change, 0.0).to(kind), mask=mask)
    change = (twos * share)[:, None] * tl.exp(second) * (atoms[None, :] - two[:, None])
    tl.store(place + rows * W, tl.where(column[None, :] < bins, change, 0.0).to(kind), mask=mask)


def loss(
    logits: Tensor,
    bias: Tensor,
    target_bias: Tensor,
    reward: Tensor,
    terminated: Tensor,
    entropy_term: Tensor,
    minimum: float,
    maximum: float,
    discount: float,
    size: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Launches `categorical.loss` with parts of `size` rows, a power of two."""
    (_, rows, width), bins = logits.shape, bias.shape[-1]
    count = row_parts.count(rows, size)
    part, dbias = (torch.empty(count, *s, dtype=torch.float32, device=bias.device) for s in ((), bias.shape))
    dlogits = torch.empty(2, rows, width, dtype=logits.dtype, device=logits.device)
    given = (t.contiguous() for t in (logits, bias, target_bias, reward, terminated.view(torch.uint8), entropy_term))
    step = (maximum - minimum) / (bins - 1)
    _loss[count,](
        *given, part, dlogits, dbias, rows, bins, minimum, maximum, step, discount, 1 / (2 * rows),
        W=width, NEAR=math.ceil(2 / discount) + 1, R=size, K=triton.next_power_of_2(width), num_warps=4,
    )  # fmt: skip
    return part, dlogits, dbias


def lower_value(logits: Tensor, bias: Tensor, minimum: float, maximum: float) -> tuple[Tensor, Tensor]:
    """Launches `categorical.lower_value`."""
    (_, rows, width), bins, size = logits.shape, bias.shape[-1], 8
    lower = torch.empty(rows, dtype=torch.float32, device=bias.device)
    dlogits = torch.empty(logits.shape, dtype=logits.dtype, device=logits.device)
    _lower_value[triton.cdiv(rows, size),](
        logits.contiguous(), bias.contiguous(), lower, dlogits, rows, bins, minimum, (maximum - minimum) / (bins - 1),
        W=width, R=size, K=triton.next_power_of_2(width), num_warps=4,
    )  # fmt: skip
    return lower, dlogits
