"""Batch norm of stacked networks by the statistics of their batch, written out forward and backward.

On a GPU a pass is one Triton kernel, or two where features are few, where a compiler takes three or four. Elsewhere it
is plain operations. Both compute in float32 and agree to rounding. The ops have no derivative of their own and no rule
for `vmap`: see `fused` for who calls them.
Source: Ioffe and Szegedy 2015, arXiv 1502.03167.
"""

from __future__ import annotations

import torch
from torch import Tensor

from functional_sl.threefry import builds_kernels

Three = tuple[Tensor, Tensor, Tensor]


@torch.library.custom_op("functional_sac::batch_norm", mutates_args=())
def forward(
    x: Tensor, scale: Tensor, bias: Tensor, residual: Tensor | None, relu: bool, dtype: torch.dtype, eps: float
) -> Three:
    """Normalises, scales and shifts; then, where asked, the ReLU and the sum with a residual.

    Args:
      x: [N, B, F] of N networks, float32 or a half type.
      scale: [N, F] float32.
      bias: [N, F] float32.
      residual: [N, B, F] of the output's type, added at the end, or None.
      relu: whether negative numbers become zero before that.
      dtype: of the output.
      eps: beside the variance.

    Returns:
      (output [N, B, F], mean and inverse standard deviation of the batch, biased, [N, F] float32).
    """
    wide = x.to(scale.dtype)
    mean = wide.mean(1)
    inverse_std = torch.rsqrt(wide.var(1, correction=0) + eps)
    y = (wide - mean.unsqueeze(1)) * (inverse_std * scale).unsqueeze(1) + bias.unsqueeze(1)
    y = (torch.relu(y) if relu else y).to(dtype)
    return (y if residual is None else y + residual).contiguous(), mean, inverse_std


@forward.register_fake
def _(
    x: Tensor, scale: Tensor, bias: Tensor, residual: Tensor | None, relu: bool, dtype: torch.dtype, eps: float
) -> Three:
    return x.new_empty(x.shape, dtype=dtype), scale.new_empty(scale.shape), scale.new_empty(scale.shape)


@torch.library.custom_op("functional_sac::batch_norm_backward", mutates_args=())
def backward(
    dy: Tensor,
    x: Tensor,
    scale: Tensor,
    bias: Tensor,
    mean: Tensor,
    inverse_std: Tensor,
    relu: bool,
    inputs: bool,
) -> Three:
    """Returns the gradients of x, scale and bias.

    Args:
      dy: [N, B, F], of the output.
      x: as given to `forward`.
      scale: likewise.
      bias: likewise.
      mean: as `forward` returned it.
      inverse_std: likewise.
      relu: as given to `forward`.
      inputs: whether the gradient of x is wanted; without, it is empty.
    """
    centred = (x.to(scale.dtype) - mean.unsqueeze(1)) * inverse_std.unsqueeze(1)
    dz = dy.to(scale.dtype)
    if relu:
        dz = torch.where(centred * scale.unsqueeze(1) + bias.unsqueeze(1) > 0, dz, 0.0)
    dbias, dscale = dz.sum(1), (dz * centred).sum(1)
    if not inputs:
        return x.new_empty(0), dscale, dbias
    rest = dz - (dbias / x.shape[1]).unsqueeze(1) - centred * (dscale / x.shape[1]).unsqueeze(1)
    return (rest * (scale * inverse_std).unsqueeze(1)).to(x.dtype).contiguous(), dscale, dbias


@backward.register_fake
def _(
    dy: Tensor,
    x: Tensor,
    scale: Tensor,
    bias: Tensor,
    mean: Tensor,
    inverse_std: Tensor,
    relu: bool,
    inputs: bool,
) -> Three:
    return x.new_empty(x.shape if inputs else (0,)), scale.new_empty(scale.shape), scale.new_empty(scale.shape)


if builds_kernels():
    from functional_sac import batch_norm_kernels

    forward.register_kernel("cuda")(batch_norm_kernels.forward)
    backward.register_kernel("cuda")(batch_norm_kernels.backward)
