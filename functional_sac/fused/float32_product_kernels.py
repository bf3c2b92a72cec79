"""The Triton kernel of `float32_products`."""

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
    stages: int


# Measured on an H200 for the sizes of critics and actor; several programs share a multiprocessor.
TILES = (Tile(128, 64, 32, 3), Tile(64, 64, 64, 2), Tile(64, 32, 32, 3))
MANY = 132  # programs, one for each multiprocessor, with which the larger tile is faster
WARPS = 4
GROUP = 8  # tiles of rows that follow each other, whose programs read the same columns


@triton.jit
def _product(
    a, b, output, a_network, a_row, a_depth, b_network, b_depth, b_feature,
    M: tl.constexpr, F: tl.constexpr, K: tl.constexpr,
    ADDS: tl.constexpr, A_ALONG: tl.constexpr, B_ALONG: tl.constexpr,
    R: tl.constexpr, C: tl.constexpr, D: tl.constexpr, GROUP: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """A tile [R, C] of one network's product; A_ALONG and B_ALONG tell whose numbers lie side by side along K."""
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
        found = tl.dot(tl.load(left), tl.load(right), found, input_precision="bf16x6")
        left += D if A_ALONG else D * a_depth
        right += D if B_ALONG else D * b_depth
    at = output + (network * M + row[:, None]) * F + feature[None, :]
    if ADDS:
        found += tl.load(at)
    tl.store(at, found)


def fits(a: Tensor, b: Tensor) -> bool:
    """Tells whether `product` takes both: on a Hopper GPU, in whole tiles, with numbers side by side along an axis."""
    lie = all(1 in x.stride()[1:] and x.data_ptr() % 16 == 0 for x in (a, b))
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
    networks, rows, depth = a.shape
    features = b.shape[2]
    size = tile(networks, rows, depth, features)
    launch(
        _product, (rows // size.rows * (features // size.features), networks), a, b, output,
        *a.stride(), *b.stride(), M=rows, F=features, K=depth, ADDS=adds,
        A_ALONG=a.stride(2) == 1, B_ALONG=b.stride(1) == 1, R=size.rows, C=size.features, D=size.depth, GROUP=GROUP,
        STAGES=size.stages, num_warps=WARPS,
    )  # fmt: skip
