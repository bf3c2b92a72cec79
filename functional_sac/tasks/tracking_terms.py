"""What motion tracking compares, and the terms of its reward.

Where no other source is named, definitions are those of BeyondMimic (arXiv:2508.08241): exponentials of squared errors
over body poses and velocities.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from functional_sl.sim import rotation

BODIES = (
    "pelvis", "left_hip_roll_link", "left_knee_link", "left_ankle_roll_link", "right_hip_roll_link",
    "right_knee_link", "right_ankle_roll_link", "torso_link", "left_shoulder_roll_link", "left_elbow_link",
    "left_wrist_yaw_link", "right_shoulder_roll_link", "right_elbow_link", "right_wrist_yaw_link",
)  # fmt: skip
ROOT = BODIES.index("pelvis")
ANCHOR = BODIES.index("torso_link")
ERRORS = tuple(
    f"error_{what}"
    for what in (
        "anchor_pos", "anchor_rot", "anchor_lin_vel", "anchor_ang_vel", "body_pos", "body_rot", "body_lin_vel",
        "body_ang_vel", "joint_pos", "joint_vel",
    )
) + tuple(f"error_body_pos/{body}" for body in BODIES)  # fmt: skip
ENDS = tuple(i for i, body in enumerate(BODIES) if "ankle" in body or "wrist" in body)


class Reference(NamedTuple):
    """One frame of a motion a row; bodies [14] follow `BODIES`."""

    joint_pos: Tensor  # [N, J]
    joint_vel: Tensor  # [N, J]
    body_pos: Tensor  # [N, 14, 3]
    body_quat: Tensor  # [N, 14, 4]
    body_lin_vel: Tensor  # [N, 14, 3], world frame
    body_ang_vel: Tensor  # [N, 14, 3], world frame


class Seen(NamedTuple):
    """The same of the robot, and its sensors."""

    joint_pos: Tensor  # [N, J]
    joint_vel: Tensor  # [N, J]
    body_pos: Tensor  # [N, 14, 3]
    body_quat: Tensor  # [N, 14, 4]
    body_lin_vel: Tensor  # [N, 14, 3]
    body_ang_vel: Tensor  # [N, 14, 3]
    base_lin_vel: Tensor  # [N, 3], of the pelvis IMU in its frame
    base_ang_vel: Tensor  # [N, 3], of the torso IMU in its frame
    contact_force: Tensor  # [N, C], on bodies that should touch nothing


class Scene(NamedTuple):
    """Robot and reference compared; bodies are compared with the reference that `reanchored` moves to the robot."""

    anchor_distance: Tensor  # [N], m
    anchor_angle: Tensor  # [N], rad
    anchor_height: Tensor  # [N], m, reference minus robot
    anchor_tilt: Tensor  # [N], difference of the vertical components of gravity in the frames of the anchors
    body_distance: Tensor  # [N, 14], m
    body_angle: Tensor  # [N, 14], rad
    body_lin_vel: Tensor  # [N, 14], m/s, length of the difference
    body_ang_vel: Tensor  # [N, 14], rad/s
    end_height: Tensor  # [N, 4], m, reference minus robot at ankles and wrists
    joint_pos_error: Tensor  # [N], rad, length of the difference over joints
    joint_vel_error: Tensor  # [N], rad/s
    body_height: Tensor  # [N, 14], m, of the robot
    joint_pos: Tensor  # [N, J], of the robot
    contact_force: Tensor  # [N, C]
    action: Tensor  # [N, J]
    last_action: Tensor  # [N, J]


def reanchored(reference: Reference, seen: Seen) -> tuple[Tensor, Tensor]:
    """Returns positions [N, 14, 3] and orientations [N, 14, 4] of the reference at the robot's place and heading.

    The reference is turned about the vertical by the difference of the anchors' headings and put where the robot's
    anchor is in x and y; heights stay.
    """
    own, its = seen.body_pos[:, ANCHOR], reference.body_pos[:, ANCHOR]
    difference = rotation.multiply(seen.body_quat[:, ANCHOR], rotation.conjugate(reference.body_quat[:, ANCHOR]))
    turn = rotation.from_yaw(rotation.yaw(difference)).unsqueeze(1)
    place = torch.cat((own[:, :2], its[:, 2:]), dim=1)
    pos = place.unsqueeze(1) + rotation.rotate(turn, reference.body_pos - its.unsqueeze(1))
    return pos, rotation.multiply(turn.expand_as(reference.body_quat), reference.body_quat)


def compare(reference: Reference, seen: Seen, action: Tensor, last_action: Tensor) -> Scene:
    """Compares N robots with their references."""
    pos, quat = reanchored(reference, seen)
    apart = reference.body_pos[:, ANCHOR] - seen.body_pos[:, ANCHOR]
    quats = (reference.body_quat[:, ANCHOR], seen.body_quat[:, ANCHOR])
    return Scene(
        anchor_distance=_length(apart),
        anchor_angle=rotation.angle(*quats),
        anchor_height=apart[:, 2],
        anchor_tilt=_gravity(quats[0]) - _gravity(quats[1]),
        body_distance=_length(pos - seen.body_pos),
        body_angle=rotation.angle(quat, seen.body_quat),
        body_lin_vel=_length(reference.body_lin_vel - seen.body_lin_vel),
        body_ang_vel=_length(reference.body_ang_vel - seen.body_ang_vel),
        end_height=ends((pos - seen.body_pos)[..., 2]),
        joint_pos_error=_length(reference.joint_pos - seen.joint_pos),
        joint_vel_error=_length(reference.joint_vel - seen.joint_vel),
        body_height=seen.body_pos[..., 2],
        joint_pos=seen.joint_pos,
        contact_force=seen.contact_force,
        action=action,
        last_action=last_action,
    )


def ends(values: Tensor) -> Tensor:
    """Returns the entries [N, 4] of ankles and wrists out of those of all bodies [N, 14]."""
    return torch.stack([values[:, i] for i in ENDS], dim=1)


def anchor_position(scene: Scene, std: float) -> Tensor:
    """Returns exp(-d^2 / std^2) of the anchors' distance d."""
    return torch.exp(-scene.anchor_distance.square() / std**2)


def anchor_orientation(scene: Scene, std: float) -> Tensor:
    """Returns exp(-a^2 / std^2) of the angle a between the anchors."""
    return torch.exp(-scene.anchor_angle.square() / std**2)


def body_position(scene: Scene, std: float) -> Tensor:
    """Returns exp(-m / std^2) of the mean squared distance m over bodies."""
    return _kernel(scene.body_distance, std)


def body_orientation(scene: Scene, std: float) -> Tensor:
    """Returns the same of the bodies' angles."""
    return _kernel(scene.body_angle, std)


def body_linear_velocity(scene: Scene, std: float) -> Tensor:
    """Returns the same of the bodies' linear velocities, in the world frame and not re-anchored."""
    return _kernel(scene.body_lin_vel, std)


def body_angular_velocity(scene: Scene, std: float) -> Tensor:
    """Returns the same of the bodies' angular velocities."""
    return _kernel(scene.body_ang_vel, std)


def action_rate(scene: Scene) -> Tensor:
    """Returns the squared change of the action, summed over joints."""
    return (scene.action - scene.last_action).square().sum(dim=1)


def joint_limits_squared(scene: Scene, lower: Tensor, upper: Tensor) -> Tensor:
    """Returns the squared excess of the joints over limits [J], summed."""
    return _excess(scene, lower, upper).square().sum(dim=1)


def joint_limits(scene: Scene, lower: Tensor, upper: Tensor) -> Tensor:
    """Returns the excess of the joints over limits [J], summed."""
    return _excess(scene, lower, upper).sum(dim=1)


def low_bodies(scene: Scene, height: float) -> Tensor:
    """Counts the bodies other than ankles and wrists that are lower than a height."""
    low = scene.body_height < height
    return (low.sum(dim=1) - ends(low).sum(dim=1)).float()


def touching_bodies(scene: Scene, force: float) -> Tensor:
    """Counts the bodies of `contact_force` that something pushes harder than a force."""
    return (scene.contact_force > force).sum(dim=1).float()


def errors(scene: Scene) -> dict[str, Tensor]:
    """Returns the errors of the records, [N] each: distances, angles and speeds, over bodies as means."""
    anchors = (scene.body_lin_vel[:, ANCHOR], scene.body_ang_vel[:, ANCHOR])
    bodies = (scene.body_distance, scene.body_angle, scene.body_lin_vel, scene.body_ang_vel)
    values = (
        scene.anchor_distance,
        scene.anchor_angle,
        *anchors,
        *(error.mean(dim=1) for error in bodies),
        scene.joint_pos_error,
        scene.joint_vel_error,
        *scene.body_distance.unbind(dim=1),
    )
    return dict(zip(ERRORS, values, strict=True))


def _kernel(error: Tensor, std: float) -> Tensor:
    return torch.exp(-error.square().mean(dim=1) / std**2)


def _excess(scene: Scene, lower: Tensor, upper: Tensor) -> Tensor:
    return (lower - scene.joint_pos).clamp_min(0.0) + (scene.joint_pos - upper).clamp_min(0.0)


def _length(v: Tensor) -> Tensor:
    return torch.linalg.vector_norm(v, dim=-1)


def _gravity(quat: Tensor) -> Tensor:
    """Returns the vertical component [N] of gravity's direction in the frame: -1 upright, 1 upside down."""
    return 2.0 * (quat[:, 1].square() + quat[:, 2].square()) - 1.0
