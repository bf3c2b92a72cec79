"""The n-step replay buffer as a pytree: one ring of packed rows on the learner's device.

A row is a complete transition with its own successor, so nothing special happens at the ring's seam or at an
episode's end. `insert` is the one exception to purity: it writes the rows in place and consumes its argument,
because copying a million rows costs more than an update.
"""

from __future__ import annotations

from typing import NamedTuple

import chex
import torch
from torch import Tensor

from functional_sac.envs.env import EnvSpec
from functional_sac.transition import Observation, Transition
from functional_sl import keys

REWARD, TERMINATED, TRUNCATED = -3, -2, -1  # columns of a packed row


class ReplayState(NamedTuple):
    """A ring of rows and the window of the last steps.

    Attributes:
      rows: [capacity, width] float32, donated to `insert`.
      window: [n, N, width] float32, the last n one-step rows of every environment, oldest first.
      steps: () int64, vector steps seen.
      cursor: () int64, where the next row goes.
      size: () int64, rows that hold a transition.
    """

    rows: Tensor
    window: Tensor
    steps: Tensor
    cursor: Tensor
    size: Tensor


class Fields(NamedTuple):
    """The columns of a packed row: actor, critic, action, next actor, next critic, then reward and two flags."""

    actor: int
    critic: int
    action: int

    @property
    def widths(self) -> tuple[int, ...]:
        """The number of columns of each part, in the order of a row."""
        return (self.actor, self.critic, self.action, self.actor, self.critic, 1, 1, 1)


def fields(spec: EnvSpec) -> Fields:
    """Returns the columns that an environment's transitions need."""
    return Fields(spec.actor_dim, spec.critic_dim, spec.action_dim)


def init(
    columns: Fields, capacity: int, num_envs: int, n_step: int = 1, device: torch.device | str | None = None
) -> ReplayState:
    """Returns an empty buffer.

    Raises:
      ValueError: if the capacity cannot hold one row an environment.
    """
    if capacity < num_envs:
        raise ValueError(f"replay_capacity={capacity} is below num_envs={num_envs}; one vector step must fit")
    width = sum(columns.widths)
    zeros = [torch.zeros((), dtype=torch.int64, device=device) for _ in range(3)]
    return ReplayState(
        torch.zeros(capacity, width, device=device), torch.zeros(n_step, num_envs, width, device=device), *zeros
    )


def pack(transition: Transition) -> Tensor:
    """Returns transitions [..., fields] as rows [..., width] float32."""
    scalars = torch.stack([x.to(torch.float32) for x in _scalars(transition)], -1)
    return torch.cat([*transition.observation, transition.action, *transition.next_observation, scalars], -1)


def _scalars(transition: Transition) -> tuple[Tensor, Tensor, Tensor]:
    return transition.reward, transition.terminated, transition.truncated


def unpack(rows: Tensor, columns: Fields) -> Transition:
    """Returns rows [..., width] as transitions."""
    actor, critic, action, next_actor, next_critic, reward, terminated, truncated = rows.split(columns.widths, -1)
    return Transition(
        observation=Observation(actor, critic),
        action=action,
        reward=reward.squeeze(-1),
        terminated=terminated.squeeze(-1) > 0.5,
        truncated=truncated.squeeze(-1) > 0.5,
        next_observation=Observation(next_actor, next_critic),
    )


def insert(
    state: ReplayState, transition: Transition, columns: Fields, gamma: float, valid: Tensor | None = None
) -> ReplayState:
    """Takes in one step of all environments and writes the n-step row of the oldest step in the window.

    The reward sums `gamma**i r_i` up to the first episode end in the window; the successor and the flags are
    that step's, else the newest's. Until the window is full nothing counts as written. As in the official code a
    window that a truncation cuts short is bootstrapped with the same `gamma**n` as a whole one.

    A step that is not valid leaves no row: the other environments' rows close up, and none of its numbers counts.
    Windows end before it as at a truncation, so none joins what lies on its two sides.

    Args:
      state: consumed: its `rows` are written in place.
      transition: [N, ...], with the true successor.
      columns: see `fields`.
      gamma: discount per step.
      valid: [N] bool, all by default.

    Returns:
      The state after it, sharing the storage of `rows`.
    """
    n_step, num_envs, _ = state.window.shape
    capacity = state.rows.shape[0]
    chex.assert_shape(transition.reward, (num_envs,))
    row = pack(transition)
    if valid is None:
        window = torch.cat([state.window[1:], row.unsqueeze(0)])
    else:
        # A row without a reward marks the gap in the window.
        row = torch.where(valid.unsqueeze(-1), row, torch.nan)
        past = torch.cat([state.window[1:-1], _cut(state.window[-1:], ~valid)]) if n_step > 1 else state.window[1:]
        window = torch.cat([past, row.unsqueeze(0)])
    steps = state.steps + 1
    full = steps >= n_step
    rows = _fold(window, columns, gamma) if n_step > 1 else window[0]
    places = torch.arange(num_envs, device=rows.device)
    if valid is None:
        slots, written = (state.cursor + places) % capacity, full * num_envs
    else:
        kept = ~window[0, :, REWARD].isnan()
        # Rows close up in front; behind them, rows that are there already are written once more.
        ahead = torch.cumsum(kept, 0)
        slots = (state.cursor + torch.where(kept, ahead - 1, ahead[-1] + places - ahead)) % capacity
        rows = torch.where(kept.unsqueeze(-1), rows, state.rows[slots])
        written = full * ahead[-1]
    state.rows[slots] = rows
    return ReplayState(
        rows=state.rows,
        window=window,
        steps=steps,
        cursor=(state.cursor + written) % capacity,
        size=torch.clamp(state.size + written, max=capacity),
    )


def cut(state: ReplayState) -> ReplayState:
    """Ends all running episodes after the newest step, as a time limit would: no window reaches what comes next."""
    newest = _cut(state.window[-1:], torch.ones_like(state.window[-1, :, 0], dtype=torch.bool))
    return state._replace(window=torch.cat([state.window[:-1], newest]))


def _cut(rows: Tensor, where: Tensor) -> Tensor:
    """Truncates the steps [..., N, width] of environments `where` [N], unless they end by themselves."""
    truncated = torch.where(where & ~(rows[..., TERMINATED] > 0.5), 1.0, rows[..., TRUNCATED])
    return torch.cat([rows[..., :TRUNCATED], truncated.unsqueeze(-1)], -1)


def _fold(window: Tensor, columns: Fields, gamma: float) -> Tensor:
    """Folds the window [n, N, width] into the n-step rows [N, width] of its oldest step."""
    start, end = columns.actor + columns.critic + columns.action, -3
    tail = window[-1, :, start:]
    for step in reversed(window[:-1, :, start:].unbind(0)):
        done = (step[:, end + 1 :] > 0.5).any(-1, keepdim=True)
        reward = step[:, end : end + 1] + gamma * torch.where(done, 0.0, tail[:, end : end + 1])
        chosen = torch.where(done, step, tail)
        tail = torch.cat([chosen[:, :end], reward, chosen[:, end + 1 :]], -1)
    return torch.cat([window[0, :, :start], tail], -1)


def indices(state: ReplayState, key: Tensor, shape: tuple[int, ...], reserved: int = 0) -> Tensor:
    """Draws row indices uniformly with replacement from the rows that hold a transition, int64 [shape].

    While none does, because no step was valid, they are all the same: a row of zeros.

    Args:
      state: the buffer.
      key: [2] int64.
      shape: of the result.
      reserved: so many of the oldest rows of a full buffer are left out. Who samples while a step of N environments
        is being written reserves N: those are the rows that it overwrites.
    """
    if not reserved:
        return keys.randint(key, shape, 0, torch.clamp(state.size, min=1))
    capacity = state.rows.shape[0]
    age = keys.randint(key, shape, 0, torch.clamp(state.size, min=1, max=capacity - reserved))
    return (state.cursor - 1 - age) % capacity


def gather(state: ReplayState, rows: Tensor, columns: Fields) -> Transition:
    """Returns the transitions [B, ...] of the row indices [B]."""
    return unpack(state.rows.index_select(0, rows), columns)
