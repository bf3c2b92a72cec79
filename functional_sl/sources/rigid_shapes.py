"""Shapes of rigid bodies and clouds of points on their surfaces."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

KINDS = ("box", "sphere", "cylinder", "convex")


class Shape(NamedTuple):
    """One body's form."""

    kind: str
    size: np.ndarray  # [3] m: half sides, or radius and half height
    corners: np.ndarray  # [C, 3] m, points that every cloud holds; of a convex body all that defines it


def draw(u: np.ndarray, normal: np.ndarray) -> Shape:
    """Returns a random shape of 6 to 14 cm half its size.

    Args:
      u: [7 or more], of which 2 to 6 count: uniform on [0, 1).
      normal: [20 or more, 3], directions of the corners of a convex body.
    """
    kind = KINDS[int(4 * u[2])]
    size = 0.06 + 0.08 * u[3:6]
    corners = np.zeros((0, 3))
    if kind == "box":
        corners = size * (np.indices((2, 2, 2)).reshape(3, 8).T * 2 - 1)
    elif kind == "cylinder":
        angle = np.arange(8) * math.pi / 4
        rim = np.stack([size[0] * np.cos(angle), size[0] * np.sin(angle), 0 * angle], -1)
        corners = np.concatenate([rim + np.array([0, 0, z]) for z in (size[1], -size[1])])
    elif kind == "convex":
        # Points of an ellipsoid are all corners of their hull.
        directions = normal[: 8 + int(13 * u[6])]
        corners = 1.3 * size * directions / np.linalg.norm(directions, axis=-1, keepdims=True)
    return Shape(kind, size, corners)


def reach(shape: Shape) -> float:
    """Returns the greatest distance of a surface point from the origin of the body's axes."""
    if shape.kind == "sphere":
        return float(shape.size[0])
    return float(np.linalg.norm(shape.corners, axis=-1).max())


def cloud(shape: Shape, triangles: np.ndarray, count: int, spread: np.ndarray) -> np.ndarray:
    """Returns `count` points [count, 3] of the surface in body axes, corners first.

    Args:
      shape: of `draw`.
      triangles: [T, 3, 3] m, the hull of a convex body; unread for the others.
      count: at least as many as corners.
      spread: [count, 4] uniform on [0, 1), the places of points that are no corners.
    """
    if shape.kind == "sphere":
        # Fibonacci's spiral: evenly spread without randomness.
        i = np.arange(count) + 0.5
        z, turn = 1 - 2 * i / count, math.pi * (1 + math.sqrt(5)) * i
        ring = np.sqrt(1 - z * z)
        return shape.size[0] * np.stack([ring * np.cos(turn), ring * np.sin(turn), z], -1)
    corners = shape.corners
    missing = count - len(corners)
    fill = {"box": _on_box, "cylinder": _on_cylinder, "convex": _on_triangles}[shape.kind]
    return np.concatenate([corners, fill(shape.size, triangles, spread[:missing])])


def _on_box(half: np.ndarray, _: np.ndarray, u: np.ndarray) -> np.ndarray:
    areas = np.array([half[1] * half[2], half[0] * half[2], half[0] * half[1]])
    axis = np.searchsorted(np.cumsum(areas) / areas.sum(), u[:, 0]).clip(max=2)
    points = half * (2 * u[:, 1:] - 1)
    rows = np.arange(len(u))
    points[rows, axis] = half[axis] * np.sign(points[rows, axis] + 1e-12)
    return points


def _on_cylinder(size: np.ndarray, _: np.ndarray, u: np.ndarray) -> np.ndarray:
    radius, height = size[0], size[1]
    angle, wall = 2 * math.pi * u[:, 1], u[:, 0] < 2 * height / (2 * height + radius)
    distance = np.where(wall, radius, radius * np.sqrt(u[:, 2]))
    z = np.where(wall, height * (2 * u[:, 3] - 1), height * np.sign(u[:, 3] - 0.5 + 1e-12))
    return np.stack([distance * np.cos(angle), distance * np.sin(angle), z], -1)


def _on_triangles(_: np.ndarray, triangles: np.ndarray, u: np.ndarray) -> np.ndarray:
    a, b, c = triangles.transpose(1, 0, 2)
    areas = np.linalg.norm(np.cross(b - a, c - a), axis=-1)
    chosen = np.searchsorted(np.cumsum(areas) / areas.sum(), u[:, 0]).clip(max=len(areas) - 1)
    root, v = np.sqrt(u[:, 1:2]), u[:, 2:3]
    return a[chosen] * (1 - root) + b[chosen] * root * (1 - v) + c[chosen] * root * v
