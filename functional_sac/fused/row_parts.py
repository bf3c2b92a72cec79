"""Sums over rows in parts of a fixed number of rows, so that a GPU adds them in a fixed order."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor


def count(rows: int, size: int) -> int:
    """Returns how many parts of `size` rows there are; the last one may have fewer."""
    return -(-rows // size)


def sums(x: Tensor, size: int) -> Tensor:
    """Returns the sums [P, ...] of every `size` rows of x [B, ...]."""
    missing = -x.shape[0] % size
    return F.pad(x, (0, 0) * (x.ndim - 1) + (0, missing)).unflatten(0, (-1, size)).sum(1)
