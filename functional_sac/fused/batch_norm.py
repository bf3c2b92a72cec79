"""Batch norm of stacked networks by the statistics of their batch, written out forward and backward.

On a GPU a pass is one Triton kernel, or two where features are few, where networks share the input or where a product
is part of it. Elsewhere it is plain operations. Both compute in float32 and agree to rounding. Nothing here has a
derivative of its own or a rule for `vmap`; it is called within the ops of `trunk`.
Source: Ioffe and Szegedy 2015, arXiv 1502.03167.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from functional_sac.fused import weight_gradients
from functional_sac.fused.float32_products import product
from functional_sl.kernels import buildable

COMMON_WIDTH = 64  # of which that of a common input, normalised, is a multiple, for a product in whole tiles
KERNELS = buildable()
if KERNELS:
    from functional_sac.fused import batch_norm_kernels, batch_norm_product_kernels, batch_norm_split_kernels


def common(
    x: Tensor, scale: Tensor, bias: Tensor, mean: Tensor, inverse_std: Tensor, dtype: torch.dtype, eps: float
) -> tuple[Tensor, Tensor]:
    """Normalises the input that all networks share, by statistics taken once, then scales and shifts for each.

    Args:
      x: [B, K], F features and zeros.
      scale: [N, F] float32.
      bias: [N, F] float32.
      mean: [N, F] float32, takes the batch's mean, the same for every network.
      inverse_std: [N, F] float32, takes its inverse standard deviation, biased, likewise.
      dtype: of the output.
      eps: beside the variance.

    Returns:
      y [N, B, K], zero behind the features, and z [1, B, W], before it was scaled and shifted, behind the features a
      one and zeros; W is `common_width`.
    """
    if KERNELS and x.is_cuda:
        return batch_norm_split_kernels.common(
            x, scale, bias, mean, inverse_std, dtype, eps, common_width(scale.shape[1])
        )
    wide = x[:, : scale.shape[1]].to(scale.dtype)
    mean.copy_(wide.mean(0).expand_as(mean))
    inverse_std.copy_(torch.rsqrt(wide.var(0, correction=0) + eps).expand_as(mean))
    centred, features = wide - mean[0], wide.shape[1]
    y = centred * (inverse_std * scale).unsqueeze(1) + bias.unsqueeze(1)
    z = F.pad(centred * inverse_std[0], (0, 1), value=1.0).unsqueeze(0)
    y, z = (F.pad(t, (0, width - t.shape[2])) for t, width in ((y, x.shape[1]), (z, common_width(features))))
    return y.to(dtype), z.to(dtype)


def common_width(features: int) -> int:
    """Returns the width of what `common` keeps: room for the features and a one."""
    return (features // COMMON_WIDTH + 1) * COMMON_WIDTH


def common_backward(d: Tensor, z: Tensor, scale: Tensor, bias: Tensor, w: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the gradients of scale, bias and the weights by which the output of `common` is multiplied.

    That of the output itself, d times w, is not computed. What is needed of it is in g, the sum of d times z over the
    rows: with s, the column of the ones, w's gradient is g scale + s bias, and scale's and bias's are the sums over H
    of w g and of w s.

    Args:
      d: [N, B, H], of the product.
      z: as `common` returned it.
      scale: as given to `common`.
      bias: likewise.
      w: [N, H, K], the weights.

    Returns:
      [N, F], [N, F] and [N, H, K] float32, zero behind the features.
    """
    parts = weight_gradients.in_parts(d, z)
    if KERNELS and d.is_cuda:
        return batch_norm_split_kernels.common_backward(parts, scale, bias, w)
    features = scale.shape[1]
    g, s = parts.sum(1)[..., : features + 1].split([features, 1], -1)
    wide = w[..., :features].to(g.dtype)
    dw = F.pad(g * scale.unsqueeze(1) + s * bias.unsqueeze(1), (0, w.shape[2] - features))
    return (wide * g).sum(1), (wide * s).sum(1), dw


def forward(
    x: Tensor, scale: Tensor, bias: Tensor, residual: Tensor | None, mean: Tensor, inverse_std: Tensor, eps: float
) -> Tensor:
    """Normalises, scales and shifts, then takes the ReLU and, where there is one, adds a residual.

    Args:
      x: [N, B, F] of N networks, float32 or a half type.
      scale: [N, F] float32.
      bias: [N, F] float32.
      residual: [N, B, F] of the type of x, or None.
      mean: [N, F] float32, takes the batch's mean.
      inverse_std: [N, F] float32, takes its inverse standard deviation, biased.
      eps: beside the variance.

    Returns:
      [N, B, F] of the type of x.
    """
    if KERNELS and x.is_cuda:
        return batch_norm_kernels.forward(x, scale, bias, residual, mean, inverse_std, eps)
    wide = x.to(scale.dtype)
    mean.copy_(wide.mean(1))
    inverse_std.copy_(torch.rsqrt(wide.var(1, correction=0) + eps))
    y = (wide - mean.unsqueeze(1)) * (inverse_std * scale).unsqueeze(1) + bias.unsqueeze(1)
    y = torch.relu(y).to(x.dtype)
    return (y if residual is None else y + residual).contiguous()


def backward(
    dy: Tensor, x: Tensor, scale: Tensor, bias: Tensor, mean: Tensor, inverse_std: Tensor, whole: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the gradients of x, scale and bias.

    Args:
      dy: [N, C, F], of the output's first C rows; those of the others are zero.
      x: as given to `forward`.
      scale: likewise.
      bias: likewise.
      mean: as `forward` left it.
      inverse_std: likewise.
      whole: [N, B, F] of the type of dy, takes dy with the zeros behind it; or None.
    """
    if KERNELS and x.is_cuda:
        return batch_norm_kernels.backward(dy, x, scale, bias, mean, inverse_std, whole)
    dy = F.pad(dy, (0, 0, 0, x.shape[1] - dy.shape[1]))
    if whole is not None:
        whole.copy_(dy)
    centred = (x.to(scale.dtype) - mean.unsqueeze(1)) * inverse_std.unsqueeze(1)
    dz = torch.where(centred * scale.unsqueeze(1) + bias.unsqueeze(1) > 0, dy.to(scale.dtype), 0.0)
    dbias, dscale = dz.sum(1), (dz * centred).sum(1)
    rest = dz - (dbias / x.shape[1]).unsqueeze(1) - centred * (dscale / x.shape[1]).unsqueeze(1)
    return (rest * (scale * inverse_std).unsqueeze(1)).to(x.dtype).contiguous(), dscale, dbias


def backward_of_product(
    d: Tensor, w: Tensor, x: Tensor, scale: Tensor, bias: Tensor, mean: Tensor, inverse_std: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns what `backward` does for the gradient d times w, which on some GPUs is computed on the way.

    Args:
      d: [N, B, K].
      w: [N, K, F] of the same type.
      x: [N, B, F], as in `backward`, like those behind it.
      scale: [N, F] float32.
      bias: [N, F] float32.
      mean: [N, F] float32.
      inverse_std: [N, F] float32.
    """
    if KERNELS and batch_norm_product_kernels.fits(d, w, x):
        return batch_norm_product_kernels.backward(d, w, x, (scale, bias, mean, inverse_std))
    return backward(product(d, w), x, scale, bias, mean, inverse_std)
