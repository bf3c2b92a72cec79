"""Triton kernels of batch norm for few features, and for an input that networks share: programs split the rows.

A first kernel adds up each part of the rows, a second one adds the parts in their order and does the rest. The parts
lie in `[N, parts, 2, F]` float32; those that `_common_end` adds up are of `weight_gradients.in_parts`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from functional_sac.fused.batch_norm_tile_kernels import normalised, rectified, totals
from functional_sl.kernels import launch

ROWS, COMMON_ROWS = 256, 128  # of a program
WIDTH = 32  # features of a program
REST_ROWS, REST_WIDTH = 32, 128  # of a program that only writes, going backward
END_ROWS, END_WIDTH = 256, 16  # of a program at a time, where the gradients of a common input end


@triton.jit
def _place(features, width, rows: tl.constexpr, R: tl.constexpr, F: tl.constexpr):
    """Returns a program's network, features and rows, which features there are, and the tile up to the rows' width.

    The width, a multiple of eight, lets whole words be loaded, where the number of features would break them up.
    """
    network = tl.program_id(1).to(tl.int64)
    column = tl.program_id(0) * F + tl.arange(0, F)
    row = tl.program_id(2) * R + tl.arange(0, R)
    inside = column < features
    return network, column, row, inside, (row < rows)[:, None] & (column < width)[None, :]


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
    x, part, features, width, x_network, x_row,
    rows: tl.constexpr, PARTS: tl.constexpr, R: tl.constexpr, F: tl.constexpr,
):  # fmt: skip
    network, column, row, inside, mask = _place(features, width, rows, R, F)
    source = x + network * x_network + column
    # Shifted by the first row, one pass loses nothing to a mean that is large beside the spread.
    shift = tl.load(source, mask=inside, other=0.0).to(tl.float32)
    value = tl.load(source[None, :] + row[:, None] * x_row, mask=mask, other=0.0).to(tl.float32)
    value = tl.where(mask, value - shift[None, :], 0.0)
    _store_part(part, tl.sum(value, 0), tl.sum(value * value, 0), network, column, inside, features, PARTS)


@triton.jit
def _moments(x, part, column, inside, network, features, x_network, eps, rows: tl.constexpr, PARTS: tl.constexpr):
    """Returns mean and inverse standard deviation by the parts that `_forward_sums` left."""
    sums, squares = _load_parts(part, network, column, inside, features, PARTS)
    average = sums / rows
    # NaN must stay: it closes the gate.
    variance = tl.maximum(squares / rows - average * average, 0.0, propagate_nan=tl.PropagateNan.ALL)
    average += tl.load(x + network * x_network + column, mask=inside, other=0.0).to(tl.float32)
    return average, 1.0 / tl.sqrt(variance + eps)


@triton.jit
def _forward_rest(
    x, part, scale, bias, residual, y, mean, inverse_std, features, x_network, x_row, moments, eps,
    rows: tl.constexpr, PARTS: tl.constexpr, ADD: tl.constexpr, R: tl.constexpr, F: tl.constexpr,
):  # fmt: skip
    network, column, row, inside, mask = _place(features, features, rows, R, F)
    average, inverse = _moments(x, part, column, inside, network, features, x_network, eps, rows, PARTS)
    if tl.program_id(2) == 0:
        tl.store(mean + network * moments + column, average, mask=inside)
        tl.store(inverse_std + network * moments + column, inverse, mask=inside)
    affine = network * features + column
    slope = tl.load(scale + affine, mask=inside, other=0.0) * inverse
    offset = tl.load(bias + affine, mask=inside, other=0.0)
    source = x + network * x_network + column[None, :] + row[:, None] * x_row
    value = tl.load(source, mask=mask, other=0.0).to(tl.float32)
    value = (value - average[None, :]) * slope[None, :] + offset[None, :]
    place = network * rows * features + column[None, :] + row[:, None] * features
    tl.store(y + place, rectified(value, residual, place, mask, y, ADD), mask=mask)


@triton.jit
def _common_rest(
    x, part, scale, bias, y, z, mean, inverse_std, features, x_row, width, z_width, moments, eps,
    rows: tl.constexpr, PARTS: tl.constexpr, NETWORKS: tl.constexpr, R: tl.constexpr, F: tl.constexpr,
):  # fmt: skip
    none, column, row, inside, mask = _place(features, width, rows, R, F)
    average, inverse = _moments(x, part, column, inside, none, features, 0, eps, rows, PARTS)
    value = tl.load(x + column[None, :] + row[:, None] * x_row, mask=mask, other=0.0).to(tl.float32)
    value = tl.where(inside[None, :], value - average[None, :], 0.0)
    normal = tl.where((column == features)[None, :], 1.0, value * inverse[None, :]).to(z.dtype.element_ty)
    there = (row < rows)[:, None] & (column < z_width)[None, :]
    tl.store(z + row[:, None].to(tl.int64) * z_width + column[None, :], normal, mask=there)
    place = row[:, None].to(tl.int64) * width + column[None, :]
    for network in tl.static_range(NETWORKS):
        if tl.program_id(2) == 0:
            tl.store(mean + network * moments + column, average, mask=inside)
            tl.store(inverse_std + network * moments + column, inverse, mask=inside)
        slope = tl.load(scale + network * features + column, mask=inside, other=0.0) * inverse
        offset = tl.load(bias + network * features + column, mask=inside, other=0.0)
        out = value * slope[None, :] + offset[None, :]
        tl.store(y + place, out.to(y.dtype.element_ty), mask=mask)
        place += rows * width


@triton.jit
def _backward_sums(
    dy, x, scale, bias, mean, inverse_std, part, features, width, dy_network, dy_row, x_network, x_row, moments,
    given: tl.constexpr, rows: tl.constexpr, PARTS: tl.constexpr, R: tl.constexpr, F: tl.constexpr,
):  # fmt: skip
    network, column, row, inside, mask = _place(features, width, rows, R, F)
    affine = network * features + column
    flow = dy + network * dy_network + column[None, :] + row[:, None] * dy_row
    value, change = normalised(
        tl.load(x + network * x_network + column[None, :] + row[:, None] * x_row, mask=mask, other=0.0),
        tl.load(flow, mask=mask & (row < given)[:, None], other=0.0),
        tl.load(mean + network * moments + column, mask=inside, other=0.0),
        tl.load(inverse_std + network * moments + column, mask=inside, other=0.0),
        tl.load(scale + affine, mask=inside, other=0.0),
        tl.load(bias + affine, mask=inside, other=0.0),
    )
    weighted = tl.where(mask, change * value, 0.0)
    _store_part(part, tl.sum(change, 0), tl.sum(weighted, 0), network, column, inside, features, PARTS)


@triton.jit
def _backward_rest(
    dy, x, scale, bias, mean, inverse_std, part, whole, dx, dscale, dbias, features, width, dy_network, dy_row,
    x_network, x_row, moments, given: tl.constexpr, rows: tl.constexpr, PARTS: tl.constexpr, WHOLE: tl.constexpr,
    R: tl.constexpr, F: tl.constexpr,
):  # fmt: skip
    network, column, row, inside, mask = _place(features, width, rows, R, F)
    affine = network * features + column
    # What takes longest is asked for before the parts are added up.
    flow = dy + network * dy_network + column[None, :] + row[:, None] * dy_row
    change = tl.load(flow, mask=mask & (row < given)[:, None], other=0.0)
    value = tl.load(x + network * x_network + column[None, :] + row[:, None] * x_row, mask=mask, other=0.0)
    total, weighted = totals(part + network * PARTS * 2 * features + column, features, inside, PARTS, F)
    if tl.program_id(2) == 0:
        tl.store(dbias + affine, total, mask=inside)
        tl.store(dscale + affine, weighted, mask=inside)
    place = network * rows * features + column[None, :] + row[:, None] * features
    if WHOLE:
        tl.store(whole + place, change, mask=mask)
    inverse = tl.load(inverse_std + network * moments + column, mask=inside, other=0.0)
    factor = tl.load(scale + affine, mask=inside, other=0.0)
    value, change = normalised(
        value,
        change,
        tl.load(mean + network * moments + column, mask=inside, other=0.0),
        inverse,
        factor,
        tl.load(bias + affine, mask=inside, other=0.0),
    )
    change -= (total / rows)[None, :] + value * (weighted / rows)[None, :]
    change *= (factor * inverse)[None, :]
    tl.store(dx + place, change.to(dx.dtype.element_ty), mask=mask)


@triton.jit
def _common_end(
    parts, scale, bias, w, dscale, dbias, dw, features, part_width, width,
    H: tl.constexpr, PARTS: tl.constexpr, R: tl.constexpr, F: tl.constexpr,
):  # fmt: skip
    network = tl.program_id(1).to(tl.int64)
    column = tl.program_id(0) * F + tl.arange(0, F)
    inside = column < features
    affine = network * features + column
    factor = tl.load(scale + affine, mask=inside, other=0.0)
    offset = tl.load(bias + affine, mask=inside, other=0.0)
    weighted = tl.zeros((R, F), factor.dtype)
    total = tl.zeros((R, F), factor.dtype)
    for begin in range(0, H, R):
        row = begin + tl.arange(0, R)
        mask = (row < H)[:, None] & inside[None, :]
        g, s = tl.zeros((R, F), factor.dtype), tl.zeros((R,), factor.dtype)
        for i in tl.static_range(PARTS):
            source = parts + ((network * PARTS + i) * H + row) * part_width
            g += tl.load(source[:, None] + column[None, :], mask=mask, other=0.0)
            s += tl.load(source + features, mask=row < H, other=0.0)
        place = (network * H + row)[:, None] * width + column[None, :]
        slope = tl.load(w + place, mask=mask, other=0.0).to(factor.dtype)
        weighted += slope * g
        total += slope * s[:, None]
        found = tl.where(inside[None, :], g * factor[None, :] + s[:, None] * offset[None, :], 0.0)
        tl.store(dw + place, found, mask=(row < H)[:, None] & (column < width)[None, :])
    tl.store(dscale + affine, tl.sum(weighted, 0), mask=inside)
    tl.store(dbias + affine, tl.sum(total, 0), mask=inside)


def forward(x: Tensor, scale: Tensor, bias: Tensor, residual: Tensor, outputs: tuple[Tensor, ...], eps: float) -> None:
    """Launches `batch_norm.forward` into (y, mean, inverse_std); a residual that is y itself is none."""
    part, size = _parts(x, ROWS)
    features, grid = x.shape[2], _grid(x.shape[2], x.shape[0], size["PARTS"])
    launch(_forward_sums, grid, x, part, features, features, *x.stride()[:2], **size)
    strides = (features, *x.stride()[:2], outputs[1].stride(0))
    launch(
        _forward_rest, grid, x, part, scale, bias, residual, *outputs, *strides, eps, ADD=residual is not outputs[0],
        **size,
    )  # fmt: skip


def backward(dy: Tensor, x: Tensor, saved: tuple[Tensor, ...], outputs: tuple[Tensor, ...]) -> None:
    """Launches `batch_norm.backward` from (scale, bias, mean, inverse_std) into (whole, dx, dscale, dbias).

    Where `whole` is dx it is not wanted.
    """
    part, size = _parts(x, ROWS)
    networks, rows, features = x.shape
    strides = (features, features, *dy.stride()[:2], *x.stride()[:2], saved[2].stride(0), dy.shape[1])
    grid = _grid(features, networks, size["PARTS"])
    launch(_backward_sums, grid, dy, x, *saved, part, *strides, **size)
    grid = triton.cdiv(features, REST_WIDTH), networks, triton.cdiv(rows, REST_ROWS)
    launch(
        _backward_rest, grid, dy, x, *saved, part, *outputs, *strides, WHOLE=outputs[0] is not outputs[1],
        **size | {"R": REST_ROWS, "F": REST_WIDTH},
    )  # fmt: skip


def common(
    x: Tensor,
    scale: Tensor,
    bias: Tensor,
    mean: Tensor,
    inverse_std: Tensor,
    dtype: torch.dtype,
    eps: float,
    z_width: int,
) -> tuple[Tensor, Tensor]:
    """Launches `batch_norm.common`."""
    networks, features = scale.shape
    x, scale, bias, width = x.contiguous(), scale.contiguous(), bias.contiguous(), x.shape[1]
    part, size = _parts(x[None, :, :features], COMMON_ROWS)
    y, z = (torch.empty(*shape, dtype=dtype, device=x.device) for shape in ((networks, *x.shape), (1, len(x), z_width)))
    launch(_forward_sums, _grid(features, 1, size["PARTS"]), x, part, features, width, 0, width, **size)
    launch(
        _common_rest, _grid(max(width, z_width), 1, size["PARTS"]), x, part, scale, bias, y, z, mean, inverse_std,
        features, width, width, z_width, mean.stride(0), eps, NETWORKS=networks, **size,
    )  # fmt: skip
    return y, z


def common_backward(parts: Tensor, scale: Tensor, bias: Tensor, w: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Launches the rest of `batch_norm.common_backward`, from what `weight_gradients.in_parts` returned."""
    networks, features = scale.shape
    height, width = w.shape[1:]
    scale, bias, w = scale.contiguous(), bias.contiguous(), w.contiguous()
    dscale, dbias, dw = torch.empty_like(scale), torch.empty_like(bias), torch.empty_like(w, dtype=parts.dtype)
    launch(
        _common_end, (triton.cdiv(width, END_WIDTH), networks), parts, scale, bias, w, dscale, dbias, dw, features,
        parts.shape[3], width, H=height, PARTS=parts.shape[1], R=min(triton.next_power_of_2(height), END_ROWS),
        F=END_WIDTH, num_warps=8,
    )  # fmt: skip
    return dscale, dbias, dw


def _parts(x: Tensor, most: int) -> tuple[Tensor, dict[str, int]]:
    """Returns where sums of parts of x [N, B, F] go, and what every kernel is specialised for."""
    rows = min(triton.next_power_of_2(x.shape[1]), most)
    count = triton.next_power_of_2(triton.cdiv(x.shape[1], rows))
    part = torch.empty(x.shape[0], count, 2, x.shape[2], dtype=torch.float32, device=x.device)
    return part, {"rows": x.shape[1], "PARTS": count, "R": rows, "F": WIDTH, "num_warps": 4}


def _grid(features: int, networks: int, parts: int) -> tuple[int, int, int]:
    return triton.cdiv(features, WIDTH), networks, parts
