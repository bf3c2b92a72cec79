"""Many clips as one set of tensors, from which a tracking task reads frames by index."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from functional_sl import tree
from functional_sl.motions import clip as clips
from functional_sl.motions.clip import MotionClip

if TYPE_CHECKING:
    from functional_sl.sim.robots.robot import Robot


class MotionLibrary(NamedTuple):
    """The frames [F] of C clips, one clip after the other, at one frame rate.

    Bodies [B] are all of `RobotModel.body_names` in that order. Conventions are those of `SimState`: quaternions
    (w, x, y, z); body velocities at the origin of the body frame and in the world frame; in `qvel` the base's angular
    velocity in its own frame.

    Attributes:
      joint_pos: joint angles.
      joint_vel: joint velocities.
      body_pos: origins of the body frames.
      body_quat: orientations of the bodies.
      body_lin_vel: linear velocities of the bodies.
      body_ang_vel: angular velocities of the bodies.
      qpos: base position, base quaternion and joint angles.
      qvel: base velocities and joint velocities.
      clip_start: first frame of each clip.
      clip_end: frame behind the last of each clip.
    """

    joint_pos: Tensor  # [F, J] float32
    joint_vel: Tensor  # [F, J] float32
    body_pos: Tensor  # [F, B, 3] float32
    body_quat: Tensor  # [F, B, 4] float32
    body_lin_vel: Tensor  # [F, B, 3] float32
    body_ang_vel: Tensor  # [F, B, 3] float32
    qpos: Tensor  # [F, 7 + J] float32
    qvel: Tensor  # [F, 6 + J] float32
    clip_start: Tensor  # [C] int64
    clip_end: Tensor  # [C] int64


def build(motions: Sequence[MotionClip], robot: Robot, fps: float, device: torch.device | str = "cpu") -> MotionLibrary:
    """Resamples clips to one frame rate, derives their velocities and body poses, and joins them.

    Args:
      motions: clip i of the library is the i-th.
      robot: whose motions these are.
      fps: the control rate.
      device: of the tensors.

    Returns:
      Contiguous tensors that share no memory.

    Raises:
      ValueError: if there is no clip, or one is not of this robot or becomes shorter than two frames.
    """
    if not motions:
        raise ValueError("a motion library needs at least one clip")
    motions = [clips.resample(motion, fps) for motion in motions]
    found = [clips.kinematics(motion, robot) for motion in motions]
    joined = clips.Kinematics(*(torch.cat(leaves) for leaves in zip(*found, strict=True)))
    qpos = torch.cat([motion.qpos for motion in motions])
    end = torch.tensor([len(motion.qpos) for motion in motions]).cumsum(0)
    library = MotionLibrary(
        joint_pos=qpos[:, clips.BASE :],
        joint_vel=joined.qvel[:, clips.BASE - 1 :],
        body_pos=joined.body_pos,
        body_quat=joined.body_quat,
        body_lin_vel=joined.body_lin_vel,
        body_ang_vel=joined.body_ang_vel,
        qpos=qpos,
        qvel=joined.qvel,
        clip_start=torch.cat((end.new_zeros(1), end[:-1])),
        clip_end=end,
    )
    return tree.to(tree.clone(library), device)
