"""The Triton kernels of `frozen_blocks`: a program computes a tile of a product and, while it holds it, what follows.

Sizes are static, and tiles divide them. What follows a product is loaded before it, to be on its way meanwhile.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from functional_sac.fused import frozen_block_tiles
from functional_sac.networks import BN_EPS
from functional_sl.kernels import launch, rowwise


@triton.jit
def _own(rows: tl.constexpr, R: tl.constexpr, F: tl.constexpr):
    """Returns a program's network, its rows among those of all networks, and its features."""
    network = tl.program_id(2).to(tl.int64)
    row = network * rows + tl.program_id(1) * R + tl.arange(0, R)
    return network, row, tl.program_id(0) * F + tl.arange(0, F)


@triton.jit
def _product(
    x, w, rows: tl.constexpr, features: tl.constexpr, depth: tl.constexpr, TURNED: tl.constexpr,
    R: tl.constexpr, F: tl.constexpr, K: tl.constexpr,
):  # fmt: skip
    """Returns a tile of x [N, B, K] times w, which is [N, F, K] if turned, else [N, K, F]."""
    network, row, feature = _own(rows, R, F)
    step = tl.arange(0, K)
    left = x + row[:, None] * depth + step[None, :]
    right = w + network * features * depth
    total = tl.zeros((R, F), tl.float32)
    for k in range(0, depth, K):
        if TURNED:
            other = tl.load(right + feature[:, None] * depth + (k + step)[None, :]).T
        else:
            other = tl.load(right + (k + step)[:, None] * features + feature[None, :])
        total = tl.dot(tl.load(left + k), other, total)
    return total


@triton.jit
def _slope(scale, var, network, feature, var_network, features: tl.constexpr, EPS: tl.constexpr):
    """Returns the slopes of a program's features."""
    spread = tl.load(var + network * var_network + feature)
    return tl.load(scale + network * features + feature) / tl.sqrt(spread + EPS)


@triton.jit
def _forward(
    x, w, scale, bias, mean, var, residual, y, passed, mean_network, var_network, EPS: tl.constexpr,
    ADD: tl.constexpr, rows: tl.constexpr, features: tl.constexpr, depth: tl.constexpr,
    R: tl.constexpr, F: tl.constexpr, K: tl.constexpr,
):  # fmt: skip
    network, row, feature = _own(rows, R, F)
    place = row[:, None] * features + feature[None, :]
    if ADD:
        rest = tl.load(residual + place)
    slope = _slope(scale, var, network, feature, var_network, features, EPS)
    offset = tl.load(bias + network * features + feature)
    offset -= tl.load(mean + network * mean_network + feature) * slope
    value = _product(x, w, rows, features, depth, True, R, F, K).to(x.dtype.element_ty).to(tl.float32)
    value = value * slope[None, :] + offset[None, :]
    # NaN stays NaN: the gate must see it.
    value = tl.where(value < 0.0, 0.0, value).to(y.dtype.element_ty)
    if ADD:
        tl.store(passed + place, (value <= 0.0) == 0)
        value = (value.to(tl.float32) + rest.to(tl.float32)).to(y.dtype.element_ty)
    tl.store(y + place, value)


@triton.jit
def _inner_backward(
    d, w, y, scale, var, output, var_network, EPS: tl.constexpr, rows: tl.constexpr, features: tl.constexpr,
    depth: tl.constexpr, R: tl.constexpr, F: tl.constexpr, K: tl.constexpr,
):  # fmt: skip
    network, row, feature = _own(rows, R, F)
    place = row[:, None] * features + feature[None, :]
    passed = tl.load(y + place)
    slope = _slope(scale, var, network, feature, var_network, features, EPS)
    value = _product(d, w, rows, features, depth, False, R, F, K).to(d.dtype.element_ty).to(tl.float32)
    value = tl.where(passed <= 0.0, 0.0, value * slope[None, :])
    tl.store(output + place, value.to(output.dtype.element_ty))


@triton.jit
def _outer_backward(
    d, w, dh, passed, scale, var, total, output, var_network, EPS: tl.constexpr, MASK: tl.constexpr,
    rows: tl.constexpr, features: tl.constexpr, depth: tl.constexpr,
    R: tl.constexpr, F: tl.constexpr, K: tl.constexpr,
):  # fmt: skip
    network, row, feature = _own(rows, R, F)
    place = row[:, None] * features + feature[None, :]
    rest = tl.load(dh + place)
    if MASK:
        alive = tl.load(passed + place)
        slope = _slope(scale, var, network, feature, var_network, features, EPS)
    value = _product(d, w, rows, features, depth, False, R, F, K)
    value = (value + rest.to(tl.float32)).to(total.dtype.element_ty)
    tl.store(total + place, value)
    if MASK:
        value = tl.where(alive, value.to(tl.float32) * slope[None, :], 0.0)
        tl.store(output + place, value.to(output.dtype.element_ty))


def inner(h: Tensor, w: Tensor, scale: Tensor, bias: Tensor, mean: Tensor, var: Tensor) -> Tensor:
    """Launches `frozen_blocks.inner`."""
    y = h.new_empty(*h.shape[:2], w.shape[1])
    _launch_forward(h, w, (scale, bias), (mean, var), y, y, y, ADD=False)
    return y


def outer(
    y: Tensor, w: Tensor, scale: Tensor, bias: Tensor, mean: Tensor, var: Tensor, h: Tensor
) -> tuple[Tensor, Tensor]:
    """Launches `frozen_blocks.outer`."""
    h = h.contiguous()
    new, passed = torch.empty_like(h), torch.empty_like(h, dtype=torch.bool)
    _launch_forward(y, w, (scale, bias), (mean, var), h, new, passed, ADD=True)
    return new, passed


def inner_backward(d: Tensor, w: Tensor, y: Tensor, scale: Tensor, var: Tensor) -> Tensor:
    """Launches `frozen_blocks.inner_backward`."""
    d, w, y, scale, var = d.contiguous(), w.contiguous(), y.contiguous(), scale.contiguous(), rowwise(var)
    output = torch.empty_like(y)
    grid, sizes = _plan(d, w.shape[2])
    launch(_inner_backward, grid, d, w, y, scale, var, output, var.stride(0), EPS=BN_EPS, **sizes)
    return output


def outer_backward(
    d: Tensor, w: Tensor, dh: Tensor, passed: Tensor | None, scale: Tensor | None, var: Tensor | None
) -> list[Tensor]:
    """Launches `frozen_blocks.outer_backward`, or without a mask `frozen_blocks.added`."""
    d, w, dh = d.contiguous(), w.contiguous(), dh.contiguous()
    total, grid, sizes = torch.empty_like(dh), *_plan(d, w.shape[2])
    if passed is None or scale is None or var is None:
        # Nobody reads or writes what stands for the mask, the norm and the second result.
        launch(_outer_backward, grid, d, w, dh, dh, dh, dh, total, total, 0, EPS=BN_EPS, MASK=False, **sizes)
        return [total]
    passed, scale, var, output = passed.contiguous(), scale.contiguous(), rowwise(var), torch.empty_like(dh)
    launch(
        _outer_backward, grid, d, w, dh, passed, scale, var, total, output, var.stride(0), EPS=BN_EPS, MASK=True,
        **sizes,
    )  # fmt: skip
    return [total, output]


def _launch_forward(
    x: Tensor, w: Tensor, norm: tuple[Tensor, Tensor], stats: tuple[Tensor, Tensor], residual: Tensor, y: Tensor,
    passed: Tensor, ADD: bool,
) -> None:  # fmt: skip
    (scale, bias), (mean, var) = (t.contiguous() for t in norm), (rowwise(t) for t in stats)
    grid, sizes = _plan(x, w.shape[1])
    launch(
        _forward, grid, x.contiguous(), w.contiguous(), scale, bias, mean, var, residual, y, passed, mean.stride(0),
        var.stride(0), EPS=BN_EPS, ADD=ADD, **sizes,
    )  # fmt: skip


def _plan(x: Tensor, features: int) -> tuple[tuple[int, int, int], dict[str, int]]:
    """Returns the grid and the static sizes for the product of x [N, B, K] with so many features."""
    networks, rows, depth = x.shape
    tile = frozen_block_tiles.tile(networks, rows, features, depth)
    assert tile is not None
    room = torch.cuda.get_device_properties(x.device).shared_memory_per_block_optin
    step = x.element_size() * (tile.rows + tile.features) * tile.depth
    sizes = {"rows": rows, "features": features, "depth": depth}
    sizes |= {"R": tile.rows, "F": tile.features, "K": tile.depth}
    sizes |= {"num_warps": tile.warps, "num_stages": max(1, min(tile.stages, room // step))}
    return (features // tile.features, rows // tile.rows, networks), sizes
