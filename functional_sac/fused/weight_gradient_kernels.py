"""The Triton kernel of `weight_gradients`: one launch for several products, a program for a tile over all rows.

Alone, such a product has too few tiles for a GPU; together they fill it, and nothing needs to be added up afterwards.
One that runs beside such a launch has small tiles, over parts of the rows, for which its programs leave room.
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
SMALL, SMALL_STAGES, PARTS = 64, 4, 8  # rows and columns of a small tile, its `STAGES`, and the most parts


@triton.jit
def _several(
    dys, xs, outputs, rows: tl.constexpr, M: tl.constexpr, N: tl.constexpr, TURNED: tl.constexpr, COUNT: tl.constexpr,
    MATRICES: tl.constexpr, R: tl.constexpr, C: tl.constexpr, D: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Products of [rows, M] and [rows, N], or the other way round where a bit of TURNED says so.

    The second ones are so many MATRICES, which the networks take in turn.
    """
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
    right = x + (network % MATRICES) * rows * width + depth[:, None] * width + column[None, :]
    found = tl.zeros((R, C), tl.float32)
    for _ in tl.range(0, rows, D, num_stages=STAGES):
        found = tl.dot(tl.trans(tl.load(left)), tl.load(right), found)
        left += D * height
        right += D * width
    tl.store(output + network * M * N + row[:, None] * width + column[None, :], found)


def fits(dy: Tensor, x: Tensor) -> bool:
    """Tells whether `several` takes both: half types on a Hopper GPU, whole tiles, and half the programs of a pair."""
    whole = all(t.shape[1] % DEPTH == t.shape[2] % HEIGHT == 0 for t in (dy, x))
    return whole and 2 * dy.shape[0] * _tiles(dy, x, WIDTHS[-1]) >= PROGRAMS and suits_hopper(dy, x)


def several(products: list[tuple[Tensor, Tensor, Tensor]]) -> None:
    """Launches `weight_gradients.weight_gradient` for (dy, x, output) of the same rows and the same two widths."""
    dys, xs, outputs = zip(*products, strict=True)
    (networks, rows, height), width = dys[0].shape, xs[0].shape[2]
    tile = next((tile for tile in WIDTHS if fill(products, tile)), WIDTHS[-1])
    launch(
        _several, (_tiles(dys[0], xs[0], tile), len(dys), networks), dys, xs, outputs, rows=rows, M=height, N=width,
        TURNED=sum(2**i for i, dy in enumerate(dys) if dy.shape[2] != height), COUNT=len(dys), MATRICES=networks,
        R=HEIGHT, C=tile, D=DEPTH, STAGES=STAGES, num_warps=tile // 16,
    )  # fmt: skip


def fill(products: list[tuple[Tensor, Tensor, Tensor]], tile: int = WIDTHS[0]) -> bool:
    """Tells whether products as `several` takes them are programs enough in tiles of this width."""
    dy, x, _ = products[0]
    return dy.shape[0] * len(products) * _tiles(dy, x, tile) >= PROGRAMS


def fits_in_parts(dy: Tensor, x: Tensor) -> bool:
    """Tells whether `in_parts` takes both: half types on a Hopper GPU, and whole tiles."""
    return all(t.shape[1] % DEPTH == t.shape[2] % SMALL == 0 for t in (dy, x)) and suits_hopper(dy, x)


def in_parts(dy: Tensor, x: Tensor) -> Tensor:
    """Launches `weight_gradients.in_parts`."""
    (networks, rows, height), width = dy.shape, x.shape[2]
    tiles, parts = height * width // SMALL**2, 1
    while parts < PARTS and 2 * parts * tiles * networks <= PROGRAMS and rows % (2 * parts * DEPTH) == 0:
        parts *= 2
    output = dy.new_empty(networks, parts, height, width, dtype=torch.float32)
    launch(
        _several, (tiles, 1, networks * parts), (dy,), (x,), (output,), rows=rows // parts, M=height, N=width, TURNED=0,
        COUNT=1, MATRICES=parts, R=SMALL, C=SMALL, D=DEPTH, STAGES=SMALL_STAGES, num_warps=4,
    )  # fmt: skip
    return output


def _tiles(dy: Tensor, x: Tensor, width: int) -> int:
    return dy.shape[2] * x.shape[2] // (HEIGHT * width)
