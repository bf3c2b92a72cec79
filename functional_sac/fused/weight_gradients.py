"""Gradients of weights: products over all rows of a batch, of which a GPU may take several at once."""

from __future__ import annotations

import torch
from torch import Tensor

from functional_sl.kernels import buildable

KERNELS = buildable()
if KERNELS:
    from functional_sac.fused import weight_gradient_kernels


def weight_gradients(pairs: list[tuple[Tensor, Tensor]]) -> list[Tensor]:
    """Returns `weight_gradient` of every pair."""
    if KERNELS and weight_gradient_kernels.fits(pairs):
        return weight_gradient_kernels.several(pairs)
    return [weight_gradient(*pair) for pair in pairs]


def weight_gradient(dy: Tensor, x: Tensor) -> Tensor:
    """Returns dy transposed times x: [N, B, M] and [N, B, K] to [N, M, K], float32 where they are of a half type."""
    if dy.dtype in (torch.bfloat16, torch.float16):
        return torch.bmm(dy.mT, x, out_dtype=torch.float32) if dy.is_cuda else torch.bmm(dy.mT.float(), x.float())
    parts = _parts(dy.shape[0] * dy.shape[2] * x.shape[2]) if dy.is_cuda else 1
    return summed_by_parts(dy, x, parts if dy.shape[1] % parts == 0 else 1)


def summed_by_parts(dy: Tensor, x: Tensor, parts: int) -> Tensor:
    """Returns `weight_gradient` of one type, its rows in parts whose products are added in their order."""
    if parts == 1:
        return torch.bmm(dy.mT, x)
    networks, rows, _ = dy.shape
    dy, x = (t.reshape(networks * parts, rows // parts, t.shape[-1]) for t in (dy, x))
    return torch.bmm(dy.mT, x).unflatten(0, (networks, parts)).sum(1)


def _parts(size: int) -> int:
    """Returns the parts in which cuBLAS is fastest in float32: thousands of rows leave it few and long programs."""
    return 4 if size >= 2**19 else 16 if size >= 2**17 else 1
