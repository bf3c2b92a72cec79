"""What one environment step leaves behind: the observation pair and the transition that replay stores."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class Observation(NamedTuple):
    """What the actor and the critic see. A symmetric task stores one view: its critic part has width 0."""

    actor: Tensor  # [N, A] float32
    critic: Tensor  # [N, C] float32; C = 0 where the critic sees what the actor sees


class Transition(NamedTuple):
    """One step of N environments."""

    observation: Observation  # leaves [N, ...] float32
    action: Tensor  # [N, D] float32 in [-1, 1]
    reward: Tensor  # [N] float32
    terminated: Tensor  # [N] bool: the task ended, nothing follows
    truncated: Tensor  # [N] bool: the time limit cut an episode that would have gone on; never true with terminated
    next_observation: Observation  # leaves [N, ...] float32: the true successor, before any reset


def symmetric(actor: Tensor) -> Observation:
    """Returns the observation of a task whose critic sees what its actor sees.

    Args:
      actor: [N, A] float32.
    """
    return Observation(actor=actor, critic=actor.new_zeros((*actor.shape[:-1], 0)))


def critic_view(observation: Observation) -> Tensor:
    """Returns what the critic sees: its own part, or the actor's where that part has width 0."""
    return observation.critic if observation.critic.shape[-1] else observation.actor
