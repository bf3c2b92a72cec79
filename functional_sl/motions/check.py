"""Whether a robot could carry out a clip: balance, limits and speeds.

The zero-moment point is where the floor's force would have to act. It follows from the wrench on the floating base
that inverse dynamics without contacts asks for. If it lies outside the convex hull of the planted soles, the robot
tips over however strong its motors are.
"""

from __future__ import annotations

from typing import NamedTuple

import mujoco
import numpy as np
import torch
from numpy.typing import NDArray

from functional_sl.motions import clip as clips
from functional_sl.motions import feet
from functional_sl.motions.clip import MotionClip
from functional_sl.motions.feet import Soles
from functional_sl.sim.robots import robot as robots
from functional_sl.sim.robots.robot import Robot

Array = NDArray[np.float64]


class Report(NamedTuple):
    """What `check` found.

    Attributes:
      zmp: zero-moment point on the floor, m; NaN where the floor would have to pull or give nothing.
      support: corners [K, 2] of the convex hull of the planted soles, one a frame.
      margin: distance of the zero-moment point from the edge of the support, below 0 outside; -inf where there is
        support but no such point; NaN where no foot is on the floor.
      force: vertical force that the floor would have to give, N.
      outside: share of the frames with support whose `margin` is below 0.
      airborne: share of the frames without support.
      depth: how far a sole goes below the floor at most, m.
      speed: largest joint speed, rad/s.
      excess: how far a joint goes beyond its range at most, rad; below 0 within.
    """

    zmp: Array  # [T, 2]
    support: tuple[Array, ...]  # T
    margin: Array  # [T]
    force: Array  # [T]
    outside: float
    airborne: float
    depth: float
    speed: float
    excess: float


def check(clip: MotionClip, robot: Robot, contact_height: float = 0.003) -> Report:
    """Checks a clip against the dynamics of a robot on a level floor at height 0.

    Args:
      clip: the motion.
      robot: who shall do it.
      contact_height: a point of a sole below this height, m, counts as planted. Captured motions need some 0.02.

    Raises:
      ValueError: if the clip has another number of joints, or the robot's feet have no shapes that are understood.
    """
    clips.make(clip.qpos, clip.fps, clip.name, len(robot.joint_names))
    model = robots.compiled(robot)
    soles = feet.soles(robot, model)
    qpos = clip.qpos.double()
    qvel, qacc = derivatives(qpos, clip.fps)
    zmp, force = zero_moment_point(model, qpos.numpy(), qvel, qacc)
    support, depth = _support(model, soles, qpos.numpy(), contact_height)
    margin = np.array([inside(point, corners) for point, corners in zip(zmp, support, strict=True)])
    supported = ~np.isnan(margin)
    joints = qpos[:, clips.BASE :].numpy()
    low, high = model.jnt_range[1:].T
    return Report(
        zmp,
        support,
        margin,
        force,
        outside=float((margin[supported] < 0).mean()) if supported.any() else 0.0,
        airborne=float(1 - supported.mean()),
        depth=depth,
        speed=float(np.abs(qvel[:, clips.BASE - 1 :]).max()),
        excess=float(np.maximum(low - joints, joints - high).max()),
    )


def derivatives(qpos: torch.Tensor, fps: float) -> tuple[Array, Array]:
    """Returns velocities and accelerations [T, 6 + J]; those of the first and last frame are their neighbours'."""
    between = torch.cat([clips.velocity(qpos[i : i + 2], fps)[:1] for i in range(len(qpos) - 1)])
    acceleration = fps * torch.diff(between, dim=0)
    if len(acceleration) == 0:
        acceleration = torch.zeros_like(between)
    acceleration = torch.cat((acceleration[:1], acceleration, acceleration[-1:]))
    return clips.velocity(qpos, fps).numpy(), acceleration[: len(qpos)].numpy()


def zero_moment_point(model: mujoco.MjModel, qpos: Array, qvel: Array, qacc: Array) -> tuple[Array, Array]:
    """Returns the zero-moment points [T, 2] on the floor and the vertical forces [T] by inverse dynamics."""
    data = mujoco.MjData(model)
    flags = model.opt.disableflags
    model.opt.disableflags |= mujoco.mjtDisableBit.mjDSBL_CONSTRAINT
    force, torque = np.empty((len(qpos), 3)), np.empty((len(qpos), 3))
    for i in range(len(qpos)):
        data.qpos[:], data.qvel[:], data.qacc[:] = qpos[i], qvel[i], qacc[i]
        mujoco.mj_inverse(model, data)
        force[i] = data.qfrc_inverse[:3]
        # MuJoCo gives the torque of a free joint in the frame of its body.
        torque[i] = data.xmat[1].reshape(3, 3) @ data.qfrc_inverse[3:6]
    model.opt.disableflags = flags
    x, y, z = qpos[:, :3].T
    pressing = np.where(force[:, 2] > 0, force[:, 2], np.nan)
    along = x - (torque[:, 1] + z * force[:, 0]) / pressing
    across = y + (torque[:, 0] - z * force[:, 1]) / pressing
    return np.stack((along, across), axis=1), force[:, 2]


def _support(model: mujoco.MjModel, soles: Soles, qpos: Array, height: float) -> tuple[tuple[Array, ...], float]:
    """Returns the hull of the soles' points on the floor in each frame, and how deep they go below it."""
    data = mujoco.MjData(model)
    bodies = [model.body(name).id for name in soles.bodies]
    radii = np.concatenate(soles.radii)
    found, deepest = [], -np.inf
    for frame in qpos:
        data.qpos[:] = frame
        mujoco.mj_kinematics(model, data)
        turned = [data.xpos[b] + p @ data.xmat[b].reshape(3, 3).T for b, p in zip(bodies, soles.points, strict=True)]
        points = np.concatenate(turned)
        low = points[:, 2] - radii
        deepest = max(deepest, -low.min())
        found.append(hull(points[low < height, :2]))
    return tuple(found), float(deepest)


def hull(points: Array) -> Array:
    """Returns the corners of the convex hull of points [P, 2], counter-clockwise (Andrew's monotone chain)."""
    points = np.unique(points, axis=0)
    if len(points) < 3:
        return points
    return np.array(_chain(points)[:-1] + _chain(points[::-1])[:-1])


def _chain(points: Array) -> list[Array]:
    kept: list[Array] = []
    for point in points:
        while len(kept) > 1 and _cross(kept[-1] - kept[-2], point - kept[-2]) <= 0:
            kept.pop()
        kept.append(point)
    return kept


def _cross(a: Array, b: Array) -> float:
    return a[0] * b[1] - a[1] * b[0]


def inside(point: Array, corners: Array) -> float:
    """Returns how far a point [2] lies within a convex polygon, below 0 outside.

    A polygon of one or two corners has no inside: the distance from it counts as outside. Without a polygon the result
    is NaN, with a polygon but a point that is NaN it is -inf.
    """
    if len(corners) == 0:
        return np.nan
    if np.isnan(point).any():
        return -np.inf
    if len(corners) < 3:
        return -_distance(point, corners[0], corners[-1])
    edges = [(corners[i - 1], corners[i]) for i in range(len(corners))]
    nearest = min(_distance(point, a, b) for a, b in edges)
    within = all(_cross(b - a, point - a) >= 0 for a, b in edges)
    return nearest if within else -nearest


def _distance(point: Array, a: Array, b: Array) -> float:
    """Returns the distance of a point from the segment between a and b."""
    along = b - a
    length = along @ along
    share = np.clip((point - a) @ along / length, 0, 1) if length else 0.0
    return float(np.linalg.norm(point - a - share * along))
