"""What the policy does: explore, act deterministically, or move at random."""

from __future__ import annotations

import torch
from torch import Tensor

from functional_sac import networks
from functional_sac.networks import Actor, Stats
from functional_sl import keys


def explore(
    params: Actor, stats: Stats, observation: Tensor, noise: Tensor, dtype: torch.dtype = torch.float32
) -> Tensor:
    """Returns `tanh(mean + std * noise)`, [N, A] in [-1, 1], by running statistics.

    Args:
      params: the policy.
      stats: its statistics.
      observation: [N, O] float32.
      noise: [N, A] standard normal.
      dtype: compute type of the matrix products.
    """
    (mean, log_std), _ = networks.actor(params, stats, observation, training=False, dtype=dtype)
    return torch.tanh(mean + torch.exp(log_std) * noise)


def deterministic(params: Actor, stats: Stats, observation: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Returns `tanh(mean)`, [N, A] in [-1, 1], by running statistics."""
    (mean, _), _ = networks.actor(params, stats, observation, training=False, dtype=dtype)
    return torch.tanh(mean)


def uniform(key: Tensor, num_envs: int, action_dim: int) -> Tensor:
    """Returns actions [N, A] uniform in [-1, 1)."""
    return keys.uniform(key, (num_envs, action_dim), -1.0, 1.0)
