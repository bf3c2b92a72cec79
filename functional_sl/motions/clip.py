"""A reference motion as positions over time; velocities and body poses are derived from them.

Positions alone are stored, so a clip never disagrees with itself, and the order in which a file lists the bodies
cannot matter.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from functional_sl import sim
from functional_sl.sim import rotation

if TYPE_CHECKING:
    from functional_sl.sim.robots.robot import Robot

BASE = 7  # position and quaternion of the floating base


class MotionClip(NamedTuple):
    """A motion of one robot; `make` checks it.

    Attributes:
      qpos: base position, base quaternion (w, x, y, z), then one angle a joint in the order of the robot's joints.
      fps: frames a second.
      name: of the clip.
    """

    qpos: Tensor  # [T, 7 + J] float32
    fps: float
    name: str

    @property
    def seconds(self) -> float:
        """Time from the first frame to the last."""
        return (len(self.qpos) - 1) / self.fps

    @property
    def joint_pos(self) -> Tensor:
        """Joint angles [T, J], a view of `qpos`."""
        return self.qpos[:, BASE:]


class Kinematics(NamedTuple):
    """What follows from a clip; conventions and body order are those of `SimState`."""

    qvel: Tensor  # [T, 6 + J] float32
    body_pos: Tensor  # [T, B, 3] float32
    body_quat: Tensor  # [T, B, 4] float32
    body_lin_vel: Tensor  # [T, B, 3] float32
    body_ang_vel: Tensor  # [T, B, 3] float32


def make(qpos: Tensor, fps: float, name: str, joints: int) -> MotionClip:
    """Returns a checked clip with unit quaternions.

    Args:
      qpos: [T, 7 + joints], of any floating dtype.
      fps: frames a second.
      name: of the clip; errors name it.
      joints: how many the robot has.

    Raises:
      ValueError: for fewer than two frames, another number of joints, values that are not finite, quaternions that
        are not of unit length, or a frame rate that is not above 0.
    """
    if not 0 < fps < float("inf"):
        raise ValueError(f"motion {name}: fps is {fps}; give the frame rate of the recording, such as fps=30")
    if qpos.ndim != 2 or qpos.shape[1] != BASE + joints:
        raise ValueError(
            f"motion {name}: positions have the shape {tuple(qpos.shape)}; the robot takes [frames, {BASE + joints}]: "
            f"base position 3, base quaternion 4, {joints} joint angles"
        )
    if len(qpos) < 2:
        raise ValueError(f"motion {name}: {len(qpos)} frame; velocities need at least 2")
    qpos = qpos.double()
    broken = (~qpos.isfinite()).nonzero()
    if len(broken):
        frame, column = broken[0].tolist()
        raise ValueError(
            f"motion {name}: frame {frame}, column {column} is {qpos[frame, column].item()}; "
            "cut these frames out or repair them"
        )
    length = torch.linalg.vector_norm(qpos[:, 3:BASE], dim=1)
    if ((length - 1).abs() > 0.01).any():
        frame = int((length - 1).abs().argmax())
        raise ValueError(
            f"motion {name}: the base quaternion of frame {frame} has length {length[frame].item():.3f} instead of 1; "
            "check the order of the columns"
        )
    qpos = torch.cat((qpos[:, :3], qpos[:, 3:BASE] / length.unsqueeze(1), qpos[:, BASE:]), dim=1)
    return MotionClip(qpos.float(), float(fps), name)


def velocity(qpos: Tensor, fps: float) -> Tensor:
    """Returns `qvel` [T, 6 + J] of positions [T, 7 + J] by differences of second order, at the ends too.

    The velocity of a frame is the mean over the intervals before and after it; at the ends it is extrapolated from the
    two nearest intervals. The angular velocity of the base is in its own frame.
    """
    before, after = qpos[:-1], qpos[1:]
    turned = rotation.multiply(rotation.conjugate(before[:, 3:BASE]), after[:, 3:BASE])
    moved = (after[:, :3] - before[:, :3], rotation.to_vector(turned), after[:, BASE:] - before[:, BASE:])
    between = fps * torch.cat(moved, dim=1)
    if len(between) == 1:
        return between.expand(2, -1).clone()
    first = 1.5 * between[:1] - 0.5 * between[1:2]
    last = 1.5 * between[-1:] - 0.5 * between[-2:-1]
    return torch.cat((first, (between[:-1] + between[1:]) / 2, last))


def kinematics(clip: MotionClip, robot: Robot) -> Kinematics:
    """Derives velocities by finite differences, and poses and velocities of all bodies from them.

    A simulator that is reset to `qpos` and `qvel` of a frame shows exactly these bodies.

    Raises:
      ValueError: if the clip has another number of joints than the robot.
    """
    make(clip.qpos, clip.fps, clip.name, len(robot.joint_names))
    qvel = velocity(clip.qpos.double(), clip.fps).float()
    simulator = sim.make(robot, threads=1)
    every = torch.ones(len(qvel), dtype=torch.bool)
    state = simulator.reset(simulator.init(len(qvel)), every, clip.qpos, qvel)
    simulator.close()
    return Kinematics(qvel, state.body_pos, state.body_quat, state.body_lin_vel, state.body_ang_vel)


def resample(clip: MotionClip, fps: float) -> MotionClip:
    """Returns the clip at another frame rate, from its first frame on.

    Positions and angles are interpolated linearly, the base's orientation along the shortest arc.
    """
    if math.isclose(fps, clip.fps):
        return clip._replace(fps=fps)
    qpos = clip.qpos.double()
    # A last frame that falls on the end of the clip but for rounding is kept.
    count = int((len(qpos) - 1) * fps / clip.fps + 1e-6) + 1
    where = (torch.arange(count, dtype=torch.float64) * clip.fps / fps).clamp_max(len(qpos) - 1)
    before = where.floor().long().clamp_max(len(qpos) - 2)
    part = (where - before).unsqueeze(1)
    a, b = qpos[before], qpos[before + 1]
    arc = rotation.to_vector(rotation.multiply(rotation.conjugate(a[:, 3:BASE]), b[:, 3:BASE]))
    turned = rotation.multiply(a[:, 3:BASE], rotation.from_vector(part * arc))
    mixed = torch.lerp(a, b, part)
    qpos = torch.cat((mixed[:, :3], turned, mixed[:, BASE:]), dim=1)
    return make(qpos, fps, clip.name, qpos.shape[1] - BASE)
