"""A block of stacked networks forward: two products, each followed by a batch norm and a ReLU, and a residual.

On a Hopper GPU, in BF16 and at the sizes of the critics, products and norms are interleaved in three kernels: a norm's
statistics are taken while its input is still on the chip, and the first norm's output goes straight into the second
product. The first two are in Gluon, an experimental part of Triton that changes from version to version, and all are
taken with those that are known. Elsewhere these are products and `batch_norm`. The way back is in `trunk`.
"""

from __future__ import annotations

import contextlib

import torch
from torch import Tensor

from functional_sac.fused import batch_norm
from functional_sac.fused.float32_products import product
from functional_sl.kernels import buildable, suits_hopper

VERSIONS = ("3.6.", "3.7.")  # of Triton, for which the kernels compile

Norm = tuple[Tensor, Tensor]  # mean and inverse standard deviation

kernels = None
if buildable():
    with contextlib.suppress(ImportError, AttributeError):
        import triton

        if triton.__version__.startswith(VERSIONS):
            from functional_sac.fused import block_forward_kernels as kernels


def fits(h: Tensor, w1: Tensor, w2: Tensor) -> bool:
    """Tells whether `forward` has kernels of its own for these."""
    if kernels is None or h.dtype != torch.bfloat16 or w1.shape[1:] != (kernels.INNER, kernels.WIDTH):
        return False
    return kernels.divide(*h.shape[:2]) and suits_hopper(h, w1, w2)


def forward(
    h: Tensor, leaves: list[Tensor], first_norm: Norm, second_norm: Norm, eps: float, trained: int
) -> list[Tensor]:
    """Takes N networks through a block, normalising by the batch.

    Args:
      h: [N, B, H] float32 or a half type.
      leaves: w1 [N, 4H, H] of the type of h, scale and bias [N, 4H] float32, w2 [N, H, 4H], scale and bias [N, H].
      first_norm: mean and inverse standard deviation [N, 4H] float32, which take the first norm's.
      second_norm: likewise [N, H].
      eps: of the batch norms.
      trained: M, how many networks train; the others' normalised activations nobody needs.

    Returns:
      The norms' inputs and outputs: [N, B, 4H], [M, B, 4H] and twice [N, B, H], of the type of h.
    """
    w1, scale1, bias1, w2, scale2, bias2 = leaves
    if fits(h, w1, w2):
        return kernels.forward(h, leaves, first_norm, second_norm, eps, trained)
    first = product(h, w1.mT)
    inner = batch_norm.forward(first, scale1, bias1, None, *first_norm, eps)
    second = product(inner, w2.mT)
    return [first, inner[:trained], second, batch_norm.forward(second, scale2, bias2, h, *second_norm, eps)]
