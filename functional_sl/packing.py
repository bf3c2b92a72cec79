"""Packing a gradient group that is written out, whatever the types of its leaves, in one pass; or its sentinel alone.

It comes to `wire.pack` in the type on the wire, but every piece of a leaf has a sentinel of its own: on a GPU one
Triton kernel casts, packs and looks, and nothing has to put together what was found before it has travelled. Elsewhere
it is plain operations, of the same bits.
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
SMALLEST = 2**19  # elements of a part, unless it is the last; smaller ones take a reduction's latency for nothing


def sentinel(layout: wire.Layout, gradients: Tree, loss: Tensor) -> Tensor:
    """Returns the sentinel of a group that does not travel, 0-d, and packs nothing; it has no rule for `vmap`.

    Args:
      layout: the group's.
      gradients: a tree of the layout's shapes, in floating-point types that the group's type holds.
      loss: 0-d, see `wire.sentinel`.

    Raises:
      ValueError: if a leaf has another shape than the layout says.
    """
    # What the pieces come to is left to a compiler, which does in one kernel what follows from it too.
    bad = _look(_leaves(layout, gradients), layout.dtype).amax() > 0
    return (bad | ~torch.isfinite(loss)).to(layout.dtype)


class Parts:
    """A group that travels in parts, the last leaves first, each as soon as enough gradients are known.

    A part is packed in its type on the wire, and the sentinels of all parts travel with the last one, which no other
    arrives behind. In one type the parts come to the whole group, to the bit over two ranks, over more to the order of
    the sums. Packing has no rule for `vmap`.
    """

    def __init__(self, layout: wire.Layout, begin: wire.Begin) -> None:
        """Takes the layout of the group and what sends a packed vector on its way."""
        self._layout, self._begin, self._left = layout, begin, len(layout.names)
        self._waiting: list[Tensor] = []
        self._sent: list[tuple[wire.Layout, Callable[[], Tensor]]] = []
        self._sentinels: list[Tensor] = []

    def send(self, leaves: Sequence[Tensor], loss: Tensor) -> None:
        """Sends the gradients of the last leaves of those that are not given yet, or has them wait for the next.

        Args:
          leaves: of the layout's shapes, in floating-point types that the group's type holds.
          loss: 0-d, see `wire.sentinel`; the same in every call.

        Raises:
          ValueError: if there are more leaves than are left, or one has another shape than the layout says.
        """
        if not 0 < len(leaves) <= self._left - len(self._waiting):
            raise ValueError(f"{len(leaves)} leaves are sent, of {self._left - len(self._waiting)} that are left")
        self._waiting = [*leaves, *self._waiting]
        first = self._left - len(self._waiting)
        part = wire.part(self._layout, first, self._left)
        if first and part.size < SMALLEST:
            return
        leaves, types = _leaves(part, self._waiting), (part.dtype, self._layout.travels_as)
        if first:
            packed, sentinels = _pack_part(leaves, loss, *types)
        else:
            packed = _pack([*leaves, *self._sentinels], loss, *types)
            sentinels = packed[part.size :]
        # Read before they are summed, which a compiler then does in place.
        self._sentinels, self._own = [*self._sentinels, sentinels], sentinels.amax()
        self._sent.insert(0, (part, self._begin(packed)))
        self._left, self._waiting = first, []

    def finish(self, gradients: Tree, loss: Tensor) -> tuple[list[Tensor], Tensor, Tensor]:
        """Sends what is left of the whole gradient, and waits.

        Returns:
          The leaves of the gradient, summed over the ranks, in the types that have travelled; the sums of all
          sentinels [Q]; and this rank's own sentinel ().
        """
        rest = self._left - len(self._waiting)
        if rest:
            self.send(tree.leaves(gradients)[:rest], loss)
        found = [(part, end()) for part, end in self._sent]
        leaves = [leaf for part, flat in found for leaf in _views(part, flat)]
        part, flat = found[0]
        return leaves, flat[part.size :], self._own


def _leaves(layout: wire.Layout, gradients: Tree) -> list[Tensor]:
    leaves = tree.leaves(gradients)
    for name, shape, leaf in zip(layout.names, layout.shapes, leaves, strict=True):
        if leaf.shape != shape:
            raise ValueError(f"leaf {name!r} is {tuple(leaf.shape)}, not {shape}")
    return leaves


def _views(layout: wire.Layout, flat: Tensor) -> list[Tensor]:
    pieces = flat[: layout.size].split(layout.sizes)
    return [piece.view(shape) for piece, shape in zip(pieces, layout.shapes, strict=True)]


@library.custom_op("functional_sl::pack", mutates_args=())
def _pack(leaves: Sequence[Tensor], loss: Tensor, dtype: torch.dtype, wire_dtype: torch.dtype) -> Tensor:
    """Returns P elements of the leaves and Q sentinels of their pieces, [P + Q] in the type on the wire."""
    raised = torch.cat([_raised(leaf.to(dtype)) for leaf in leaves]) | ~torch.isfinite(loss)
    return torch.cat([*(leaf.reshape(-1).to(dtype).to(wire_dtype) for leaf in leaves), raised.to(wire_dtype)])


@_pack.register_fake
def _(leaves: Sequence[Tensor], loss: Tensor, dtype: torch.dtype, wire_dtype: torch.dtype) -> Tensor:
    return loss.new_empty(sum(_sizes(leaves)), dtype=wire_dtype)


@library.custom_op("functional_sl::pack_part", mutates_args=())
def _pack_part(
    leaves: Sequence[Tensor], loss: Tensor, dtype: torch.dtype, wire_dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Returns what `_pack` does as two tensors, [P] and [Q]."""
    packed, sentinels = _pack(leaves, loss, dtype, wire_dtype).split(_sizes(leaves))
    return packed.clone(), sentinels.clone()


@_pack_part.register_fake
def _(leaves: Sequence[Tensor], loss: Tensor, dtype: torch.dtype, wire_dtype: torch.dtype):
    packed, sentinels = (loss.new_empty(size, dtype=wire_dtype) for size in _sizes(leaves))
    return packed, sentinels


def _sizes(leaves: Sequence[Tensor]) -> list[int]:
    """Returns P and Q."""
    return [sum(leaf.numel() for leaf in leaves), sum(-(-leaf.numel() // PIECE) for leaf in leaves)]


def _raised(leaf: Tensor) -> Tensor:
    """Tells by piece whether a magnitude is not below the limit."""
    below = leaf.reshape(-1).abs() < wire.limit(leaf.dtype)
    return ~F.pad(below, (0, -below.numel() % PIECE), value=True).unflatten(0, (-1, PIECE)).all(1)


@library.custom_op("functional_sl::look", mutates_args=())
def _look(leaves: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    """Returns int32 [Q], 1 where a magnitude in one of Q pieces is not below this type's limit, else 0."""
    return torch.cat([_raised(leaf.to(dtype)) for leaf in leaves]).to(torch.int32)


@_look.register_fake
def _(leaves: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    return leaves[0].new_empty(_sizes(leaves)[1], dtype=torch.int32)


if buildable():
    from functional_sl import packing_kernels

    @_pack.register_kernel("cuda")
    def _(leaves: Sequence[Tensor], loss: Tensor, dtype: torch.dtype, wire_dtype: torch.dtype) -> Tensor:
        both = loss.new_empty(sum(_sizes(leaves)), dtype=wire_dtype)
        packing_kernels.pack(leaves, loss, *both.split(_sizes(leaves)), dtype, wire.limit(dtype), PIECE)
        return both

    @_pack_part.register_kernel("cuda")
    def _(leaves: Sequence[Tensor], loss: Tensor, dtype: torch.dtype, wire_dtype: torch.dtype):
        packed, sentinels = (loss.new_empty(size, dtype=wire_dtype) for size in _sizes(leaves))
        packing_kernels.pack(leaves, loss, packed, sentinels, dtype, wire.limit(dtype), PIECE)
        return packed, sentinels

    @_look.register_kernel("cuda")
    def _(leaves: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
        found = leaves[0].new_empty(_sizes(leaves)[1], dtype=torch.int32)
        packing_kernels.pack(leaves, None, None, found, dtype, wire.limit(dtype), PIECE)
        return found
