"""The trunks of stacked networks forward and backward as one operator each: a schedule of products and batch norms.

A compiler would see each launch as an operation of its own and copy where an operator may write in place. Who calls
these, and with what, is `gradients`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor, library

from functional_sac.fused import batch_norm, block_forward, weight_gradients
from functional_sac.fused.alignment import BLOCK_LEAVES, INPUT_LEAVES
from functional_sac.fused.float32_products import add_product, product
from functional_sl import streams

KEPT = 4  # tensors of a block in what is kept; those before are both moments, z and the first h


@library.custom_op("functional_sac::trunk_forward", mutates_args=())
def forward(x: Tensor, leaves: list[Tensor], eps: float, trained: int) -> list[Tensor]:
    """Takes N networks through their trunks, normalising by the batch.

    Args:
      x: [B, K] float32, the common input: I features, and zeros.
      leaves: scale and bias [N, I] of the input's norm, w [N, H, K]; then of every block w1 [N, 4H, H], scale and bias
        [N, 4H], w2 [N, H, 4H], scale and bias [N, H]. Matrices are in the type of the products, the others float32.
      eps: of the batch norms.
      trained: M, how many networks `backward` will be for, the first ones.

    Returns:
      mean and inverse standard deviation [N, S] of all batch norms; z [1, B, W], see `batch_norm.common`, and
      h [N, B, H]; then of every block the norms' inputs and outputs, [N, B, 4H], of the first networks [M, B, 4H], and
      [N, B, H] twice. The last one is the trunk's output.
    """
    scale, bias, w = leaves[:INPUT_LEAVES]
    kept = _moments(leaves)
    norms = _by_norm(*kept, leaves)
    y, z = batch_norm.common(x, scale, bias, *next(norms), w.dtype, eps)
    kept += [z, product(y, w.mT)]
    for of_block in _by_block(leaves):
        kept += block_forward.forward(kept[-1], of_block, next(norms), next(norms), eps, trained)
    return kept


@forward.register_fake
def _(x: Tensor, leaves: list[Tensor], eps: float, trained: int) -> list[Tensor]:
    scale, _, w = leaves[:INPUT_LEAVES]
    (networks, outer, _), rows = w.shape, x.shape[0]
    sizes = [(1, batch_norm.common_width(scale.shape[1])), (networks, outer)]
    for w1, *_ in _by_block(leaves):
        inner = w1.shape[1]
        sizes += [(networks, inner), (trained, inner), (networks, outer), (networks, outer)]
    return [*_moments(leaves), *(w.new_empty(count, rows, width) for count, width in sizes)]


@library.custom_op("functional_sac::trunk_backward", mutates_args=())
def backward(dh: Tensor, leaves: list[Tensor], kept: list[Tensor], behind: list[Tensor]) -> list[Tensor]:
    """Returns the gradients of the leaves of the first M networks, in their order and float32, and of what is behind.

    Args:
      dh: [M, C, H], of the first C rows of the trunk's output; those of the others are zero.
      leaves: as given to `forward`.
      kept: what it returned.
      behind: what nobody waits for of the gradients of the layer behind the trunk, so that it is computed beside the
        others: the gradient [M, C, O] of a product with weights and its input [M, C, H], then sums in parts [P, ...].
        The last results are the weights' gradient [M, O, H] and the sums [...]. It may be empty.
    """
    leaves, kept = _of_first(dh.shape[0], leaves, kept)
    whole, found = torch.empty_like(kept[-1]), []
    with streams.aside(dh.device) as aside, weight_gradients.later(dh.device) as later:
        of_behind = _finish(behind, later, aside)
        for index in reversed(range(block_count(leaves))):
            dh, *of_block = _through_block(dh, whole, leaves, kept, index, later)
            found = of_block + found
        return _through_input(dh, leaves, kept) + found + of_behind


@backward.register_fake
def _(dh: Tensor, leaves: list[Tensor], kept: list[Tensor], behind: list[Tensor]) -> list[Tensor]:
    return _like(leaves, dh, kept) + _finished_like(behind, kept)


@library.custom_op("functional_sac::trunk_backward_block", mutates_args=())
def backward_block(
    dh: Tensor, leaves: list[Tensor], kept: list[Tensor], index: int, behind: list[Tensor]
) -> list[Tensor]:
    """Returns the gradient of a block's input [M, B, H], then those of its leaves: one step of `backward`.

    Args:
      dh: [M, C, H], of the block's output, as in `backward`.
      leaves: of the whole trunk.
      kept: likewise.
      index: the block's.
      behind: as in `backward` for the last block, whose results end likewise; for the others empty.
    """
    leaves, kept = _of_first(dh.shape[0], leaves, kept)
    with streams.aside(dh.device) as aside, weight_gradients.later(dh.device) as later:
        of_behind = _finish(behind, later, aside)
        return _through_block(dh, torch.empty_like(kept[-1]), leaves, kept, index, later) + of_behind


@backward_block.register_fake
def _(dh: Tensor, leaves: list[Tensor], kept: list[Tensor], index: int, behind: list[Tensor]) -> list[Tensor]:
    h, of_block = kept[-1], _like(_by_block(leaves)[index], dh, kept)
    return [h.new_empty(dh.shape[0], *h.shape[1:]), *of_block, *_finished_like(behind, kept)]


@library.custom_op("functional_sac::trunk_backward_input", mutates_args=())
def backward_input(dh: Tensor, leaves: list[Tensor], kept: list[Tensor]) -> list[Tensor]:
    """Returns the gradients of the input's leaves; arguments as in `backward`, dh [M, B, H] that of the first block."""
    leaves, kept = _of_first(dh.shape[0], leaves, kept)
    return _through_input(dh, leaves, kept)


@backward_input.register_fake
def _(dh: Tensor, leaves: list[Tensor], kept: list[Tensor]) -> list[Tensor]:
    return _like(leaves[:INPUT_LEAVES], dh, kept)


def block_count(leaves: list[Tensor]) -> int:
    """Returns the number of a trunk's blocks."""
    return (len(leaves) - INPUT_LEAVES) // BLOCK_LEAVES


def _through_block(
    dh: Tensor,
    whole: Tensor,
    leaves: list[Tensor],
    kept: list[Tensor],
    index: int,
    later: Callable[[Tensor, Tensor], Tensor],
) -> list[Tensor]:
    """Goes backward through a block; `whole` takes the gradient of its input, or is that of its output already."""
    w1, scale1, bias1, w2, scale2, bias2 = _by_block(leaves)[index]
    h, first, inner, second = kept[3 + index * KEPT :][:KEPT]
    norm1, norm2 = list(_by_norm(*kept[:2], leaves))[1 + 2 * index :][:2]
    d, *found2 = batch_norm.backward(dh, second, scale2, bias2, *norm2, None if dh is whole else whole)
    dx, *found1 = batch_norm.backward_of_product(d, w2, first, scale1, bias1, *norm1)
    dw2, flow = later(d, inner), add_product(whole, dx, w1)
    return [flow, later(dx, h), *found1, dw2, *found2]


def _through_input(dh: Tensor, leaves: list[Tensor], kept: list[Tensor]) -> list[Tensor]:
    _, _, z, *_ = kept
    return list(batch_norm.common_backward(dh, z, *leaves[:INPUT_LEAVES]))


def _finish(
    behind: list[Tensor], later: Callable[[Tensor, Tensor], Tensor], aside: Callable[..., list[Tensor]]
) -> list[Tensor]:
    """Returns what `behind` comes to at the end of both blocks."""
    if not behind:
        return []
    dy, x, *parts = behind
    return [later(dy, x), *aside(_sums, *parts)]


def _sums(*parts: Tensor) -> list[Tensor]:
    return [t.sum(0) for t in parts]


def _finished_like(behind: list[Tensor], kept: list[Tensor]) -> list[Tensor]:
    if not behind:
        return []
    dy, x, *parts = behind
    w = dy.new_empty(dy.shape[0], dy.shape[2], x.shape[2], dtype=kept[0].dtype)
    return [w, *(t.new_empty(t.shape[1:]) for t in parts)]


def _of_first(count: int, *lists: list[Tensor]) -> list[list[Tensor]]:
    """Returns what belongs to the first networks."""
    return [[t[:count] for t in tensors] for tensors in lists]


def _like(leaves: list[Tensor], dh: Tensor, kept: list[Tensor]) -> list[Tensor]:
    return [leaf.new_empty(dh.shape[0], *leaf.shape[1:], dtype=kept[0].dtype) for leaf in leaves]


def _widths(leaves: list[Tensor]) -> list[int]:
    """Returns the features of each batch norm, in the order of `networks.Stats`."""
    return [scale.shape[1] for scale in (leaves[0], *leaves[INPUT_LEAVES + 1 :: 3])]


def _moments(leaves: list[Tensor]) -> list[Tensor]:
    networks, total = leaves[0].shape[0], sum(_widths(leaves))
    return [leaves[0].new_empty(networks, total) for _ in range(2)]


def _by_norm(mean: Tensor, inverse_std: Tensor, leaves: list[Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
    widths = _widths(leaves)
    return zip(mean.split(widths, -1), inverse_std.split(widths, -1), strict=True)


def _by_block(leaves: list[Tensor]) -> list[list[Tensor]]:
    return [leaves[i : i + BLOCK_LEAVES] for i in range(INPUT_LEAVES, len(leaves), BLOCK_LEAVES)]
