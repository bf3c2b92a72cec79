"""The trunks of stacked networks forward and backward as one operator each: a schedule of products and batch norms.

A compiler would see each launch as an operation of its own and copy where an operator may write in place. Who calls
these, and with what, is `gradients`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor, library

from functional_sac.fused import batch_norm
from functional_sl import streams

SMALL = 2**17  # elements of a weight's gradient; larger ones fill a GPU by themselves
INPUT, LEAVES, KEPT = 3, 6, 4  # tensors of the input and of a block in the list of leaves; of a block in what is kept


@library.custom_op("functional_sac::trunk_forward", mutates_args=())
def forward(x: Tensor, leaves: list[Tensor], eps: float) -> list[Tensor]:
    """Takes N networks through their trunks, normalising by the batch.

    Args:
      x: [B, K] float32, the common input: I features, and zeros.
      leaves: scale and bias [N, I] of the input's norm, w [N, H, K]; then of every block w1 [N, 4H, H], scale and bias
        [N, 4H], w2 [N, H, 4H], scale and bias [N, H]. Matrices are in the type of the products, the others float32.
      eps: of the batch norms.

    Returns:
      mean and inverse standard deviation [N, S] of all batch norms; y [N, B, K], the normalised input, and h [N, B, H];
      then of every block the norms' inputs and outputs, [N, B, 4H] twice and [N, B, H] twice. The last one is the
      trunk's output.
    """
    scale, bias, w = leaves[:INPUT]
    kept = _moments(leaves)
    norms = _by_norm(*kept, leaves)
    y = batch_norm.common(x, scale, bias, *next(norms), w.dtype, eps)
    h = torch.bmm(y, w.mT)
    kept += [y, h]
    for w1, scale1, bias1, w2, scale2, bias2 in _by_block(leaves[INPUT:], LEAVES):
        first = torch.bmm(h, w1.mT)
        inner = batch_norm.forward(first, scale1, bias1, None, *next(norms), eps)
        second = torch.bmm(inner, w2.mT)
        h = batch_norm.forward(second, scale2, bias2, h, *next(norms), eps)
        kept += [first, inner, second, h]
    return kept


@forward.register_fake
def _(x: Tensor, leaves: list[Tensor], eps: float) -> list[Tensor]:
    w = leaves[INPUT - 1]
    widths = [w.shape[2], w.shape[1]]
    for w1, *_ in _by_block(leaves[INPUT:], LEAVES):
        inner, outer = w1.shape[1:]
        widths += [inner, inner, outer, outer]
    return [*_moments(leaves), *(w.new_empty(w.shape[0], x.shape[0], width) for width in widths)]


@library.custom_op("functional_sac::trunk_backward", mutates_args=())
def backward(dh: Tensor, x: Tensor, leaves: list[Tensor], kept: list[Tensor]) -> list[Tensor]:
    """Returns the gradients of the leaves of the first M networks, in their order and float32.

    Args:
      dh: [M, C, H], of the first C rows of the trunk's output; those of the others are zero.
      x: as given to `forward`.
      leaves: likewise.
      kept: what it returned.
    """
    leaves, kept = _of_first(dh.shape[0], leaves, kept)
    whole, found = torch.empty_like(kept[-1]), []
    with streams.aside(dh.device) as aside:
        for index in reversed(range(blocks(leaves))):
            dh, *of_block = _through_block(dh, whole, leaves, kept, index, aside)
            found = of_block + found
        return _through_input(dh, x, leaves, kept, aside) + found


@backward.register_fake
def _(dh: Tensor, x: Tensor, leaves: list[Tensor], kept: list[Tensor]) -> list[Tensor]:
    return _like(leaves, dh, kept)


@library.custom_op("functional_sac::trunk_backward_block", mutates_args=())
def backward_block(dh: Tensor, leaves: list[Tensor], kept: list[Tensor], index: int) -> list[Tensor]:
    """Returns the gradient of a block's input [M, B, H], then those of its leaves: one step of `backward`.

    Args:
      dh: [M, C, H], of the block's output, as in `backward`.
      leaves: of the whole trunk.
      kept: likewise.
      index: the block's.
    """
    leaves, kept = _of_first(dh.shape[0], leaves, kept)
    with streams.aside(dh.device) as aside:
        return _through_block(dh, torch.empty_like(kept[-1]), leaves, kept, index, aside)


@backward_block.register_fake
def _(dh: Tensor, leaves: list[Tensor], kept: list[Tensor], index: int) -> list[Tensor]:
    h = kept[-1]
    return [h.new_empty(dh.shape[0], *h.shape[1:]), *_like(_by_block(leaves[INPUT:], LEAVES)[index], dh, kept)]


@library.custom_op("functional_sac::trunk_backward_input", mutates_args=())
def backward_input(dh: Tensor, x: Tensor, leaves: list[Tensor], kept: list[Tensor]) -> list[Tensor]:
    """Returns the gradients of the input's leaves; arguments as in `backward`, dh [M, B, H] that of the first block."""
    leaves, kept = _of_first(dh.shape[0], leaves, kept)
    with streams.aside(dh.device) as aside:
        return _through_input(dh, x, leaves, kept, aside)


@backward_input.register_fake
def _(dh: Tensor, x: Tensor, leaves: list[Tensor], kept: list[Tensor]) -> list[Tensor]:
    return _like(leaves[:INPUT], dh, kept)


def blocks(leaves: list[Tensor]) -> int:
    """Returns the number of a trunk's blocks."""
    return (len(leaves) - INPUT) // LEAVES


def _through_block(
    dh: Tensor, whole: Tensor, leaves: list[Tensor], kept: list[Tensor], index: int, aside: Callable[..., Tensor]
) -> list[Tensor]:
    """Goes backward through a block; `whole` takes the gradient of its input, or is that of its output already."""
    w1, scale1, bias1, w2, scale2, bias2 = _by_block(leaves[INPUT:], LEAVES)[index]
    h, first, inner, second = kept[3 + index * KEPT :][:KEPT]
    norm1, norm2 = list(_by_norm(*kept[:2], leaves))[1 + 2 * index :][:2]
    d, *found2 = batch_norm.backward(dh, second, scale2, bias2, *norm2, None if dh is whole else whole)
    flow, dw2 = _with_gradient(lambda: torch.bmm(d, w2), d, inner, aside)
    d, *found1 = batch_norm.backward(flow, first, scale1, bias1, *norm1)
    flow, dw1 = _with_gradient(lambda: whole.baddbmm_(d, w1), d, h, aside)
    return [flow, dw1, *found1, dw2, *found2]


def _through_input(
    dh: Tensor, x: Tensor, leaves: list[Tensor], kept: list[Tensor], aside: Callable[..., Tensor]
) -> list[Tensor]:
    mean, inverse_std, y, *_ = kept
    dy, dw = _with_gradient(lambda: torch.bmm(dh, leaves[INPUT - 1]), dh, y, aside)
    return [*batch_norm.common_backward(dy, x, *next(_by_norm(mean, inverse_std, leaves))), dw]


def _with_gradient(
    product: Callable[[], Tensor], dy: Tensor, x: Tensor, aside: Callable[..., Tensor]
) -> tuple[Tensor, Tensor]:
    """Returns a product for which a norm waits, and a weight's gradient, which leaves that norm room if it is small."""
    if dy.shape[0] * dy.shape[2] * x.shape[2] > SMALL:
        weight = weight_gradient(dy, x)
        return product(), weight
    found = product()
    return found, aside(weight_gradient, dy, x)


def _of_first(count: int, *lists: list[Tensor]) -> list[list[Tensor]]:
    """Returns what belongs to the first networks."""
    return [[t[:count] for t in tensors] for tensors in lists]


def _like(leaves: list[Tensor], dh: Tensor, kept: list[Tensor]) -> list[Tensor]:
    return [leaf.new_empty(dh.shape[0], *leaf.shape[1:], dtype=kept[0].dtype) for leaf in leaves]


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


def _widths(leaves: list[Tensor]) -> list[int]:
    """Returns the features of each batch norm, in the order of `networks.Stats`."""
    return [scale.shape[1] for scale in (leaves[0], *leaves[INPUT + 1 :: 3])]


def _moments(leaves: list[Tensor]) -> list[Tensor]:
    networks, total = leaves[0].shape[0], sum(_widths(leaves))
    return [leaves[0].new_empty(networks, total) for _ in range(2)]


def _by_norm(mean: Tensor, inverse_std: Tensor, leaves: list[Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
    widths = _widths(leaves)
    return zip(mean.split(widths, -1), inverse_std.split(widths, -1), strict=True)


def _by_block(tensors: list[Tensor], size: int) -> list[list[Tensor]]:
    return [tensors[i : i + size] for i in range(0, len(tensors), size)]
