"""The categorical return distribution and its Bellman target (C51, Bellemare et al. 2017, arXiv 1707.06887)."""

from __future__ import annotations

import math

import chex
import torch
from torch import Tensor


def support(min_value: float, max_value: float, bins: int, device: torch.device | str | None = None) -> Tensor:
    """Returns the bin centres [bins] float32, evenly spaced from `min_value` to `max_value`."""
    return torch.linspace(min_value, max_value, bins, device=device)


def expectation(log_probs: Tensor, atoms: Tensor) -> Tensor:
    """Returns the mean return [...] of log-probabilities [..., bins] over the atoms [bins]."""
    return torch.exp(log_probs) @ atoms


def pessimistic(log_probs: Tensor, atoms: Tensor) -> Tensor:
    """Returns, row by row, the distribution of the ensemble member with the lowest mean return.

    Args:
      log_probs: [2, B, bins]; a tie takes member 0.
      atoms: [bins].

    Returns:
      [B, bins] log-probabilities.
    """
    chex.assert_rank([log_probs, atoms], [3, 1])
    first, second = expectation(log_probs, atoms)
    return torch.where((second < first).unsqueeze(-1), log_probs[1], log_probs[0])


def bellman_target(
    probs: Tensor, reward: Tensor, terminated: Tensor, entropy_term: Tensor, atoms: Tensor, discount: float
) -> Tensor:
    """Projects one transition's backed-up distribution onto the evenly spaced atoms.

    Source atom j moves to `t_j = clip(r + discount (v_j - alpha log pi))`, or to `clip(r)` where the episode
    terminated, and its mass is shared between the two neighbours of `t_j`: equation 7 of arXiv 1707.06887.

    A scatter adds in no fixed order on a GPU, and the dense sum over all pairs of atoms costs bins^2. But the moved
    atoms are evenly spaced too, `discount` apart, so the few that reach a bin are found by division and
    gathered. The order of addition is fixed on every device.

    Args:
      probs: [bins], sums to one.
      reward: () scaled (n-step) reward.
      terminated: () bool.
      entropy_term: () temperature times the next action's log-probability.
      atoms: [bins].
      discount: `gamma**n`, in (0, 1].

    Returns:
      [bins], sums to one; NaN throughout where the reward or the entropy term is not finite, so that the gate closes.
    """
    chex.assert_rank([probs, reward, terminated, entropy_term, atoms], [1, 0, 0, 0, 1])
    last = atoms.shape[0] - 1
    width = (atoms[-1] - atoms[0]) / last
    bins = torch.arange(last + 1, device=atoms.device, dtype=atoms.dtype)
    # Positions in units of bins: source atom j lands at first + discount * j.
    first = (reward + discount * (atoms[0] - entropy_term) - atoms[0]) / width
    landing = first + discount * bins
    inside = (landing > 0) & (landing < last)
    moving = torch.where(inside, probs, 0.0)
    reaching = torch.arange(math.floor(2 / discount) + 1, device=atoms.device, dtype=atoms.dtype)
    source = torch.ceil((bins - 1 - first) / discount).unsqueeze(-1) + reaching
    index = source.nan_to_num(0.0).clamp(0, last)
    share = torch.where(source == index, _hat(first + discount * source - bins.unsqueeze(-1)), 0.0)
    total = (share * moving[index.to(torch.int64)]).sum(-1)
    low, high = torch.where(landing <= 0, probs, 0.0).sum(), torch.where(landing >= last, probs, 0.0).sum()
    total = total + (bins == 0) * low + (bins == last) * high
    ended = _hat(((reward - atoms[0]) / width).clamp(0, last) - bins)
    # Zero, or NaN where the reward or the entropy term is not finite.
    return torch.where(terminated, ended, total) + 0.0 * first


def _hat(distance: Tensor) -> Tensor:
    return (1.0 - distance.abs()).clamp_min(0.0)
