"""Samplers as pure functions of data and key.

A data set is a tree of tensors that share their leading axis, one row a sample.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from functional_sl import keys, tree
from functional_sl.tree import Tree


def size(data: Tree) -> int:
    """Returns the number of rows.

    Raises:
      ValueError: if there is none, or two leaves differ in it; names the leaf.
    """
    lengths = {name: leaf.shape[0] if leaf.ndim else None for name, leaf in tree.named(data).items()}
    first = next(iter(lengths.values()), None)
    if not first:
        raise ValueError(f"a data set has leaves with at least one row, not {lengths}")
    for name, length in lengths.items():
        if length != first:
            raise ValueError(f"leaf {name!r} has {length} rows, expected {first} as the other leaves")
    return first


def rows(key: Tensor, count: int, batch_size: int) -> Tensor:
    """Returns row numbers in [0, count), drawn uniformly with replacement.

    Args:
      key: [2].
      count: rows of the data set, below 2^31.
      batch_size: B.

    Returns:
      [B] int64.
    """
    return keys.randint(key, (batch_size,), 0, count)


def uniform(data: Tree, key: Tensor, batch_size: int) -> Tree:
    """Returns rows of the data drawn uniformly with replacement: a `sample` for recipes whose rows are samples."""
    chosen = rows(key, size(data), batch_size)
    return tree.map(lambda leaf: leaf.index_select(0, chosen), data)


def in_order(data: Tree, batch_size: int) -> Iterator[Tree]:
    """Yields every row once, in order; the last batch holds what is left."""
    count = size(data)
    for start in range(0, count, batch_size):
        yield tree.map(lambda leaf, at=start: leaf[at : at + batch_size], data)
