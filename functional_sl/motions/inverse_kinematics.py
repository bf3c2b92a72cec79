"""Joint angles that put the centre of mass, the feet and the pelvis where a plan wants them.

Damped least squares over all coordinates (Wampler, 1986) with the Jacobians of MuJoCo, frame by frame from the
solution of the frame before.
"""

from __future__ import annotations

import mujoco
import numpy as np
from numpy.typing import NDArray

from functional_sl.motions.planner import Plan

Array = NDArray[np.float64]

_DAMPING = 1e-6
_PULL = 0.1
_ITERATIONS = 30
_TOLERANCE = 1e-6
_LIMIT_MARGIN = 0.02  # rad


def solve(
    model: mujoco.MjModel, feet: tuple[str, ...], base: str, plan: Plan, com: Array, start: Array
) -> tuple[Array, Array]:
    """Solves the frames of a plan.

    Args:
      model: the robot, whose first joint is free and all others hinges.
      feet: names of the foot bodies, left and right.
      base: name of the body with the free joint.
      plan: targets of T frames.
      com: path [T, 2] of the centre of mass.
      start: qpos from which the first frame is sought.

    Returns:
      qpos [T, nq], and the largest distance [T] of a foot or of the centre of mass from its target in metres.
    """
    data = mujoco.MjData(model)
    bodies = [model.body(name).id for name in (*feet, base)]
    # The tasks determine the legs; the posture draws all other joints.
    pull = np.where(_carries(model, bodies[:2]), 0.0, _PULL**2)
    limits = np.clip(_LIMIT_MARGIN, None, np.ptp(model.jnt_range[1:], axis=1) / 2)
    low, high = model.jnt_range[1:, 0] + limits, model.jnt_range[1:, 1] - limits
    qpos, errors = np.empty((len(com), model.nq)), np.empty(len(com))
    current = start.copy()
    for i in range(len(com)):
        target = np.append(com[i], plan.com_height[i])
        places = plan.feet[i]
        turns = [*(_quat(yaw, 0.0) for yaw in plan.feet_yaw[i]), _quat(plan.feet_yaw[i].mean(), plan.lean[i])]
        for _ in range(_ITERATIONS):
            task, jacobian = _tasks(model, data, bodies, current, target, places, turns)
            step = _step(jacobian, task, pull, plan.posture[i] - current[7:])
            mujoco.mj_integratePos(model, current, step, 1.0)
            current[7:] = np.clip(current[7:], low, high)
            if np.abs(step).max() < _TOLERANCE:
                break
        task, _ = _tasks(model, data, bodies, current, target, places, turns)
        errors[i] = np.linalg.norm(task[:9].reshape(3, 3), axis=1).max()
        qpos[i] = current
    return qpos, errors


def _tasks(
    model: mujoco.MjModel,
    data: mujoco.MjData,
    bodies: list[int],
    qpos: Array,
    com: Array,
    places: Array,
    turns: list[Array],
) -> tuple[Array, Array]:
    """Returns the errors [18] and their Jacobian [18, nv].

    Rows: centre of mass, place of the left and the right foot, turn of the left foot, the right foot and the base.
    """
    data.qpos[:] = qpos
    mujoco.mj_kinematics(model, data)
    mujoco.mj_comPos(model, data)
    jacobian, error = np.zeros((18, model.nv)), np.zeros(18)
    error[:3] = com - data.subtree_com[bodies[-1]]
    mujoco.mj_jacSubtreeCom(model, data, jacobian[:3], bodies[-1])
    for k, (body, turn) in enumerate(zip(bodies, turns, strict=True)):
        place = slice(3 + 3 * k, 6 + 3 * k)
        angle = slice(9 + 3 * k, 12 + 3 * k)
        if k < 2:
            error[place] = places[k] - data.xpos[body]
            mujoco.mj_jacBody(model, data, jacobian[place], jacobian[angle], body)
        else:
            mujoco.mj_jacBody(model, data, None, jacobian[angle], body)
        error[angle] = _turn_to(data.xquat[body], turn)
    return error, jacobian


def _carries(model: mujoco.MjModel, feet: list[int]) -> Array:
    """Returns which hinges [J] lie between the base and a foot."""
    found = np.zeros(model.njnt, dtype=bool)
    for body in feet:
        while body:
            found |= model.jnt_bodyid == body
            body = model.body_parentid[body]
    return found[1:]


def _step(jacobian: Array, task: Array, pull: Array, posture: Array) -> Array:
    weight = np.append(np.zeros(6), pull)
    normal = jacobian.T @ jacobian + np.diag(weight + _DAMPING)
    gradient = jacobian.T @ task
    gradient[6:] += pull * posture
    return np.linalg.solve(normal, gradient)


def _turn_to(found: Array, wanted: Array) -> Array:
    """Returns the rotation vector, in the world frame, that takes one orientation into the other."""
    back, turn, vector = np.zeros(4), np.zeros(4), np.zeros(3)
    mujoco.mju_negQuat(back, found)
    mujoco.mju_mulQuat(turn, wanted, back)
    mujoco.mju_quat2Vel(vector, turn, 1.0)
    return vector


def _quat(yaw: float, pitch: float) -> Array:
    """Returns the rotation by `pitch` about y, then by `yaw` about z."""
    cy, sy, cp, sp = np.cos(yaw / 2), np.sin(yaw / 2), np.cos(pitch / 2), np.sin(pitch / 2)
    return np.array([cy * cp, -sy * sp, cy * sp, sy * cp])
