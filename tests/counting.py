"""An environment whose every transition can be checked by arithmetic."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from functional_sac.envs.env import Env, EnvSpec, Task, autoreset
from functional_sac.transition import Observation, symmetric
from functional_sl import keys


class Count(NamedTuple):
    start: Tensor  # [N] float32, a random multiple of 100
    t: Tensor  # [N] float32, steps of the episode


def count(limit: int, *, ends_at: int | None = None, critic_dim: int = 0, weight: float = 0.0) -> Env:
    """Builds it: the observation is (start + t, start), the reward t + 1 plus `weight` times the action.

    Args:
      limit: the time limit truncates after that many steps.
      ends_at: the task terminates after that many steps.
      critic_dim: 0, or the width of a critic's observation that holds start + t throughout.
      weight: of the action in the reward.
    """

    def reset(key: Tensor) -> Count:
        return Count(start=100.0 * keys.randint(key, (), 0, 1000), t=torch.zeros(key.shape[0]))

    def step(physics: Count, action: Tensor) -> tuple[Count, Tensor, Tensor]:
        t = physics.t + 1
        ended = torch.zeros_like(t, dtype=torch.bool) if ends_at is None else t >= ends_at
        return physics._replace(t=t), t + weight * action[:, 0], ended

    def observe(physics: Count) -> Observation:
        now = physics.start + physics.t
        both = symmetric(torch.stack([now, physics.start], -1))
        return both._replace(critic=now.unsqueeze(-1).repeat(1, critic_dim)) if critic_dim else both

    spec = EnvSpec("count", actor_dim=2, critic_dim=critic_dim, action_dim=1, max_episode_steps=limit, control_dt=0.1)
    return autoreset(Task(spec, reset, step, observe))
