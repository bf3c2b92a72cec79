"""Reacher: a planar two-link arm, both joints driven, brings its tip to a random target.

The arm moves in a horizontal plane: M(q) q'' + C(q, q') q' + D q' = tau, with M and C of the two-link manipulator
(Murray, Li and Sastry, "A Mathematical Introduction to Robotic Manipulation", 1994, section 4.2.3), uniform links,
and a point mass, the payload, at the tip:

    M = [[a + 2 b cos q2, d + b cos q2], [d + b cos q2, d]]
    C = b sin(q2) [[-q2', -(q1' + q2')], [q1', 0]]

`reacher` carries no payload. `reacher_asymmetric` draws one every episode, which only the critic sees.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from functional_sac.envs import drawing
from functional_sac.envs.env import Env, EnvSpec, Task, autoreset
from functional_sac.transition import Observation, symmetric
from functional_sl import keys

LINK_LENGTH = 0.5  # m, each
LINK_MASS = 1.0  # kg, each
MAX_PAYLOAD = 1.0  # kg
MAX_TORQUE = (4.0, 2.0)  # N m: shoulder, elbow
DAMPING = (0.8, 0.4)  # N m s/rad
TARGET_RADIUS = (0.2, 0.95)  # m from the shoulder
TOLERANCE = 0.2  # m of distance at which the reward is one half
DT = 0.01  # s
SUBSTEPS = 2


class Arm(NamedTuple):
    """The physics of N arms."""

    angle: Tensor  # [N, 2] float32, rad: shoulder from +x, elbow from the first link
    velocity: Tensor  # [N, 2] float32, rad/s
    target: Tensor  # [N, 2] float32, m
    payload: Tensor  # [N] float32, kg


def acceleration(arm: Arm, torque: Tensor) -> Tensor:
    """Solves the equations above for q'', [N, 2] in rad/s^2, under torques in newton metres, [N, 2]."""
    load = arm.payload * LINK_LENGTH**2
    link = LINK_MASS * LINK_LENGTH**2
    a, b, d = 5.0 / 3.0 * link + 2.0 * load, 0.5 * link + load, link / 3.0 + load
    shoulder, elbow = arm.velocity.unbind(-1)
    b_cos, b_sin = b * torch.cos(arm.angle[:, 1]), b * torch.sin(arm.angle[:, 1])
    m11, m12, m22 = a + 2.0 * b_cos, d + b_cos, d
    tau1 = torque[:, 0] - DAMPING[0] * shoulder + b_sin * elbow * (2.0 * shoulder + elbow)
    tau2 = torque[:, 1] - DAMPING[1] * elbow - b_sin * shoulder.square()
    determinant = m11 * m22 - m12.square()
    solution = (m22 * tau1 - m12 * tau2, m11 * tau2 - m12 * tau1)
    return torch.stack(solution, dim=-1) / determinant[:, None]


def advance(arm: Arm, torque: Tensor, dt: float = DT) -> Arm:
    """Moves by `dt` with semi-implicit Euler."""
    velocity = arm.velocity + dt * acceleration(arm, torque)
    return arm._replace(angle=arm.angle + dt * velocity, velocity=velocity)


def tip(angle: Tensor) -> Tensor:
    """Returns where the arm ends, [N, 2] in metres from the shoulder, for joint angles [N, 2]."""
    absolute = torch.cumsum(angle, dim=-1)
    return LINK_LENGTH * torch.stack((torch.cos(absolute).sum(-1), torch.sin(absolute).sum(-1)), dim=-1)


def reward(arm: Arm, action: Tensor) -> Tensor:
    """Returns near * small control in [0, 1], [N]; the long tail of `near` points to the target from anywhere."""
    distance_squared = (arm.target - tip(arm.angle)).square().sum(-1)
    near = 1.0 / (1.0 + distance_squared / TOLERANCE**2)
    return near * (1.0 - 0.2 * action.square().mean(-1))


def render(arm: Arm) -> np.ndarray:
    """Draws the arm and its target."""
    extent = 1.15
    shoulder = float(arm.angle[0])
    elbow_at = (LINK_LENGTH * math.cos(shoulder), LINK_LENGTH * math.sin(shoulder))
    tip_at, target = tuple(tip(arm.angle).tolist()), tuple(arm.target.tolist())
    image = drawing.capsule(drawing.blank(), target, target, 0.08, drawing.GREEN, extent)
    image = drawing.capsule(image, (0.0, 0.0), elbow_at, 0.06, drawing.BLUE, extent)
    image = drawing.capsule(image, elbow_at, tip_at, 0.045, drawing.ORANGE, extent)
    return drawing.capsule(image, (0.0, 0.0), (0.0, 0.0), 0.03, drawing.DARK, extent)


def _start(key: Tensor, max_payload: float) -> Arm:
    draws = keys.uniform(key, (5,), -1.0, 1.0)
    low, high = TARGET_RADIUS
    radius = (low + high) / 2.0 + (high - low) / 2.0 * draws[:, 2:3]
    bearing = math.pi * draws[:, 3]
    return Arm(
        angle=math.pi * draws[:, 0:2],
        velocity=torch.zeros_like(draws[:, 0:2]),
        target=radius * torch.stack((torch.cos(bearing), torch.sin(bearing)), dim=-1),
        payload=max_payload / 2.0 * (1.0 + draws[:, 4]),
    )


def _step(arm: Arm, action: Tensor) -> tuple[Arm, Tensor, Tensor]:
    torque = torch.stack((MAX_TORQUE[0] * action[:, 0], MAX_TORQUE[1] * action[:, 1]), dim=-1)
    for _ in range(SUBSTEPS):
        arm = advance(arm, torque)
    score = reward(arm, action)
    return arm, score, torch.zeros_like(score, dtype=torch.bool)


def _features(arm: Arm) -> Tensor:
    return torch.cat(
        (torch.cos(arm.angle), torch.sin(arm.angle), arm.velocity, arm.target, arm.target - tip(arm.angle)), dim=-1
    )


def _make(task: str, max_payload: float, solved_return: float) -> Env:
    spec = EnvSpec(
        task=task,
        actor_dim=10,
        critic_dim=11 if max_payload else 0,
        action_dim=2,
        max_episode_steps=200,
        control_dt=SUBSTEPS * DT,
        solved_return=solved_return,
    )

    def reset(key: Tensor) -> Arm:
        return _start(key, max_payload)

    def observe(arm: Arm) -> Observation:
        features = _features(arm)
        if not max_payload:
            return symmetric(features)
        return Observation(actor=features, critic=torch.cat((features, arm.payload[:, None]), dim=-1))

    return autoreset(Task(spec, reset, _step, observe, render))


def reacher() -> Env:
    """Returns the task without payload: 200 steps, never terminates, return in [0, 200].

    Both actor and critic see cos and sin of the angles, velocities, target, and the way from tip to target: [N, 10].
    """
    return _make("reacher", max_payload=0.0, solved_return=150.0)


def reacher_asymmetric() -> Env:
    """Returns the task with a payload up to `MAX_PAYLOAD`, which the critic sees, [N, 11], and the actor does not."""
    return _make("reacher_asymmetric", max_payload=MAX_PAYLOAD, solved_return=140.0)
