"""Triton kernels of batch norm for few features: the rows are split over programs.

A first kernel adds up each part of the rows, a second one adds the parts in their order and does the rest. The parts
lie in `[N, parts, 2, F]` float32.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

ROWS = 256  # of a program
WIDTH = 32  # features of a program


@triton.jit
def tile(source, flow, mask, average, inverse, factor, offset, RELU: tl.constexpr):
    """Loads a tile of x, normalised, and of the output's gradient where the ReLU lets it through."""
    value = tl.load(source, mask=mask, other=0.0).to(tl.float32)
    change = tl.load(flow, mask=mask, other=0.0).to(tl.float32)
    value = (value - average[None, :]) * inverse[None, :]
    if RELU:
        change = tl.where(value * factor[None, :] + offset[None, :] > 0.0, change, 0.0)
    return value, change


@triton.jit
def _place(features, rows: tl.constexpr, R: tl.constexpr, F: tl.constexpr):
    """Returns a program's network, features and rows, which of both there are, and both at once."""
    network = tl.program_id(1).to(tl.int64)
    column = tl.program_id(0) * F + tl.arange(0, F)
    row = tl.program_id(2) * R + tl.arange(0, R)
    inside = column < features
    return network, column, row, inside, (row < rows)[:, None] & inside[None, :]


@triton.jit
def _store_part(part, first, second, network, column, inside, features, PARTS: tl.constexpr):
    place = part + (network * PARTS + tl.program_id(2)) * 2 * features + column
    tl.store(place, first, mask=inside)
    tl.store(place + features, second, mask=inside)


@triton.jit
def _load_parts(part, network, column, inside, features, PARTS: tl.constexpr):
    place = part + (network * PARTS + tl.arange(0, PARTS)[:, None]) * 2 * features + column[None, :]
    first = tl.load(place, mask=inside[None, :], other=0.0)
    second = tl.load(place + features, mask=inside[None, :], other=0.0)
    return tl.sum(first, 0), tl.sum(second, 0)


@triton.jit
def _forward_sums(
    x, part, features, x_network, x_row,
    rows: tl.constexpr, PARTS: tl.constexpr, R: tl.constexpr, F: tl.constexpr,
):  # fmt: skip
    network, column, row, inside, mask = _place(features, rows, R, F)
    source = x + network * x_network + column
    # Shifted by the first row, one pass loses nothing to a mean that is large beside the spread.
    shift = tl.load(source, mask=inside, other=0.0).to(tl.float32)
    value = tl.load(source[None, :] + row[:, None] * x_row, mask=mask, other=0.0).to(tl.float32)
    value = tl.where(mask, value - shift[None, :], 0.0)
    _store_part(part, tl.sum(value, 0), tl.sum(value * value, 0), network, column, inside, features, PARTS)


@triton.jit
def _forward_rest(
    x, part, scale, bias, residual, y, mean, inverse_std, features, x_network, x_row, eps,
    rows: tl.constexpr, PARTS: tl.constexpr, RELU: tl.constexpr, ADD: tl.constexpr, R: tl.constexpr, F: tl.constexpr,
):  # fmt: skip
    network, column, row, inside, mask = _place(features, rows, R, F)
    source = x + network * x_network + column
    affine = network * features + column
    sums, squares = _load_parts(part, network, column, inside, features, PARTS)
    average = sums / rows
    # NaN must stay: it closes the gate.
    variance = tl.maximum(squares / rows - average * average, 0.0, propagate_nan=tl.PropagateNan.ALL)
    average += tl.load(source, mask=inside, other=0.0).to(tl.float32)
    inverse = 1.0 / tl.sqrt(variance + eps)
    if tl.program_id(2) == 0:
        tl.store(mean + affine, average, mask=inside)
        tl.store(inverse_std + affine, inverse, mask=inside)
    slope = tl.load(scale + affine, mask=inside, other=0.0) * inverse
    offset = tl.load(bias + affine, mask=inside, other=0.0)
    value = tl.load(source[None, :] + row[:, None] * x_row, mask=mask, other=0.0).to(tl.float32)
    value = (value - average[None, :]) * slope[None, :] + offset[None, :]
    if RELU:
        # NaN stays NaN: the gate must see it.
        value = tl.where(value < 0.0, 0.0, value)
    value = value.to(y.dtype.element_ty)
    place = network * rows * features + column[None, :] + row[:, None] * features
    if ADD:
        other = tl.load(residual + place, mask=mask, other=0.0)
        value = (value.to(tl.float32) + other.to(tl.float32)).to(y.dtype.element_ty)
    tl.store(y + place, value, mask=mask)


@triton.jit
def _backward_sums(
    dy, x, scale, bias, mean, inverse_std, part, features, dy_network, dy_row, x_network, x_row,
    rows: tl.constexpr, PARTS: tl.constexpr, RELU: tl.constexpr, R: tl.constexpr, F: tl.constexpr,
):  # fmt: skip
    network, column, row, inside, mask = _place(features, rows, R, F)
    affine = network * features + column
    value, change = tile(
        x + network * x_network + column[None, :] + row[:, None] * x_row,
        dy + network * dy_network + column[None, :] + row[:, None] * dy_row,
        mask,
        tl.load(mean + affine, mask=inside, other=0.0),
        tl.load(inverse_std + affine, mask=inside, other=0.0),
        tl.load(scale + affine, mask=inside, other=0.0),
        tl.load(bias + affine, mask=inside, other=0.0),
        RELU,
    )
    weighted = tl.where(mask, change * value, 0.0)
    _store_part(part, tl.sum(change, 0), tl.sum(weighted, 0), network, column, inside, features, PARTS)


@triton.jit
def _backward_rest(
    dy, x, scale, bias, mean, inverse_std, part, dx, dscale, dbias, features, dy_network, dy_row, x_network, x_row,
    rows: tl.constexpr, PARTS: tl.constexpr, RELU: tl.constexpr, INPUTS: tl.constexpr, R: tl.constexpr, F: tl.constexpr,
):  # fmt: skip
    network, column, row, inside, mask = _place(features, rows, R, F)
    affine = network * features + column
    total, weighted = _load_parts(part, network, column, inside, features, PARTS)
    if tl.program_id(2) == 0:
        tl.store(dbias + affine, total, mask=inside)
        tl.store(dscale + affine, weighted, mask=inside)
    if INPUTS:
        inverse = tl.load(inverse_std + affine, mask=inside, other=0.0)
        factor = tl.load(scale + affine, mask=inside, other=0.0)
        value, change = tile(
            x + network * x_network + column[None, :] + row[:, None] * x_row,
            dy + network * dy_network + column[None, :] + row[:, None] * dy_row,
            mask,
            tl.load(mean + affine, mask=inside, other=0.0),
            inverse,
            factor,
            tl.load(bias + affine, mask=inside, other=0.0),
            RELU,
        )
        change -= (total / rows)[None, :] + value * (weighted / rows)[None, :]
        change *= (factor * inverse)[None, :]
        place = dx + network * rows * features + column[None, :] + row[:, None] * features
        tl.store(place, change.to(dx.dtype.element_ty), mask=mask)


def forward(
    x: Tensor, scale: Tensor, bias: Tensor, residual: Tensor, outputs: tuple[Tensor, ...], relu: bool, eps: float
) -> None:
    """Launches `batch_norm.forward` into (y, mean, inverse_std); a residual that is y itself is none."""
    part, size = _parts(x)
    source = (*x.shape[2:], *x.stride()[:2])
    _forward_sums[_grid(x, size["PARTS"])](x, part, *source, **size)
    _forward_rest[_grid(x, size["PARTS"])](
        x, part, scale, bias, residual, *outputs, *source, eps, RELU=relu, ADD=residual is not outputs[0], **size
    )


def backward(dy: Tensor, x: Tensor, saved: tuple[Tensor, ...], outputs: tuple[Tensor, ...], relu: bool) -> None:
    """Launches `batch_norm.backward` of (scale, bias, mean, inverse_std) into (dx, dscale, dbias); dx may be empty."""
    part, size = _parts(x)
    inputs, strides = outputs[0].numel() > 0, (*x.shape[2:], *dy.stride()[:2], *x.stride()[:2])
    _backward_sums[_grid(x, size["PARTS"])](dy, x, *saved, part, *strides, RELU=relu, **size)
    _backward_rest[_grid(x, size["PARTS"] if inputs else 1)](
        dy, x, *saved, part, *outputs, *strides, RELU=relu, INPUTS=inputs, **size
    )


def _parts(x: Tensor) -> tuple[Tensor, dict[str, int]]:
    """Returns where sums of parts go, and what every kernel is specialised for."""
    rows = min(triton.next_power_of_2(x.shape[1]), ROWS)
    count = triton.next_power_of_2(triton.cdiv(x.shape[1], rows))
    part = torch.empty(x.shape[0], count, 2, x.shape[2], dtype=torch.float32, device=x.device)
    return part, {"rows": x.shape[1], "PARTS": count, "R": rows, "F": WIDTH, "num_warps": 4}


def _grid(x: Tensor, parts: int) -> tuple[int, int, int]:
    return triton.cdiv(x.shape[2], WIDTH), x.shape[0], parts
