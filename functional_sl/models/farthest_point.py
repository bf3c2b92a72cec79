"""Farthest-point sampling with masks: the order in which points cover a shape best."""

from __future__ import annotations

import torch
from torch import Tensor


def order(points: Tensor, mask: Tensor) -> Tensor:
    """Returns the order in which farthest-point sampling takes the points; every prefix is spread over the shape.

    The first is the point farthest from the origin, each next one farthest from those before it; of equal ones the
    earlier. Points that are not valid come last, in their own order, and whatever they hold decides nothing.

    Args:
      points: [..., P, 3] m, about a centre of the shape.
      mask: [..., P] bool, which points are valid.

    Returns:
      [..., P] int64.
    """
    points = torch.where(mask[..., None], points, 0.0)
    slots = torch.arange(points.shape[-2], device=points.device)
    distance, used, found = points.square().sum(-1), torch.zeros_like(mask), []
    for i in range(points.shape[-2]):
        score = torch.where(mask, distance, -1.0 - slots)
        chosen = torch.where(used, -torch.inf, score).argmax(-1, keepdim=True)
        at = slots == chosen
        used = used | at
        place = torch.where(at[..., None], points, 0.0).sum(-2, keepdim=True)
        gap = (points - place).square().sum(-1)
        distance = gap if i == 0 else torch.minimum(distance, gap)
        found.append(chosen)
    return torch.cat(found, -1)
