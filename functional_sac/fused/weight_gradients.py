"""Gradients of weights: products over all rows of a batch, which may wait for each other and share a launch."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from functional_sac.fused.float32_products import product
from functional_sl import streams
from functional_sl.kernels import buildable

SMALL = 2**18  # elements of a gradient; larger ones fill a GPU by themselves
KERNELS = buildable()
if KERNELS:
    from functional_sac.fused import weight_gradient_kernels


@contextlib.contextmanager
def later(device: torch.device) -> Iterator[Callable[[Tensor, Tensor], Tensor]]:
    """Yields `call(dy, x)`, whose results are `weight_gradient` of both from the end of the block on.

    Small ones are computed beside what the block launches. Large ones may wait, so that those of the same rows and
    widths are one launch: until they fill a GPU, which they then do beside the rest, or for the block's end. The
    tensors must not be written before.
    """
    waiting: dict[tuple[int, frozenset[int]], list[tuple[Tensor, Tensor, Tensor]]] = {}
    with streams.aside(device) as aside:

        def call(dy: Tensor, x: Tensor) -> Tensor:
            widths = dy.shape[2], x.shape[2]
            if KERNELS and weight_gradient_kernels.fits(dy, x):
                output = dy.new_empty(dy.shape[0], *widths, dtype=torch.float32)
                alike = dy.shape[1], frozenset(widths)
                waiting.setdefault(alike, []).append((dy, x, output))
                if weight_gradient_kernels.fill(waiting[alike]):
                    aside(weight_gradient_kernels.several, waiting.pop(alike))
                return output
            small = dy.shape[0] * widths[0] * widths[1] <= SMALL
            return aside(weight_gradient, dy, x) if small else weight_gradient(dy, x)

        yield call
        for alike in waiting.values():
            weight_gradient_kernels.several(alike)


def weight_gradient(dy: Tensor, x: Tensor) -> Tensor:
    """Returns dy transposed times x: [N, B, M] and [N, B, K] to [N, M, K], float32 where they are of a half type.

    On a GPU and in float32 it adds up products of parts of the rows, at which cuBLAS is faster: thousands of rows alone
    leave it few and long programs.
    """
    if dy.dtype in (torch.bfloat16, torch.float16):
        return torch.bmm(dy.mT, x, out_dtype=torch.float32) if dy.is_cuda else torch.bmm(dy.mT.float(), x.float())
    size = dy.shape[0] * dy.shape[2] * x.shape[2]
    parts = 4 if size >= 2**19 else 16 if size >= 2**15 else 1
    split = dy.is_cuda and dy.dtype == torch.float32 and dy.shape[1] % parts == 0
    return summed_by_parts(dy, x, parts if split else 1)


def in_parts(dy: Tensor, x: Tensor) -> Tensor:
    """Returns parts [N, P, M, K] that add up to `weight_gradient`, where networks share x [1, B, K].

    It takes little of a GPU, beside gradients that fill it.
    """
    if KERNELS and weight_gradient_kernels.fits_in_parts(dy, x):
        return weight_gradient_kernels.in_parts(dy, x)
    return weight_gradient(dy, x.expand(dy.shape[0], -1, -1)).unsqueeze(1)


def summed_by_parts(dy: Tensor, x: Tensor, parts: int) -> Tensor:
    """Returns `weight_gradient` of one type, its rows in parts whose products are added in their order."""
    if parts == 1:
        return product(dy.mT, x)
    networks, rows, _ = dy.shape
    dy, x = (t.reshape(networks * parts, rows // parts, t.shape[-1]) for t in (dy, x))
    return product(dy.mT, x).unflatten(0, (networks, parts)).sum(1)
