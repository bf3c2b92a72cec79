"""A robot drawn as its bodies' joined origins, without a renderer: for films of training runs on any machine."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from functional_sac.envs import drawing
from functional_sl.sim import sensors
from functional_sl.sim.contract import RobotModel, SimState

if TYPE_CHECKING:
    from functional_sl.sim.robots.robot import Robot

AZIMUTH, ELEVATION = np.radians(35.0), np.radians(15.0)
GHOST = (200, 214, 232)
FLOOR = (228, 229, 232)
TILE = 0.5  # m between two lines of the floor

_TOWARD = np.array([-np.cos(ELEVATION) * np.cos(AZIMUTH), -np.cos(ELEVATION) * np.sin(AZIMUTH), -np.sin(ELEVATION)])
_RIGHT = np.array([-np.sin(AZIMUTH), np.cos(AZIMUTH), 0.0])
_UP = np.cross(_RIGHT, _TOWARD)


def links(robot: Robot, model: RobotModel) -> list[tuple[int, int]]:
    """Returns pairs of places to be joined, as indices into `points`: bodies with their parents, tips with bodies."""
    names, ends = robot.body_names, tips(model)
    parents = [robot.spec.body(name).parent.name for name in names]
    pairs = [(names.index(parent), i) for i, parent in enumerate(parents) if parent in names]
    return pairs + [(model.site(end).body, len(names) + k) for k, end in enumerate(ends)]


def points(model: RobotModel, state: SimState, i: int) -> np.ndarray:
    """Returns the origins of the bodies of world i, then the sites at the tips of its limbs, [B + T, 3]."""
    one = SimState(*(leaf[i : i + 1] for leaf in state))
    ends = [sensors.position(model, one, tip) for tip in tips(model)]
    return torch.cat((one.body_pos[0], *ends)).cpu().numpy()


def draw(
    pairs: list[tuple[int, int]], places: np.ndarray, height: float, ghost: np.ndarray | None = None
) -> np.ndarray:
    """Returns a picture that follows the robot, uint8 [SIZE, SIZE, 3].

    Args:
      pairs: from `links`.
      places: from `points`, m; the first is the base.
      height: of the standing base, which sets the scale.
      ghost: origins of a reference's bodies [B, 3], drawn pale behind the robot.
    """
    centre = np.array([*places[0, :2], 0.8 * height])
    extent = 1.25 * height
    image = _floor(drawing.blank(), centre, extent)
    if ghost is not None:
        bodies = [pair for pair in pairs if max(pair) < len(ghost)]
        image = _skeleton(image, bodies, ghost - centre, extent, GHOST)
    return _skeleton(image, pairs, places - centre, extent, drawing.BLUE)


def tips(model: RobotModel) -> list[str]:
    """Returns the names of the sites at the tips of limbs."""
    return [name for name in model.sites if name.endswith(("foot", "palm"))]


def _skeleton(
    image: np.ndarray, pairs: list[tuple[int, int]], bodies: np.ndarray, extent: float, colour: drawing.Colour
) -> np.ndarray:
    depth = bodies @ _TOWARD
    for parent, child in sorted(pairs, key=lambda pair: -depth[list(pair)].sum()):
        image = drawing.capsule(image, _flat(bodies[parent]), _flat(bodies[child]), 0.03 * extent, colour, extent)
    return image


def _floor(image: np.ndarray, centre: np.ndarray, extent: float) -> np.ndarray:
    first = np.round(centre[:2] / TILE)
    for axis in (0, 1):
        for line in range(-3, 4):
            ends = []
            for far in (-3, 3):
                corner = np.zeros(3)
                corner[axis], corner[1 - axis] = TILE * (first[axis] + line), TILE * (first[1 - axis] + far)
                ends.append(_flat(corner - centre))
            image = drawing.capsule(image, *ends, 0.004 * extent, FLOOR, extent)
    return image


def _flat(point: np.ndarray) -> drawing.Point:
    return float(point @ _RIGHT), float(point @ _UP)
