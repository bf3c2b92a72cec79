"""Windows of a quadruped's episodes: M frames that a world model sees and N steps that it forecasts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from functional_sl import data, keys
from functional_sl.sources import episodes
from functional_sl.sources.episodes import Episodes


class Frames(NamedTuple):
    """T frames of episodes one after another, and where windows may begin."""

    state: Tensor  # [T, S] float32
    action: Tensor  # [T, A] float32, applied in the frame
    contact: Tensor  # [T, C] bool
    terminated: Tensor  # [T] bool
    end: Tensor  # [T] int64, one behind the last frame of its episode
    anchor: Tensor  # [W] int64, first frames of windows with a whole history and at least one step behind it


class Windows(NamedTuple):
    """B windows of M frames and N forecast steps; what is not valid may hold anything."""

    state: Tensor  # [B, M + N, S]
    action: Tensor  # [B, M + N - 1, A]
    contact: Tensor  # [B, N, C] bool
    terminated: Tensor  # [B, N] bool
    valid: Tensor  # [B, N] bool
    weight: Tensor  # [B, members] int64, how often a member's bootstrap sample holds the window


def frames_of(recorded: Episodes, history: int, stride: int) -> Frames:
    """Returns the frames of episodes; windows begin at every `stride`-th frame of an episode.

    With a stride of N the forecasts of all windows hold every frame behind a history once.

    Raises:
      ValueError: if no episode is longer than the history.
    """
    lengths, first = recorded.lengths, episodes.starts(recorded)
    start, end = (x.repeat_interleave(lengths) for x in (first, first + lengths))
    at = torch.arange(len(start))
    anchor = ((at + history < end) & ((at - start) % stride == 0)).nonzero()[:, 0]
    if not len(anchor):
        raise ValueError(f"no episode has more than history={history} frames; the longest has {int(lengths.max())}")
    values = (recorded.values[name] for name in ("state", "action", "contact", "terminated"))
    return Frames(*values, end, anchor)


def window(frames: Frames, anchor: Tensor, history: int, forecast: int) -> tuple[Tensor, ...]:
    """Returns state, action, contact, terminated and valid of `Windows` that begin at `anchor` [B]."""
    steps = anchor[:, None] + torch.arange(history + forecast, device=anchor.device)
    end = frames.end[anchor, None]
    # Behind its end the last frame of the episode stands, never one of the next.
    inside = torch.minimum(steps, end - 1)
    ahead = inside[:, history:]
    return (
        frames.state[inside],
        frames.action[inside[:, :-1]],
        frames.contact[ahead],
        frames.terminated[ahead],
        steps[:, history:] < end,
    )


def sample(frames: Frames, key: Tensor, batch_size: int, *, history: int, forecast: int, members: int) -> Windows:
    """Returns windows drawn uniformly from all of them, with the bootstrap sample of every member."""
    chosen, own = keys.split(key).unbind(0)
    anchor = frames.anchor[data.rows(chosen, len(frames.anchor), batch_size)]
    return Windows(*window(frames, anchor, history, forecast), bootstrap(own, batch_size, members))


def bootstrap(key: Tensor, rows: int, members: int) -> Tensor:
    """Returns how often each of `rows` is in a resample of as many with replacement, [rows, members] int64.

    A single member takes every row once.
    """
    if members == 1:
        return torch.ones(rows, 1, dtype=torch.int64, device=key.device)
    drawn = torch.sort(keys.randint(key, (members, rows), 0, rows)).values
    # Where each row's draws begin and, a row on, end: no atomics, and no table of rows by draws.
    bounds = torch.arange(rows + 1, device=key.device).expand(members, -1).contiguous()
    return torch.diff(torch.searchsorted(drawn, bounds)).T


def batches(frames: Frames, batch_size: int, *, history: int, forecast: int, members: int) -> Iterator[Windows]:
    """Yields every held-out window once, in order, with the same weight for every member."""
    for anchor in frames.anchor.split(batch_size):
        weight = torch.ones(len(anchor), members, dtype=torch.int64, device=anchor.device)
        yield Windows(*window(frames, anchor, history, forecast), weight)


def count(batch: Windows) -> Tensor:
    """Returns the number of valid (window, step) pairs over all members' samples, () int64."""
    return (batch.valid.sum(1, dtype=torch.int64)[:, None] * batch.weight).sum()
