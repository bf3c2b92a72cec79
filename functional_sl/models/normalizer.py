"""Per-channel mean and scale of a data set, computed once and frozen.

One rule holds in training, in inference and in an exported model: a channel that does not vary has scale 1. Its
constant maps to 0 and back to itself, and another value that turns up later maps to its plain distance.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Normalizer(NamedTuple):
    """The affine map x -> (x - mean) / std, channel by channel."""

    mean: Tensor  # [D] float32
    std: Tensor  # [D] float32, positive


def fit(x: Tensor, mask: Tensor | None = None, floor: float = 1e-6, eps: float = 0.0) -> Normalizer:
    """Returns the statistics of the valid rows: two passes in float64, with the population variance.

    Args:
      x: [..., D] floating point.
      mask: [...] bool, the valid rows; all if None. What stands in other rows does not matter.
      floor: a standard deviation below this counts as constant, and its scale is 1.
      eps: added to the variance of a channel that varies: std = sqrt(var + eps).

    Raises:
      ValueError: without a valid row, or for NaN or infinity in one; names the channels.
    """
    mean, variance = _moments(x, mask)
    std = torch.where(variance.sqrt() < floor, 1.0, (variance + eps).sqrt())
    return Normalizer(mean.to(torch.float32), std.to(torch.float32))


def constant(x: Tensor, mask: Tensor | None = None, floor: float = 1e-6) -> Tensor:
    """Tells which channels `fit` takes for constant.

    Returns:
      [D] bool.
    """
    return _moments(x, mask)[1].sqrt() < floor


def normalize(n: Normalizer, x: Tensor) -> Tensor:
    """Returns (x - mean) / std of x [..., D]."""
    return (x - n.mean) / n.std


def denormalize(n: Normalizer, y: Tensor) -> Tensor:
    """Returns y * std + mean of y [..., D]."""
    return y * n.std + n.mean


def _moments(x: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    rows = (x.reshape(x.shape[:-1].numel(), x.shape[-1]) if mask is None else x[mask]).to(torch.float64)
    if not len(rows):
        raise ValueError(f"no valid row among {tuple(x.shape[:-1])}: statistics need at least one")
    bad = (~torch.isfinite(rows)).any(0).nonzero().flatten().tolist()
    if bad:
        raise ValueError(f"NaN or infinity in channels {bad}: mask these rows or repair the data")
    # Distances from the first row are exactly zero in a constant channel, however large its value.
    shift = rows[0].clone()
    rows = rows - shift
    offset = rows.mean(0)
    return shift + offset, torch.square(rows - offset).mean(0)
