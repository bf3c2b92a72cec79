"""The contract of a batched environment, and `autoreset`, which builds one from a physics description.

An environment is two pure functions on batched tensors. They never write an argument, never branch on a value
and draw every random number from the keys in the state. So they run eagerly, under `torch.func.vmap` over a
leading axis of seeds, under `torch.compile(fullgraph=True)` and inside a CUDA graph, on the device of the key.
No leaf that they return shares memory with another or with an argument.

An episode that ends is followed by the next one within the same step. The step therefore returns two
observations: `final_observation` is the true successor, which targets bootstrap from, and `observation` is what
the policy acts on next.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from functional_sac.transition import Observation
from functional_sl import keys, tree, wire

Physics = Any  # a NamedTuple of tensors with a leading axis [N]
LARGEST = wire.limit(torch.float32)  # of an environment's numbers; statistics sum their squares too


@dataclasses.dataclass(frozen=True)
class EnvSpec:
    """The static facts of a task."""

    task: str
    actor_dim: int
    critic_dim: int  # 0 where the critic sees what the actor sees
    action_dim: int
    max_episode_steps: int
    control_dt: float  # seconds
    solved_return: float | None = None

    def __post_init__(self) -> None:
        least = {"actor_dim": 1, "critic_dim": 0, "action_dim": 1, "max_episode_steps": 1}
        for name, bound in least.items():
            if getattr(self, name) < bound:
                raise ValueError(f"{self.task}: {name} is {getattr(self, name)}; it must be at least {bound}")
        if not self.control_dt > 0:
            raise ValueError(f"{self.task}: control_dt is {self.control_dt} s; it must be positive")


class EnvState(NamedTuple):
    """The state of N environments."""

    key: Tensor  # [N, 2] int64: what each environment's next reset draws from
    physics: Physics  # leaves [N, ...]
    episode_return: Tensor  # [N] float32: sum of the rewards of the running episode
    episode_length: Tensor  # [N] int64: steps of the running episode


class TimeStep(NamedTuple):
    """What one step of N environments returns."""

    observation: Observation  # what the policy sees next: the new episode's first where one ended
    final_observation: Observation  # the true successor, which replay stores
    reward: Tensor  # [N] float32
    terminated: Tensor  # [N] bool
    truncated: Tensor  # [N] bool: the time limit; False where terminated
    episode_return: Tensor  # [N] float32, this step included: the whole episode's where it ended
    episode_length: Tensor  # [N] int64, this step included


class Env(NamedTuple):
    """A batched environment."""

    spec: EnvSpec
    # (key [2] int64, num_envs) -> (state, first observation)
    init: Callable[[Tensor, int], tuple[EnvState, Observation]]
    # (state, action [N, D]) -> (state, time step)
    step: Callable[[EnvState, Tensor], tuple[EnvState, TimeStep]]
    # (state, i) -> uint8 [H, W, 3], a picture of environment i; None where a task has none
    render: Callable[[EnvState, int], np.ndarray] | None = None
    # state -> 0-d float64 sums since `init` by name, `steps` and `episodes` among them; see `averages`
    metrics: Callable[[EnvState], dict[str, Tensor]] | None = None
    # () -> None, frees what the functions hold, such as a simulator; afterwards none of them may be called
    release: Callable[[], None] | None = None
    # () -> str, why the pictures drawn so far are only sketches; empty where they are not
    sketched: Callable[[], str] | None = None

    @contextlib.contextmanager
    def opened(
        self, key: Tensor, num_envs: int, *, episodes: int | None = None, drawn: bool = False
    ) -> Iterator[tuple[EnvState, Observation]]:
        """Yields what `init` returns; there is nothing to close, and pure environments never rest (see `HostEnv`)."""
        yield self.init(key, num_envs)

    def close(self) -> None:
        """Frees what the environment holds."""
        if self.release is not None:
            self.release()


class Task(NamedTuple):
    """Batched physics without episodes: all functions are pure and hold to the rules of the contract above."""

    spec: EnvSpec
    # keys [N, 2] int64 -> physics
    reset: Callable[[Tensor], Physics]
    # (physics, action [N, D] float32 in [-1, 1]) -> (physics, reward [N] float32, terminated [N] bool)
    step: Callable[[Physics, Tensor], tuple[Physics, Tensor, Tensor]]
    # physics -> observation
    observe: Callable[[Physics], Observation]
    # physics of one environment (leaves without [N], on the CPU) -> uint8 [H, W, 3]
    render: Callable[[Physics], np.ndarray] | None = None


def autoreset(task: Task) -> Env:
    """Adds episodes to a task: time limit, reset within the step, true successor, statistics, action bounds.

    Episode e of environment i starts from the key `fold_in(key, i)` with e added to its last word. So its start
    depends on the key, i and e alone: not on the actions, not on the number of environments.

    Actions are clamped to [-1, 1]. A step whose reward or successor is not finite, as after a NaN action, shows just
    that to all who look, and its environment begins the next episode at once; the other environments do not notice.
    """
    spec = task.spec

    def init(key: Tensor, num_envs: int) -> tuple[EnvState, Observation]:
        check_init(spec, key, num_envs)
        env_keys = keys.split(key, num_envs)
        physics = tree.clone(task.reset(env_keys))
        state = EnvState(
            key=advance(env_keys, 1),
            physics=physics,
            episode_return=key.new_zeros(num_envs, dtype=torch.float32),
            episode_length=key.new_zeros(num_envs),
        )
        return state, _checked_observation(spec, num_envs, tree.clone(task.observe(physics)))

    def step(state: EnvState, action: Tensor) -> tuple[EnvState, TimeStep]:
        check_action(spec, state, action)
        physics, reward, terminated = task.step(state.physics, action.float().clamp(-1.0, 1.0))
        _check_result(spec, state, reward, terminated)
        episode_return = state.episode_return + reward
        episode_length = state.episode_length + 1
        truncated = (episode_length >= spec.max_episode_steps) & ~terminated
        done = terminated | truncated
        final_observation = task.observe(physics)
        restart = done | ~finite(final_observation, reward)

        reset_physics = task.reset(state.key)
        next_state = EnvState(
            key=advance(state.key, restart),
            physics=tree.where_rows(restart, reset_physics, physics),
            episode_return=episode_return.masked_fill(restart, 0.0),
            episode_length=episode_length.masked_fill(restart, 0),
        )
        return next_state, TimeStep(
            observation=tree.where_rows(restart, task.observe(reset_physics), final_observation),
            final_observation=final_observation,
            reward=reward,
            terminated=terminated,
            truncated=truncated,
            episode_return=episode_return,
            episode_length=episode_length,
        )

    def render(state: EnvState, i: int) -> np.ndarray:
        return task.render(tree.map(lambda x: x[i].cpu(), state.physics))

    return Env(spec, init, step, render if task.render else None)


def advance(key: Tensor, episodes: Tensor | int) -> Tensor:
    """Adds a number of episodes, [..., N] or one for all, to the last word of keys [..., N, 2]."""
    # Threefry makes unrelated streams of neighbouring keys, so this needs no second hash a step.
    return torch.stack((key[..., 0], (key[..., 1] + episodes) & 0xFFFFFFFF), dim=-1)


def finite(observation: Observation, reward: Tensor) -> Tensor:
    """Tells for each of N environments whether all numbers of its observation and its reward are below `LARGEST`.

    Returns:
      [N] bool.
    """
    parts = [(x.abs() < LARGEST).all(-1) for x in observation if x.shape[-1]]
    return torch.stack([reward.abs() < LARGEST, *parts]).all(0)


def averages(now: Mapping[str, float], before: Mapping[str, float]) -> dict[str, float]:
    """Returns means of an environment's metrics between two readings of its sums (summed over ranks where there are).

    What lies under `episode/` is a mean over the finished episodes, and left out where none finished; all else is one
    over the steps of all environments.
    """
    counts = {name: now[name] - before.get(name, 0.0) for name in ("steps", "episodes")}
    found = {}
    for name in sorted(now.keys() - counts.keys()):
        count = counts["episodes" if name.startswith("episode/") else "steps"]
        if count > 0:
            found[name] = (now[name] - before.get(name, 0.0)) / count
    return found


def _checked_observation(spec: EnvSpec, num_envs: int, observation: Observation) -> Observation:
    for part, width in (("actor", spec.actor_dim), ("critic", spec.critic_dim)):
        _check_tensor(spec, f"observe(...).{part}", getattr(observation, part), (num_envs, width), torch.float32)
    return observation


def _check_result(spec: EnvSpec, state: EnvState, reward: Tensor, terminated: Tensor) -> None:
    shape = tuple(state.episode_return.shape)
    _check_tensor(spec, "the reward", reward, shape, torch.float32)
    _check_tensor(spec, "terminated", terminated, shape, torch.bool)


def _check_tensor(spec: EnvSpec, what: str, found: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    if tuple(found.shape) != shape or found.dtype != dtype:
        raise ValueError(
            f"{spec.task}: {what} is {found.dtype} {tuple(found.shape)}; the task's spec asks for {dtype} {shape}"
        )


def check_init(spec: EnvSpec, key: Tensor, num_envs: int) -> None:
    """Raises ValueError for anything but one key and a positive number of environments."""
    if key.shape != (2,) or key.dtype != torch.int64:
        raise ValueError(
            f"{spec.task}: init got a key of shape {tuple(key.shape)} and {key.dtype}; "
            "it takes one key, shape (2,) and torch.int64, as keys.key(seed) makes it"
        )
    if num_envs < 1:
        raise ValueError(f"{spec.task}: num_envs is {num_envs}; it must be at least 1")


def check_action(spec: EnvSpec, state: EnvState, action: Tensor) -> None:
    """Raises ValueError for actions of another shape than [N, D]."""
    expected = (state.episode_length.shape[0], spec.action_dim)
    if action.shape != expected:
        raise ValueError(
            f"{spec.task}: the action has shape {tuple(action.shape)}; "
            f"{expected[0]} environments with {expected[1]} actuators take {expected}"
        )
