"""How one gradient group travels between ranks: a static layout, one packed vector, a sentinel.

A group is packed as `[P + 1]`: its P gradient elements in the order of `tree.leaves`, then the sentinel. It is raised
where something is not finite, and where a gradient is so large that sums over ranks or squares might not be: what
arrives under sentinels of zero is finite, and nobody has to look at it again.
"""

from __future__ import annotations

import dataclasses
import hashlib
import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from functional_sl import tree
from functional_sl.tree import Tree

WIRE_DTYPES = ("float32", "bfloat16")
BFLOAT16_MINIMUM = 1024  # gradient elements; below it the halved traffic saves nothing worth the rounding


@dataclasses.dataclass(frozen=True)
class Layout:
    """The static description of one packed group: hashable Python values only, equal on every rank."""

    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    dtype: torch.dtype  # of every leaf and of the packed vector
    wire_dtype: str  # as asked for; `travels_as` is what it comes to

    @property
    def sizes(self) -> tuple[int, ...]:
        """The number of elements of each leaf."""
        return tuple(math.prod(shape) for shape in self.shapes)

    @property
    def size(self) -> int:
        """P, the number of gradient elements; the packed vector has one more, the sentinel."""
        return sum(self.sizes)

    @property
    def travels_as(self) -> torch.dtype:
        """The dtype on the wire: BF16 for an FP32 group of at least 1024 elements that asks for it, else its own."""
        narrow = self.wire_dtype == "bfloat16" and self.dtype == torch.float32 and self.size >= BFLOAT16_MINIMUM
        return torch.bfloat16 if narrow else self.dtype


class Reduced(NamedTuple):
    """What a reduction comes to, in the group's dtype: the same bytes on every rank."""

    gradient: Tensor  # [P], the mean over the ranks
    sentinel: Tensor  # (), the sum over the ranks


# Of a packed vector [P + 1], which may be overwritten.
Reduce = Callable[[Tensor, Layout], Reduced]

# Any vector's sum over the ranks in its own dtype, on its way while the caller computes on; what comes back waits, on
# the stream of the beginning. The vector may be overwritten.
Begin = Callable[[Tensor], Callable[[], Tensor]]


def layout(template: Tree, wire_dtype: str = "float32") -> Layout:
    """Describes the group whose gradients have the names, shapes and dtype of `template`.

    Args:
      template: the parameters (or gradients) of one optimizer; leaves of one floating-point dtype.
      wire_dtype: `float32` or `bfloat16`, independent of autocast.

    Raises:
      ValueError: on another wire dtype, an empty tree, or a leaf that is no floating-point tensor of the
        group's dtype; it names the leaf.
    """
    if wire_dtype not in WIRE_DTYPES:
        raise ValueError(f"wire_dtype is {wire_dtype!r}; it must be one of {', '.join(WIRE_DTYPES)}")
    named = tree.named(template)
    if not named:
        raise ValueError("the template has no leaves: a gradient group needs at least one parameter")
    first, dtype = next((name, getattr(leaf, "dtype", None)) for name, leaf in named.items())
    for name, leaf in named.items():
        if not isinstance(leaf, Tensor) or not leaf.is_floating_point():
            kind = leaf.dtype if isinstance(leaf, Tensor) else type(leaf).__name__
            raise ValueError(f"leaf {name!r} is {kind}: a gradient group holds floating-point tensors only")
        if leaf.dtype != dtype:
            raise ValueError(f"leaf {name!r} is {leaf.dtype} but leaf {first!r} is {dtype}: use one group a dtype")
    return Layout(tuple(named), tuple(tuple(leaf.shape) for leaf in named.values()), dtype, wire_dtype)


def part(layout: Layout, first: int, last: int) -> Layout:
    """Returns the layout of a group's leaves from `first` up to `last`; they travel in the type of the whole group."""
    return dataclasses.replace(layout, names=layout.names[first:last], shapes=layout.shapes[first:last])


def limit(dtype: torch.dtype) -> float:
    """Returns what the magnitudes of a group's gradient elements must stay below: 2^48 in FP32 and BF16.

    Whatever follows is finite then: their sum over ranks, in whatever order and type on the wire, their squares, of
    which Adam keeps a mean for ever, and the sum of 2^31 squares, which a norm is made of. FP16, in which squares are
    not taken, has 2^9, of which 100 ranks have a finite sum.
    """
    _, exponent = math.frexp(torch.finfo(dtype).max)
    return 2.0 ** (exponent // 2 - 16 if exponent > 64 else exponent - 7)


def digest(layout: Layout) -> str:
    """Returns the SHA-256 of everything in the layout, in hexadecimal: ranks compare it before they reduce."""
    return hashlib.sha256(repr(dataclasses.astuple(layout)).encode()).hexdigest()


def pack(layout: Layout, gradients: Tree, sentinel: Tensor) -> Tensor:
    """Returns the gradients and their sentinel as one vector.

    Args:
      layout: the group's.
      gradients: a tree of the layout's shapes and dtype.
      sentinel: 0-d, as `sentinel` returns it.

    Returns:
      `[P + 1]`, in the group's own dtype.

    Raises:
      ValueError: if a leaf has another shape or dtype than the layout says.
    """
    leaves = tree.leaves(gradients)
    for name, shape, leaf in zip(layout.names, layout.shapes, leaves, strict=True):
        if leaf.shape != shape or leaf.dtype != layout.dtype:
            raise ValueError(f"leaf {name!r} is {leaf.dtype} {tuple(leaf.shape)}, not {layout.dtype} {shape}")
    return torch.cat([*(leaf.reshape(-1) for leaf in leaves), sentinel.to(layout.dtype).reshape(1)])


def unpack(flat: Tensor, like: Tree) -> Tree:
    """Returns views of `flat` in the shapes and the structure of `like`.

    Args:
      flat: `[P]` or `[P + 1]`; a sentinel at the end is left out.
      like: the template. The structure is read from it here, since a structure made outside a compiled
        region cannot be used inside.

    Raises:
      ValueError: if `flat` has another length.
    """
    leaves, structure = tree.flatten(like)
    sizes = [leaf.numel() for leaf in leaves]
    if flat.ndim != 1 or flat.shape[0] - sum(sizes) not in (0, 1):
        raise ValueError(
            f"the packed vector has shape {tuple(flat.shape)}; the template needs [{sum(sizes)}] or one more"
        )
    parts = flat[: sum(sizes)].split(sizes)
    return tree.unflatten(structure, [part.view(leaf.shape) for part, leaf in zip(parts, leaves, strict=True)])


def sentinel(loss: Tensor, gradients: Tree) -> Tensor:
    """Tells whether this rank's loss is not finite or one of its gradients too large, as a number that can be summed.

    The loss counts too: its derivatives can be finite where it is not.

    Args:
      loss: 0-d, of any floating-point dtype.
      gradients: a tree, or one flat vector.

    Returns:
      0-d of the gradients' dtype: 1 where something is wrong, else 0.
    """
    leaves = [leaf.reshape(-1) for leaf in tree.leaves(gradients)]
    flat = leaves[0] if len(leaves) == 1 else torch.cat(leaves)
    return (~((flat.abs() < limit(flat.dtype)).all() & torch.isfinite(loss))).to(flat.dtype)
