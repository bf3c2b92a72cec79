"""The Triton kernel of `weight_gradients`: one launch for several products, a program for a tile over all rows.

Alone, such a product has too few tiles for a GPU; together they fill it, and nothing needs to be added up afterwards.
"""

from __future__ import annotations

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


def fits(dy: Tensor, x: Tensor) -> bool:
    """Tells whether `several` takes both: half types on a Hopper GPU, whole tiles, and half the programs of a pair."""
    whole = all(t.shape[1] % DEPTH == t.shape[2] % HEIGHT == 0 for t in (dy, x))
    return whole and 2 * dy.shape[0] * _tiles(dy, x, WIDTHS[-1]) >= PROGRAMS and suits_hopper(dy, x)


def several(products: list[tuple[Tensor, Tensor, Tensor]]) -> None:
    """Launches `weight_gradients.weight_gradient` for (dy, x, output) of the same rows and the same two widths."""
    dys, xs, outputs = zip(*products, strict=True)
    (networks, rows, height), width = dys[0].shape, xs[0].shape[2]
    enough = (tile for tile in WIDTHS if networks * len(dys) * _tiles(dys[0], xs[0], tile) >= PROGRAMS)
    tile = next(enough, WIDTHS[-1])
    launch(
        _several, (_tiles(dys[0], xs[0], tile), len(dys), networks), dys, xs, outputs, rows=rows, M=height, N=width,
        TURNED=sum(2**i for i, dy in enumerate(dys) if dy.shape[2] != height), COUNT=len(dys), R=HEIGHT, C=tile,
        D=DEPTH, STAGES=STAGES, num_warps=tile // 16,
    )  # fmt: skip


def _tiles(dy: Tensor, x: Tensor, width: int) -> int:
    return dy.shape[2] * x.shape[2] // (HEIGHT * width)
