"""What a network's autocast must leave alone."""

from __future__ import annotations

import torch
from torch import Tensor


def full(like: Tensor) -> torch.autocast:
    """Returns the context in which products have the dtype of their factors, inside an autocast too.

    Geometry belongs there: a place of 1 m has steps of 4 mm in bfloat16, and a loss divides it by dt^2.

    Args:
      like: any tensor of the device.
    """
    return torch.autocast(like.device.type, enabled=False)
