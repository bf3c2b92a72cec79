"""The robots of `functional_sl.models.articulation` simulated in MuJoCo (extra `mujoco`).

MuJoCo writes quaternions wxyz and a free joint's velocity as the linear one of the body's origin in world axes, then
the angular one in the body's axes. What leaves this module has the layout of the project.
"""

from __future__ import annotations

import copy
import math
import os
from typing import Any

import numpy as np
import torch
from torch import Tensor

from functional_sl.models.articulation import Body, Robot
from functional_sl.models.nerd import conjugate, rotate, wrap
from functional_sl.sim import engine

_CHUNK = 512  # trajectories whose substeps are in memory at once


def require() -> Any:
    """Returns the module `mujoco` with its `rollout`.

    Raises:
      ImportError: in one line, if it is not installed or does not start.
    """
    return engine.mujoco("this robot's data come from MuJoCo", "rollout")


def version() -> str:
    """Returns the simulator's name and version."""
    return f"mujoco {require().__version__}"


def model(robot: Robot) -> Any:
    """Compiles a robot into an `MjModel`: no friction loss, a motor of gear 1 on every joint, gravity along -z."""
    mujoco = require()
    spec = mujoco.MjSpec()
    spec.compiler.degree = False
    spec.option.timestep = robot.frame_dt / robot.substeps
    spec.option.integrator = (
        mujoco.mjtIntegrator.mjINT_IMPLICITFAST if robot.floating else mujoco.mjtIntegrator.mjINT_EULER
    )
    if robot.ground:
        plane = {"type": mujoco.mjtGeom.mjGEOM_PLANE, "size": [0.0, 0.0, 1.0], "contype": 1, "conaffinity": 0}
        # Its own friction and stiffness count (priority), at three substeps of the slowest robot.
        spec.worldbody.add_geom(name="ground", priority=1, friction=[0.75, 0.005, 0.0001], solref=[0.01, 1.0], **plane)
    made: list[Any] = []
    for i, body in enumerate(robot.bodies):
        made.append(_add(mujoco, spec, spec.worldbody if body.parent < 0 else made[body.parent], body))
        if i == 0 and robot.floating:
            made[0].add_freejoint()
    for joint in robot.joints:
        motor = spec.add_actuator(name=joint.name, target=joint.name, trntype=mujoco.mjtTrn.mjTRN_JOINT)
        motor.set_to_motor()
    compiled = spec.compile()
    if robot.ground:
        # A plane that coincides with the world's frame would be read from there, whatever its own pose says.
        compiled.geom_sameframe[0] = mujoco.mjtSameFrame.mjSAMEFRAME_NONE
    return compiled


def simulate(robot: Robot, start: Tensor, actuation: Tensor, normal: Tensor, offset: Tensor) -> Tensor:
    """Returns the trajectories of a robot over its plane {x : normal . x = offset}.

    Args:
      robot: any.
      start: [N, S] float64.
      actuation: [N, T, J] N or N m, held over the substeps of each frame of time.
      normal: [N, 3]; unread without a ground.
      offset: [N] m.

    Returns:
      [N, T + 1, S] float64. A trajectory that MuJoCo gives up is NaN from there on.
    """
    mujoco = require()
    compiled = model(robot)
    workers = [mujoco.MjData(compiled) for _ in range(len(os.sched_getaffinity(0)))]
    models = [copy.copy(compiled) for _ in range(min(_CHUNK, len(start)))] if robot.ground else [compiled]
    initial, controls = _to_mujoco(robot, start), actuation.numpy()
    found = np.empty((len(start), actuation.shape[1] + 1, initial.shape[1] + 1))
    for i in range(0, len(start), _CHUNK):
        part = slice(i, i + _CHUNK)
        if robot.ground:
            for one, n, d in zip(models, normal[part].tolist(), offset[part].tolist(), strict=False):
                one.geom_quat[0], one.geom_pos[0] = _upright_to(n), np.array(n) * d
        state = np.concatenate([np.zeros((len(initial[part]), 1)), initial[part]], 1)  # the time in front
        steps, _ = mujoco.rollout.rollout(
            models[: len(state)] if robot.ground else compiled,
            workers,
            state,
            np.repeat(controls[part], robot.substeps, 1),
        )
        found[part, 0] = state
        found[part, 1:] = steps[:, robot.substeps - 1 :: robot.substeps]
    return _from_mujoco(robot, torch.from_numpy(_without_resets(found)))


def _add(mujoco: Any, spec: Any, parent: Any, body: Body) -> Any:
    made = parent.add_body(name=body.name, pos=body.position)
    if body.rod:
        made.explicitinertial = True
        made.mass, made.ipos, made.inertia = body.rod.mass, body.rod.centre, body.rod.inertia
    if body.joint:
        joint = body.joint
        kind = mujoco.mjtJoint.mjJNT_SLIDE if joint.kind == "slide" else mujoco.mjtJoint.mjJNT_HINGE
        limits = {"limited": 1, "range": joint.limits} if joint.limits else {"limited": 0}
        made.add_joint(
            name=joint.name, type=kind, axis=joint.axis, armature=joint.armature, damping=joint.damping, **limits
        )
    for geom in body.geoms:
        shape = {"size": [geom.radius, 0.0, 0.0], "mass": geom.mass, "contype": 0, "conaffinity": 1}
        if geom.end is None:
            made.add_geom(name=geom.name, type=mujoco.mjtGeom.mjGEOM_SPHERE, pos=geom.start, **shape)
        else:
            made.add_geom(name=geom.name, type=mujoco.mjtGeom.mjGEOM_CAPSULE, fromto=[*geom.start, *geom.end], **shape)
    return made


def _upright_to(normal: list[float]) -> np.ndarray:
    """Returns the quaternion wxyz that turns z onto a unit vector; not for straight down."""
    x, y, z = normal
    w = math.sqrt((1 + z) / 2)
    return np.array([w, -y / (2 * w), x / (2 * w), 0.0])


def _to_mujoco(robot: Robot, state: Tensor) -> np.ndarray:
    if not robot.floating:
        return state.numpy()
    joints = len(robot.joints)
    position, q, angles, angular, linear, rates = state.split([3, 4, joints, 3, 3, joints], -1)
    linear = linear - torch.linalg.cross(position, angular)
    angular = rotate(conjugate(q), angular)
    return torch.cat([position, q[:, 3:], q[:, :3], angles, linear, angular, rates], -1).numpy()


def _from_mujoco(robot: Robot, found: Tensor) -> Tensor:
    joints = len(robot.joints)
    if not robot.floating:
        angles, rates = found[..., 1:].split([joints, joints], -1)
        turning = torch.tensor([joint.continuous for joint in robot.joints])
        return torch.cat([torch.where(turning, wrap(angles), angles), rates], -1)
    position, q, angles, linear, angular, rates = found[..., 1:].split([3, 4, joints, 3, 3, joints], -1)
    q = torch.cat([q[..., 1:], q[..., :1]], -1)
    angular = rotate(q, angular)
    return torch.cat([position, q, angles, angular, linear + torch.linalg.cross(position, angular), rates], -1)


def _without_resets(found: np.ndarray) -> np.ndarray:
    """Marks what follows where MuJoCo found the state unstable and started it anew, which its clock shows."""
    lost = np.maximum.accumulate(np.diff(found[:, :, 0], axis=1) <= 0, axis=1)
    found[:, 1:][lost] = np.nan
    return found
