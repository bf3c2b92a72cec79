"""Evaluation of a policy: whole episodes side by side, deterministic actions, nothing of the training touched."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from functional_sac import acting
from functional_sac.envs.env import Env, EnvState, averages, finite
from functional_sac.envs.host import HostEnv
from functional_sac.networks import Actor, Stats

LOOK_EVERY = 25  # steps between two looks whether any episode is still running


class Result(NamedTuple):
    """One episode of each of E environments."""

    returns: Tensor  # [E] float32, unscaled
    lengths: Tensor  # [E] int64
    terminated: Tensor  # [E] bool, the others reached the time limit


def evaluate(
    env: Env | HostEnv, params: Actor, stats: Stats, key: Tensor, episodes: int, dtype: torch.dtype = torch.float32
) -> Result:
    """Plays `episodes` environments for one episode each with `tanh(mean)`.

    The episodes' starts depend on `key` alone, so two policies meet the same ones. An episode ends too with the first
    number that is not finite, and its return is not finite then.

    Args:
      env: an environment; of one on the host, simulations of their own are opened and closed.
      params: the policy.
      stats: its running statistics, which are read only.
      key: [2] int64.
      episodes: E.
      dtype: compute type of the matrix products.
    """
    device = key.device
    result = Result(
        returns=torch.zeros(episodes, device=device),
        lengths=torch.zeros(episodes, dtype=torch.int64, device=device),
        terminated=torch.zeros(episodes, dtype=torch.bool, device=device),
    )
    running = torch.ones(episodes, dtype=torch.bool, device=device)
    with env.opened(key, episodes, episodes=1) as (state, observation):
        for t in range(env.spec.max_episode_steps):
            # Looking at a device takes longer than a step of the host.
            if t % LOOK_EVERY == 0 and not running.any():
                break
            state, step = env.step(state, acting.deterministic(params, stats, observation.actor, dtype))
            observation = step.observation
            seen = finite(step.final_observation, torch.zeros_like(step.reward))
            broken = ~(seen & step.reward.isfinite())
            ends = running & (step.terminated | step.truncated | broken)
            result = Result(
                returns=torch.where(ends, torch.where(seen, step.episode_return, torch.nan), result.returns),
                lengths=torch.where(ends, step.episode_length, result.lengths),
                terminated=torch.where(ends, step.terminated, result.terminated),
            )
            running = running & ~ends
    return result


def measures(env: Env, policy: Callable[[Tensor], Tensor], key: Tensor) -> list[dict[str, float]]:
    """Returns what an environment measures at each step of one episode, see `Env.metrics`.

    Args:
      env: an environment that measures.
      policy: observation [1, O] -> action [1, A].
      key: [2] int64; the episode is the one that `frames` shows.
    """
    found: list[dict[str, float]] = []
    with env.opened(key, 1) as (state, observation):
        now = _read(env, state)
        for _ in range(env.spec.max_episode_steps):
            state, step = env.step(state, policy(observation.actor))
            before, now, observation = now, _read(env, state), step.observation
            found.append(averages(now, before))
            if step.terminated[0] | step.truncated[0]:
                break
    return found


def _read(env: Env, state: EnvState) -> dict[str, float]:
    return {name: float(x) for name, x in env.metrics(state).items()}


def frames(
    env: Env | HostEnv,
    policy: Callable[[Tensor], Tensor],
    key: Tensor,
    *,
    episodes: int = 1,
    every: int = 1,
    most: int | None = None,
) -> list[np.ndarray]:
    """Returns the pictures, uint8 [H, W, 3], of whole episodes of one environment: one before each step.

    Args:
      env: an environment that can be drawn.
      policy: observation [1, O] -> action [1, A].
      key: [2] int64.
      episodes: how many; each takes at most the task's `max_episode_steps` steps.
      every: takes the picture of every n-th step only, the first included.
      most: ends with so many pictures; without a number, with the last episode.

    Raises:
      ValueError: if the environment has no picture.
      RenderError: if one on the host cannot draw it here.
    """
    if env.render is None:
        raise ValueError(f"task {env.spec.task!r} cannot be drawn")
    pictures: list[np.ndarray] = []
    with env.opened(key, 1, drawn=True) as (state, observation):
        for t in range(episodes * env.spec.max_episode_steps):
            if t % every == 0:
                pictures.append(env.render(state, 0))
            state, step = env.step(state, policy(observation.actor))
            observation = step.observation
            episodes -= int(step.terminated[0] | step.truncated[0])
            if not episodes or len(pictures) == most:
                break
    return pictures
