"""Scripted experts of the classic tasks: pure functions of the actor's observation, with its channels named.

They are named as `functional_sac.envs.experts:pendulum` where demonstrations are collected, and solve their tasks.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from functional_sac.envs import cartpole as cart
from functional_sac.envs import pendulum as rod
from functional_sac.envs import reacher as arm
from functional_sl.sources.demonstrations import Expert

# Discrete linear-quadratic regulators of the upright positions, rounded.
_CART_GAINS = (-2.8, -42.0, -4.65, -11.0)  # N per m, rad, m/s, rad/s
_ROD_GAINS = (5.0, 1.2)  # of the largest torque per rad, rad/s
_ARM_STIFFNESS, _ARM_DAMPING = (25.0, 10.0), (4.0, 1.6)  # N m/rad, N m s/rad


def _pendulum(observation: Tensor) -> Tensor:
    """Pumps the energy of the upright rest (Astrom and Furuta, 2000), and holds the rod where it arrives."""
    cosine, sine, speed = observation.unbind(-1)
    angle = torch.atan2(sine, cosine)
    surplus = 0.5 * speed.square() + 1.5 * rod.GRAVITY / rod.LENGTH * (cosine - 1.0)
    swing = (-0.5 * surplus * speed).clamp(-1.0, 1.0)
    hold = -(_ROD_GAINS[0] * angle + _ROD_GAINS[1] * speed).clamp(-1.0, 1.0)
    return _blend(hold, swing, angle.abs(), 0.5, 0.025)[:, None]


def _cartpole(observation: Tensor) -> Tensor:
    """Pumps the pole's energy by moving the cart, and regulates all four states near the top."""
    position, cosine, sine, velocity, angular_velocity = observation.unbind(-1)
    angle = torch.atan2(sine, cosine)
    moment = cart.POLE_MASS * cart.HALF_LENGTH
    inertia = 4.0 / 3.0 * moment * cart.HALF_LENGTH
    surplus = 0.5 * inertia * angular_velocity.square() + moment * cart.GRAVITY * (cosine - 1.0)
    push = (cart.CART_MASS + cart.POLE_MASS) * (10.0 * surplus * angular_velocity * cosine - position - velocity)
    states = (position, angle, velocity, angular_velocity)
    regulate = -sum(gain * state for gain, state in zip(_CART_GAINS, states, strict=True))
    swing, hold = (x.clamp(-cart.MAX_FORCE, cart.MAX_FORCE) / cart.MAX_FORCE for x in (push, regulate))
    return _blend(hold, swing, angle.abs() + 0.1 * angular_velocity.abs(), 1.0, 0.05)[:, None]


def _reacher(observation: Tensor) -> Tensor:
    """Solves the inverse kinematics for the elbow's present side, and drives both joints there."""
    cosine, sine, velocity, target = (observation[:, i : i + 2] for i in (0, 2, 4, 6))
    angle = torch.atan2(sine, cosine)
    squared = 2.0 * arm.LINK_LENGTH**2
    elbow = torch.acos(((target.square().sum(-1) - squared) / squared).clamp(-1.0, 1.0))
    elbow = torch.where(sine[:, 1] >= 0.0, elbow, -elbow)
    shoulder = torch.atan2(target[:, 1], target[:, 0]) - 0.5 * elbow  # the links are equally long
    turn = torch.remainder(shoulder - angle[:, 0] + math.pi, 2.0 * math.pi) - math.pi
    way = torch.stack((turn, elbow - angle[:, 1]), -1)
    stiffness, damping, limit = (velocity.new_tensor(x) for x in (_ARM_STIFFNESS, _ARM_DAMPING, arm.MAX_TORQUE))
    return ((stiffness * way - damping * velocity) / limit).clamp(-1.0, 1.0)


def _blend(near: Tensor, far: Tensor, distance: Tensor, border: float, width: float) -> Tensor:
    return torch.lerp(far, near, torch.sigmoid((border - distance) / width))


def _channels(*names: str) -> tuple[tuple[str, str], ...]:
    return tuple((name, unit) for name, _, unit in (text.partition(" ") for text in names))


pendulum = Expert(_pendulum, _channels("cos_angle 1", "sin_angle 1", "speed rad/s"), _channels("torque 2 N m"))
cartpole_swingup = Expert(
    _cartpole,
    _channels("position m", "cos_angle 1", "sin_angle 1", "velocity m/s", "angular_velocity rad/s"),
    _channels("force 10 N"),
)
reacher = Expert(
    _reacher,
    _channels(
        *(f"{function}_{joint} 1" for function in ("cos", "sin") for joint in ("shoulder", "elbow")),
        *("shoulder_speed rad/s", "elbow_speed rad/s", "target_x m", "target_y m", "way_x m", "way_y m"),
    ),
    _channels("shoulder_torque 4 N m", "elbow_torque 2 N m"),
)
