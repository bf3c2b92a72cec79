"""Products of stacked float32 matrices at least as exact as float32 sums, on a GPU's matrix units.

A float32 number is the sum of three in BF16. On a Hopper GPU the large products here are the six largest ones of such
parts, added up in float32: what is left out is less than what a float32 sum rounds away (Henry et al. 2019,
arXiv:1904.06376). Where TF32 is allowed, and elsewhere, they are PyTorch's.
"""

from __future__ import annotations

import torch
from torch import Tensor, library

from functional_sl.kernels import buildable

LARGE = 2**28  # multiplications from which the kernel is faster than cuBLAS

KERNELS = buildable()
if KERNELS:
    from functional_sac.fused import float32_product_kernels


def product(a: Tensor, b: Tensor) -> Tensor:
    """Returns a times b: [N, M, K] and [N, K, F], of any one floating-point type, to [N, M, F]."""
    if not _fits(a, b):
        return torch.bmm(a, b)
    found = a.new_empty(a.shape[0], a.shape[1], b.shape[2])
    float32_product_kernels.product(a, b, found, adds=False)
    return found


def traced_product(a: Tensor, b: Tensor, onto: Tensor | None = None) -> Tensor:
    """Returns `product`, added to `onto` [N, M, F], where a compiler traces: only an op knows how its operands lie."""
    if not (a.is_cuda and a.dtype == torch.float32):
        return torch.bmm(a, b) if onto is None else torch.baddbmm(onto, a, b)
    found = _product(a, b)
    return found if onto is None else onto + found


_product = library.custom_op("functional_sac::product", product, mutates_args=())


@_product.register_fake
def _(a: Tensor, b: Tensor) -> Tensor:
    return a.new_empty(a.shape[0], a.shape[1], b.shape[2])


def add_product(onto: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """Adds `product` of both to `onto` [N, M, F] in place, and returns it."""
    if not (_fits(a, b) and onto.is_contiguous()):
        return onto.baddbmm_(a, b)
    float32_product_kernels.product(a, b, onto, adds=True)
    return onto


def _fits(a: Tensor, b: Tensor) -> bool:
    large = a.is_cuda and a.dtype == b.dtype == torch.float32 and a.numel() * b.shape[2] >= LARGE
    # "none" where nobody has chosen; the older reading of it raises where the newer setting was made.
    exact = large and torch.version.hip is None and torch.backends.cuda.matmul.fp32_precision in ("none", "ieee")
    return KERNELS and exact and float32_product_kernels.fits(a, b)
