"""Schedules: closures from a step count to a value, in tensor arithmetic without a host read.

A count is a 0-d int64 tensor on any device; the value is a 0-d float64 tensor beside it. Float64 holds every
count up to 2^53, and a 0-d float64 tensor does not promote the float32 vectors that it multiplies.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

Schedule = Callable[[Tensor], Tensor]


def constant(value: float) -> Schedule:
    """Returns the schedule that is `value` at every count.

    Raises:
      ValueError: if `value` is negative or not finite.
    """
    _check(value=value)

    def schedule(count: Tensor) -> Tensor:
        return torch.full_like(count, value, dtype=torch.float64)

    return schedule


def linear(init_value: float, end_value: float, transition_steps: int) -> Schedule:
    """Returns the schedule that goes straight from `init_value` to `end_value` and stays there.

    Args:
      init_value: the value at count 0.
      end_value: the value, exactly, from count `transition_steps` on.
      transition_steps: length of the way, in counts; at least 1.

    Raises:
      ValueError: if a number is negative or not finite, or there is no step to make the way in.
    """
    _check(init_value=init_value, end_value=end_value, transition_steps=transition_steps)
    if transition_steps < 1:
        raise ValueError(f"transition_steps={transition_steps} must be at least 1; use constant(end_value) for no way")

    def schedule(count: Tensor) -> Tensor:
        s = count.to(torch.float64)
        return torch.where(
            s < transition_steps, init_value + (end_value - init_value) * s / transition_steps, end_value
        )

    return schedule


def warmup_cosine(
    init_value: float, peak_value: float, end_value: float, warmup_steps: int, decay_steps: int
) -> Schedule:
    """Returns a linear warm-up followed by half a cosine, the learning rate of FlashSAC.

    At count s, with w = `warmup_steps` and d = `decay_steps`:

      s < w:       init + (peak - init) * s / w
      w <= s < d:  end + (peak - end) * (1 + cos(pi * (s - w) / (d - w))) / 2
      d <= s:      end

    Args:
      init_value: the value at count 0 (unused without a warm-up).
      peak_value: the value at count `warmup_steps`.
      end_value: the value, exactly, from count `decay_steps` on.
      warmup_steps: length of the warm-up, in counts; 0 starts at the peak.
      decay_steps: length of warm-up and cosine together, in counts.

    Raises:
      ValueError: if a number is negative or not finite, or the warm-up is longer than the whole.
    """
    _check(init_value=init_value, peak_value=peak_value, end_value=end_value)
    _check(warmup_steps=warmup_steps, decay_steps=decay_steps)
    if warmup_steps > decay_steps:
        raise ValueError(
            f"warmup_steps={warmup_steps} exceeds decay_steps={decay_steps}, which is the total length with the warm-up"
        )
    # A phase of no length is never selected; 1 keeps its unused branch free of a division by zero.
    warmup_length, cosine_length = max(warmup_steps, 1), max(decay_steps - warmup_steps, 1)

    def schedule(count: Tensor) -> Tensor:
        s = count.to(torch.float64)
        warmup = init_value + (peak_value - init_value) * s / warmup_length
        phase = math.pi * (s - warmup_steps) / cosine_length
        cosine = end_value + (peak_value - end_value) * (1 + torch.cos(phase)) / 2
        return torch.where(s < warmup_steps, warmup, torch.where(s < decay_steps, cosine, end_value))

    return schedule


def _check(**numbers: float) -> None:
    for name, value in numbers.items():
        if not math.isfinite(value) or value < 0:
            raise ValueError(f"{name}={value} must be finite and not negative")
