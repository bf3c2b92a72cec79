"""Gymnasium environments whose every transition can be checked by arithmetic, registered as `gym_probes:Name-v0`."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv, VectorEnv


class Count(gymnasium.Env):
    """Observation [start + 100 episode + t], reward t + 1 or `reward`, T steps.

    Attributes:
      starts: the seeds of its episodes.
    """

    observation_space = spaces.Box(-np.inf, np.inf, (1,), np.float32)
    action_space = spaces.Box(-1.0, 1.0, (1,), np.float32)
    metadata = {"render_modes": ["rgb_array"], "render_fps": 20}

    def __init__(
        self,
        T: int = 4,
        start: float = 0.0,
        ends_by: str = "truncated",
        reward: float | None = None,
        random_start: bool = False,
        render_mode: str | None = None,
    ) -> None:
        """`ends_by`: `truncated`, `terminated`, `both`, or `never`; `random_start` draws the start from the seed."""
        self.T, self.first, self.ends_by, self.constant = T, start, ends_by, reward
        self.random_start, self.render_mode = random_start, render_mode
        self.episode, self.seeds = -1, []

    def observe(self) -> np.ndarray:
        """Returns a new array."""
        return np.array([self.first + 100 * self.episode + self.t], np.float32)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Begins the next episode."""
        super().reset(seed=seed)
        self.seeds.append(seed)
        self.episode, self.t = self.episode + 1, 0
        if self.random_start:
            self.first = float(self.np_random.integers(1, 10_000) * 1000)
        return self.observe(), {}

    def step(self, action: np.ndarray) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """Counts."""
        self.t += 1
        over = self.t >= self.T and self.ends_by != "never"
        terminated, truncated = (over and self.ends_by in (way, "both") for way in ("terminated", "truncated"))
        return self.observe(), self.t if self.constant is None else self.constant, terminated, truncated, {}

    def render(self) -> np.ndarray:
        """Draws a picture as bright as its step."""
        return np.full((40, 30, 3), 10 + self.t, np.uint8)


class Reuse(Count):
    """`Count` that returns one and the same array, overwrites it in `reset`, and overwrites the action."""

    def __init__(self, **kwargs: Any) -> None:
        """Allocates the array."""
        super().__init__(**kwargs)
        self.array = np.zeros(1, np.float32)

    def observe(self) -> np.ndarray:
        """Overwrites the array."""
        self.array[:] = super().observe()
        return self.array

    def step(self, action: np.ndarray) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """Counts and destroys what it was given."""
        action[:] = np.nan
        return super().step(action)


class Box2(Count):
    """Action Box([0, -3], [10, 1]); the observation and the reward hold what was received."""

    action_space = spaces.Box(np.array([0.0, -3.0], np.float32), np.array([10.0, 1.0], np.float32))
    observation_space = spaces.Box(-np.inf, np.inf, (2,), np.float32)
    last = np.zeros(2, np.float32)

    def observe(self) -> np.ndarray:
        """Returns the last action."""
        return self.last.copy()

    def step(self, action: np.ndarray) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """Takes note of the action."""
        assert action.dtype == np.float32
        assert self.action_space.contains(action)
        self.last = action.copy()
        _, _, terminated, truncated, info = super().step(action)
        return self.observe(), float(action[0]), terminated, truncated, info


class Bad(Count):
    """`Count` that is not finite at step k of its episodes of even number, which would go on to T."""

    def __init__(self, k: int = 2, where: str = "observation", value: float = np.nan, **kwargs: Any) -> None:
        """`where`: `observation` or `reward`; `k=0` for an environment that is never bad."""
        super().__init__(**kwargs)
        self.k, self.where, self.value = k, where, value

    def step(self, action: np.ndarray) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """Counts and fails."""
        observation, reward, *flags = super().step(action)
        if self.t == self.k and self.episode % 2 == 0:
            if self.where == "observation":
                observation[:] = self.value
            else:
                reward = self.value
        return observation, reward, *flags


DTYPES = {
    "float64": (spaces.Box(-np.inf, np.inf, (1,), np.float64), 1e6, 1.0),
    "int64": (spaces.Box(-(2**40), 2**40, (1,), np.int64), 1000, 1),
    "uint8": (spaces.Box(0, 255, (1,), np.uint8), 100, 1),
    "bool": (spaces.MultiBinary(1), 1, 0),
}


class F64(Count):
    """Observations of another type near 1e6 (or 1000, or 100): number + step; the reward is a numpy float64."""

    def __init__(self, dtype: str = "float64", **kwargs: Any) -> None:
        """`dtype`: a key of `DTYPES`."""
        super().__init__(**kwargs)
        self.observation_space, self.base, self.by = DTYPES[dtype]

    def observe(self) -> np.ndarray:
        """Returns an array of the space's type."""
        return np.array([self.base + self.by * self.t], self.observation_space.dtype)

    def step(self, action: np.ndarray) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        """Counts."""
        observation, reward, *rest = super().step(action)
        return observation, np.float64(reward), *rest


class Spaces(Count):
    """`Count` with the spaces that it is given; only for what is refused, or flattened."""

    def __init__(self, observation: spaces.Space | None = None, action: spaces.Space | None = None) -> None:
        """Takes either."""
        super().__init__()
        self.observation_space = observation or self.observation_space
        self.action_space = action or self.action_space


class Both(Count):
    """A Dict observation: b is the count, a/y its double [2, 1], a/x True; sorted: a/x, a/y, b."""

    observation_space = spaces.Dict(
        {
            "b": spaces.Box(-np.inf, np.inf, (1,), np.float64),
            "a": spaces.Dict({"y": spaces.Box(-np.inf, np.inf, (2, 1), np.float32), "x": spaces.MultiBinary(1)}),
        }
    )

    def observe(self) -> dict[str, Any]:
        """Returns it."""
        now = super().observe()
        return {"b": now.astype(np.float64), "a": {"y": np.full((2, 1), 2 * now[0]), "x": np.ones(1, np.int8)}}


for _kind in (Count, Reuse, Box2, Bad, F64, Both):
    gymnasium.register(id=f"{_kind.__name__}-v0", entry_point=_kind)
gymnasium.register(id="Never-v0", entry_point=functools.partial(Count, ends_by="never"))
gymnasium.register(id="RandomStart-v0", entry_point=functools.partial(Count, random_start=True))


def vector(mode: AutoresetMode, makers: list[Callable[[], gymnasium.Env]], num_envs: int) -> SyncVectorEnv:
    """Returns the makers' environments, in turn, side by side."""
    return SyncVectorEnv([makers[i % len(makers)] for i in range(num_envs)], autoreset_mode=mode)


COUNTS = [functools.partial(Count, T=length, start=10_000.0 * length) for length in (3, 5, 7)]
THREES = [functools.partial(Count, T=3, reward=1.0)]


def counts_next_step(num_envs: int) -> VectorEnv:
    """Episodes of 3, 5 and 7 in turn."""
    return vector(AutoresetMode.NEXT_STEP, COUNTS, num_envs)


def counts_same_step(num_envs: int) -> VectorEnv:
    """Episodes of 3, 5 and 7 in turn."""
    return vector(AutoresetMode.SAME_STEP, COUNTS, num_envs)


def counts_disabled(num_envs: int) -> VectorEnv:
    """Episodes of 3, 5 and 7 in turn."""
    return vector(AutoresetMode.DISABLED, COUNTS, num_envs)


def counts_unnamed(num_envs: int) -> VectorEnv:
    """A vector environment that does not tell its mode."""
    env = counts_same_step(num_envs)
    del env.metadata["autoreset_mode"]
    return env


def threes_next_step(num_envs: int) -> VectorEnv:
    """Episodes of 3 with reward 1."""
    return vector(AutoresetMode.NEXT_STEP, THREES, num_envs)


def threes_same_step(num_envs: int) -> VectorEnv:
    """Episodes of 3 with reward 1."""
    return vector(AutoresetMode.SAME_STEP, THREES, num_envs)


def threes_disabled(num_envs: int) -> VectorEnv:
    """Episodes of 3 with reward 1."""
    return vector(AutoresetMode.DISABLED, THREES, num_envs)


def bads(mode: AutoresetMode, num_envs: int) -> VectorEnv:
    """Environment 0 fails at step 2 of every other episode of 5; the others never do."""
    makers = [functools.partial(Bad, k=2 if i == 0 else 0, T=5, start=1000.0 * i) for i in range(num_envs)]
    return vector(mode, makers, num_envs)


def in_turn(*makers: Callable[[], gymnasium.Env]) -> Callable[[], gymnasium.Env]:
    """Returns a function that makes them in turn; its first call, by which a task's spaces are looked at, is extra.

    A test puts it where a task's name finds it: `monkeypatch.setattr(gym_probes, "task", in_turn(...))`, then
    `--task=gym_probes:task --sim=gym`.
    """
    turns = itertools.count(-1)
    return lambda: makers[next(turns) % len(makers)]()


TWO_LENGTHS = [functools.partial(Count, T=length, reward=1.0) for length in (5, 50)]


def task() -> gymnasium.Env:
    """Stands where `in_turn` puts another."""
    return Count()
