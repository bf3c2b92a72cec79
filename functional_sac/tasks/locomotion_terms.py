"""What walking tasks look at, and the terms of their rewards, as in UniLab and MuJoCo Playground."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

ERRORS = ("error_lin_vel", "error_yaw_rate")


class Seen(NamedTuple):
    """What was measured on the robots; feet [F] are the task's."""

    lin_vel: Tensor  # [N, 3], of the base IMU in its frame
    ang_vel: Tensor  # [N, 3], of the gyro in its frame
    gravity: Tensor  # [N, 3], its direction in the gyro's frame
    joint_pos: Tensor  # [N, J], less the default pose
    joint_vel: Tensor  # [N, J]
    base_height: Tensor  # [N]
    foot_height: Tensor  # [N, F], of the feet's frames
    foot_tilt: Tensor  # [N, F], squared x and y of the feet's quaternions, summed
    foot_force: Tensor  # [N, F], N


class Scene(NamedTuple):
    """What rewards and terminations look at."""

    seen: Seen
    command: Tensor  # [N, 3]
    phase: Tensor  # [N, F] in [0, 1), foot by foot
    action: Tensor  # [N, J]
    last_action: Tensor  # [N, J]


class View(NamedTuple):
    """What observations are made of."""

    seen: Seen
    command: Tensor  # [N, 3]
    phase: Tensor  # [N, F]
    last_action: Tensor  # [N, J]


def track_lin_vel(scene: Scene, sigma: float) -> Tensor:
    """Returns exp(-e^2 / sigma) of the planar velocity error e."""
    return torch.exp(-(scene.command[:, :2] - scene.seen.lin_vel[:, :2]).square().sum(dim=1) / sigma)


def track_yaw_rate(scene: Scene, sigma: float) -> Tensor:
    """Returns exp(-e^2 / sigma) of the yaw rate error e."""
    return torch.exp(-(scene.command[:, 2] - scene.seen.ang_vel[:, 2]).square() / sigma)


def vertical_velocity(scene: Scene) -> Tensor:
    """Returns the squared velocity along the base's z axis."""
    return scene.seen.lin_vel[:, 2].square()


def roll_pitch_rate(scene: Scene) -> Tensor:
    """Returns the squared angular velocity about x and y, summed."""
    return scene.seen.ang_vel[:, :2].square().sum(dim=1)


def tilt(scene: Scene) -> Tensor:
    """Returns the squared horizontal part of gravity's direction: sin^2 of the tilt."""
    return scene.seen.gravity[:, :2].square().sum(dim=1)


def base_height(scene: Scene, height: float) -> Tensor:
    """Returns the squared error of the base's height."""
    return (scene.seen.base_height - height).square()


def action_rate(scene: Scene) -> Tensor:
    """Returns the squared change of the action, summed over joints."""
    return (scene.action - scene.last_action).square().sum(dim=1)


def pose(scene: Scene, weights: Tensor) -> Tensor:
    """Returns the squared distance from the default pose, weighted by joint [J] and summed."""
    return (weights * scene.seen.joint_pos.square()).sum(dim=1)


def pose_l1(scene: Scene) -> Tensor:
    """Returns the distance from the default pose, summed over joints."""
    return scene.seen.joint_pos.abs().sum(dim=1)


def foot_tilt(scene: Scene) -> Tensor:
    """Returns the tilt of the feet, summed; 0 where they are flat."""
    return scene.seen.foot_tilt.sum(dim=1)


def swing_targets(phase: Tensor, height: float) -> Tensor:
    """Returns the height of a foot at a phase in [0, 1): cubic Bezier curves, 0 at phase 1/2 and `height` at 0.

    Each half turn is the curve 3 t^2 - 2 t^3 of rising or falling.
    """
    x = torch.remainder(phase + 0.5, 1.0)
    t = torch.where(x <= 0.5, 2.0 * x, 2.0 - 2.0 * x)
    return height * t.square() * (3.0 - 2.0 * t)


def foot_swing(scene: Scene, height: float, sigma: float) -> Tensor:
    """Returns exp(-e^2 / sigma) of the feet's errors e from `swing_targets`, squared and summed."""
    error = scene.seen.foot_height - swing_targets(scene.phase, height)
    return torch.exp(-error.square().sum(dim=1) / sigma)


def contact_phase(scene: Scene, force: float, stance: float) -> Tensor:
    """Returns the share of feet that touch the ground just when their phase is in the stance, [0, stance)."""
    return ((scene.seen.foot_force > force) == (scene.phase < stance)).float().mean(dim=1)


def swing_height(scene: Scene, height: float, sigma: float, stance: float) -> Tensor:
    """Returns exp(-e^2 / sigma) of a foot's error e from a height, where its phase is in the swing, as a mean."""
    near = torch.exp(-(scene.seen.foot_height - height).square() / sigma)
    return (near * (scene.phase >= stance)).mean(dim=1)


def alive(scene: Scene) -> Tensor:
    """Returns 1."""
    return torch.ones_like(scene.seen.base_height)


def errors(scene: Scene) -> dict[str, Tensor]:
    """Returns the velocity errors of the records."""
    return {
        "error_lin_vel": torch.linalg.vector_norm(scene.command[:, :2] - scene.seen.lin_vel[:, :2], dim=1),
        "error_yaw_rate": (scene.command[:, 2] - scene.seen.ang_vel[:, 2]).abs(),
    }
