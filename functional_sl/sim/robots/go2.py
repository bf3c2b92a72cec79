"""Unitree Go2 with 12 joints: masses, lengths, inertias, limits and torques as the maker publishes them; own shapes.

The order of the joints is that of the actions: front left, front right, rear left, rear right; hip, thigh, calf each.
"""

from __future__ import annotations

from pathlib import Path

from functional_sl.sim.robots import robot as robots
from functional_sl.sim.robots.robot import Contact, Frame, Motor, Options, Robot, Shape

NAME = "go2"
GEOMETRIES = ("cheap", "full")
LEGS = ("FL", "FR", "RL", "RR")

LINKS = robots.table(
    """
base world free
  0 0 0.445 | 1 0 0 0 | 6.921
  0.021112 0 -0.005366 | -0.000543471 0.713435 -0.00173769 0.700719 | 0.107027 0.0980771 0.0244531
FL_hip base FL_hip_joint x -1.0472 1.0472
  0.1934 0.0465 0 | 1 0 0 0 | 0.678
  -0.0054 0.00194 -0.000105 | 0.497014 0.499245 0.505462 0.498237 | 0.00088403 0.000596003 0.000479967
FL_thigh FL_hip FL_thigh_joint y -1.5708 3.4907
  0 0.0955 0 | 1 0 0 0 | 1.152
  -0.00374 -0.0223 -0.0327 | 0.829533 0.0847635 -0.0200632 0.551623 | 0.00594973 0.00584149 0.000878787
FL_calf FL_thigh FL_calf_joint y -2.7227 -0.83776
  0 0 -0.213 | 1 0 0 0 | 0.241352
  0.00629595 -0.000622121 -0.141417 | 0.710672 0.00154099 -0.00450087 0.703508 | 0.0014901 0.00146356 5.31397e-05
FR_hip base FR_hip_joint x -1.0472 1.0472
  0.1934 -0.0465 0 | 1 0 0 0 | 0.678
  -0.0054 -0.00194 -0.000105 | 0.498237 0.505462 0.499245 0.497014 | 0.00088403 0.000596003 0.000479967
FR_thigh FR_hip FR_thigh_joint y -1.5708 3.4907
  0 -0.0955 0 | 1 0 0 0 | 1.152
  -0.00374 0.0223 -0.0327 | 0.551623 -0.0200632 0.0847635 0.829533 | 0.00594973 0.00584149 0.000878787
FR_calf FR_thigh FR_calf_joint y -2.7227 -0.83776
  0 0 -0.213 | 1 0 0 0 | 0.241352
  0.00629595 0.000622121 -0.141417 | 0.703508 -0.00450087 0.00154099 0.710672 | 0.0014901 0.00146356 5.31397e-05
RL_hip base RL_hip_joint x -1.0472 1.0472
  -0.1934 0.0465 0 | 1 0 0 0 | 0.678
  0.0054 0.00194 -0.000105 | 0.505462 0.498237 0.497014 0.499245 | 0.00088403 0.000596003 0.000479967
RL_thigh RL_hip RL_thigh_joint y -0.5236 4.5379
  0 0.0955 0 | 1 0 0 0 | 1.152
  -0.00374 -0.0223 -0.0327 | 0.829533 0.0847635 -0.0200632 0.551623 | 0.00594973 0.00584149 0.000878787
RL_calf RL_thigh RL_calf_joint y -2.7227 -0.83776
  0 0 -0.213 | 1 0 0 0 | 0.241352
  0.00629595 -0.000622121 -0.141417 | 0.710672 0.00154099 -0.00450087 0.703508 | 0.0014901 0.00146356 5.31397e-05
RR_hip base RR_hip_joint x -1.0472 1.0472
  -0.1934 -0.0465 0 | 1 0 0 0 | 0.678
  0.0054 -0.00194 -0.000105 | 0.499245 0.497014 0.498237 0.505462 | 0.00088403 0.000596003 0.000479967
RR_thigh RR_hip RR_thigh_joint y -0.5236 4.5379
  0 -0.0955 0 | 1 0 0 0 | 1.152
  -0.00374 0.0223 -0.0327 | 0.551623 -0.0200632 0.0847635 0.829533 | 0.00594973 0.00584149 0.000878787
RR_calf RR_thigh RR_calf_joint y -2.7227 -0.83776
  0 0 -0.213 | 1 0 0 0 | 0.241352
  0.00629595 0.000622121 -0.141417 | 0.703508 -0.00450087 0.00154099 0.710672 | 0.0014901 0.00146356 5.31397e-05
"""
)

FRAMES = {"imu": Frame("base", (-0.02557, 0.0, 0.04232))} | {
    f"{leg}_foot": Frame(f"{leg}_calf", (-0.002, 0.0, -0.213)) for leg in LEGS
}
FOOT_RADIUS = 0.022

_STAND = (0.0, 0.0, 0.33, *robots.UNIT, *((0.0, 0.8, -1.5) * 2), *((0.0, 1.0, -1.5) * 2))
_FOOT_FRICTION = 0.4
# With ten iterations of the solver a ratio of 100 does not converge: the standing robot trembles.
_OPTIONS = Options(sim_dt=0.01, decimation=2, elliptic=True, impedance_ratio=10.0)


def robot(geometry: str = "cheap", xml_path: str | Path | None = None) -> Robot:
    """Returns the Go2 on a floor; its body never meets itself.

    Args:
      geometry: `cheap`: feet, trunk and head; `full`: hips, thighs and calves too.
      xml_path: a user's model of the same robot in place of the links and shapes.

    Raises:
      ValueError: for an unknown name, or a model that is not this robot.
      FileNotFoundError: if the model does not exist.
    """
    if geometry not in GEOMETRIES:
        raise ValueError(f"geometry={geometry!r}: the {NAME} has {' and '.join(GEOMETRIES)}")
    return robots.build(
        NAME,
        LINKS,
        _shapes(geometry),
        {joint: _motor(joint) for joint in JOINTS},
        FRAMES,
        _STAND,
        _OPTIONS,
        Contact(self_collision=False, foot_friction=_FOOT_FRICTION),
        xml_path,
    )


JOINTS = tuple(link.joint.name for link in LINKS if link.joint)
BODIES = tuple(link.body for link in LINKS)


def _motor(joint: str) -> Motor:
    effort = 45.43 if "calf" in joint else 23.7
    return Motor(kp=35.0, kd=0.5, effort_limit=effort, armature=0.01, friction_loss=0.2)


def _shapes(geometry: str) -> tuple[Shape, ...]:
    trunk = (
        Shape("base", (0.1881, 0.04675, 0.057), (0.0, 0.0, 0.0)),
        Shape("base", (0.047,), (0.293, 0.0, -0.06)),
    )
    feet = tuple(Shape(f"{leg}_calf", (FOOT_RADIUS,), FRAMES[f"{leg}_foot"].pos, foot=True) for leg in LEGS)
    return trunk + feet + (tuple(s for leg in LEGS for s in _leg(leg)) if geometry == "full" else ())


def _leg(leg: str) -> tuple[Shape, ...]:
    side = 1.0 if leg[1] == "L" else -1.0
    return (
        Shape(f"{leg}_hip", (0.046,), (0.0, 0.08 * side, 0.0)),
        Shape(f"{leg}_thigh", (0.017, 0.01225, 0.1065), (0.0, 0.0, -0.1065)),
        Shape(f"{leg}_calf", (0.012,), (0.02, 0.0, 0.0), (0.0, 0.0, -0.12)),
        Shape(f"{leg}_calf", (0.011,), (0.02, 0.0, -0.12), (0.02, 0.0, -0.18)),
    )
