"""RMS norm of stacked networks, written out forward and backward.

On a GPU a pass is one Triton kernel, elsewhere plain operations. Both compute in float32 and agree to rounding. The
ops have no derivative of their own and no rule for `vmap`: `critic_heads` and `actor_head` call them.
Source: Zhang and Sennrich 2019, arXiv 1910.07467.
"""

from __future__ import annotations

import torch
from torch import Tensor, library

from functional_sac.fused import row_parts
from functional_sl.kernels import buildable

ROWS = 16  # of a part of the backward pass


@library.custom_op("functional_sac::rms_norm", mutates_args=())
def forward(x: Tensor, scale: Tensor, dtype: torch.dtype, eps: float) -> Tensor:
    """Divides rows by their root mean square and scales them.

    Args:
      x: [N, B, H] of N networks or [M, N, B, H] of M times N, float32 or a half type; it may be a view.
      scale: [N, H] or [M, N, H] float32.
      dtype: of the result.
      eps: beside the mean square.

    Returns:
      As x, contiguous.
    """
    wide = x.to(scale.dtype)
    inverse = torch.rsqrt((wide * wide).mean(-1, keepdim=True) + eps)
    return (wide * inverse * scale.unsqueeze(-2)).to(dtype).contiguous()


@forward.register_fake
def _(x: Tensor, scale: Tensor, dtype: torch.dtype, eps: float) -> Tensor:
    return x.new_empty(x.shape, dtype=dtype)


@library.custom_op("functional_sac::rms_norm_backward", mutates_args=())
def backward(dy: Tensor, x: Tensor, scale: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Returns the gradients of x and scale.

    Args:
      dy: [N, B, H], of the result.
      x: [N, B, H], as given to `forward`.
      scale: [N, H], likewise.
      eps: likewise.

    Returns:
      (gradient of x, of scale in parts [P, N, H] float32, which add up to it).
    """
    wide, flow = x.to(scale.dtype), dy.to(scale.dtype)
    inverse = torch.rsqrt((wide * wide).mean(-1, keepdim=True) + eps)
    unit = wide * inverse
    scaled = flow * scale.unsqueeze(1)
    dx = (scaled - unit * (scaled * unit).mean(-1, keepdim=True)) * inverse
    return dx.to(x.dtype).contiguous(), row_parts.sums((flow * unit).movedim(1, 0), ROWS)


@backward.register_fake
def _(dy: Tensor, x: Tensor, scale: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    networks, rows, width = x.shape
    return x.new_empty(x.shape), scale.new_empty(row_parts.count(rows, ROWS), networks, width)


if buildable():
    from functional_sac.fused import rms_norm_kernels

    forward.register_kernel("cuda")(rms_norm_kernels.forward)
    backward.register_kernel("cuda")(lambda *given: rms_norm_kernels.backward(*given, ROWS))
