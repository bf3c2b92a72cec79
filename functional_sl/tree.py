"""The pytree vocabulary of both packages, on optree.

Trees are nested NamedTuples, dicts, lists and tuples of tensors. optree sorts dict keys, so the order
of the leaves is the same on every rank however a dict was built.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable, Iterable
from typing import Any

import optree
import torch
from torch import Tensor

Tree = Any


def map(fn: Callable[..., Any], *trees: Tree) -> Tree:
    """Applies `fn` leaf by leaf to trees of one structure.

    Raises:
      ValueError: if the structures differ.
    """
    return optree.tree_map(fn, *trees)


def leaves(tree: Tree) -> list[Tensor]:
    """Returns the leaves in optree's order (dict keys sorted)."""
    return optree.tree_leaves(tree)


def flatten(tree: Tree) -> tuple[list[Tensor], optree.PyTreeSpec]:
    """Returns the leaves and the structure that `unflatten` takes."""
    return optree.tree_flatten(tree)


def unflatten(structure: optree.PyTreeSpec, leaves: list[Tensor] | tuple[Tensor, ...]) -> Tree:
    """Rebuilds the tree that `flatten` took apart."""
    return optree.tree_unflatten(structure, leaves)


def names(tree: Tree) -> list[str]:
    """Returns one unique name a leaf, such as `critic/params/blocks/0/w1`, in the order of `leaves`.

    A `/` inside a key is written `~1` and a `~` is written `~0` (RFC 6901), so two string keys never share a name.

    Raises:
      ValueError: if keys of different types do, such as 1 and "1".
    """
    found = ["/".join(_segment(entry) for entry in accessor) for accessor in optree.tree_accessors(tree)]
    if len(set(found)) < len(found):
        shared = next(name for name in found if found.count(name) > 1)
        raise ValueError(f"two leaves have the name {shared!r}: give dict keys of one type, such as 1 or '1'")
    return found


def _segment(entry: optree.PyTreeEntry) -> str:
    text = str(entry.field if isinstance(entry, optree.NamedTupleEntry) else entry.entry)
    return text.replace("~", "~0").replace("/", "~1")


def named(tree: Tree) -> dict[str, Tensor]:
    """Returns the leaves by name."""
    return dict(zip(names(tree), leaves(tree), strict=True))


def zeros_like(tree: Tree) -> Tree:
    """Returns zeros of every leaf's shape, dtype and device."""
    return map(torch.zeros_like, tree)


def clone(tree: Tree) -> Tree:
    """Returns a copy whose leaves are contiguous and share memory with nothing."""
    return map(lambda x: x.clone(memory_format=torch.contiguous_format), tree)


def to(tree: Tree, device: torch.device | str) -> Tree:
    """Returns the tree on `device`."""
    return map(lambda x: x.to(device), tree)


def add(a: Tree, b: Tree) -> Tree:
    """Returns `a + b`, leaf by leaf."""
    return map(torch.add, a, b)


def lerp(start: Tree, end: Tree, weight: float | Tensor) -> Tree:
    """Returns `start + weight * (end - start)`, leaf by leaf (Polyak averaging for a small `weight`)."""
    return map(lambda a, b: torch.lerp(a, b, weight), start, end)


def where(condition: Tensor, new: Tree, old: Tree) -> Tree:
    """Selects whole trees by one 0-d bool: `new` where true, `old` where false; never a mixture.

    A leaf that is the very same tensor on both sides is passed through.
    """
    return map(lambda a, b: a if a is b else torch.where(condition, a, b), new, old)


def where_rows(rows: Tensor, new: Tree, old: Tree) -> Tree:
    """Selects row by row: of leaves [N, ...], those of `new` where `rows` [N] is true and those of `old` elsewhere."""
    return map(lambda a, b: torch.where(rows.reshape(rows.shape + (1,) * (b.ndim - 1)), a, b), new, old)


def norm(tree: Tree) -> Tensor:
    """Returns the global L2 norm over all leaves as a 0-d tensor."""
    flat = leaves(tree)
    if len(flat) == 1:
        return torch.linalg.vector_norm(flat[0])
    return torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(x) for x in flat]))


def stack(trees: list[Tree]) -> Tree:
    """Stacks trees of one structure along a new leading axis."""
    return map(lambda *xs: torch.stack(xs), *trees)


def concatenate(trees: Iterable[Tree], axis: int = 0) -> Tree:
    """Joins trees of one structure along an axis that every leaf has."""
    return map(lambda *xs: torch.cat(xs, axis), *trees)


def index(tree: Tree, i: int) -> Tree:
    """Returns entry `i` of every leaf's leading axis (the inverse of `stack`)."""
    return map(lambda x: x[i], tree)


def size(tree: Tree) -> int:
    """Returns the number of elements over all leaves."""
    return sum(x.numel() for x in leaves(tree))


def copy_into(target: Tree, source: Tree) -> None:
    """Copies `source` into the buffers of `target`, whose addresses stay.

    Raises:
      ValueError: if the structures differ.
    """
    optree.tree_map_(lambda t, s: t.copy_(s), target, source)


def bits_equal(a: Tree, b: Tree) -> bool:
    """Tells whether two trees agree in structure, dtypes, shapes and every bit.

    Separates 0.0 from -0.0 and accepts NaNs of the same bits. Reads the values on the host.
    """
    left, left_structure = flatten(a)
    right, right_structure = flatten(b)
    return left_structure == right_structure and all(
        x.dtype == y.dtype and x.shape == y.shape and torch.equal(_bits(x), _bits(y))
        for x, y in zip(left, right, strict=True)
    )


def digest(tree: Tree) -> str:
    """Returns the SHA-256 of the names, dtypes, shapes and bits of all leaves, in hexadecimal.

    Contiguous leaves on the CPU, such as a data set, are not copied.
    """
    sha = hashlib.sha256()
    for name, leaf in named(tree).items():
        sha.update(f"{name} {leaf.dtype} {tuple(leaf.shape)}\n".encode())
        sha.update(memoryview(_bits(leaf).numpy()))
    return sha.hexdigest()


def _bits(x: Tensor) -> Tensor:
    return x.detach().cpu().contiguous().reshape(-1).view(torch.uint8)


def overlapping(tree: Tree) -> tuple[str, str] | None:
    """Returns the names of two leaves whose spans of memory overlap, or None.

    A span goes from a leaf's first element to its last. Disjoint slices of one buffer pass; interleaved views, such
    as two columns of a matrix, count as overlapping.
    """
    spans = sorted((*_span(leaf), name) for name, leaf in named(tree).items() if leaf.numel())
    for (_, end, first), (start, _, second) in itertools.pairwise(spans):
        if start < end:
            return first, second
    return None


def _span(x: Tensor) -> tuple[int, int]:
    extent = sum((n - 1) * abs(s) for n, s in zip(x.shape, x.stride(), strict=True)) + 1
    return x.data_ptr(), x.data_ptr() + extent * x.element_size()
