"""Evaluation of a policy: whole episodes side by side, deterministic actions, nothing of the training touched."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from functional_sac import acting
from functional_sac.envs.env import Env, EnvState, averages, finite
from functional_sac.envs.host import HostEnv
from functional_sac.networks import Actor, Stats
from functional_sac.transition import Observation
from functional_sl import capture, tree

STREAM = 0x5EED  # of a seed, apart from every one that training draws from
LOOK_EVERY = 25  # steps between two looks whether any episode is still running


Act = Callable[[Tensor], Tensor]  # observations [E, O] -> actions [E, A]


class Result(NamedTuple):
    """One episode of each of E environments."""

    returns: Tensor  # [E] float32, unscaled
    lengths: Tensor  # [E] int64
    terminated: Tensor  # [E] bool, the others reached the time limit


class Regions:
    """Steps of evaluations: called, or captured on a GPU and kept for the next evaluation of the same size."""

    def __init__(self, graph: bool = False) -> None:
        """Takes whether steps are captured; environments on the host are not."""
        self._make = capture.Captured if graph else capture.Eager
        self._kept: dict[int, capture.Captured | capture.Eager] = {}

    def keep(self, episodes: int, fn: Callable[[Any], tuple[Any, Any]]) -> capture.Captured | capture.Eager:
        """Returns the steps of so many episodes; after the first call `fn` must be the same function of its state."""
        if episodes not in self._kept:
            self._kept[episodes] = self._make(fn)
        return self._kept[episodes]

    @classmethod
    def suited(cls, env: Env | HostEnv, device: torch.device, compiled: bool) -> Regions:
        """Returns captured steps on a GPU for policies whose training is compiled, else called ones."""
        return cls(device.type == "cuda" and compiled and isinstance(env, Env))

    @contextlib.contextmanager
    def once(self, fn: Callable[[Any], tuple[Any, Any]]) -> Iterator[capture.Captured | capture.Eager]:
        """Yields steps that are used here alone."""
        with contextlib.closing(self._make(fn)) as region:
            yield region

    def close(self) -> None:
        """Frees what was kept."""
        while self._kept:
            self._kept.popitem()[1].close()


class _Play(NamedTuple):
    """Episodes that are being played."""

    params: Actor
    stats: Stats
    state: EnvState
    observation: Observation
    running: Tensor  # [E] bool
    result: Result


def evaluate(
    env: Env | HostEnv,
    params: Actor,
    stats: Stats,
    key: Tensor,
    episodes: int,
    dtype: torch.dtype = torch.float32,
    regions: Regions | None = None,
) -> Result:
    """Plays `episodes` environments for one episode each with `tanh(mean)`.

    The episodes' starts depend on `key` alone, so two policies meet the same ones. An episode ends too with the first
    number that is not `finite`, and its return is not finite then.

    Args:
      env: an environment; of one on the host, simulations of their own are opened and closed.
      params: the policy.
      stats: its running statistics, which are read only.
      key: [2] int64.
      episodes: E.
      dtype: compute type of the matrix products.
      regions: of evaluations of this environment and this type alone; without, steps are called.
    """
    device, regions = key.device, regions or Regions()
    result = Result(
        returns=torch.zeros(episodes, device=device),
        lengths=torch.zeros(episodes, dtype=torch.int64, device=device),
        terminated=torch.zeros(episodes, dtype=torch.bool, device=device),
    )

    def advance(play: _Play) -> tuple[_Play, tuple[()]]:
        action = acting.deterministic(play.params, play.stats, play.observation.actor, dtype)
        state, step = env.step(play.state, action)
        broken = ~finite(step.final_observation, step.reward)
        unsound = broken & step.episode_return.isfinite()  # an infinite one says what it is
        ends, last = play.running & (step.terminated | step.truncated | broken), play.result
        result = Result(
            returns=torch.where(ends, torch.where(unsound, torch.nan, step.episode_return), last.returns),
            lengths=torch.where(ends, step.episode_length, last.lengths),
            terminated=torch.where(ends, step.terminated, last.terminated),
        )
        return play._replace(state=state, observation=step.observation, running=play.running & ~ends, result=result), ()

    with env.opened(key, episodes, episodes=1) as start:
        region = regions.keep(episodes, advance)
        running = torch.ones(episodes, dtype=torch.bool, device=device)
        # A capture works in the buffers of its first state, which are nobody else's.
        play = region.load(tree.clone(_Play(params, stats, *start, running, result)))
        for t in range(env.spec.max_episode_steps):
            # Looking at a device takes longer than a step of the host.
            if t % LOOK_EVERY == 0 and not play.running.any():
                break
            play, _ = region(play)
        return tree.clone(play.result)


def _steps(env: Env | HostEnv, policy: Act) -> Callable[[Any], tuple[Any, Tensor]]:
    """Returns one step of one environment: (state, observation) -> (the same after it, () bool: an episode ended)."""

    def advance(pair: tuple[EnvState, Observation]) -> tuple[tuple[EnvState, Observation], Tensor]:
        state, step = env.step(pair[0], policy(pair[1].actor))
        return (state, step.observation), step.terminated[0] | step.truncated[0]

    return advance


def measures(env: Env, policy: Act, key: Tensor, regions: Regions | None = None) -> list[dict[str, float]]:
    """Returns what an environment measures at each step of one episode, see `Env.metrics`.

    Args:
      env: an environment that measures.
      policy: observation [1, O] -> action [1, A].
      key: [2] int64; the episode is the one that `frames` shows.
      regions: see `evaluate`.
    """
    found: list[dict[str, float]] = []
    with env.opened(key, 1) as pair, (regions or Regions()).once(_steps(env, policy)) as region:
        pair = tree.clone(pair)
        now = _read(env, pair[0])
        for _ in range(env.spec.max_episode_steps):
            pair, ended = region(pair)
            before, now = now, _read(env, pair[0])
            found.append(averages(now, before))
            if ended:
                break
    return found


def _read(env: Env, state: EnvState) -> dict[str, float]:
    return {name: float(x) for name, x in env.metrics(state).items()}


def frames(
    env: Env | HostEnv,
    policy: Act,
    key: Tensor,
    *,
    every: int = 1,
    most: int | None = None,
    regions: Regions | None = None,
) -> list[np.ndarray]:
    """Returns the pictures, uint8 [H, W, 3], of an episode of one environment: one before each step.

    Args:
      env: an environment that can be drawn.
      policy: observation [1, O] -> action [1, A].
      key: [2] int64.
      every: takes the picture of every n-th step only, the first included.
      most: ends with so many pictures; without a number, with the episode.
      regions: see `evaluate`.

    Raises:
      ValueError: if the environment has no picture.
      RenderError: if one on the host cannot draw it here.
    """
    if env.render is None:
        raise ValueError(f"task {env.spec.task!r} cannot be drawn")
    pictures: list[np.ndarray] = []
    with env.opened(key, 1, drawn=True) as pair, (regions or Regions()).once(_steps(env, policy)) as region:
        pair = tree.clone(pair)
        for t in range(env.spec.max_episode_steps):
            if t % every == 0:
                pictures.append(env.render(pair[0], 0))
            pair, ended = region(pair)
            if ended or len(pictures) == most:
                break
    return pictures
