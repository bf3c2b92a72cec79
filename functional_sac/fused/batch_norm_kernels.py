"""The Triton kernels of `batch_norm`: a program takes a few features of one network through all rows.

Rows are read twice, the second time from cache, which is told so. Where features are few that would leave most of the
GPU idle, and `batch_norm_split_kernels` takes over. Nothing is added atomically, so the same input gives the same bits.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from functional_sac.fused import batch_norm_split_kernels
from functional_sac.fused.batch_norm_tile_kernels import normalised, rectified
from functional_sl.kernels import launch, rowwise

TILE = 16384  # elements that a program holds at a time
FORWARD_WIDTH, BACKWARD_WIDTH = 32, 16  # features of a program
PROGRAMS = 128  # about as many as the GPU has multiprocessors; with fewer the rows are split


@triton.jit
def _forward(
    x, scale, bias, residual, y, mean, inverse_std, features, x_network, x_row, moments, eps,
    rows: tl.constexpr, ADD: tl.constexpr, R: tl.constexpr, F: tl.constexpr,
):  # fmt: skip
    network = tl.program_id(1).to(tl.int64)
    column = tl.program_id(0) * F + tl.arange(0, F)
    inside = column < features
    source = x + network * x_network + column
    affine = network * features + column
    # Shifted by the first row, one pass loses nothing to a mean that is large beside the spread.
    shift = tl.load(source, mask=inside, other=0.0).to(tl.float32)
    sums = tl.zeros((R, F), tl.float32)
    squares = tl.zeros((R, F), tl.float32)
    for begin in range(0, rows, R):
        row = begin + tl.arange(0, R)
        mask = (row < rows)[:, None] & inside[None, :]
        value = tl.load(source[None, :] + row[:, None] * x_row, mask=mask, other=0.0, eviction_policy="evict_last")
        value = tl.where(mask, value.to(tl.float32) - shift[None, :], 0.0)
        sums += value
        squares += value * value
    average = tl.sum(sums, 0) / rows
    # NaN must stay: it closes the gate.
    variance = tl.maximum(tl.sum(squares, 0) / rows - average * average, 0.0, propagate_nan=tl.PropagateNan.ALL)
    average += shift
    inverse = 1.0 / tl.sqrt(variance + eps)
    tl.store(mean + network * moments + column, average, mask=inside)
    tl.store(inverse_std + network * moments + column, inverse, mask=inside)
    slope = tl.load(scale + affine, mask=inside, other=0.0) * inverse
    offset = tl.load(bias + affine, mask=inside, other=0.0)
    # Outputs and residuals lie one row after the other.
    place = network * rows * features + column
    for begin in range(0, rows, R):
        row = begin + tl.arange(0, R)
        mask = (row < rows)[:, None] & inside[None, :]
        value = tl.load(source[None, :] + row[:, None] * x_row, mask=mask, other=0.0, eviction_policy="evict_first")
        value = (value.to(tl.float32) - average[None, :]) * slope[None, :] + offset[None, :]
        output = place[None, :] + row[:, None] * features
        value = rectified(value, residual, output, mask, y, ADD)
        tl.store(y + output, value, mask=mask, eviction_policy="evict_first")


@triton.jit
def _backward(
    dy, x, scale, bias, mean, inverse_std, whole, dx, dscale, dbias, features, dy_network, dy_row, x_network, x_row,
    moments, given: tl.constexpr, rows: tl.constexpr, WHOLE: tl.constexpr, R: tl.constexpr, F: tl.constexpr,
):  # fmt: skip
    network = tl.program_id(1).to(tl.int64)
    column = tl.program_id(0) * F + tl.arange(0, F)
    inside = column < features
    source = x + network * x_network + column
    flow = dy + network * dy_network + column
    affine = network * features + column
    average = tl.load(mean + network * moments + column, mask=inside, other=0.0)
    inverse = tl.load(inverse_std + network * moments + column, mask=inside, other=0.0)
    factor = tl.load(scale + affine, mask=inside, other=0.0)
    offset = tl.load(bias + affine, mask=inside, other=0.0)
    sums = tl.zeros((R, F), tl.float32)
    products = tl.zeros((R, F), tl.float32)
    for begin in range(0, rows, R):
        row = begin + tl.arange(0, R)
        mask = (row < rows)[:, None] & inside[None, :]
        change = tl.load(flow[None, :] + row[:, None] * dy_row, mask=mask & (row < given)[:, None], other=0.0)
        value = tl.load(source[None, :] + row[:, None] * x_row, mask=mask, other=0.0)
        value, change = normalised(value, change, average, inverse, factor, offset)
        sums += change
        products += tl.where(mask, change * value, 0.0)
    total, weighted = tl.sum(sums, 0), tl.sum(products, 0)
    tl.store(dbias + affine, total, mask=inside)
    tl.store(dscale + affine, weighted, mask=inside)
    total /= rows
    weighted /= rows
    slope = factor * inverse
    place = network * rows * features + column
    for begin in range(0, rows, R):
        row = begin + tl.arange(0, R)
        mask = (row < rows)[:, None] & inside[None, :]
        change = tl.load(flow[None, :] + row[:, None] * dy_row, mask=mask & (row < given)[:, None], other=0.0)
        if WHOLE:
            tl.store(whole + place[None, :] + row[:, None] * features, change, mask=mask)
        value = tl.load(source[None, :] + row[:, None] * x_row, mask=mask, other=0.0)
        value, change = normalised(value, change, average, inverse, factor, offset)
        change = (change - total[None, :] - value * weighted[None, :]) * slope[None, :]
        tl.store(dx + place[None, :] + row[:, None] * features, change.to(dx.dtype.element_ty), mask=mask)


def forward(
    x: Tensor, scale: Tensor, bias: Tensor, residual: Tensor | None, mean: Tensor, inverse_std: Tensor, eps: float
) -> Tensor:
    """Launches `batch_norm.forward`."""
    rows, features = x.shape[1:]
    x, scale, bias = rowwise(x), scale.contiguous(), bias.contiguous()
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    added = y if residual is None else residual.contiguous()
    if _programs(x, FORWARD_WIDTH) < PROGRAMS:
        batch_norm_split_kernels.forward(x, scale, bias, added, (y, mean, inverse_std), eps)
        return y
    launch(
        _forward, _grid(x, FORWARD_WIDTH), x, scale, bias, added, y, mean, inverse_std, features, *x.stride()[:2],
        mean.stride(0), eps, rows=rows, ADD=residual is not None, R=_rows(rows, FORWARD_WIDTH), F=FORWARD_WIDTH,
        num_warps=16,
    )  # fmt: skip
    return y


def backward(
    dy: Tensor, x: Tensor, scale: Tensor, bias: Tensor, mean: Tensor, inverse_std: Tensor, whole: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Launches `batch_norm.backward`."""
    rows, features = x.shape[1:]
    dy, x, scale, bias = rowwise(dy), rowwise(x), scale.contiguous(), bias.contiguous()
    dx = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    dscale, dbias = torch.empty_like(scale), torch.empty_like(bias)
    outputs = (dx if whole is None else whole, dx, dscale, dbias)
    if _programs(x, BACKWARD_WIDTH) < PROGRAMS:
        batch_norm_split_kernels.backward(dy, x, (scale, bias, mean, inverse_std), outputs)
        return dx, dscale, dbias
    launch(
        _backward, _grid(x, BACKWARD_WIDTH), dy, x, scale, bias, mean, inverse_std, *outputs, features,
        *dy.stride()[:2], *x.stride()[:2], mean.stride(0), given=dy.shape[1], rows=rows, WHOLE=whole is not None,
        R=_rows(rows, BACKWARD_WIDTH), F=BACKWARD_WIDTH, num_warps=8,
    )  # fmt: skip
    return dx, dscale, dbias


def _grid(x: Tensor, width: int) -> tuple[int, int]:
    return triton.cdiv(x.shape[-1], width), x.shape[0]


def _programs(x: Tensor, width: int) -> int:
    return triton.cdiv(x.shape[-1], width) * x.shape[0]


def _rows(rows: int, width: int) -> int:
    return min(triton.next_power_of_2(rows), TILE // width)
