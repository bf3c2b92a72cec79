"""The motions that can be generated: each is a plan over time, in a style of a few numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from functional_sl.motions import planner
from functional_sl.motions.planner import Plan, Stance, Timing

Array = NDArray[np.float64]


class Range(NamedTuple):
    """A number of a style: its usual value, and the bounds between which variations are drawn."""

    usual: float
    low: float
    high: float


class Gait(NamedTuple):
    """A motion: `plan(stance, t, mirrored, **style)`, where a mirrored one begins with, or uses, the other side."""

    plan: Callable[..., Plan]
    style: dict[str, Range]


def squat(
    stance: Stance, t: Array, mirrored: bool, *, depth: float, period: float, sway: float, swing: float, lean: float
) -> Plan:
    """Squats with arms that swing forward as the body sinks, and a slow sway from side to side."""
    plan, fade = planner.standing(stance, t), planner.envelope(t, 1.0)
    sink = fade * (1 - np.cos(2 * np.pi * t / period)) / 2
    side = -1.0 if mirrored else 1.0
    zmp = plan.zmp.copy()
    zmp[:, 1] += side * sway * fade * np.sin(np.pi * t / period)
    swung = _add(stance, plan.posture, dict.fromkeys(_both("shoulder_pitch"), -swing * sink))
    return plan._replace(zmp=zmp, com_height=plan.com_height - depth * sink, lean=lean * sink, posture=swung)


def step(stance: Stance, t: Array, mirrored: bool, *, single: float, double: float, lift: float, swing: float) -> Plan:
    """Steps in place; the arm of the other side swings forward with the lifted foot."""
    plan = planner.stepping(
        stance, t, Timing(_HOLD, single, double), length=0.0, turn=0.0, lift=lift, first=int(mirrored)
    )
    lifted = (plan.feet[:, :, 2] - stance.feet[:, 2]) / lift
    arms = {"left_shoulder_pitch_joint": lifted[:, 1], "right_shoulder_pitch_joint": lifted[:, 0]}
    return plan._replace(posture=_add(stance, plan.posture, {name: -swing * x for name, x in arms.items()}))


def walk(
    stance: Stance, t: Array, mirrored: bool, *, single: float, double: float, length: float, turn: float,
    lift: float, swing: float,
) -> Plan:  # fmt: skip
    """Walks along an arc; each arm swings with the foot of the other side."""
    plan = planner.stepping(
        stance, t, Timing(_HOLD, single, double), length=length, turn=turn, lift=lift, first=int(mirrored)
    )
    heading = plan.feet_yaw.mean(axis=1)
    apart = plan.feet[:, 0, :2] - plan.feet[:, 1, :2]
    ahead = (np.cos(heading) * apart[:, 0] + np.sin(heading) * apart[:, 1]) / length
    arms = {"left_shoulder_pitch_joint": swing * ahead, "right_shoulder_pitch_joint": -swing * ahead}
    return plan._replace(posture=_add(stance, plan.posture, arms))


def wave(stance: Stance, t: Array, mirrored: bool, *, period: float, angle: float, height: float, sway: float) -> Plan:
    """Raises an arm to the side, forearm up, and waves it while the weight moves over the feet and back."""
    plan, fade = planner.standing(stance, t), planner.envelope(t, 1.5)
    side, sign = ("left", 1.0) if mirrored else ("right", -1.0)
    beat = fade * np.sin(2 * np.pi * t / period)
    zmp = plan.zmp.copy()
    zmp[:, 1] += sign * sway * fade * np.sin(np.pi * t / (2 * period))
    raised = {
        f"{side}_shoulder_pitch_joint": -0.2 * fade,
        f"{side}_shoulder_roll_joint": sign * (height - 0.2) * fade,
        f"{side}_shoulder_yaw_joint": sign * 1.45 * fade,
        f"{side}_elbow_joint": -0.5 * fade + angle * beat,
        "waist_roll_joint": -0.05 * sign * beat,
    }
    return plan._replace(zmp=zmp, posture=_add(stance, plan.posture, raised))


# Seconds of standing before the first step and after the last.
_HOLD = 0.8

GAITS = {
    "squat": Gait(
        squat,
        {
            "depth": Range(0.10, 0.06, 0.14),
            "period": Range(2.6, 2.0, 3.5),
            "sway": Range(0.02, 0.0, 0.03),
            "swing": Range(0.8, 0.3, 1.2),
            "lean": Range(0.15, 0.0, 0.3),
        },
    ),
    "step": Gait(
        step,
        {
            "single": Range(0.40, 0.36, 0.5),
            "double": Range(0.16, 0.14, 0.24),
            "lift": Range(0.06, 0.04, 0.08),
            "swing": Range(0.3, 0.0, 0.5),
        },
    ),
    "walk": Gait(
        walk,
        {
            "single": Range(0.42, 0.38, 0.48),
            "double": Range(0.16, 0.14, 0.22),
            "length": Range(0.16, 0.10, 0.20),
            "turn": Range(0.0, -0.15, 0.15),
            "lift": Range(0.06, 0.05, 0.08),
            "swing": Range(0.3, 0.1, 0.5),
        },
    ),
    "wave": Gait(
        wave,
        {
            "period": Range(1.0, 0.8, 1.5),
            "angle": Range(0.4, 0.25, 0.5),
            "height": Range(1.4, 1.1, 1.6),
            "sway": Range(0.02, 0.0, 0.03),
        },
    ),
}


def _both(name: str) -> list[str]:
    return [f"{side}_{name}_joint" for side in ("left", "right")]


def _add(stance: Stance, posture: Array, angles: dict[str, Array]) -> Array:
    posture = posture.copy()
    for name, angle in angles.items():
        posture[:, stance.joints[name]] += angle
    return posture
