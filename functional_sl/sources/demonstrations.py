"""Demonstrations of an expert in a world, as episodes.

The expert's actions may be disturbed while they are executed; what is stored is its undisturbed answer to each
observation, so that the data shows how to come back (Laskey et al., "DART: noise injection for robust imitation
learning", CoRL 2017).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from functional_sl import keys
from functional_sl.run import loading
from functional_sl.sources import worlds
from functional_sl.sources.episodes import Episodes, Feature, Schema, unnamed_channels
from functional_sl.sources.worlds import Act

OBSERVATION, ACTION = "observation", "action"


class Expert(NamedTuple):
    """A policy that knows the task, and what the numbers of the task mean."""

    act: Act  # pure: observation [N, O] -> action [N, A] in [-1, 1]
    observation: tuple[tuple[str, str], ...] = ()  # name and unit by channel; empty if nobody named them
    action: tuple[tuple[str, str], ...] = ()


def load_expert(name: str) -> Expert:
    """Returns the expert that `package.module:name` names: an `Expert`, or a function observation -> action.

    Raises:
      ValueError: if there is neither.
    """
    found = loading.load(name)
    if isinstance(found, Expert):
        return found
    if not callable(found):
        raise ValueError(f"{name!r} is {type(found).__name__}; an expert is a function observation -> action")
    return Expert(found)


def generate(world: str, expert: str, key: Tensor, count: int, noise: float) -> Episodes:
    """Returns one demonstration from each of `count` random starts; `episodes.write` stores them.

    Args:
      world: `package.module:function`, see `functional_sl.sources.worlds`.
      expert: `package.module:name`, see `load_expert`.
      key: [2]; decides starts and noise.
      count: how many.
      noise: standard deviation of the disturbance of executed actions, in units of the action.
    """
    return collect(worlds.load(world), load_expert(expert), key, count, noise, {"world": world, "expert": expert})


def collect(
    world: Any, expert: Expert, key: Tensor, count: int, noise: float, about: Mapping[str, Any] | None = None
) -> Episodes:
    """Returns demonstrations as `generate` does, of a world and an expert that are there already.

    Args:
      world: see `functional_sl.sources.worlds`.
      expert: who demonstrates.
      key: [2].
      count: how many.
      noise: as there.
      about: further JSON for the schema.
    """
    start, disturbance = keys.split(key).unbind(0)
    seen = worlds.rollout(world, worlds.noisy(expert.act, disturbance, noise), start, count)
    inside = torch.arange(len(seen.reward))[None] < seen.lengths[:, None]  # [N, T]
    observation = seen.observation.transpose(0, 1)[inside]
    values = {OBSERVATION: observation, ACTION: expert.act(observation)}
    spec = world.spec
    named = {OBSERVATION: (spec.actor_dim, expert.observation), ACTION: (spec.action_dim, expert.action)}
    features = tuple(
        Feature(name, (width,), "float32", channels or unnamed_channels(width, name))
        for name, (width, channels) in named.items()
    )
    about = {**(about or {}), "timing": "observation before action", "noise": noise, "key": key.tolist()}
    return Episodes(Schema(features, spec.control_dt, "", about), values, seen.lengths, seen.terminated)
