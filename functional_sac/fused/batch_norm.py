"""Batch norm of stacked networks by the statistics of their batch, written out forward and backward.

On a GPU a pass is one Triton kernel, or two where features are few. Elsewhere it is plain operations. Both compute in
float32 and agree to rounding. Nothing here has a derivative of its own or a rule for `vmap`; it is called by `trunk`.
Source: Ioffe and Szegedy 2015, arXiv 1502.03167.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from functional_sl.kernels import buildable

KERNELS = buildable()
if KERNELS:
    from functional_sac.fused import batch_norm_kernels, batch_norm_parts, batch_norm_products


def common(
    x: Tensor, scale: Tensor, bias: Tensor, mean: Tensor, inverse_std: Tensor, dtype: torch.dtype, eps: float
) -> Tensor:
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
      [N, B, K], zero behind the features.
    """
    if KERNELS and x.is_cuda:
        return batch_norm_parts.common(x, scale, bias, mean, inverse_std, dtype, eps)
    wide = x[:, : scale.shape[1]].to(scale.dtype)
    mean.copy_(wide.mean(0).expand_as(mean))
    inverse_std.copy_(torch.rsqrt(wide.var(0, correction=0) + eps).expand_as(mean))
    y = (wide - mean[0]) * (inverse_std * scale).unsqueeze(1) + bias.unsqueeze(1)
    return F.pad(y, (0, x.shape[1] - wide.shape[1])).to(dtype)


def common_backward(dy: Tensor, x: Tensor, mean: Tensor, inverse_std: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the gradients of scale and bias [N, F]; that of the input nobody asks for.

    Args:
      dy: [N, B, K], of the output of `common`.
      x: as given to `common`.
      mean: as `common` left it.
      inverse_std: likewise.
    """
    if KERNELS and x.is_cuda:
        return batch_norm_parts.common_backward(dy, x, mean, inverse_std)
    features = mean.shape[1]
    dz = dy[..., :features].to(mean.dtype)
    centred = (x[:, :features].to(mean.dtype) - mean[0]) * inverse_std[0]
    return (dz * centred).sum(1), dz.sum(1)


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
    if KERNELS and batch_norm_products.fits(d, w, x):
        return batch_norm_products.backward(d, w, x, (scale, bias, mean, inverse_std))
    return backward(torch.bmm(d, w), x, scale, bias, mean, inverse_std)
