"""Reference motions without any recording: squat, stepping in place, walking, waving.

Feet and zero-moment point are planned, the centre of mass follows from the pendulum, the joint angles from inverse
kinematics. The whole body's zero-moment point then differs from the pendulum's, for limbs swing and bodies turn; the
plan is corrected by this difference and solved again.
"""

from __future__ import annotations

import difflib
from typing import NamedTuple

import mujoco
import numpy as np
import torch
from numpy.typing import NDArray

from functional_sl.motions import check, feet, inverse_kinematics, planner
from functional_sl.motions import clip as clips
from functional_sl.motions.clip import MotionClip
from functional_sl.motions.gaits import GAITS
from functional_sl.motions.planner import Plan, Stance
from functional_sl.sim.robots import g1
from functional_sl.sim.robots import robot as robots
from functional_sl.sim.robots.robot import Robot

Array = NDArray[np.float64]
NAMES = tuple(GAITS)

_CORRECTIONS = 2
# The correction is averaged over so many seconds: the differences of the clip are noisy, the robot's errors slow.
_WINDOW = 0.1
_CROUCH = 0.01  # m below standing: a knee with less to stretch turns more slowly


class Generated(NamedTuple):
    """A clip and how it came about."""

    clip: MotionClip
    plan: Plan
    com: Array  # [T, 2], path of the centre of mass
    error: Array  # [T], distance of feet and centre of mass from their targets, m


def generate(
    name: str, seed: int = 0, *, seconds: float = 8.0, fps: float = 50.0, robot: Robot | None = None
) -> MotionClip:
    """Returns a reference motion of the G1 that starts and ends standing.

    Args:
      name: one of `NAMES`.
      seed: 0 for the usual style; other seeds draw another style, and the side that begins.
      seconds: length; the clip has `seconds * fps` frames.
      fps: frames a second.
      robot: a G1; the default one if left out.

    Raises:
      ValueError: for an unknown name, or a clip too short for two steps.
    """
    return trace(name, seed, seconds=seconds, fps=fps, robot=robot).clip


def trace(
    name: str, seed: int = 0, *, seconds: float = 8.0, fps: float = 50.0, robot: Robot | None = None
) -> Generated:
    """Generates as `generate` does and also returns the plan and the errors."""
    if name not in GAITS:
        near = difflib.get_close_matches(name, NAMES, 1, 0.0)[0]
        raise ValueError(f"no motion {name!r} can be generated; the nearest name is {near!r} of {', '.join(NAMES)}")
    robot = g1.robot() if robot is None else robot
    model = robots.compiled(robot)
    stance = standing(robot, model)
    t = np.arange(round(seconds * fps)) / fps
    mirrored, style = drawn(name, seed)
    plan = GAITS[name].plan(stance, t, mirrored, **style)
    qpos, com, error = _realised(robot, model, plan, fps)
    title = name if seed == 0 else f"{name}:{seed}"
    return Generated(clips.make(torch.from_numpy(qpos), fps, title, len(robot.joint_names)), plan, com, error)


def drawn(name: str, seed: int) -> tuple[bool, dict[str, float]]:
    """Returns whether a motion is mirrored, and its style; seed 0 gives the usual one."""
    style = GAITS[name].style
    if seed == 0:
        return False, {key: r.usual for key, r in style.items()}
    random = np.random.default_rng([seed, NAMES.index(name)])
    return bool(random.integers(2)), {key: random.uniform(r.low, r.high) for key, r in style.items()}


def standing(robot: Robot, model: mujoco.MjModel) -> Stance:
    """Returns the robot's default pose with level soles on the floor, the middle between them over the origin."""
    soles, data = feet.soles(robot, model), mujoco.MjData(model)
    data.qpos[:] = robot.default_qpos
    mujoco.mj_kinematics(model, data)
    mujoco.mj_comPos(model, data)
    left, right = (data.body(name).xpos for name in soles.bodies)
    apart = (left[1] - right[1]) / 2
    return Stance(
        feet=np.array([(*(-soles.centre + (0, y)), soles.height) for y in (apart, -apart)]),
        sole=soles.centre,
        com_height=data.subtree_com[1][2] + soles.height - (left[2] + right[2]) / 2 - _CROUCH,
        posture=np.array(robot.default_qpos[clips.BASE :]),
        joints={name: i for i, name in enumerate(robot.joint_names)},
    )


def _realised(robot: Robot, model: mujoco.MjModel, plan: Plan, fps: float) -> tuple[Array, Array, Array]:
    """Returns qpos, the path of the centre of mass and the error of each frame."""
    soles = feet.soles(robot, model).bodies
    aim, start = plan.zmp, np.array(robot.default_qpos)
    for last in (False,) * _CORRECTIONS + (True,):
        com = planner.pendulum(aim, plan.com_height, fps)
        qpos, error = inverse_kinematics.solve(model, soles, robot.body_names[0], plan, com, start)
        if not last:
            derivatives = check.derivatives(torch.from_numpy(qpos), fps)
            found, _ = check.zero_moment_point(model, qpos, *derivatives)
            aim = aim + _averaged(plan.zmp - found, max(1, round(_WINDOW * fps)))
    return qpos, com, error


def _averaged(values: Array, window: int) -> Array:
    """Returns the running mean of [T, 2] over `window` frames, the ends held."""
    before = window // 2
    padded = np.pad(values, ((before, window - 1 - before), (0, 0)), mode="edge")
    kernel = np.full(window, 1 / window)
    return np.stack([np.convolve(column, kernel, mode="valid") for column in padded.T], axis=1)
