"""Dynamic loss scaling for FP16 gradients (Micikevicius et al., arXiv:1710.03740, section 3.2), without a host read."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor


class LossScaleState(NamedTuple):
    """The scale in use and the way to its next growth."""

    scale: Tensor  # () float32
    growth: Tensor  # () int64, finite steps since the scale last changed


class LossScale(NamedTuple):
    """Closures over static growth and backoff factors."""

    init: Callable[..., LossScaleState]  # (device=None) -> state
    update: Callable[[LossScaleState, Tensor], LossScaleState]  # (state, finite () bool) -> state


def dynamic(
    init_scale: float = 2.0**16,
    growth_factor: float = 2.0,
    backoff_factor: float = 0.5,
    growth_interval: int = 2000,
    min_scale: float = 1.0,
    max_scale: float = 2.0**24,
) -> LossScale:
    """Returns the rule of `torch.amp.GradScaler`, kept within bounds.

    Every step that was not finite multiplies the scale by `backoff_factor`; `growth_interval` finite steps in a
    row multiply it by `growth_factor`. Either starts the row anew.

    Args:
      init_scale: the first scale, within the bounds.
      growth_factor: above 1. Factors that are powers of two keep scaling free of rounding.
      backoff_factor: in (0, 1).
      growth_interval: finite steps in a row before the scale grows; at least 1.
      min_scale: the scale never falls below it; above 0.
      max_scale: the scale never rises above it.

    Raises:
      ValueError: if a number is out of its range.
    """
    if not 0 < min_scale <= init_scale <= max_scale <= torch.finfo(torch.float32).max:
        raise ValueError(
            f"loss scale: need 0 < min_scale <= init_scale <= max_scale in float32, "
            f"not min_scale={min_scale}, init_scale={init_scale}, max_scale={max_scale}"
        )
    if not (1 < growth_factor < math.inf and 0 < backoff_factor < 1 and growth_interval >= 1):
        raise ValueError(
            f"loss scale: need growth_factor > 1, 0 < backoff_factor < 1 and growth_interval >= 1, "
            f"not growth_factor={growth_factor}, backoff_factor={backoff_factor}, growth_interval={growth_interval}"
        )

    def init(device: torch.device | str | None = None) -> LossScaleState:
        return LossScaleState(
            scale=torch.full((), init_scale, dtype=torch.float32, device=device),
            growth=torch.zeros((), dtype=torch.int64, device=device),
        )

    def update(state: LossScaleState, finite: Tensor) -> LossScaleState:
        growth = state.growth + 1
        grows = growth >= growth_interval
        old = state.scale.to(torch.float64)
        new = torch.where(finite, torch.where(grows, old * growth_factor, old), old * backoff_factor)
        return LossScaleState(
            scale=torch.clamp(new, min_scale, max_scale).to(torch.float32),
            growth=torch.where(finite & ~grows, growth, 0),
        )

    return LossScale(init, update)
