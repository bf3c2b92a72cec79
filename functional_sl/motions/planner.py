"""Where the centre of mass must go so that the feet can carry the motion.

The robot is taken as a point mass on massless legs (linear inverted pendulum, Kajita et al., 2001): its zero-moment
point is p = c - z / (g + z'') c''. Given p(t), the path c(t) of the centre of mass is a boundary value problem.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
GRAVITY = 9.81


class Stance(NamedTuple):
    """The robot standing upright with both soles on the floor, facing along x."""

    feet: Array  # [2, 3], origins of the foot bodies, left and right
    sole: Array  # [2], middle of a sole relative to its body's origin
    com_height: float
    posture: Array  # [J]
    joints: dict[str, int]  # index by joint name

    @property
    def centre(self) -> Array:
        """Middle [2] between the soles."""
        return self.feet[:, :2].mean(axis=0) + self.sole


class Plan(NamedTuple):
    """What the inverse kinematics is to reach, frame by frame.

    Attributes:
      zmp: where the zero-moment point shall be.
      com_height: height of the centre of mass.
      feet: origins of the foot bodies, left and right.
      feet_yaw: headings of the feet, which stay level.
      lean: pitch of the pelvis; its heading is the mean of the feet's.
      posture: joint angles to which the joints that nothing else determines are drawn.
    """

    zmp: Array  # [T, 2]
    com_height: Array  # [T]
    feet: Array  # [T, 2, 3]
    feet_yaw: Array  # [T, 2]
    lean: Array  # [T]
    posture: Array  # [T, J]


def smooth(s: Array) -> Array:
    """Returns the step from 0 at s <= 0 to 1 at s >= 1 of least jerk: 10 s^3 - 15 s^4 + 6 s^5."""
    s = np.clip(s, 0.0, 1.0)
    return s**3 * (10 - 15 * s + 6 * s**2)


def bump(s: Array) -> Array:
    """Returns 64 s^3 (1 - s)^3: from 0 to 1 and back, at rest and without acceleration at both ends."""
    s = np.clip(s, 0.0, 1.0)
    return 64 * (s * (1 - s)) ** 3


def envelope(t: Array, ramp: float) -> Array:
    """Returns 1 that fades in from 0 over the first `ramp` seconds of the times `t` [T] and out over the last."""
    return smooth((t - t[0]) / ramp) * smooth((t[-1] - t) / ramp)


def standing(stance: Stance, t: Array) -> Plan:
    """Returns the plan of standing still at the times `t` [T]."""
    n = len(t)
    return Plan(
        zmp=np.tile(stance.centre, (n, 1)),
        com_height=np.full(n, stance.com_height),
        feet=np.tile(stance.feet, (n, 1, 1)),
        feet_yaw=np.zeros((n, 2)),
        lean=np.zeros(n),
        posture=np.tile(stance.posture, (n, 1)),
    )


class Timing(NamedTuple):
    """How a walk is laid out in time."""

    hold: float  # seconds of standing at both ends
    single: float  # seconds on one foot in a step
    double: float  # seconds on both feet after it


def stepping(stance: Stance, t: Array, timing: Timing, *, length: float, turn: float, lift: float, first: int) -> Plan:
    """Returns the plan of steps along an arc, with a last one that brings the feet together.

    Args:
      stance: where it starts.
      t: times [T].
      timing: of the steps; as many as fit are made.
      length: way of the body in a step; 0 steps in place.
      turn: angle by which a step turns.
      lift: height of the swinging foot.
      first: 0 to swing the left foot first, 1 the right one.

    Raises:
      ValueError: if there is no time for two steps.
    """
    count = int((t[-1] - 2 * timing.hold - timing.double) / (timing.single + timing.double) + 1e-9)
    if count < 2:
        raise ValueError(f"{t[-1]:.2f} s leave no time for two steps of {timing.single + timing.double:.2f} s")
    plan = standing(stance, t)
    middle, heading, start = stance.centre, 0.0, timing.hold
    feet, yaws, zmp = stance.feet.copy(), np.zeros(2), stance.centre
    for k in range(count):
        side = (first + k) % 2
        if k < count - 1:
            heading += turn
            middle = middle + length * np.array([np.cos(heading), np.sin(heading)])
        land = _foothold(stance, middle, heading, side)
        plan = _step(plan, t, start + timing.double, timing, side, land - feet[side], heading - yaws[side], lift)
        support = _sole(stance, feet[1 - side], yaws[1 - side])
        plan = _shift(plan, t, start, timing.double, support - zmp)
        zmp, feet[side], yaws[side] = support, land, heading
        start += timing.single + timing.double
    end = (_sole(stance, feet[0], yaws[0]) + _sole(stance, feet[1], yaws[1])) / 2
    return _shift(plan, t, start, timing.double, end - zmp)


def _step(plan: Plan, t: Array, start: float, timing: Timing, side: int, way: Array, turn: float, lift: float) -> Plan:
    s = (t - start) / timing.single
    feet, yaw = plan.feet.copy(), plan.feet_yaw.copy()
    feet[:, side] += smooth(s)[:, None] * way
    feet[:, side, 2] += lift * bump(s)
    yaw[:, side] += smooth(s) * turn
    return plan._replace(feet=feet, feet_yaw=yaw)


def _shift(plan: Plan, t: Array, start: float, seconds: float, way: Array) -> Plan:
    return plan._replace(zmp=plan.zmp + smooth((t - start) / seconds)[:, None] * way)


def _turned(yaw: float, v: Array) -> Array:
    return np.array([np.cos(yaw) * v[0] - np.sin(yaw) * v[1], np.sin(yaw) * v[0] + np.cos(yaw) * v[1]])


def _foothold(stance: Stance, middle: Array, heading: float, side: int) -> Array:
    offset = stance.feet[side, :2] - stance.centre
    return np.array([*(middle + _turned(heading, offset)), stance.feet[side, 2]])


def _sole(stance: Stance, foot: Array, yaw: float) -> Array:
    return foot[:2] + _turned(yaw, stance.sole)


def pendulum(zmp: Array, com_height: Array, fps: float) -> Array:
    """Solves c - z / (g + z'') c'' = p for the path of the centre of mass, at rest at both ends.

    Args:
      zmp: p, [T, 2].
      com_height: z, [T].
      fps: frames a second.

    Returns:
      c, [T, 2]: the solution of the tridiagonal system that second differences make of the equation.
    """
    z = com_height
    rising = np.gradient(np.gradient(z)) * fps**2
    a = z / (GRAVITY + rising) * fps**2
    lower, upper = -a.copy(), -a.copy()
    # At rest at the ends: the frame beyond mirrors the one within.
    upper[0], lower[-1] = -2 * a[0], -2 * a[-1]
    return _tridiagonal(lower, 1 + 2 * a, upper, zmp)


def _tridiagonal(lower: Array, diagonal: Array, upper: Array, right: Array) -> Array:
    """Solves by elimination (Thomas); the matrix is diagonally dominant, so no pivot is needed."""
    diagonal, right = diagonal.copy(), right.copy()
    for i in range(1, len(right)):
        factor = lower[i] / diagonal[i - 1]
        diagonal[i] -= factor * upper[i - 1]
        right[i] -= factor * right[i - 1]
    right[-1] /= diagonal[-1]
    for i in range(len(right) - 2, -1, -1):
        right[i] = (right[i] - upper[i] * right[i + 1]) / diagonal[i]
    return right
