"""Windows over episodes: a history of observations and the chunk of actions that follows, with its mask.

A window belongs to one frame, its anchor: H observations up to the anchor and F actions from it on. A history that
would begin before its episode repeats the first observation. What a chunk holds behind its episode's end is the
padding policy's choice:

    mask           nothing; those steps are not supervised
    repeat_last    the episode's last action, supervised
    terminal_hold  the zero action, supervised, where the task ended; masked where only the recording stopped
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from functional_sl import tree
from functional_sl.sources import episodes as stored
from functional_sl.sources.episodes import Episodes
from functional_sl.tree import Tree

PADDING = ("mask", "repeat_last", "terminal_hold")


class Frames(NamedTuple):
    """T frames of episodes one after another, and the bounds of each frame's episode."""

    observation: Tree  # of leaves [T, ...]; one feature [T, O] float32 from `frames`
    action: Tensor  # [T, A] float32
    valid: Tensor  # [T] bool: the action may be supervised
    start: Tensor  # [T] int64, the first frame of its episode
    end: Tensor  # [T] int64, one behind the last
    terminated: Tensor  # [T] bool: the task ended at that end


class Windows(NamedTuple):
    """B windows."""

    observation: Tree  # of leaves [B, H, ...], oldest first
    action: Tensor  # [B, F, A]
    valid: Tensor  # [B, F] bool: the supervised steps


def frames(episodes: Episodes, observation: str, action: str) -> Frames:
    """Returns the frames of episodes, of which two features are named; actions that do not count become zero.

    Raises:
      ValueError: if a feature is absent or no vector of float32.
    """
    values = []
    for name in (observation, action):
        if name not in episodes.values:
            raise ValueError(f"the episodes have no feature {name!r}; they have {', '.join(episodes.values)}")
        value = episodes.values[name]
        if value.ndim != 2 or value.dtype != torch.float32:
            raise ValueError(f"the feature {name!r} is {value.dtype} {tuple(value.shape)}; expected float32 [T, D]")
        values.append(value)
    lengths, first, valid = episodes.lengths, stored.starts(episodes), stored.valid(episodes)
    bounds = (x.repeat_interleave(lengths) for x in (first, first + lengths, episodes.terminated))
    return Frames(values[0], torch.where(valid[:, None], values[1], 0.0), valid, *bounds)


def window(frames: Frames, anchor: Tensor, history: int, chunk: int, padding: str) -> Windows:
    """Returns the windows of `anchor` [B] int64."""
    device = anchor.device
    start, end = frames.start[anchor, None], frames.end[anchor, None]
    past = torch.maximum(anchor[:, None] + torch.arange(1 - history, 1, device=device), start)
    future = anchor[:, None] + torch.arange(chunk, device=device)
    inside, nearest = future < end, torch.minimum(future, end - 1)
    action, valid = frames.action[nearest], frames.valid[nearest]
    if padding == "mask":
        valid = valid & inside
    elif padding == "terminal_hold":
        hold = ~inside & frames.terminated[anchor, None]
        action = torch.where(hold[..., None], 0.0, action)
        valid = valid & (inside | hold)
    return Windows(tree.map(lambda leaf: leaf[past], frames.observation), action, valid)
