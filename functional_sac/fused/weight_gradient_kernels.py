"""The Triton kernel of `weight_gradients`: one launch for several products, a program for a tile over all rows.

Alone, such a product has too few tiles for a GPU; together they fill it, and nothing needs to be added up afterwards.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from functional_sl.kernels import launch, suits_hopper

HEIGHT, WIDTHS = 128, (128, 64)  # of a tile of a gradient; the wider one where there are programs enough
DEPTH, STAGES = 64, 5  # rows of the batch that are read at once, and how often ahead
PROGRAMS = 128  # about as many as a Hopper GPU has multiprocessors; with fewer, cuBLAS is faster


@triton.jit
def _several(
    dys, xs, outputs, rows: tl.constexpr, M: tl.constexpr, N: tl.constexpr, TURNED: tl.constexpr, COUNT: tl.constexpr,
    R: tl.constexpr, C: tl.constexpr, D: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Products of [rows, M] and [rows, N], or the other way round where a bit of TURNED says so."""
    which, network = tl.program_id(1), tl.program_id(2).to(tl.int64)
    dy, x, output = dys[0], xs[0], outputs[0]
    for i in tl.static_range(1, COUNT):
        if which == i:
            dy, x, output = dys[i], xs[i], outputs[i]
    turned = ((TURNED >> which) & 1) == 1
    height, width = tl.where(turned, N, M), tl.where(turned, M, N)
    down, along = tl.program_id(0) // (width // C), tl.program_id(0) % (width // C)
    row, column, depth = down * R + tl.arange(0, R), along * C + tl.arange(0, C), tl.arange(0, D)
    left = dy + network * rows * height + depth[:, None] * height + row[None, :]
    right = x + network * rows * width + depth[:, None] * width + column[None, :]
    found = tl.zeros((R, C), tl.float32)
    for _ in tl.range(0, rows, D, num_stages=STAGES):
        found = tl.dot(tl.trans(tl.load(left)), tl.load(right), found)
        left += D * height
        right += D * width
    tl.store(output + network * M * N + row[:, None] * width + column[None, :], found)


def fits(pairs: list[tuple[Tensor, Tensor]]) -> bool:
    """Tells whether `several` takes these: half types on a Hopper GPU, two widths, and whole tiles, enough of them."""
    tensors = [t for pair in pairs for t in pair]
    alike = len({t.shape[:2] for t in tensors}) == len({frozenset(t.shape[2] for t in pair) for pair in pairs}) == 1
    whole = all(t.shape[1] % DEPTH == t.shape[2] % HEIGHT == 0 for t in tensors)
    return alike and whole and _width(pairs) > 0 and suits_hopper(*tensors)


def _width(pairs: list[tuple[Tensor, Tensor]]) -> int:
    """Returns the width of a tile, or 0 where no one gives programs enough."""
    numbers = sum(dy.shape[0] * dy.shape[2] * x.shape[2] for dy, x in pairs)
    return next((width for width in WIDTHS if numbers >= PROGRAMS * HEIGHT * width), 0)


def several(pairs: list[tuple[Tensor, Tensor]]) -> list[Tensor]:
    """Launches `weight_gradients.weight_gradients`."""
    dys, xs = zip(*pairs, strict=True)
    (networks, rows, height), width, tile = dys[0].shape, xs[0].shape[2], _width(pairs)
    outputs = tuple(dy.new_empty(networks, dy.shape[2], x.shape[2], dtype=torch.float32) for dy, x in pairs)
    launch(
        _several, (height * width // (HEIGHT * tile), len(pairs), networks), dys, xs, outputs, rows=rows, M=height,
        N=width, TURNED=sum(2**i for i, dy in enumerate(dys) if dy.shape[2] != height), COUNT=len(pairs), R=HEIGHT,
        C=tile, D=DEPTH, STAGES=STAGES, num_warps=tile // 16,
    )  # fmt: skip
    return list(outputs)
