"""The trained policy as a pure function over flat dicts of tensors: what a bundle of it names and an export traces.

action = offset + scale * tanh(mean(observation))         by running statistics, in the units of the environment
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from functional_sac import acting
from functional_sac.networks import Actor, BatchNorm, Block, Stats, Trunk
from functional_sl import tree

NAME = "functional_sac.policy:act"


class Bounds(NamedTuple):
    """The environment's own actions, onto which the policy's [-1, 1] is mapped; -1 and 1 change no bit."""

    low: Tensor  # [A] float32
    high: Tensor  # [A] float32


class Policy(NamedTuple):
    """Everything that `act` needs."""

    params: Actor
    stats: Stats
    action: Bounds


def act(tensors: Mapping[str, Tensor], inputs: Mapping[str, Tensor], *, blocks: int, dtype: str) -> dict[str, Tensor]:
    """Returns the deterministic action.

    Args:
      tensors: a `Policy` by the names of `tree.named`.
      inputs: `observation`, [B, O] float32, not normalised.
      blocks: residual blocks of the network.
      dtype: compute type of the matrix products, such as `float32`.

    Returns:
      `action`, [B, A] float32 in the environment's units.
    """
    names, structure = tree.names(_template(blocks)), tree.flatten(_template(blocks))[1]
    params, stats, (low, high) = tree.unflatten(structure, [tensors[name] for name in names])
    unit = acting.deterministic(params, stats, inputs["observation"], getattr(torch, dtype))
    action = 0.5 * (low + high) + 0.5 * (high - low) * unit
    return {"action": torch.minimum(torch.maximum(action, low), high)}


def _template(blocks: int) -> Policy:
    norm = BatchNorm(0, 0)
    trunk = Trunk(norm, 0, (Block(0, norm, 0, norm),) * blocks, 0)
    return Policy(Actor(trunk, 0, 0, 0, 0), Stats(0, 0), Bounds(0, 0))
