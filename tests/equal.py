"""Equality of trees to the last bit, with the leaf that differs in the message."""

from __future__ import annotations

from typing import Any

import chex
from torch import Tensor

from functional_sl import tree


def assert_bits_equal(actual: Any, expected: Any) -> None:
    """Fails unless both trees agree in structure, dtypes, shapes and every bit; names the first leaf that differs."""
    chex.assert_trees_all_equal_comparator(tree.bits_equal, _describe, actual, expected)


def all_finite(values: Any) -> bool:
    """Tells whether no leaf of a tree holds NaN or infinity."""
    return all(bool(leaf.isfinite().all()) for leaf in tree.leaves(values))


def _describe(actual: Tensor, expected: Tensor) -> str:
    if actual.dtype != expected.dtype or actual.shape != expected.shape:
        sides = (f"{x.dtype} {tuple(x.shape)}" for x in (actual, expected))
        return "bits differ: " + " against ".join(sides)
    gap = (actual.double() - expected.double()).abs().max()
    return f"bits differ, by up to {gap:.3g}"
