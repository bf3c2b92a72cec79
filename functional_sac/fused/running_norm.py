"""Batch norm by running statistics with a ReLU behind it, written out for stacked networks that are only read.

On a GPU a pass is one Triton kernel, elsewhere plain operations. Both compute in float32 and agree to rounding. The
ops have no derivative of their own and no rule for `vmap`: see `frozen_critics` for who calls them.
"""

from __future__ import annotations

import torch
from torch import Tensor, library

from functional_sac.networks import BN_EPS, BatchNorm, Stats
from functional_sl.kernels import buildable


def affine(norm: BatchNorm, stats: Stats) -> tuple[Tensor, Tensor]:
    """Returns the slope and the offset [N, 1, F] that a norm [N, F] and its running statistics [N, F] come to."""
    slope = norm.scale * torch.rsqrt(stats.var + BN_EPS)
    return slope.unsqueeze(1), (norm.bias - stats.mean * slope).unsqueeze(1)


@library.custom_op("functional_sac::running_norm", mutates_args=())
def forward(x: Tensor, scale: Tensor, bias: Tensor, mean: Tensor, var: Tensor, residual: Tensor | None) -> Tensor:
    """Normalises, scales, shifts, takes the ReLU and adds a residual, where there is one.

    Args:
      x: [N, B, F] of N networks, float32 or a half type.
      scale: [N, F] float32.
      bias: [N, F] float32.
      mean: [N, F] float32, running.
      var: [N, F] float32, running.
      residual: [N, B, F] of the type of x, or None.

    Returns:
      [N, B, F] of the type of x, contiguous.
    """
    slope, offset = affine(BatchNorm(scale, bias), Stats(mean, var))
    y = torch.relu(torch.addcmul(offset, x.to(slope.dtype), slope)).to(x.dtype)
    return (y if residual is None else y + residual).contiguous()


@forward.register_fake
def _(x: Tensor, scale: Tensor, bias: Tensor, mean: Tensor, var: Tensor, residual: Tensor | None) -> Tensor:
    return x.new_empty(x.shape)


@library.custom_op("functional_sac::running_norm_backward", mutates_args=())
def backward(dy: Tensor, x: Tensor, scale: Tensor, bias: Tensor, mean: Tensor, var: Tensor) -> Tensor:
    """Returns the gradient of x [N, B, F], from that of the result; the other arguments as given to `forward`."""
    slope, offset = affine(BatchNorm(scale, bias), Stats(mean, var))
    dead = torch.addcmul(offset, x.to(slope.dtype), slope) <= 0
    return torch.where(dead, 0.0, dy.to(slope.dtype) * slope).to(x.dtype).contiguous()


@backward.register_fake
def _(dy: Tensor, x: Tensor, scale: Tensor, bias: Tensor, mean: Tensor, var: Tensor) -> Tensor:
    return x.new_empty(x.shape)


if buildable():
    from functional_sac.fused import running_norm_kernels

    forward.register_kernel("cuda")(lambda *given: running_norm_kernels.forward(*given, BN_EPS))
    backward.register_kernel("cuda")(lambda *given: running_norm_kernels.backward(*given, BN_EPS))
