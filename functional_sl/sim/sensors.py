"""Readings of ideal sensors on a robot, computed from the poses and velocities of its bodies.

All take the robot's facts, a state of N worlds and the name of a site.
"""

from __future__ import annotations

import torch
from torch import Tensor

from functional_sl.sim import rotation
from functional_sl.sim.contract import RobotModel, SimState


def position(model: RobotModel, state: SimState, site: str) -> Tensor:
    """Returns the site's position [N, 3] in the world frame."""
    found = model.site(site)
    return state.body_pos[:, found.body] + rotation.rotate(state.body_quat[:, found.body], found.pos)


def orientation(model: RobotModel, state: SimState, site: str) -> Tensor:
    """Returns the site's orientation [N, 4], from the site frame to the world frame."""
    found = model.site(site)
    return rotation.multiply(state.body_quat[:, found.body], found.quat.expand(state.qpos.shape[0], 4))


def velocity(model: RobotModel, state: SimState, site: str) -> Tensor:
    """Returns the site's linear velocity [N, 3] in the world frame."""
    found = model.site(site)
    arm = rotation.rotate(state.body_quat[:, found.body], found.pos)
    return state.body_lin_vel[:, found.body] + torch.linalg.cross(state.body_ang_vel[:, found.body], arm)


def velocimeter(model: RobotModel, state: SimState, site: str) -> Tensor:
    """Returns the site's linear velocity [N, 3] in the site's own frame."""
    return rotation.rotate_inverse(orientation(model, state, site), velocity(model, state, site))


def gyro(model: RobotModel, state: SimState, site: str) -> Tensor:
    """Returns the angular velocity [N, 3] in the site's own frame."""
    spin = state.body_ang_vel[:, model.site(site).body]
    return rotation.rotate_inverse(orientation(model, state, site), spin)


def projected_gravity(model: RobotModel, state: SimState, site: str) -> Tensor:
    """Returns the direction of gravity [N, 3] in the site's own frame ((0, 0, -1) when upright)."""
    return -rotation.matrix(orientation(model, state, site))[..., 2, :]
