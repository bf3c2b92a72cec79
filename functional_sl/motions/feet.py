"""The soles of a robot: where its feet can press on the floor."""

from __future__ import annotations

from typing import NamedTuple

import mujoco
import numpy as np
from numpy.typing import NDArray

from functional_sl.sim.robots.robot import Robot

Array = NDArray[np.float64]
FRAMES = ("left_foot", "right_foot")


class Soles(NamedTuple):
    """The points of both feet that can meet the floor, in the frames of their bodies."""

    bodies: tuple[str, ...]  # left, right
    points: tuple[Array, ...]  # [P, 3] a foot: centres of spheres that enclose the shapes' ends
    radii: tuple[Array, ...]  # [P]

    @property
    def height(self) -> float:
        """Height of a foot body's origin over the floor that it stands on."""
        return float(max((r - p[:, 2]).max() for p, r in zip(self.points, self.radii, strict=True)))

    @property
    def centre(self) -> Array:
        """Middle [2] of the left sole in its body's frame."""
        low = self.points[0][:, 2] - self.radii[0]
        lowest = self.points[0][low < low.min() + 1e-3, :2]
        return (lowest.min(0) + lowest.max(0)) / 2


def soles(robot: Robot, model: mujoco.MjModel) -> Soles:
    """Reads the soles from the spheres, capsules and boxes of the bodies that carry `FRAMES`.

    A capsule on a floor touches it under its two ends, so these bound the support and not its round side.

    Raises:
      ValueError: if a foot has none of these shapes.
    """
    bodies = tuple(robot.frames[name].body for name in FRAMES)
    found = [_points(model, body) for body in bodies]
    return Soles(bodies, tuple(points for points, _ in found), tuple(radii for _, radii in found))


def _points(model: mujoco.MjModel, body: str) -> tuple[Array, Array]:
    points, radii = [], []
    for geom in np.flatnonzero(model.geom_bodyid == model.body(body).id):
        if not (model.geom_contype[geom] or model.geom_conaffinity[geom]):
            continue
        offsets, radius = _ends(model.geom_type[geom], model.geom_size[geom])
        turn = np.zeros(9)
        mujoco.mju_quat2Mat(turn, model.geom_quat[geom])
        points.append(model.geom_pos[geom] + offsets @ turn.reshape(3, 3).T)
        radii.append(np.full(len(offsets), radius))
    points = [p for p in points if len(p)]
    if not points:
        raise ValueError(f"{body} has no sphere, capsule or box for contact, so its sole is unknown")
    return np.concatenate(points), np.concatenate(radii)


def _ends(kind: int, size: Array) -> tuple[Array, float]:
    """Returns the ends of a shape in its own frame and the radius about them."""
    shapes = mujoco.mjtGeom
    if kind == shapes.mjGEOM_SPHERE:
        return np.zeros((1, 3)), size[0]
    if kind == shapes.mjGEOM_CAPSULE:
        return np.array([[0, 0, -size[1]], [0, 0, size[1]]]), size[0]
    if kind == shapes.mjGEOM_BOX:
        corners = np.stack(np.meshgrid(*[(-1, 1)] * 3), axis=-1).reshape(-1, 3)
        return corners * size, 0.0
    return np.zeros((0, 3)), 0.0
