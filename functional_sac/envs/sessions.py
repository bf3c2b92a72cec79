"""Gymnasium environments as sessions: single ones, stepped one after the other here, and vector environments.

Threads and processes were measured and are not faster on two cores: a step of MuJoCo takes less time than handing it
over, and its Python part holds the interpreter.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import gymnasium
import numpy as np
from PIL import Image

from functional_sac.envs.env import LARGEST
from functional_sac.envs.host import RenderError, Steps, seed
from functional_sac.envs.spaces import Actions, Observations

NEXT_STEP, SAME_STEP, DISABLED = MODES = ("NextStep", "SameStep", "Disabled")
PICTURE = 256  # pixels, the longer side at most


class Singles:
    """N single environments. An episode that ends is followed by the next within the same step."""

    def __init__(
        self,
        make: Callable[[], gymnasium.Env],
        num_envs: int,
        observations: Observations,
        actions: Actions,
        episodes: int | None = None,
    ) -> None:
        """Makes the environments; each rests after so many episodes, if given."""
        self._envs = [make() for _ in range(num_envs)]
        self._observations, self._actions = observations, actions
        self._tally = _Tally(num_envs)
        self._left = np.full(num_envs, np.inf if episodes is None else episodes)
        self._now = np.zeros((num_envs, observations.width), np.float32)

    def reset(self, key: np.ndarray) -> np.ndarray:
        """See `Session`."""
        self._tally.clear(np.ones(len(self._envs), bool))
        for i in range(len(self._envs)):
            self._reset(i, key[i])
        return self._now.copy()

    def step(self, action: np.ndarray, key: np.ndarray) -> Steps:
        """See `Session`."""
        commands, number = self._actions.decode(action), len(self._envs)
        awake = self._left > 0
        reward = np.zeros(number)
        terminated, truncated = np.zeros((2, number), bool)
        for i in np.flatnonzero(awake):
            value, reward[i], terminated[i], truncated[i] = _stepped(self._envs[i].step(commands[i]))
            self._observations.encode(value, self._now[i])
        final = self._now.copy()
        ended = terminated | truncated
        restarted = awake & (ended | ~_finite(final, reward))
        totals = self._tally.add(reward, awake)
        self._tally.clear(restarted)
        self._left -= restarted
        for i in np.flatnonzero(restarted & (self._left > 0)):
            self._reset(i, key[i])
        flags = (terminated, truncated & ~terminated)
        return Steps(
            self._now.copy(), final, _float32(reward), *flags, *totals, np.ones(number, bool), restarted=restarted
        )

    def render(self, i: int) -> np.ndarray:
        """See `Session`."""
        return picture(self._envs[i])

    def close(self) -> None:
        """See `Session`."""
        for env in self._envs:
            env.close()

    def _reset(self, i: int, key: np.ndarray) -> None:
        self._observations.encode(self._envs[i].reset(seed=seed(key))[0], self._now[i])


class Vector:
    """A vector environment, in any of gymnasium's three modes of autoreset.

    In the modes `SameStep` and `NextStep` it begins episodes itself: only its first ones have a seed from a key. In
    `NextStep` that takes a step in which nothing happens; such a step is not `present`. Numbers that are not finite
    end an episode where the mode is `Disabled` or the environment is one of gymnasium's own, which take a reset mask.
    """

    def __init__(self, env: gymnasium.vector.VectorEnv, observations: Observations, actions: Actions) -> None:
        """Takes over an environment whose metadata names its mode."""
        self._env, self._mode = env, mode(env)
        self._observations, self._actions = observations, actions
        self._tally = _Tally(env.num_envs)
        self._over = np.zeros(env.num_envs, bool)  # in NextStep: the next step only resets
        own = (gymnasium.vector.SyncVectorEnv, gymnasium.vector.AsyncVectorEnv)
        self._masked = self._mode == DISABLED or isinstance(env.unwrapped, own)

    def reset(self, key: np.ndarray) -> np.ndarray:
        """See `Session`."""
        self._tally.clear(np.ones(self._env.num_envs, bool))
        self._over[:] = False
        return self._encoded(self._env.reset(seed=[seed(row) for row in key])[0])

    def step(self, action: np.ndarray, key: np.ndarray) -> Steps:
        """See `Session`."""
        value, reward, terminated, truncated, info = self._env.step(self._actions.decode(action))
        present = ~self._over
        reward = np.where(present, np.asarray(reward, np.float64), 0.0)
        terminated, truncated = (np.asarray(x, bool) & present for x in (terminated, truncated))
        ended, now = terminated | truncated, self._encoded(value)
        final = self._final(now, ended, info) if self._mode == SAME_STEP else now.copy()
        totals = self._tally.add(reward, present)
        broken = present & ~_finite(final, reward)
        self._tally.clear(ended | broken)
        if self._mode == NEXT_STEP:
            self._over = ended
        asked = (ended | broken) if self._mode == DISABLED else (broken & ~ended)
        if asked.any() and self._masked:
            seeds = [seed(row) for row in key]
            fresh, _ = self._env.reset(seed=seeds, options={"reset_mask": asked.copy()})
            now = np.where(asked[:, None], self._encoded(fresh), now)
        flags = (terminated, truncated & ~terminated)
        return Steps(now, final, _float32(reward), *flags, *totals, present, restarted=ended | broken)

    def render(self, i: int) -> np.ndarray:
        """Raises RenderError: vector environments are not drawn."""
        raise RenderError("a vector environment is not drawn")

    def close(self) -> None:
        """See `Session`."""
        self._env.close()

    def _encoded(self, value: Any) -> np.ndarray:
        rows = np.empty((self._env.num_envs, self._observations.width), np.float32)
        self._observations.encode(value, rows)
        return rows

    def _final(self, now: np.ndarray, ended: np.ndarray, info: dict[str, Any]) -> np.ndarray:
        final = now.copy()
        if ended.any() and "final_obs" not in info:
            raise ValueError("an episode ended in mode SameStep, but the step's info has no 'final_obs'")
        for i in np.flatnonzero(ended):
            self._observations.encode(_row(info["final_obs"], i), final[i])
        return final


def mode(env: gymnasium.vector.VectorEnv) -> str:
    """Returns the mode of autoreset that a vector environment declares, one of `MODES`.

    Raises:
      ValueError: if it names none, or another.
    """
    named = env.metadata.get("autoreset_mode")
    found = getattr(named, "value", named)
    if found not in MODES:
        raise ValueError(
            f"{type(env).__name__}: metadata['autoreset_mode'] is {named!r}, so the steps after an episode's end mean "
            "nothing certain; set it to one of gymnasium.vector.AutoresetMode"
        )
    return found


def picture(env: gymnasium.Env) -> np.ndarray:
    """Returns what an environment draws, uint8 [H, W, 3], reduced to `PICTURE` pixels.

    Raises:
      RenderError: if it draws none.
    """
    try:
        image = env.render()
    except Exception as error:  # whatever a graphics library raises
        raise RenderError(f"{type(error).__name__}: {' '.join(str(error).split())}") from error
    if not isinstance(image, np.ndarray) or image.ndim != 3 or image.shape[-1] != 3:
        raise RenderError(f"render() returned {type(image).__name__}, not an image [H, W, 3]")
    factor = -(-max(image.shape[:2]) // PICTURE)
    return np.asarray(Image.fromarray(image.astype(np.uint8, copy=False)).reduce(factor))


class _Tally:
    """Return and length of the running episodes."""

    def __init__(self, num_envs: int) -> None:
        self._returns, self._lengths = np.zeros(num_envs), np.zeros(num_envs, np.int64)

    def add(self, reward: np.ndarray, present: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Takes in a step and returns both, the step included."""
        self._returns += reward
        self._lengths += present
        return _float32(self._returns), self._lengths.copy()

    def clear(self, where: np.ndarray) -> None:
        """Begins new episodes."""
        self._returns[where], self._lengths[where] = 0.0, 0


def _stepped(found: Any) -> tuple[Any, float, bool, bool]:
    """Returns observation, reward and both ends of what a single environment's step returned."""
    if not isinstance(found, tuple) or len(found) != 5:
        what = f"{len(found)} values" if isinstance(found, tuple) else f"a {type(found).__name__}"
        raise ValueError(f"step() returned {what}; gymnasium's has 5: observation, reward, terminated, truncated, info")
    value, reward, terminated, truncated, _ = found
    number = np.asarray(reward)
    if number.size != 1 or number.dtype.kind not in "biuf":
        raise ValueError(f"step() returned the reward {reward!r:.100}; it must be one real number")
    return value, float(number.reshape(())), bool(terminated), bool(truncated)


def _finite(observation: np.ndarray, reward: np.ndarray) -> np.ndarray:
    return (np.abs(observation) < LARGEST).all(-1) & (np.abs(_float32(reward)) < LARGEST)


def _float32(values: np.ndarray) -> np.ndarray:
    with np.errstate(over="ignore", invalid="ignore"):
        return values.astype(np.float32)


def _row(value: Any, i: int) -> Any:
    return {name: _row(part, i) for name, part in value.items()} if isinstance(value, dict) else value[i]
