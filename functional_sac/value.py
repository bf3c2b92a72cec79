"""The categorical return distribution and its Bellman target (C51, Bellemare et al. 2017, arXiv 1707.06887)."""

from __future__ import annotations

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
    """Backs transitions' distributions up and projects them onto the evenly spaced atoms.

    Source atom j moves to `t_j = clip(r + discount (v_j - alpha log pi))`, or to `clip(r)` where the episode
    terminated (equation 7 of arXiv 1707.06887, with the entropy of soft actor-critic).

    Args:
      probs: [..., bins], sums to one.
      reward: [...] scaled (n-step) reward.
      terminated: [...] bool.
      entropy_term: [...] temperature times the next action's log-probability.
      atoms: [bins].
      discount: `gamma**n`.

    Returns:
      [..., bins], sums to one; NaN if the reward or the entropy term is not finite.
    """
    chex.assert_equal_shape([probs[..., 0], reward, terminated, entropy_term])
    chex.assert_rank(atoms, 1)
    reward, terminated, entropy_term = (x.unsqueeze(-1) for x in (reward, terminated, entropy_term))
    moved = reward + torch.where(terminated, 0.0, discount * (atoms - entropy_term))
    # An infinite reward is clipped to a healthy target; zero times it is NaN, which closes the gate.
    return project(probs, moved.clamp(atoms[0], atoms[-1]), atoms) + 0.0 * (reward + entropy_term)


def project(probs: Tensor, targets: Tensor, atoms: Tensor) -> Tensor:
    """Shares each mass between the two atoms around its target: `m_k = sum_j p_j max(0, 1 - |t_j - v_k| / width)`.

    On an eager CPU the masses are scattered, which there adds in one order. Elsewhere the sum is dense: a scatter on
    a GPU adds in no fixed order, and runs would differ.

    Args:
      probs: [..., bins].
      targets: [..., bins] within [atoms[0], atoms[-1]].
      atoms: [bins].

    Returns:
      [..., bins].
    """
    last = atoms.shape[0] - 1
    position = (targets - atoms[0]) * (last / (atoms[-1] - atoms[0]))
    if atoms.device.type != "cpu" or torch.compiler.is_compiling():
        bins = torch.arange(last + 1, device=atoms.device, dtype=atoms.dtype)
        shares = (1.0 - (position.unsqueeze(-1) - bins).abs()).clamp_min(0.0)
        # Not a matrix product, which would write the shares to memory.
        return (probs.unsqueeze(-1) * shares).sum(-2)
    lower = position.floor()
    upper_mass = probs * (position - lower)
    index = lower.to(torch.int64).clamp(0, last)
    shared = torch.zeros_like(probs).scatter_add(-1, index, probs - upper_mass)
    return shared.scatter_add(-1, (index + 1).clamp_max(last), upper_mass)
