"""Sizes as matrix units want them: multiples of eight, reached with zeros."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

ALIGNMENT = 8  # elements


def padded_size(size: int) -> int:
    """Returns the next multiple of eight, or the size itself if it is one."""
    return size + -size % ALIGNMENT


def padded(x: Tensor) -> Tensor:
    """Returns x with zeros behind its last axis up to a multiple of eight."""
    return F.pad(x, (0, -x.shape[-1] % ALIGNMENT))


def padded_rows(w: Tensor) -> Tensor:
    """Returns matrices [..., M, K] with rows of zeros up to a multiple of eight."""
    return F.pad(w, (0, 0, 0, -w.shape[-2] % ALIGNMENT))
