"""The Triton kernels of `float32_products`: one splits an operand into its parts, one multiplies the other by these."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from functional_sl.kernels import launch


class Tile(NamedTuple):
    """What a program computes, of so many rows and features, and in which steps along what it sums over."""

    rows: int
    features: int
    depth: int
    warps: int


# Measured on an H200 for the sizes of critics and actor.
TILES = (Tile(128, 128, 32, 8), Tile(64, 64, 64, 4), Tile(64, 32, 32, 4))
MANY = 128  # programs, about one for each multiprocessor, with which the larger tile is faster
STAGES = 3
GROUP = 8  # tiles of rows that follow each other, whose programs read the same columns
SPLIT = 4096  # numbers that a program splits


@triton.jit
def _parts(x):
    """Returns three BF16 numbers whose sum is x."""
    one = x.to(tl.bfloat16)
    rest = x - one.to(tl.float32)
    two = rest.to(tl.bfloat16)
    return one, two, (rest - two.to(tl.float32)).to(tl.bfloat16)


@triton.jit
def _split(
    x, parts, network, row, ALL: tl.constexpr, ROWS: tl.constexpr, LENGTH: tl.constexpr,
    R: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """Of R rows of one network; the parts of a number lie ALL numbers apart."""
    i, column = tl.program_id(0) * R + tl.arange(0, R)[:, None], tl.arange(0, C)[None, :]
    inside = (i < ROWS) & (column < LENGTH)
    which = tl.program_id(1).to(tl.int64)
    one, two, three = _parts(tl.load(x + which * network + i * row + column, mask=inside, other=0.0))
    at = parts + (which * ROWS + i) * LENGTH + column
    tl.store(at, one, mask=inside)
    tl.store(at + ALL, two, mask=inside)
    tl.store(at + 2 * ALL, three, mask=inside)


@triton.jit
def _product(
    a, b, output, a_network, a_row, a_depth, b_part, b_network, b_depth, b_feature, o_network, o_row, o_feature,
    M: tl.constexpr, F: tl.constexpr, K: tl.constexpr,
    ADDS: tl.constexpr, A_ALONG: tl.constexpr, B_ALONG: tl.constexpr, O_ALONG: tl.constexpr,
    R: tl.constexpr, C: tl.constexpr, D: tl.constexpr, GROUP: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """A tile [R, C] of one network's product; ..._ALONG tell whose numbers lie side by side along K, or F."""
    across = F // C
    down, along = tl.swizzle2d(tl.program_id(0) // across, tl.program_id(0) % across, M // R, across, GROUP)
    network = tl.program_id(1).to(tl.int64)
    row, feature, depth = down * R + tl.arange(0, R), along * C + tl.arange(0, C), tl.arange(0, D)
    if A_ALONG:
        left = a + network * a_network + row[:, None] * a_row + depth[None, :]
    else:
        left = a + network * a_network + row[:, None] + depth[None, :] * a_depth
    if B_ALONG:
        right = b + network * b_network + depth[:, None] + feature[None, :] * b_feature
    else:
        right = b + network * b_network + depth[:, None] * b_depth + feature[None, :]
    found = tl.zeros((R, C), tl.float32)
    for _ in tl.range(0, K, D, num_stages=STAGES):
        b1, b2, b3 = tl.load(right), tl.load(right + b_part), tl.load(right + 2 * b_part)
        a1, a2, a3 = _parts(tl.load(left))
        # From the smallest to the largest. The matrix units round less than float32 only within a step.
        step = tl.dot(a3, b1)
        step = tl.dot(a1, b3, step)
        step = tl.dot(a2, b2, step)
        step = tl.dot(a2, b1, step)
        step = tl.dot(a1, b2, step)
        found += tl.dot(a1, b1, step)
        left += D if A_ALONG else D * a_depth
        right += D if B_ALONG else D * b_depth
    if O_ALONG:
        at = output + network * o_network + row[:, None] * o_row + feature[None, :]
    else:
        at = output + network * o_network + row[:, None] + feature[None, :] * o_feature
    if ADDS:
        found += tl.load(at)
    tl.store(at, found)


def fits(a: Tensor, b: Tensor) -> bool:
    """Tells whether `product` takes both: on a Hopper GPU, in whole tiles, with numbers side by side along an axis."""
    lie = all(1 in x.stride()[1:] and x.data_ptr() % 16 == 0 for x in (a, b))
    a, b = _smaller_last(a, b)
    return lie and tile(*a.shape, b.shape[2]) is not None and torch.cuda.get_device_capability(a.device)[0] == 9


def tile(networks: int, rows: int, depth: int, features: int) -> Tile | None:
    """Returns the largest tile that comes out even and makes many programs, else the smallest one, or None."""
    found = None
    for size in TILES:
        if rows % size.rows == features % size.features == depth % size.depth == 0:
            found = size
            if networks * (rows // size.rows) * (features // size.features) >= MANY:
                break
    return found


def product(a: Tensor, b: Tensor, output: Tensor, *, adds: bool) -> None:
    """Writes a [N, M, K] times b [N, K, F] into `output` [N, M, F], or adds it to what is there."""
    if b.numel() > a.numel():
        output = output.mT
    a, b = _smaller_last(a, b)
    networks, rows, depth = a.shape
    features = b.shape[2]
    parts = _in_parts(b)
    size = tile(networks, rows, depth, features)
    launch(
        _product, (rows // size.rows * (features // size.features), networks), a, parts, output,
        *a.stride(), *parts.stride(), *output.stride(), M=rows, F=features, K=depth, ADDS=adds,
        A_ALONG=a.stride(2) == 1, B_ALONG=parts.stride(2) == 1, O_ALONG=output.stride(2) == 1,
        R=size.rows, C=size.features, D=size.depth, GROUP=GROUP, STAGES=STAGES, num_warps=size.warps,
    )  # fmt: skip


def _smaller_last(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the operands of the product, or of the transposed one, of which the second is split beforehand."""
    return (a, b) if b.numel() <= a.numel() else (b.mT, a.mT)


def _in_parts(b: Tensor) -> Tensor:
    """Returns three BF16 tensors [3, *b.shape] whose sum is b, and which lie as it does."""
    lying = b if b.stride(2) == 1 else b.mT
    networks, rows, length = lying.shape
    parts = b.new_empty(3, networks, rows, length, dtype=torch.bfloat16)
    columns = triton.next_power_of_2(length)
    several = max(1, SPLIT // columns)
    launch(
        _split, (triton.cdiv(rows, several), networks), lying, parts, *lying.stride()[:2], ALL=lying.numel(),
        ROWS=rows, LENGTH=length, R=several, C=columns,
    )  # fmt: skip
    return parts if b.stride(2) == 1 else parts.mT
