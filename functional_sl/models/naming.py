"""Trees from the flat names that a bundle stores."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor


def nested(flat: Mapping[str, Tensor]) -> Any:
    """Rebuilds dicts and lists from the names of `functional_sl.tree.named`; a folder of numbers is a list."""
    folders: dict[str, dict[str, Tensor]] = {}
    for name, leaf in flat.items():
        first, _, rest = name.partition("/")
        folders.setdefault(first, {})[rest] = leaf
    tree = {first: leaves[""] if "" in leaves else nested(leaves) for first, leaves in folders.items()}
    return [tree[i] for i in sorted(tree, key=int)] if all(name.isdigit() for name in tree) else tree
