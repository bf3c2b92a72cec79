"""Pendulum swing-up: a torque too weak to lift a rod that must stand on its end.

Dynamics, costs and limits are those of Gym's Pendulum-v1: a uniform rod of mass m and length l on a driven hinge,
theta'' = 3 g / (2 l) sin(theta) + 3 u / (m l^2), theta = 0 upright, stepped by semi-implicit Euler.
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

GRAVITY = 10.0  # m/s^2
MASS = 1.0  # kg
LENGTH = 1.0  # m
MAX_TORQUE = 2.0  # N m
MAX_SPEED = 8.0  # rad/s
DT = 0.05  # s


class Pendulum(NamedTuple):
    """The physics of N pendulums."""

    angle: Tensor  # [N] float32, rad from upright, counted over full turns
    speed: Tensor  # [N] float32, rad/s


def reset(key: Tensor) -> Pendulum:
    """Draws the angle from [-pi, pi] and the speed from [-1, 1]; `key` is [N, 2]."""
    angle, speed = keys.uniform(key, (2,), -1.0, 1.0).unbind(-1)
    return Pendulum(angle=math.pi * angle, speed=speed)


def step(physics: Pendulum, action: Tensor) -> tuple[Pendulum, Tensor, Tensor]:
    """Applies the torque `MAX_TORQUE * action` for `DT`; the cost is that of the state before the step."""
    torque = MAX_TORQUE * action[:, 0]
    from_upright = torch.remainder(physics.angle + math.pi, 2.0 * math.pi) - math.pi
    cost = from_upright.square() + 0.1 * physics.speed.square() + 0.001 * torque.square()
    acceleration = 1.5 * GRAVITY / LENGTH * torch.sin(physics.angle) + 3.0 / (MASS * LENGTH**2) * torque
    speed = (physics.speed + DT * acceleration).clamp(-MAX_SPEED, MAX_SPEED)
    angle = physics.angle + DT * speed
    return Pendulum(angle=angle, speed=speed), -cost, torch.zeros_like(cost, dtype=torch.bool)


def observe(physics: Pendulum) -> Observation:
    """Returns (cos angle, sin angle, speed)."""
    return symmetric(torch.stack((torch.cos(physics.angle), torch.sin(physics.angle), physics.speed), dim=-1))


def render(physics: Pendulum) -> np.ndarray:
    """Draws the rod."""
    angle = float(physics.angle)
    tip = (LENGTH * math.sin(angle), LENGTH * math.cos(angle))
    image = drawing.capsule(drawing.blank(), (0.0, 0.0), tip, 0.09, drawing.ORANGE, extent=1.25)
    return drawing.capsule(image, (0.0, 0.0), (0.0, 0.0), 0.045, drawing.DARK, extent=1.25)


def pendulum() -> Env:
    """Returns the swing-up task: 200 steps, never terminates; a good policy's return is above -180."""
    spec = EnvSpec(
        task="pendulum",
        actor_dim=3,
        critic_dim=0,
        action_dim=1,
        max_episode_steps=200,
        control_dt=DT,
        solved_return=-180.0,
    )
    return autoreset(Task(spec, reset, step, observe, render))
