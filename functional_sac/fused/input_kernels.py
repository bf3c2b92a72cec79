"""The Triton kernel of `inputs`: a program writes some rows and columns of one block; whose is static."""

from __future__ import annotations

from collections.abc import Sequence

import triton
import triton.language as tl
from torch import Tensor

from functional_sl.kernels import launch, rowwise

ROWS, COLUMNS = 16, 64  # of a program


@triton.jit
def _piece(
    rows, places, tail, output, size, BEGIN: tl.constexpr, COUNT: tl.constexpr, TAIL: tl.constexpr,
    LENGTH: tl.constexpr, TAIL_LENGTH: tl.constexpr, WIDTH: tl.constexpr, R: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(1) * R + tl.arange(0, R)
    column = tl.program_id(0) * C + tl.arange(0, C)
    there = (row < size)[:, None]
    place = tl.load(places + row, mask=row < size, other=0).to(tl.int64)
    source = rows + place[:, None] * LENGTH + BEGIN + column[None, :]
    value = tl.load(source, mask=there & (column < COUNT)[None, :], other=0.0)
    if TAIL > 0:
        behind = column - COUNT
        mask = there & ((behind >= 0) & (behind < TAIL))[None, :]
        value = tl.where(mask, tl.load(tail + row[:, None] * TAIL_LENGTH + behind[None, :], mask=mask), value)
    tl.store(output + row[:, None] * WIDTH + column[None, :], value, mask=there & (column < WIDTH)[None, :])


@triton.jit
def _pick(
    rows, places, tail, output, size, PIECES: tl.constexpr, COUNT: tl.constexpr, LENGTH: tl.constexpr,
    TAIL_LENGTH: tl.constexpr, WIDTH: tl.constexpr, R: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    for i in tl.static_range(COUNT):
        if tl.program_id(2) == i:
            _piece(
                rows, places, tail, output + i * size * WIDTH, size, PIECES[i][0], PIECES[i][1], PIECES[i][2], LENGTH,
                TAIL_LENGTH, WIDTH, R, C,
            )  # fmt: skip


def pick(
    rows: Tensor, places: Tensor, begins: Sequence[int], counts: Sequence[int], tail: Tensor | None, width: int
) -> Tensor:
    """Launches `inputs.pick`."""
    rows, places, size = rowwise(rows), places.contiguous(), places.shape[0]
    tails = [0] * len(begins)
    if tail is not None:
        tail, tails[-1] = rowwise(tail), tail.shape[1]
    output = rows.new_empty(len(begins) * size, width)
    grid = (triton.cdiv(width, COLUMNS), triton.cdiv(size, ROWS), len(begins))
    # Without a tail nobody reads it.
    launch(
        _pick, grid, rows, places, output if tail is None else tail, output, size,
        PIECES=tuple(zip(begins, counts, tails, strict=True)), COUNT=len(begins), LENGTH=rows.stride(0),
        TAIL_LENGTH=0 if tail is None else tail.stride(0), WIDTH=width, R=ROWS, C=COLUMNS, num_warps=4,
    )  # fmt: skip
    return output
