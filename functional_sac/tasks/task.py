"""The contract of a robot task: pure functions over the state of N worlds, the same on every simulator.

A task is one table of rewards, one of observations, and a few functions. What it remembers has two parts: `own`, with
a row for each environment, is set anew when an episode begins; `shared` belongs to all environments and stays.

A step is judged by what the policy was shown before it: the reward compares the new state with the command, the gait
phase and the reference frame of the last observation; only then do these move on.

All random numbers are uniform in [0, 1) and come in as arguments. No function reads a value on the host, so all of
them run under `torch.compile` and inside a CUDA graph.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from functional_sac.transition import Observation
from functional_sl.sim.contract import SimState

Own = Any  # a NamedTuple of tensors [N, ...]
Shared = Any  # a tree of tensors without the axis of environments
Seen = Any  # what was measured on the robots, a NamedTuple of tensors [N, ...]
Scene = Any  # what rewards and terminations look at, a NamedTuple of tensors [N, ...]
View = Any  # what observations are made of, a NamedTuple of tensors [N, ...]


class Term(NamedTuple):
    """A term of the reward, which is `control_dt` times the weighted sum of all terms."""

    name: str
    function: Callable[[Scene], Tensor]  # -> [N] float32
    weight: float
    source: str  # where the term is defined


class Part(NamedTuple):
    """A part of the observation: `scale` times what the function returns plus uniform noise of +-`noise`."""

    name: str
    function: Callable[[View], Tensor]  # -> [N, size] float32
    size: int
    noise: float = 0.0
    scale: float = 1.0


class Start(NamedTuple):
    """Where new episodes begin."""

    own: Own
    qpos: Tensor  # [N, 7 + J] float32
    qvel: Tensor  # [N, 6 + J] float32


class Outcome(NamedTuple):
    """How a step ended."""

    terminated: Tensor  # [N] bool
    done: Tensor  # [N] bool, terminated or truncated
    length: Tensor  # [N] int64, of the episode, this step included


class RobotTask(NamedTuple):
    """A task of one robot.

    Attributes:
      name: the task.
      max_episode_steps: the time limit.
      default_pose: joint angles [J] at which a zero action aims.
      action_scale: radians [J] of an action of 1.
      terms: of the reward.
      actor: parts of what the actor sees, in this order.
      privileged: parts of what the critic sees beside them; to the critic nothing is noisy.
      step_draws: random numbers an environment's step takes, beside those of the noise.
      start_draws: random numbers the start of an episode takes.
      shared: returns the first `Shared`.
      look: `SimState -> Seen`.
      scene: `(own, seen, action [N, J], last action [N, J]) -> Scene`.
      view: `(own, seen, last action [N, J]) -> View`.
      terminated: `scene -> [N] bool`.
      expired: `own -> [N] bool`: the episode ends in time with this step, as at the time limit.
      advance: `(own, episode length [N] int64, uniform [N, step_draws]) -> own` of the next step.
      start: `(shared, uniform [N, start_draws]) -> Start`.
      learn: `(shared, own, Outcome) -> shared`.
      possible_length: `own -> [N] int64`: steps that the episode can have from its start.
      measured: names of the measures.
      measures: `(own, shared, scene) -> ([N] or 0-d float32, ...)`, what the records show, in the order of the names.
      weights: `shared -> [T] float32`, factors on the weights of the terms; None for ones.
      reference: `own -> (qpos [N, 7 + J], body origins [N, B, 3])`, where the robot should be now, for pictures; or
        None.
      push: `(episode length [N], uniform [N, step_draws]) -> (mask [N] bool, velocity [N, 6 + J] to add)`, or None.
    """

    name: str
    max_episode_steps: int
    default_pose: Tensor
    action_scale: Tensor
    terms: tuple[Term, ...]
    actor: tuple[Part, ...]
    privileged: tuple[Part, ...]
    step_draws: int
    start_draws: int
    shared: Callable[[], Shared]
    look: Callable[[SimState], Seen]
    scene: Callable[[Own, Seen, Tensor, Tensor], Scene]
    view: Callable[[Own, Seen, Tensor], View]
    terminated: Callable[[Scene], Tensor]
    expired: Callable[[Own], Tensor]
    advance: Callable[[Own, Tensor, Tensor], Own]
    start: Callable[[Shared, Tensor], Start]
    learn: Callable[[Shared, Own, Outcome], Shared]
    possible_length: Callable[[Own], Tensor]
    measured: tuple[str, ...]
    measures: Callable[[Own, Shared, Scene], tuple[Tensor, ...]]
    weights: Callable[[Shared], Tensor] | None = None
    reference: Callable[[Own], tuple[Tensor, Tensor]] | None = None
    push: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]] | None = None

    @property
    def noise_draws(self) -> int:
        """Random numbers that the noise of one observation takes."""
        return sum(part.size for part in self.actor if part.noise)


def target(task: RobotTask, action: Tensor) -> Tensor:
    """Returns the target angles [N, J] of actions [N, J] in [-1, 1]."""
    return task.default_pose + task.action_scale * action


def rewards(task: RobotTask, shared: Shared, scene: Scene) -> Tensor:
    """Returns the weighted terms [T, N], before the factor `control_dt`."""
    terms = [term.weight * term.function(scene) for term in task.terms]
    stacked = torch.stack(terms)
    return stacked if task.weights is None else task.weights(shared).unsqueeze(1) * stacked


def observe(task: RobotTask, view: View, uniform: Tensor) -> Observation:
    """Returns what actor and critic see.

    Args:
      task: the task.
      view: of N environments.
      uniform: [N, noise_draws] in [0, 1).
    """
    clean, noisy, at = [], [], 0
    for part in task.actor:
        value = part.function(view)
        clean.append(_scaled(part, value))
        if part.noise:
            drawn = uniform[:, at : at + part.size]
            at += part.size
            noisy.append(_scaled(part, value + part.noise * (2.0 * drawn - 1.0)))
        else:
            noisy.append(clean[-1])
    clean += [_scaled(part, part.function(view)) for part in task.privileged]
    return Observation(actor=torch.cat(noisy, dim=1), critic=torch.cat(clean, dim=1))


def _scaled(part: Part, value: Tensor) -> Tensor:
    return value if part.scale == 1.0 else part.scale * value


def describe(task: RobotTask) -> dict[str, Any]:
    """Returns what an exported policy's user must know, as plain numbers and texts: parts, default pose, scales."""
    return {
        "task": task.name,
        "observation": [{"name": x.name, "size": x.size, "noise": x.noise, "scale": x.scale} for x in task.actor],
        "default_pose": task.default_pose.tolist(),
        "action_scale": task.action_scale.tolist(),
    }
