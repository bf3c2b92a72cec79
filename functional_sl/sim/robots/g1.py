"""Unitree G1 with 29 joints: masses, lengths, inertias, limits and motors as the maker publishes them; own shapes.

The order of the joints is that of the actions: left leg, right leg, waist, left arm, right arm.
"""

from __future__ import annotations

import math
from pathlib import Path

from functional_sl.sim.robots import robot as robots
from functional_sl.sim.robots.robot import Contact, Frame, Motor, Options, Robot, Shape, Vector

NAME = "g1"
GEOMETRIES = ("cheap", "full")
DYNAMICS = ("unilab", "beyondmimic")

LINKS = robots.table(
    """
pelvis world free
  0 0 0.793 | 1 0 0 0 | 3.813
  0 0 -0.07605 | 1 0 -0.000399148 0 | 0.010549 0.0093089 0.0079184
left_hip_pitch_link pelvis left_hip_pitch_joint y -2.5307 2.8798
  0 0.064452 -0.1027 | 1 0 0 0 | 1.35
  0.002741 0.047791 -0.02606 | 0.954862 0.293964 0.0302556 0.030122 | 0.00181517 0.00153422 0.00116212
left_hip_roll_link left_hip_pitch_link left_hip_roll_joint x -0.5236 2.9671
  0 0.052 -0.030465 | 0.996179 0 -0.0873386 0 | 1.52
  0.029812 -0.001045 -0.087934 | 0.977808 -1.97119e-05 0.205576 -0.0403793 | 0.00254986 0.00241169 0.00148755
left_hip_yaw_link left_hip_roll_link left_hip_yaw_joint z -2.7576 2.7576
  0.025001 0 -0.12412 | 1 0 0 0 | 1.702
  -0.057709 -0.010981 -0.15078 | 0.600598 0.15832 0.223482 0.751181 | 0.00776166 0.00717575 0.00160139
left_knee_link left_hip_yaw_link left_knee_joint y -0.087267 2.8798
  -0.078273 0.0021489 -0.17734 | 0.996179 0 0.0873386 0 | 1.932
  0.005457 0.003964 -0.12074 | 0.923418 -0.0327699 0.0158246 0.382067 | 0.0113804 0.0112778 0.00146458
left_ankle_pitch_link left_knee_link left_ankle_pitch_joint y -0.87267 0.5236
  0 -9.4445e-05 -0.30001 | 1 0 0 0 | 0.074
  -0.007269 0 0.011137 | 0.603053 0.369225 0.369225 0.603053 | 1.89e-05 1.40805e-05 6.9195e-06
left_ankle_roll_link left_ankle_pitch_link left_ankle_roll_joint x -0.2618 0.2618
  0 0 -0.017558 | 1 0 0 0 | 0.608
  0.026505 0 -0.016425 | -0.000481092 0.728482 -0.000618967 0.685065 | 0.00167218 0.0016161 0.000217621
right_hip_pitch_link pelvis right_hip_pitch_joint y -2.5307 2.8798
  0 -0.064452 -0.1027 | 1 0 0 0 | 1.35
  0.002741 -0.047791 -0.02606 | 0.954862 -0.293964 0.0302556 -0.030122 | 0.00181517 0.00153422 0.00116212
right_hip_roll_link right_hip_pitch_link right_hip_roll_joint x -2.9671 0.5236
  0 -0.052 -0.030465 | 0.996179 0 -0.0873386 0 | 1.52
  0.029812 0.001045 -0.087934 | 0.977808 1.97119e-05 0.205576 0.0403793 | 0.00254986 0.00241169 0.00148755
right_hip_yaw_link right_hip_roll_link right_hip_yaw_joint z -2.7576 2.7576
  0.025001 0 -0.12412 | 1 0 0 0 | 1.702
  -0.057709 0.010981 -0.15078 | 0.751181 0.223482 0.15832 0.600598 | 0.00776166 0.00717575 0.00160139
right_knee_link right_hip_yaw_link right_knee_joint y -0.087267 2.8798
  -0.078273 -0.0021489 -0.17734 | 0.996179 0 0.0873386 0 | 1.932
  0.005457 -0.003964 -0.12074 | 0.923439 0.0345276 0.0116333 -0.382012 | 0.011374 0.0112843 0.00146452
right_ankle_pitch_link right_knee_link right_ankle_pitch_joint y -0.87267 0.5236
  0 9.4445e-05 -0.30001 | 1 0 0 0 | 0.074
  -0.007269 0 0.011137 | 0.603053 0.369225 0.369225 0.603053 | 1.89e-05 1.40805e-05 6.9195e-06
right_ankle_roll_link right_ankle_pitch_link right_ankle_roll_joint x -0.2618 0.2618
  0 0 -0.017558 | 1 0 0 0 | 0.608
  0.026505 0 -0.016425 | 0.000481092 0.728482 0.000618967 0.685065 | 0.00167218 0.0016161 0.000217621
waist_yaw_link pelvis waist_yaw_joint z -2.618 2.618
  0 0 0 | 1 0 0 0 | 0.214
  0.003494 0.000233 0.018034 | 0.289697 0.591001 -0.337795 0.672821 | 0.000163531 0.000107714 0.000102205
waist_roll_link waist_yaw_link waist_roll_joint x -0.52 0.52
  -0.0039635 0 0.044 | 1 0 0 0 | 0.086
  0 2.3e-05 0 | 0.5 0.5 -0.5 0.5 | 8.245e-06 7.079e-06 6.339e-06
torso_link waist_roll_link waist_pitch_joint y -0.52 0.52
  0 0 0 | 1 0 0 0 | 7.818
  0.00203158 0.000339683 0.184568 | 0.999803 -6.03319e-05 0.0198256 0.00131986 | 0.121847 0.109825 0.0273735
left_shoulder_pitch_link torso_link left_shoulder_pitch_joint y -3.0892 2.6704
  0.0039563 0.10022 0.24778 | 0.990264 0.139201 1.38722e-05 -9.86868e-05 | 0.718
  0 0.035892 -0.011628 | 0.654152 0.0130458 -0.326267 0.68225 | 0.000465864 0.000432842 0.000406394
left_shoulder_roll_link left_shoulder_pitch_link left_shoulder_roll_joint x -1.5882 2.2515
  0 0.038 -0.013831 | 0.990268 -0.139172 0 0 | 0.643
  -0.000227 0.00727 -0.063243 | 0.701256 -0.0196223 -0.00710317 0.712604 | 0.000691311 0.000618011 0.000388977
left_shoulder_yaw_link left_shoulder_roll_link left_shoulder_yaw_joint z -2.618 2.618
  0 0.00624 -0.1032 | 1 0 0 0 | 0.734
  0.010773 -0.002949 -0.072009 | 0.716879 -0.0964829 -0.0679942 0.687134 | 0.00106187 0.00103217 0.000400661
left_elbow_link left_shoulder_yaw_link left_elbow_joint y -1.0472 2.0944
  0.015783 0 -0.080518 | 1 0 0 0 | 0.6
  0.064956 0.004454 -0.010062 | 0.541765 0.636132 0.388821 0.388129 | 0.000443035 0.000421612 0.000259353
left_wrist_roll_link left_elbow_link left_wrist_roll_joint x -1.97222 1.97222
  0.1 0.00188791 -0.01 | 1 0 0 0 | 0.085445
  0.0171394 0.000537591 4.8864e-07 | 0.575338 0.411667 -0.574906 0.411094 | 5.48211e-05 4.96646e-05 3.57798e-05
left_wrist_pitch_link left_wrist_roll_link left_wrist_pitch_joint y -1.61443 1.61443
  0.038 0 0 | 1 0 0 0 | 0.48405
  0.0229999 -0.00111685 -0.00111658 | 0.249998 0.661363 0.293036 0.643608 | 0.000430353 0.000429873 0.000164648
left_wrist_yaw_link left_wrist_pitch_link left_wrist_yaw_joint z -1.61443 1.61443
  0.046 0 0 | 1 0 0 0 | 0.254576
  0.0708244 0.000191745 0.00161742 | 0.510571 0.526295 0.468078 0.493188 | 0.000646113 0.000559993 0.000147566
right_shoulder_pitch_link torso_link right_shoulder_pitch_joint y -3.0892 2.6704
  0.0039563 -0.10021 0.24778 | 0.990264 -0.139201 1.38722e-05 9.86868e-05 | 0.718
  0 -0.035892 -0.011628 | 0.68225 -0.326267 0.0130458 0.654152 | 0.000465864 0.000432842 0.000406394
right_shoulder_roll_link right_shoulder_pitch_link right_shoulder_roll_joint x -2.2515 1.5882
  0 -0.038 -0.013831 | 0.990268 0.139172 0 0 | 0.643
  -0.000227 -0.00727 -0.063243 | 0.712604 -0.00710317 -0.0196223 0.701256 | 0.000691311 0.000618011 0.000388977
right_shoulder_yaw_link right_shoulder_roll_link right_shoulder_yaw_joint z -2.618 2.618
  0 -0.00624 -0.1032 | 1 0 0 0 | 0.734
  0.010773 0.002949 -0.072009 | 0.687134 -0.0679942 -0.0964829 0.716879 | 0.00106187 0.00103217 0.000400661
right_elbow_link right_shoulder_yaw_link right_elbow_joint y -1.0472 2.0944
  0.015783 0 -0.080518 | 1 0 0 0 | 0.6
  0.064956 -0.004454 -0.010062 | 0.388129 0.388821 0.636132 0.541765 | 0.000443035 0.000421612 0.000259353
right_wrist_roll_link right_elbow_link right_wrist_roll_joint x -1.97222 1.97222
  0.1 -0.00188791 -0.01 | 1 0 0 0 | 0.085445
  0.0171394 -0.000537591 4.8864e-07 | 0.411667 0.575338 -0.411094 0.574906 | 5.48211e-05 4.96646e-05 3.57798e-05
right_wrist_pitch_link right_wrist_roll_link right_wrist_pitch_joint y -1.61443 1.61443
  0.038 0 0 | 1 0 0 0 | 0.48405
  0.0229999 0.00111685 -0.00111658 | 0.643608 0.293036 0.661363 0.249998 | 0.000430353 0.000429873 0.000164648
right_wrist_yaw_link right_wrist_pitch_link right_wrist_yaw_joint z -1.61443 1.61443
  0.046 0 0 | 1 0 0 0 | 0.254576
  0.0708244 -0.000191745 0.00161742 | 0.493188 0.468078 0.526295 0.510571 | 0.000646113 0.000559993 0.000147566
"""
)

FRAMES = {
    "imu_in_pelvis": Frame("pelvis", (0.04525, 0.0, -0.08339)),
    "imu_in_torso": Frame("torso_link", (-0.03959, -0.00224, 0.14792)),
    "left_foot": Frame("left_ankle_roll_link", (0.04, 0.0, -0.037)),
    "right_foot": Frame("right_ankle_roll_link", (0.04, 0.0, -0.037)),
    "left_palm": Frame("left_wrist_yaw_link", (0.08, 0.0, 0.0)),
    "right_palm": Frame("right_wrist_yaw_link", (0.08, 0.0, 0.0)),
}

# Reflected inertia (kg m^2) and largest torque (N m) of the four motors; `pair` is two of the small ones on one joint.
_MOTORS = {
    "small": (0.003609725, 25.0),
    "pair": (2 * 0.003609725, 50.0),
    "medium": (0.010177520, 88.0),
    "large": (0.025101925, 139.0),
    "wrist": (0.00425, 5.0),
}
_MOTOR_OF = {
    "hip_pitch": "medium", "hip_roll": "large", "hip_yaw": "medium", "knee": "large",
    "ankle_pitch": "pair", "ankle_roll": "pair", "waist_yaw": "medium", "waist_roll": "pair", "waist_pitch": "pair",
    "shoulder_pitch": "small", "shoulder_roll": "small", "shoulder_yaw": "small", "elbow": "small",
    "wrist_roll": "small", "wrist_pitch": "wrist", "wrist_yaw": "wrist",
}  # fmt: skip
# Gains place every joint's own inertia at this frequency with twice the critical damping (arXiv:2508.08241).
_NATURAL_FREQUENCY = 2 * math.pi * 10
_DAMPING_RATIO = 2.0

_STAND = {
    "hip_pitch": -0.312, "knee": 0.669, "ankle_pitch": -0.363, "shoulder_pitch": 0.2,
    "left_shoulder_roll": 0.2, "right_shoulder_roll": -0.2, "elbow": 0.6,
}  # fmt: skip
_STAND_HEIGHT = 0.754

_OPTIONS = {"unilab": Options(sim_dt=1 / 150, decimation=3), "beyondmimic": Options(sim_dt=0.005, decimation=4)}
_FOOT_FRICTION = 0.6
_EXCLUDED = (
    ("left_elbow_link", "left_wrist_pitch_link"),
    ("right_elbow_link", "right_wrist_pitch_link"),
    ("pelvis", "left_hip_roll_link"),
    ("pelvis", "right_hip_roll_link"),
)

_MIDDLE = (
    Shape("pelvis", (0.07,), (0.0, 0.0, -0.08)),
    Shape("torso_link", (0.09,), (0.01, 0.0, 0.08), (0.01, 0.0, 0.2)),
    Shape("torso_link", (0.06,), (0.0, 0.0, 0.43)),
)
_LEFT = (
    Shape("left_hip_roll_link", (0.06,), (0.02, 0.0, 0.0), (0.02, 0.0, -0.08)),
    Shape("left_hip_yaw_link", (0.055,), (0.0, 0.0, -0.03), (-0.06, 0.0, -0.17)),
    Shape("left_knee_link", (0.045,), (0.01, 0.0, 0.0), (0.01, 0.0, -0.15)),
    Shape("left_knee_link", (0.03,), (0.01, 0.0, -0.2), (0.01, 0.0, -0.28)),
    Shape("left_shoulder_yaw_link", (0.035,), (0.0, 0.0, -0.08), (0.0, 0.0, 0.05)),
    Shape("left_elbow_link", (0.035,), (-0.01, 0.0, -0.01), (0.08, 0.0, -0.01)),
    Shape("left_wrist_pitch_link", (0.035,), (-0.01, 0.0, 0.0), (0.06, 0.0, 0.0)),
    Shape("left_wrist_yaw_link", (0.035,), (0.07, 0.0, 0.0), (0.15, -0.02, 0.0)),
)
# Heel, toe and side of the capsules along the sole.
_SOLE = {
    "cheap": ((-0.05, 0.125, -0.025), (-0.05, 0.125, 0.025)),
    "full": (
        (0.05, 0.1, -0.026), (-0.044, 0.123, -0.018), (-0.052, 0.13, -0.01), (-0.054, 0.132, 0.0),
        (-0.052, 0.13, 0.01), (-0.044, 0.123, 0.018), (0.05, 0.1, 0.026),
    ),
}  # fmt: skip
_CORNERS = {"cheap": (), "full": ((-0.05, 0.025), (-0.05, -0.025), (0.12, 0.03), (0.12, -0.03))}


def robot(geometry: str = "cheap", dynamics: str = "unilab", xml_path: str | Path | None = None) -> Robot:
    """Returns the G1 on a floor.

    Args:
      geometry: `cheap`: two capsules a foot, and the body meets only the floor; `full`: seven capsules and four
        spheres a foot, and the body meets itself.
      dynamics: `unilab`: armature 0.01 and friction loss 0.3 at every joint, 3 substeps of 1/150 s; `beyondmimic`: each
        motor's own armature, no friction loss, 4 substeps of 0.005 s. The gains are the same.
      xml_path: a user's model of the same robot in place of the links and shapes.

    Raises:
      ValueError: for an unknown name, or a model that is not this robot.
      FileNotFoundError: if the model does not exist.
    """
    _check("geometry", geometry, GEOMETRIES)
    _check("dynamics", dynamics, DYNAMICS)
    left = _LEFT + _left_foot(geometry)
    return robots.build(
        NAME,
        LINKS,
        _MIDDLE + left + tuple(_mirrored(shape) for shape in left),
        {joint: _motor(joint, dynamics) for joint in JOINTS},
        FRAMES,
        (0.0, 0.0, _STAND_HEIGHT, *robots.UNIT, *(_standing(joint) for joint in JOINTS)),
        _OPTIONS[dynamics],
        Contact(geometry == "full", _FOOT_FRICTION, _EXCLUDED if geometry == "full" else ()),
        xml_path,
    )


JOINTS = tuple(link.joint.name for link in LINKS if link.joint)
BODIES = tuple(link.body for link in LINKS)


def _motor(joint: str, dynamics: str) -> Motor:
    inertia, effort = _MOTORS[_MOTOR_OF[_kind(joint)]]
    kp = inertia * _NATURAL_FREQUENCY**2
    kd = 2 * _DAMPING_RATIO * inertia * _NATURAL_FREQUENCY
    armature, friction_loss = (0.01, 0.3) if dynamics == "unilab" else (inertia, 0.0)
    return Motor(kp, kd, effort, armature, friction_loss)


def _standing(joint: str) -> float:
    return _STAND.get(joint.removesuffix("_joint"), _STAND.get(_kind(joint), 0.0))


def _kind(joint: str) -> str:
    return joint.removeprefix("left_").removeprefix("right_").removesuffix("_joint")


def _left_foot(geometry: str) -> tuple[Shape, ...]:
    body = "left_ankle_roll_link"
    soles = (Shape(body, (0.01,), (heel, y, -0.025), (toe, y, -0.025), foot=True) for heel, toe, y in _SOLE[geometry])
    corners = (Shape(body, (0.005,), (x, y, -0.03), foot=True) for x, y in _CORNERS[geometry])
    return (*soles, *corners)


def _mirrored(shape: Shape) -> Shape:
    def flip(v: Vector | None) -> Vector | None:
        return v and (v[0], -v[1], v[2])

    body = shape.body.replace("left_", "right_")
    return shape._replace(body=body, start=flip(shape.start), end=flip(shape.end))


def _check(what: str, value: str, known: tuple[str, ...]) -> None:
    if value not in known:
        raise ValueError(f"{what}={value!r}: the {NAME} has {' and '.join(known)}")
