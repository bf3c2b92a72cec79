"""The products of blocks that are only read, each with what follows it, forward and backward.

Batch norm by running statistics is an affine map, so that norm, ReLU and residual end the product before them, and
their derivatives the product behind them. On a GPU and in BF16 an op is one Triton kernel, where `frozen_block_tiles`
has a tile; elsewhere these are plain operations. Both round a product to its type before the norm and agree to
roundings.

For the backward pass a ReLU's output tells where it let through: BF16 has the exponents of float32, so that no normal
number is rounded to zero. With a residual added the output does not tell, and a mask is kept. NaN passes.

The ops have no derivative of their own and no rule for `vmap`: see `frozen_networks` for who calls them.
"""

from __future__ import annotations

import torch
from torch import Tensor, library

from functional_sac.fused import frozen_block_tiles
from functional_sac.fused.float32_products import traced_product
from functional_sac.networks import BN_EPS, BatchNorm, Stats
from functional_sl.kernels import buildable

KERNELS = buildable()


def fits(x: Tensor, features: int) -> bool:
    """Tells whether the product of x [N, B, K] with so many features is one for the kernels."""
    if not (x.is_cuda and x.dtype == torch.bfloat16 and KERNELS):
        return False
    return frozen_block_tiles.tile(*x.shape[:2], features, x.shape[2]) is not None


def slope(scale: Tensor, var: Tensor) -> Tensor:
    """Returns the slope [N, 1, F] that the scale [N, F] of a norm and the running variance [N, F] come to."""
    return (scale * torch.rsqrt(var + BN_EPS)).unsqueeze(1)


def inner(h: Tensor, w: Tensor, norm: BatchNorm, stats: Stats) -> Tensor:
    """Returns the ReLU [N, B, F] of a normalised product.

    Args:
      h: [N, B, K] of N networks.
      w: [N, F, K] of the type of h.
      norm: [N, F] float32.
      stats: [N, F] float32, running.
    """
    return (_inner if fits(h, w.shape[1]) else _plain_inner)(h, w, *norm, *stats)


def outer(y: Tensor, w: Tensor, norm: BatchNorm, stats: Stats, h: Tensor) -> tuple[Tensor, Tensor]:
    """Returns `inner` of y plus a residual h [N, B, F], and where the ReLU let through, [N, B, F] bool."""
    return (_outer if fits(y, w.shape[1]) else _plain_outer)(y, w, *norm, *stats, h)


def masked(dh: Tensor, passed: Tensor, scale: Tensor, var: Tensor) -> Tensor:
    """Returns the gradient of what `outer` normalised, [N, B, F], from that of its result."""
    return torch.where(passed, dh * slope(scale, var), 0.0).to(dh.dtype)


def inner_backward(d: Tensor, w: Tensor, y: Tensor, scale: Tensor, var: Tensor) -> Tensor:
    """Returns the gradient of what `inner` normalised.

    Args:
      d: [N, B, H], of what `outer` normalised.
      w: [N, H, F], as given to `outer`.
      y: [N, B, F], what `inner` returned.
      scale: [N, F], of the norm given to `inner`.
      var: [N, F], likewise.
    """
    return (_inner_backward if fits(d, w.shape[2]) else _plain_inner_backward)(d, w, y, scale, var)


def outer_backward(
    d: Tensor, w: Tensor, dh: Tensor, passed: Tensor, scale: Tensor, var: Tensor
) -> tuple[Tensor, Tensor]:
    """Returns `added`, the gradient of a block's input, and `masked` of it for the block before.

    Args:
      d: [N, B, F], of what `inner` normalised.
      w: [N, F, H], as given to `inner`.
      dh: [N, B, H], of the block's result.
      passed: [N, B, H] bool, of the block before.
      scale: [N, H], of the last norm of the block before.
      var: [N, H], likewise.
    """
    run = _outer_backward if fits(d, w.shape[2]) else _plain_outer_backward
    dh, d = run(d, w, dh, passed, scale, var)
    return dh, d


def added(d: Tensor, w: Tensor, dh: Tensor) -> Tensor:
    """Returns dh [N, B, H] plus the product of d [N, B, F] and w [N, F, H]."""
    run = _outer_backward if fits(d, w.shape[2]) else _plain_outer_backward
    return run(d, w, dh, None, None, None)[0]


def _plain_inner(h: Tensor, w: Tensor, scale: Tensor, bias: Tensor, mean: Tensor, var: Tensor) -> Tensor:
    factor = slope(scale, var)
    offset = bias.unsqueeze(1) - mean.unsqueeze(1) * factor
    return torch.relu(torch.addcmul(offset, traced_product(h, w.mT).to(factor.dtype), factor)).to(h.dtype)


def _plain_outer(
    y: Tensor, w: Tensor, scale: Tensor, bias: Tensor, mean: Tensor, var: Tensor, h: Tensor
) -> tuple[Tensor, Tensor]:
    change = _plain_inner(y, w, scale, bias, mean, var)
    return change + h, ~(change <= 0)


def _plain_inner_backward(d: Tensor, w: Tensor, y: Tensor, scale: Tensor, var: Tensor) -> Tensor:
    return masked(traced_product(d, w), ~(y <= 0), scale, var)


def _plain_outer_backward(
    d: Tensor, w: Tensor, dh: Tensor, passed: Tensor | None, scale: Tensor | None, var: Tensor | None
) -> list[Tensor]:
    dh = traced_product(d, w, onto=dh)
    if passed is None or scale is None or var is None:
        return [dh]
    return [dh, masked(dh, passed, scale, var)]


_inner = library.custom_op("functional_sac::frozen_inner", _plain_inner, mutates_args=())
_outer = library.custom_op("functional_sac::frozen_outer", _plain_outer, mutates_args=())
_inner_backward = library.custom_op("functional_sac::frozen_inner_backward", _plain_inner_backward, mutates_args=())
_outer_backward = library.custom_op("functional_sac::frozen_outer_backward", _plain_outer_backward, mutates_args=())


@_inner.register_fake
def _(h: Tensor, w: Tensor, scale: Tensor, bias: Tensor, mean: Tensor, var: Tensor) -> Tensor:
    return h.new_empty(*h.shape[:2], w.shape[1])


@_outer.register_fake
def _(y: Tensor, w: Tensor, scale: Tensor, bias: Tensor, mean: Tensor, var: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
    return h.new_empty(h.shape), h.new_empty(h.shape, dtype=torch.bool)


@_inner_backward.register_fake
def _(d: Tensor, w: Tensor, y: Tensor, scale: Tensor, var: Tensor) -> Tensor:
    return y.new_empty(y.shape)


@_outer_backward.register_fake
def _(
    d: Tensor, w: Tensor, dh: Tensor, passed: Tensor | None, scale: Tensor | None, var: Tensor | None
) -> list[Tensor]:
    return [dh.new_empty(dh.shape) for _ in range(1 if passed is None else 2)]


if KERNELS:
    from functional_sac.fused import frozen_block_kernels

    _inner.register_kernel("cuda")(frozen_block_kernels.inner)
    _outer.register_kernel("cuda")(frozen_block_kernels.outer)
    _inner_backward.register_kernel("cuda")(frozen_block_kernels.inner_backward)
    _outer_backward.register_kernel("cuda")(frozen_block_kernels.outer_backward)
