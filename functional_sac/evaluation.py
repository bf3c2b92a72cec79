"""Evaluation of a policy: whole episodes side by side, deterministic actions, nothing of the training touched."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from functional_sac import acting
from functional_sac.envs.env import Env
from functional_sac.networks import Actor, Stats


class Result(NamedTuple):
    """One episode of each of E environments."""

    returns: Tensor  # [E] float32, unscaled
    lengths: Tensor  # [E] int64
    terminated: Tensor  # [E] bool, the others reached the time limit


def evaluate(
    env: Env, params: Actor, stats: Stats, key: Tensor, episodes: int, dtype: torch.dtype = torch.float32
) -> Result:
    """Plays `episodes` environments for one episode each with `tanh(mean)`.

    The episodes' starts depend on `key` alone, so two policies meet the same ones.

    Args:
      env: a pure environment.
      params: the policy.
      stats: its running statistics, which are read only.
      key: [2] int64.
      episodes: E.
      dtype: compute type of the matrix products.
    """
    state, observation = env.init(key, episodes)
    device = key.device
    result = Result(
        returns=torch.zeros(episodes, device=device),
        lengths=torch.zeros(episodes, dtype=torch.int64, device=device),
        terminated=torch.zeros(episodes, dtype=torch.bool, device=device),
    )
    running = torch.ones(episodes, dtype=torch.bool, device=device)
    for _ in range(env.spec.max_episode_steps):
        action = acting.deterministic(params, stats, observation.actor, dtype)
        state, step = env.step(state, action)
        observation = step.observation
        ends = running & (step.terminated | step.truncated)
        result = Result(
            returns=torch.where(ends, step.episode_return, result.returns),
            lengths=torch.where(ends, step.episode_length, result.lengths),
            terminated=torch.where(ends, step.terminated, result.terminated),
        )
        running = running & ~ends
    return result


def frames(env: Env, policy: Callable[[Tensor], Tensor], key: Tensor, *, episodes: int = 1) -> list[np.ndarray]:
    """Returns the pictures, uint8 [H, W, 3], of whole episodes of one environment: one before each step.

    Args:
      env: an environment that can be drawn.
      policy: observation [1, O] -> action [1, A].
      key: [2] int64.
      episodes: how many.

    Raises:
      ValueError: if the environment has no picture.
    """
    if env.render is None:
        raise ValueError(f"task {env.spec.task!r} cannot be drawn")
    pictures: list[np.ndarray] = []
    state, observation = env.init(key, 1)
    while episodes:
        pictures.append(env.render(state, 0))
        state, step = env.step(state, policy(observation.actor))
        observation = step.observation
        episodes -= int(step.terminated[0] | step.truncated[0])
    return pictures
