"""Exploration noise that is held for a random number of steps (FlashSAC, arXiv 2604.04539).

The number of repeats follows a truncated zeta law, `p(k) ~ k**-mu` for `k = 1..max_repeat`.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from functional_sl import keys


class NoiseState(NamedTuple):
    """The noise in force.

    Attributes:
      noise: [N, A] float32.
      count: () or [N] int64, steps for which it was used.
      length: () or [N] int64, steps for which it is to be used.
    """

    noise: Tensor
    count: Tensor
    length: Tensor


def zeta_cdf(mu: float, max_repeat: int, device: torch.device | str | None = None) -> Tensor:
    """Returns the cumulative truncated zeta law [max_repeat] float32."""
    mass = torch.arange(1, max_repeat + 1, device=device, dtype=torch.float32) ** -mu
    return torch.cumsum(mass / mass.sum(), 0)


def init(
    num_envs: int, action_dim: int, *, shared: bool = True, device: torch.device | str | None = None
) -> NoiseState:
    """Returns a state whose first step draws.

    Args:
      num_envs: N.
      action_dim: A.
      shared: one repeat counter for all environments (official) instead of one each (UniLab).
      device: where the state lives.
    """
    shape = () if shared else (num_envs,)
    return NoiseState(
        noise=torch.zeros(num_envs, action_dim, device=device),
        count=torch.zeros(shape, dtype=torch.int64, device=device),
        length=torch.ones(shape, dtype=torch.int64, device=device),
    )


def repeats(u: Tensor, cdf: Tensor) -> Tensor:
    """Returns the number of repeats, `1 + min {i : u < cdf[i]}`, for uniform `u` in [0, 1); int64 of u's shape."""
    return ((u.unsqueeze(-1) >= cdf[:-1]).sum(-1) + 1).to(torch.int64)


def redraw(state: NoiseState, candidate: Tensor, u: Tensor, cdf: Tensor, restart: Tensor | None = None) -> NoiseState:
    """Takes up the candidate where the noise in force is used up, and counts the step.

    Args:
      state: before the step.
      candidate: [N, A] standard normal.
      u: uniform in [0, 1), of the counters' shape.
      cdf: [max_repeat], see `zeta_cdf`.
      restart: [N] bool, environments whose episode ended before this step (per-environment counters only).

    Returns:
      The state whose `noise` acts in this step.
    """
    fresh = (state.count == 0) | (state.count >= state.length)
    if restart is not None:
        fresh = fresh | restart
    return NoiseState(
        noise=torch.where(fresh.unsqueeze(-1), candidate, state.noise),
        count=torch.where(fresh, 1, state.count + 1),
        length=torch.where(fresh, repeats(u, cdf), state.length),
    )


def update(
    state: NoiseState, candidate_key: Tensor, length_key: Tensor, cdf: Tensor, restart: Tensor | None = None
) -> NoiseState:
    """Returns the state whose `noise` acts in this step, see `redraw`, with what it draws by two keys.

    Args:
      state: before the step.
      candidate_key: [2], of the candidate.
      length_key: [2], of its number of repeats.
      cdf: as in `redraw`.
      restart: as in `redraw`.
    """
    candidate = keys.normal(candidate_key, tuple(state.noise.shape))
    return redraw(state, candidate, keys.uniform(length_key, tuple(state.count.shape)), cdf, restart)
