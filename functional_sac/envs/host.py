"""Environments that live on the host: the contract of `env.Env` with an effect in it.

A `HostEnv` has the fields of an `Env`, so evaluation and films are the same code. What differs: its state is a handle
of live simulations, which a step moves on for good; so its step cannot be mapped, compiled or captured, and a state
can be stepped once. An iteration therefore acts, steps on the host, and then stores and learns (see `hosted`).

Every episode starts from a seed of its own, drawn from the key `fold_in(key, i)` of environment i with the number of
the episode added to its last word, as in `env.autoreset`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from functional_sac.envs import transfer
from functional_sac.envs.env import EnvSpec, TimeStep, advance, check_init
from functional_sac.transition import Observation, symmetric
from functional_sl import keys


class HostState(NamedTuple):
    """A handle of N live environments."""

    key: Tensor  # [N, 2] int64: what each environment's next reset draws its seed from
    session: Tensor  # () int64: which simulations, in this process alone


class Steps(NamedTuple):
    """What one step of N simulations returns, as new arrays; see `TimeStep`."""

    observation: np.ndarray  # [N, O] float32
    final_observation: np.ndarray  # [N, O] float32
    reward: np.ndarray  # [N] float32
    terminated: np.ndarray  # [N] bool
    truncated: np.ndarray  # [N] bool, False where terminated
    episode_return: np.ndarray  # [N] float32
    episode_length: np.ndarray  # [N] int64
    present: np.ndarray  # [N] bool: False where the simulation took no step but only began an episode
    restarted: np.ndarray  # [N] bool: a new episode began from the given key


class Session(Protocol):
    """N simulations on the host."""

    def reset(self, key: np.ndarray) -> np.ndarray:
        """Begins an episode everywhere and returns observations [N, O] float32; `key` is [N, 2] int64."""

    def step(self, action: np.ndarray, key: np.ndarray) -> Steps:
        """Takes actions [N, A] float32 in [-1, 1]; an episode that begins takes its seed from its row of `key`.

        An environment whose numbers are not finite begins a new episode.
        """

    def render(self, i: int) -> np.ndarray:
        """Returns a picture of simulation i, uint8 [H, W, 3]."""

    def close(self) -> None:
        """Ends the simulations."""


class RenderError(RuntimeError):
    """A picture could not be drawn; training does not need it."""


class HostEnv:
    """A batched environment of live simulations.

    Attributes:
      spec: the task.
      render: `(state, i) -> uint8 [H, W, 3]` for a state that was opened with `drawn`, or None without pictures.
      idles: whether a simulation may spend a step on nothing but its reset.
      bounds: the commands [A] to which the actions -1 and 1 are mapped.
    """

    metrics = sketched = None  # see `Env`

    def __init__(
        self,
        spec: EnvSpec,
        open_session: Callable[..., Session],
        *,
        bounds: tuple[np.ndarray, np.ndarray],
        drawable: bool = False,
        idles: bool = False,
    ) -> None:
        """Opens nothing yet.

        Args:
          spec: the task.
          open_session: `(num_envs, episodes=, drawn=) -> session`.
          bounds: see the attribute.
          drawable: whether sessions draw pictures.
          idles: see the attribute.
        """
        self.spec, self.bounds, self.idles, self._open = spec, bounds, idles, open_session
        self.render = self._render if drawable else None
        self._sessions: dict[int, Session] = {}
        self._opened = 0

    def init(self, key: Tensor, num_envs: int) -> tuple[HostState, Observation]:
        """Opens `num_envs` simulations of their own, which live until `close`; see `Env.init`."""
        return self._begin(key, num_envs)

    @contextlib.contextmanager
    def opened(
        self, key: Tensor, num_envs: int, *, episodes: int | None = None, drawn: bool = False
    ) -> Iterator[tuple[HostState, Observation]]:
        """Yields what `init` returns, and ends the simulations afterwards.

        Args:
          key: [2] int64.
          num_envs: N.
          episodes: how many each simulation plays before it rests: then its steps take no time, its observation
            stays, its reward is 0 and its flags are False.
          drawn: whether pictures are wanted.

        Raises:
          RenderError: if they are, and cannot be had.
        """
        state, observation = self._begin(key, num_envs, episodes=episodes, drawn=drawn)
        try:
            yield state, observation
        finally:
            self._sessions.pop(int(state.session)).close()

    def step(self, state: HostState, action: Tensor) -> tuple[HostState, TimeStep]:
        """Moves the simulations on; see `Env.step`."""
        state, step, _ = self.advance(state, action)
        return state, step

    def advance(
        self, state: HostState, action: Tensor, meanwhile: Callable[[], None] = lambda: None
    ) -> tuple[HostState, TimeStep, Tensor]:
        """Moves the simulations on, also of several seeds: all may have leading axes.

        Args:
          state: of the simulations.
          action: [..., N, A].
          meanwhile: called once the action has left the device, before the host steps: a device goes on with what it
            launches.

        Returns:
          The state, the time step, and [..., N] bool: False where no step was taken but an episode only begun.
        """
        taken, key, numbers = transfer.fetch(action.float(), state.key, state.session)
        expected = (*key.shape[:-1], self.spec.action_dim)
        if taken.shape != expected:
            raise ValueError(
                f"{self.spec.task}: the action has shape {taken.shape}; these environments take {expected}"
            )
        meanwhile()
        rows = zip(self._of(numbers), _flat(taken, 2), _flat(key, 2), strict=True)
        found = [session.step(actions, seeds) for session, actions, seeds in rows]
        arrays = transfer.send(
            [_joined(column, numbers.shape) for column in zip(*found, strict=True)], state.key.device
        )
        *fields, present, restarted = arrays
        now, final, *rest = fields
        step = TimeStep(symmetric(now), symmetric(final), *rest)
        return state._replace(key=advance(state.key, restarted)), step, present

    def restart(self, state: HostState, key: Tensor) -> tuple[HostState, Observation]:
        """Begins new episodes in the simulations of `state` from keys [..., N, 2]."""
        seeds, numbers = transfer.fetch(key, state.session)
        found = [session.reset(rows) for session, rows in zip(self._of(numbers), _flat(seeds, 2), strict=True)]
        (observation,) = transfer.send([_joined(found, numbers.shape)], state.key.device)
        return state._replace(key=advance(key, 1)), symmetric(observation)

    def close(self) -> None:
        """Ends all simulations."""
        while self._sessions:
            self._sessions.popitem()[1].close()

    def _begin(self, key: Tensor, num_envs: int, **how: int | bool | None) -> tuple[HostState, Observation]:
        check_init(self.spec, key, num_envs)
        number, self._opened = self._opened, self._opened + 1
        self._sessions[number] = self._open(num_envs, **how)
        session = torch.tensor(number, device=key.device)
        return self.restart(HostState(key=key, session=session), keys.split(key, num_envs))

    def _of(self, numbers: np.ndarray) -> list[Session]:
        return [self._sessions[number] for number in numbers.reshape(-1).tolist()]

    def _render(self, state: HostState, i: int) -> np.ndarray:
        return self._sessions[int(state.session)].render(i)


def seed(key: np.ndarray) -> int:
    """Returns a seed below 2**31 from a key [2] int64."""
    return int(np.random.SeedSequence(key.tolist()).generate_state(1)[0] >> 1)


def _flat(values: np.ndarray, axes: int) -> np.ndarray:
    """Joins all but the last `axes` axes."""
    return values.reshape(-1, *values.shape[-axes:])


def _joined(values: Sequence[np.ndarray], lead: tuple[int, ...]) -> np.ndarray:
    """Returns the arrays, one a session, as one array with the leading axes of the sessions."""
    joined = values[0] if len(values) == 1 else np.stack(values)
    return joined.reshape(*lead, *values[0].shape)
