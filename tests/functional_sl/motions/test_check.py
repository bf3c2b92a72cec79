"""The zero-moment point against mechanics of a rigid body, and the geometry of the support."""

from __future__ import annotations

import numpy as np
import pytest
import torch

mujoco = pytest.importorskip("mujoco")

from functional_sl.motions import check, feet  # noqa: E402
from functional_sl.motions import clip as clips  # noqa: E402
from functional_sl.sim.robots import g1  # noqa: E402
from functional_sl.sim.robots import robot as robots  # noqa: E402

ROBOT = g1.robot()
MODEL = robots.compiled(ROBOT)
GRAVITY = 9.81


def com(qpos: np.ndarray) -> np.ndarray:
    data = mujoco.MjData(MODEL)
    data.qpos[:] = qpos
    mujoco.mj_kinematics(MODEL, data)
    mujoco.mj_comPos(MODEL, data)
    return data.subtree_com[1].copy()


def moving(acceleration: tuple[float, float, float], lift: float = 0.0, frames: int = 6) -> clips.MotionClip:
    """The standing pose, tilted, in uniform acceleration from rest."""
    t = torch.arange(frames, dtype=torch.float64).unsqueeze(1) / 50
    qpos = torch.tensor(ROBOT.default_qpos, dtype=torch.float64).repeat(frames, 1)
    qpos[:, 3:7] = torch.tensor([0.98, 0.1, -0.15, 0.0916515]).double()
    qpos[:, :3] += 0.5 * t**2 * torch.tensor(acceleration) + torch.tensor([0.2, -0.1, lift])
    return clips.make(qpos, 50.0, "pushed", 29)


@pytest.mark.parametrize("a", [(0.0, 0.0, 0.0), (1.0, 0.0, 0.0), (0.0, -2.0, 0.0), (0.5, 0.5, 3.0)])
def test_zero_moment_point_of_a_rigid_body(a: tuple[float, float, float]) -> None:
    """For a body that does not turn it is c - z a / (g + a_z), and the floor gives m (g + a_z)."""
    motion = moving(a)
    qpos = motion.qpos.double().numpy()
    # float32 positions carry 1e-7 m, which second differences at 50 fps raise to some 1e-3 m/s^2.
    points, force = check.zero_moment_point(MODEL, qpos, *check.derivatives(motion.qpos.double(), motion.fps))
    centre = com(qpos[3])
    expected = centre[:2] - centre[2] * np.array(a[:2]) / (GRAVITY + a[2])
    np.testing.assert_allclose(points[3], expected, atol=1e-3)
    assert force[3] == pytest.approx(MODEL.body_subtreemass[0] * (GRAVITY + a[2]), rel=1e-3)


def test_standing_is_balanced_and_leaning_is_not() -> None:
    upright = clips.make(torch.tensor([ROBOT.default_qpos] * 3), 50.0, "stand", 29)
    report = check.check(upright, ROBOT)
    assert report.outside == 0.0
    assert report.margin.min() > 0.05
    assert report.speed == 0.0
    assert report.excess < 0
    # 0.2 g forward at 0.67 m height takes the point 13 cm ahead, beyond the toes.
    t = torch.arange(3).unsqueeze(1) / 50
    pushed = upright.qpos + torch.cat((-0.5 * 0.2 * GRAVITY * t**2, torch.zeros(3, 35)), dim=1)
    report = check.check(upright._replace(qpos=pushed), ROBOT)
    assert report.outside == 1.0
    assert -0.1 < report.margin.min() < 0


def test_frames_in_the_air_and_in_free_fall() -> None:
    """Without a foot on the floor there is no margin; falling with the feet on it has no zero-moment point."""
    flying = check.check(moving((0.0, 0.0, 0.0), lift=0.5), ROBOT)
    assert flying.airborne == 1.0
    assert flying.outside == 0.0
    assert np.isnan(flying.margin).all()
    falling = check.check(moving((0.0, 0.0, -12.0)), ROBOT, contact_height=1.0)
    assert falling.outside == 1.0
    assert np.isneginf(falling.margin).all()
    assert falling.force.max() < 0


def test_limits_and_speed_are_measured() -> None:
    """The left knee (joint 3, upper limit 2.8798) goes from 2.6 to 2.9 in 0.1 s."""
    qpos = torch.tensor([ROBOT.default_qpos] * 6)
    qpos[:, 10] = torch.linspace(2.6, 2.9, 6)
    report = check.check(clips.make(qpos, 50.0, "kick", 29), ROBOT)
    assert report.excess == pytest.approx(2.9 - 2.8798, abs=1e-5)
    assert report.speed == pytest.approx(3.0, rel=1e-4)


@pytest.mark.parametrize("geometry", g1.GEOMETRIES)
def test_soles_reach_from_heel_to_toe(geometry: str) -> None:
    robot = g1.robot(geometry)
    soles = feet.soles(robot, robots.compiled(robot))
    assert soles.height == pytest.approx(0.035)
    left, right = soles.points
    assert left[:, 0].min() == pytest.approx(-0.05, abs=0.005)
    assert left[:, 0].max() == pytest.approx(0.125, abs=0.008)
    np.testing.assert_allclose(np.sort(left[:, 1]), np.sort(-right[:, 1]), atol=1e-9)


SQUARE = np.array([[0.0, 0.0], [2.0, 0.0], [2.0, 2.0], [0.0, 2.0]])


def test_hull_of_a_square_leaves_out_what_lies_within_or_on_an_edge() -> None:
    points = np.concatenate((SQUARE, [[1.0, 1.0], [1.0, 0.0], [0.0, 0.0]]))
    found = check.hull(points)
    assert sorted(map(tuple, found)) == sorted(map(tuple, SQUARE))
    area = sum(a[0] * b[1] - a[1] * b[0] for a, b in zip(found, np.roll(found, -1, axis=0), strict=True)) / 2
    assert area == 4.0  # positive: counter-clockwise


@pytest.mark.parametrize(
    ("point", "margin"),
    [((1.0, 1.0), 1.0), ((0.25, 1.0), 0.25), ((2.5, 1.0), -0.5), ((5.0, 6.0), -5.0), ((2.0, 1.0), 0.0)],
)
def test_margin_is_the_distance_from_the_edge(point: tuple[float, float], margin: float) -> None:
    """(5, 6) is 3 and 4 beyond the corner (2, 2)."""
    assert check.inside(np.array(point), SQUARE) == pytest.approx(margin)


def test_margin_of_a_line_and_of_nothing() -> None:
    assert check.inside(np.array([1.0, 1.0]), check.hull(SQUARE[:2])) == -1.0
    assert np.isnan(check.inside(np.zeros(2), np.zeros((0, 2))))
