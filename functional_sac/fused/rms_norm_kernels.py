"""The Triton kernels of `rms_norm`: a program takes a few whole rows of one network.

Backward, what a row was divided by is computed anew, which is cheaper than to read it. Nothing is added atomically.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from functional_sac.fused import row_parts
from functional_sl.kernels import launch, rowwise

TILE = 2048  # elements that a program of the forward pass holds at a time


@triton.jit
def _forward(
    x, scale, y, networks, rows, width, x_set, x_network, x_row, eps, R: tl.constexpr, H: tl.constexpr
):  # fmt: skip
    network = tl.program_id(1).to(tl.int64)
    row = tl.program_id(0) * R + tl.arange(0, R)
    column = tl.arange(0, H)
    mask = (row < rows)[:, None] & (column < width)[None, :]
    source = x + (network // networks) * x_set + (network % networks) * x_network
    value = tl.load(source + row[:, None] * x_row + column[None, :], mask=mask, other=0.0).to(tl.float32)
    inverse = 1.0 / tl.sqrt(tl.sum(value * value, 1) / width + eps)
    factor = tl.load(scale + network * width + column, mask=column < width, other=0.0)
    value = value * inverse[:, None] * factor[None, :]
    place = y + network * rows * width + row[:, None] * width + column[None, :]
    tl.store(place, value.to(y.dtype.element_ty), mask=mask)


@triton.jit
def _backward(
    dy, x, scale, dx, part, rows, width, dy_network, dy_row, x_network, x_row, eps,
    R: tl.constexpr, H: tl.constexpr,
):  # fmt: skip
    network = tl.program_id(1).to(tl.int64)
    row = tl.program_id(0) * R + tl.arange(0, R)
    column = tl.arange(0, H)
    inside = column < width
    mask = (row < rows)[:, None] & inside[None, :]
    value = tl.load(x + network * x_network + row[:, None] * x_row + column[None, :], mask=mask, other=0.0)
    flow = tl.load(dy + network * dy_network + row[:, None] * dy_row + column[None, :], mask=mask, other=0.0)
    value, flow = value.to(tl.float32), flow.to(tl.float32)
    inverse = 1.0 / tl.sqrt(tl.sum(value * value, 1) / width + eps)
    value *= inverse[:, None]
    scaled = flow * tl.load(scale + network * width + column, mask=inside, other=0.0)[None, :]
    common = tl.sum(scaled * value, 1) / width
    change = (scaled - value * common[:, None]) * inverse[:, None]
    place = dx + network * rows * width + row[:, None] * width + column[None, :]
    tl.store(place, change.to(dx.dtype.element_ty), mask=mask)
    sums = part + (tl.program_id(0) * tl.num_programs(1) + network) * width + column
    tl.store(sums, tl.sum(flow * value, 0), mask=inside)


def forward(x: Tensor, scale: Tensor, dtype: torch.dtype, eps: float) -> Tensor:
    """Launches `rms_norm.forward`."""
    x, scale = rowwise(x), scale.contiguous()
    strides = x.stride()[:-1] if x.ndim == 4 else (0, *x.stride()[:-1])
    networks, rows, width = x.shape[-3:]
    y = torch.empty(x.shape, dtype=dtype, device=x.device)
    columns = triton.next_power_of_2(width)
    tile = max(1, TILE // columns)
    launch(
        _forward, (triton.cdiv(rows, tile), x.numel() // (rows * width)), x, scale, y, networks, rows, width, *strides,
        eps, R=tile, H=columns, num_warps=4,
    )  # fmt: skip
    return y


def backward(dy: Tensor, x: Tensor, scale: Tensor, eps: float, size: int) -> tuple[Tensor, Tensor]:
    """Launches `rms_norm.backward` with parts of `size` rows, a power of two."""
    dy, x, scale = rowwise(dy), rowwise(x), scale.contiguous()
    networks, rows, width = x.shape
    dx = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    part = torch.empty(row_parts.count(rows, size), networks, width, dtype=torch.float32, device=x.device)
    launch(
        _backward, (triton.cdiv(rows, size), networks), dy, x, scale, dx, part, rows, width, *dy.stride()[:2],
        *x.stride()[:2], eps, R=size, H=triton.next_power_of_2(width), num_warps=2,
    )  # fmt: skip
    return dx, part
