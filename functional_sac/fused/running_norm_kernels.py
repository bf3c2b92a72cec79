"""The Triton kernels of batch norm by running statistics: a program takes a tile of one network."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from functional_sac.fused.tiles import rectified
from functional_sl.kernels import launch, rowwise

ROWS, WIDTH = 32, 128  # of a program


@triton.jit
def _tile(
    x, scale, bias, mean, var, rows, features, x_network, x_row, mean_network, var_network, eps,
    R: tl.constexpr, F: tl.constexpr,
):  # fmt: skip
    """Returns a tile before the ReLU, its slope, its place in tensors that lie row by row, and what there is of it."""
    network = tl.program_id(2).to(tl.int64)
    row, column = tl.program_id(1) * R + tl.arange(0, R), tl.program_id(0) * F + tl.arange(0, F)
    inside = column < features
    mask = (row < rows)[:, None] & inside[None, :]
    spread = tl.load(var + network * var_network + column, mask=inside, other=1.0)
    slope = tl.load(scale + network * features + column, mask=inside, other=0.0) / tl.sqrt(spread + eps)
    offset = tl.load(bias + network * features + column, mask=inside, other=0.0)
    offset -= tl.load(mean + network * mean_network + column, mask=inside, other=0.0) * slope
    value = tl.load(x + network * x_network + row[:, None] * x_row + column[None, :], mask=mask, other=0.0)
    value = value.to(tl.float32) * slope[None, :] + offset[None, :]
    return value, slope, network * rows * features + row[:, None] * features + column[None, :], mask


@triton.jit
def _forward(
    x, scale, bias, mean, var, residual, y, rows, features, x_network, x_row, mean_network, var_network, eps,
    ADD: tl.constexpr, R: tl.constexpr, F: tl.constexpr,
):  # fmt: skip
    value, _, place, mask = _tile(
        x, scale, bias, mean, var, rows, features, x_network, x_row, mean_network, var_network, eps, R, F
    )
    tl.store(y + place, rectified(value, residual, place, mask, y, ADD), mask=mask)


@triton.jit
def _backward(
    dy, x, scale, bias, mean, var, dx, rows, features, x_network, x_row, mean_network, var_network, eps,
    R: tl.constexpr, F: tl.constexpr,
):  # fmt: skip
    value, slope, place, mask = _tile(
        x, scale, bias, mean, var, rows, features, x_network, x_row, mean_network, var_network, eps, R, F
    )
    change = tl.load(dy + place, mask=mask, other=0.0).to(tl.float32) * slope[None, :]
    tl.store(dx + place, tl.where(value <= 0.0, 0.0, change).to(dx.dtype.element_ty), mask=mask)


def forward(
    x: Tensor, scale: Tensor, bias: Tensor, mean: Tensor, var: Tensor, residual: Tensor | None, eps: float
) -> Tensor:
    """Launches `running_norm.forward`."""
    x, scale, bias, mean, var = (rowwise(t) for t in (x, scale.contiguous(), bias.contiguous(), mean, var))
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    added = y if residual is None else residual.contiguous()
    launch(
        _forward, _grid(x), x, scale, bias, mean, var, added, y, *x.shape[1:], *x.stride()[:2], mean.stride(0),
        var.stride(0), eps, ADD=residual is not None, R=ROWS, F=WIDTH, num_warps=4,
    )  # fmt: skip
    return y


def backward(dy: Tensor, x: Tensor, scale: Tensor, bias: Tensor, mean: Tensor, var: Tensor, eps: float) -> Tensor:
    """Launches `running_norm.backward`."""
    x, scale, bias, mean, var = (rowwise(t) for t in (x, scale.contiguous(), bias.contiguous(), mean, var))
    dx = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    launch(
        _backward, _grid(x), dy.contiguous(), x, scale, bias, mean, var, dx, *x.shape[1:], *x.stride()[:2],
        mean.stride(0), var.stride(0), eps, R=ROWS, F=WIDTH, num_warps=4,
    )  # fmt: skip
    return dx


def _grid(x: Tensor) -> tuple[int, int, int]:
    return triton.cdiv(x.shape[2], WIDTH), triton.cdiv(x.shape[1], ROWS), x.shape[0]
