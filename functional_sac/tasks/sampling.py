"""Where episodes of motion tracking begin: more often where policies failed.

The frames of all clips are one line that is cut into bins of about a second. A bin's weight is an average of the
number of failures in it plus a uniform share (the adaptive sampling of BeyondMimic, arXiv:2508.08241, without the
smoothing kernel). Failures are counts, not rates, and the average moves only on steps with a failure.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

ALPHA = 0.001
UNIFORM_SHARE = 0.1
MEASURES = ("sampling_entropy", "sampling_top1_prob", "sampling_top1_bin")
# Weights as integers: their cumulative sum is exact, and deterministic on a GPU.
_RESOLUTION = 2.0**31


class Sampling(NamedTuple):
    """The average number of failures a step by bin."""

    failures: Tensor  # [K] float32


def init(num_frames: int, fps: float, device: torch.device | str = "cpu") -> Sampling:
    """Returns the statistics before any failure."""
    return Sampling(torch.zeros(math.floor(num_frames / fps) + 1, device=device))


def probabilities(state: Sampling) -> Tensor:
    """Returns the probability of each bin [K]."""
    weights = state.failures + UNIFORM_SHARE / state.failures.shape[0]
    return weights / weights.sum()


def draw(probability: Tensor, uniform: Tensor, num_frames: int) -> Tensor:
    """Returns frames [N] int64.

    Args:
      probability: [K] float32.
      uniform: [N, 2] in [0, 1): for the bin, and for the place in it.
      num_frames: F.
    """
    bins = probability.shape[0]
    ladder = (probability * _RESOLUTION).long().cumsum(0)
    height = (uniform[:, 0].double() * ladder[-1]).long()
    chosen = torch.searchsorted(ladder, height, right=True).clamp(max=bins - 1)
    return ((chosen + uniform[:, 1]) / bins * (num_frames - 1)).long()


def update(state: Sampling, frame: Tensor, failed: Tensor, num_frames: int) -> Sampling:
    """Counts the failures [N] bool at frames [N] int64 of F."""
    bins = state.failures.shape[0]
    at = (frame * bins // num_frames).clamp(max=bins - 1)
    hit = (at.unsqueeze(1) == torch.arange(bins, device=at.device)) & failed.unsqueeze(1)
    rate = ALPHA * failed.any()
    return Sampling(state.failures + rate * (hit.sum(0) - state.failures))


def measures(probability: Tensor) -> dict[str, Tensor]:
    """Returns entropy (1 where all bins are alike), largest probability and its bin as a share of the line."""
    bins = probability.shape[0]
    entropy = -(probability * (probability + 1e-12).log()).sum() / math.log(bins) if bins > 1 else probability.sum()
    top, at = probability.max(0)
    return dict(zip(MEASURES, (entropy, top, at / bins), strict=True))
