"""The Triton kernels of `inputs`: a program writes some rows and columns of one block, or of all networks' inputs."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from functional_sac.networks import BN_EPS
from functional_sac.padding import padded_size
from functional_sl.kernels import launch, rowwise

ROWS, COLUMNS = 16, 64  # of a program
SIDE = 32  # rows and columns of a program that normalises


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


@triton.jit
def _normalised(
    rows, places, scale, bias, mean, var, y, size, mean_network, var_network, PICK: tl.constexpr, EPS: tl.constexpr,
    NETWORKS: tl.constexpr, BEGIN: tl.constexpr, FEATURES: tl.constexpr, LENGTH: tl.constexpr, WIDTH: tl.constexpr,
    C: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(1) * C + tl.arange(0, C)
    column = tl.program_id(0) * C + tl.arange(0, C)
    there, inside = row < size, column < FEATURES
    place = (tl.load(places + row, mask=there, other=0) if PICK else row).to(tl.int64)
    source = rows + place[:, None] * LENGTH + BEGIN + column[None, :]
    value = tl.load(source, mask=there[:, None] & inside[None, :], other=0.0).to(scale.dtype.element_ty)
    for network in tl.static_range(NETWORKS):
        spread = tl.load(var + network * var_network + column, mask=inside, other=0.0)
        slope = tl.load(scale + network * FEATURES + column, mask=inside, other=0.0) / tl.sqrt(spread + EPS)
        offset = tl.load(bias + network * FEATURES + column, mask=inside, other=0.0)
        offset -= tl.load(mean + network * mean_network + column, mask=inside, other=0.0) * slope
        output = y + (network * size + row).to(tl.int64)[:, None] * WIDTH + column[None, :]
        normal = (value * slope[None, :] + offset[None, :]).to(y.dtype.element_ty)
        tl.store(output, normal, mask=there[:, None] & (column < WIDTH)[None, :])


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


def normalised(
    rows: Tensor, places: Tensor | None, begin: int, scale: Tensor, bias: Tensor, mean: Tensor, var: Tensor,
    dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    """Launches `inputs.normalised`."""
    rows, scale, bias, mean, var = rowwise(rows), scale.contiguous(), bias.contiguous(), rowwise(mean), rowwise(var)
    size, (count, features) = (rows if places is None else places).shape[0], scale.shape
    y = rows.new_empty(count, size, padded_size(features), dtype=dtype)
    grid = (triton.cdiv(y.shape[2], SIDE), triton.cdiv(size, SIDE))
    # Without places nobody reads them.
    launch(
        _normalised, grid, rows, rows if places is None else places.contiguous(), scale, bias, mean, var, y, size,
        mean.stride(0), var.stride(0), PICK=places is not None, EPS=BN_EPS, NETWORKS=count, BEGIN=begin,
        FEATURES=features, LENGTH=rows.stride(0), WIDTH=y.shape[2], C=SIDE, num_warps=4,
    )  # fmt: skip
    return y
