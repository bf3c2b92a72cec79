"""Packing a gradient group that is written out, whatever the types of its leaves, in one pass; or its sentinel alone.

It comes to `wire.pack` of the leaves in the group's type, with `wire.sentinel`. On a GPU a Triton kernel casts, packs
and looks for what is not finite piece by piece, and for a packed vector a second one of a single program puts together
what was found; elsewhere it is plain operations, of the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, library

from functional_sl import tree, wire
from functional_sl.kernels import buildable
from functional_sl.tree import Tree

PIECE = 2048  # elements of a leaf that are looked at together


def pack(layout: wire.Layout, gradients: Tree, loss: Tensor) -> Tensor:
    """Returns the gradients and their sentinel as one vector; it has no rule for `vmap`.

    Args:
      layout: the group's.
      gradients: a tree of the layout's shapes, in floating-point types that the group's type holds.
      loss: 0-d, see `wire.sentinel`.

    Returns:
      `[P + 1]`, in the group's own dtype.

    Raises:
      ValueError: if a leaf has another shape than the layout says.
    """
    return _pack(_leaves(layout, gradients), loss, layout.dtype)


def sentinel(layout: wire.Layout, gradients: Tree, loss: Tensor) -> Tensor:
    """Returns what `pack` would put at the end, 0-d, and packs nothing; arguments as there."""
    # What the pieces come to is left to a compiler, which does in one kernel what follows from it too.
    bad = _not_finite(_leaves(layout, gradients), layout.dtype).amax() > 0
    return (bad | ~torch.isfinite(loss)).to(layout.dtype)


def _leaves(layout: wire.Layout, gradients: Tree) -> list[Tensor]:
    leaves = tree.leaves(gradients)
    for name, shape, leaf in zip(layout.names, layout.shapes, leaves, strict=True):
        if leaf.shape != shape:
            raise ValueError(f"leaf {name!r} is {tuple(leaf.shape)}, not {shape}")
    return leaves


class Parts:
    """A group that travels in parts, the last leaves first, each as soon as its gradients are known.

    Every part has a sentinel of its own. In one type the parts come to the whole group, to the bit over two ranks, over
    more to the order of the sums.
    """

    def __init__(self, layout: wire.Layout, begin: wire.Begin) -> None:
        """Takes the layout of the group, and what sends a packed vector on its way."""
        self._layout, self._begin, self._left = layout, begin, len(layout.names)
        self._ends: list[Callable[[], wire.Reduced]] = []
        self._own: list[Tensor] = []

    def send(self, leaves: Sequence[Tensor], loss: Tensor) -> None:
        """Sends the gradients of the last leaves of those that have not been sent; see `pack`."""
        first = self._left - len(leaves)
        part = wire.part(self._layout, first, self._left)
        packed = pack(part, list(leaves), loss)
        self._ends.insert(0, self._begin(packed, part))
        self._own.append(packed[-1])
        self._left = first

    def finish(self, gradients: Tree, loss: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Sends what is left of the whole gradient, and waits.

        Returns:
          The mean gradient [P], the sum of all sentinels (), and this rank's own sentinel ().
        """
        if self._left:
            self.send(tree.leaves(gradients)[: self._left], loss)
        means, sentinels = zip(*(end() for end in self._ends), strict=True)
        return torch.cat(means), torch.stack(sentinels).sum(), torch.stack(self._own).amax()


@library.custom_op("functional_sl::pack", mutates_args=())
def _pack(leaves: Sequence[Tensor], loss: Tensor, dtype: torch.dtype) -> Tensor:
    flat = torch.cat([leaf.reshape(-1).to(dtype) for leaf in leaves])
    return torch.cat([flat, wire.sentinel(loss, flat).reshape(1)])


@_pack.register_fake
def _(leaves: Sequence[Tensor], loss: Tensor, dtype: torch.dtype) -> Tensor:
    return loss.new_empty((sum(leaf.numel() for leaf in leaves) + 1,), dtype=dtype)


@library.custom_op("functional_sl::not_finite", mutates_args=())
def _not_finite(leaves: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    """Returns int32 [Q], 1 where one of Q pieces of the leaves is not finite in this type, else 0."""
    found = []
    for leaf in leaves:
        finite = torch.isfinite(leaf.to(dtype).reshape(-1))
        found.append(~F.pad(finite, (0, -finite.numel() % PIECE), value=True).unflatten(0, (-1, PIECE)).all(1))
    return torch.cat(found).to(torch.int32)


@_not_finite.register_fake
def _(leaves: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    return leaves[0].new_empty(sum(-(-leaf.numel() // PIECE) for leaf in leaves), dtype=torch.int32)


if buildable():
    from functional_sl import packing_kernels

    @_pack.register_kernel("cuda")
    def _(leaves: Sequence[Tensor], loss: Tensor, dtype: torch.dtype) -> Tensor:
        return packing_kernels.pack(leaves, loss, dtype, PIECE)

    @_not_finite.register_kernel("cuda")
    def _(leaves: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
        return packing_kernels.not_finite(leaves, dtype, PIECE)
