"""The pendulum against its closed solution, and the profiles of steps."""

from __future__ import annotations

import numpy as np
import pytest

from functional_sl.motions import planner
from functional_sl.motions.planner import Stance, Timing

STANCE = Stance(
    feet=np.array([[0.0, 0.1, 0.03], [0.0, -0.1, 0.03]]), sole=np.array([0.04, 0.0]), com_height=0.7,
    posture=np.zeros(2), joints={},
)  # fmt: skip


def test_a_point_mass_over_a_resting_point_rests() -> None:
    point = np.tile([0.3, -0.2], (50, 1))
    np.testing.assert_allclose(planner.pendulum(point, np.full(50, 0.7), 50.0), point, atol=1e-12)


def test_pendulum_of_a_swaying_point() -> None:
    """For p = cos(w t), c = cos(w t) / (1 + w^2 z / g): at rest at t = 0 and after whole periods, like the solver."""
    w, z, t = 2 * np.pi, 0.7, np.arange(201) / 100
    point = np.stack((np.cos(w * t), 3 * np.cos(w * t)), axis=1)
    found = planner.pendulum(point, np.full(201, z), 100.0)
    # Second differences at 100 fps are right to (w h)^2 / 12, some 3e-4.
    np.testing.assert_allclose(found, point / (1 + w**2 * z / planner.GRAVITY), rtol=0, atol=1e-3)


def test_pendulum_heeds_the_rising_of_the_mass() -> None:
    """The solution put back into the equation, with the acceleration of the height taken by another formula."""
    t = np.arange(101) / 50
    z = 0.7 + 0.05 * np.cos(np.pi * t)
    point = np.stack((0.1 * np.sin(t) ** 2, 0 * t), axis=1)
    c = planner.pendulum(point, z, 50.0)
    bent = (c[2:] - 2 * c[1:-1] + c[:-2]) * 2500
    rising = -0.05 * np.pi**2 * np.cos(np.pi * t[1:-1])
    again = c[1:-1] - (z[1:-1] / (planner.GRAVITY + rising))[:, None] * bent
    np.testing.assert_allclose(again[3:-3], point[4:-4], atol=1e-4)


@pytest.mark.parametrize("profile", [planner.smooth, planner.bump])
def test_profiles_start_and_end_at_rest(profile) -> None:
    s = np.linspace(-0.5, 1.5, 20001)
    speed = np.gradient(profile(s), s)
    acceleration = np.gradient(speed, s)
    for end in (0.0, 1.0):
        near = np.abs(s - end) < 3e-4
        assert np.abs(speed[near]).max() < 1e-4
        assert np.abs(acceleration[near]).max() < 0.2  # the greatest is 5.8 and 12
    assert profile(np.array([0.5]))[0] == pytest.approx(0.5 if profile is planner.smooth else 1.0)


@pytest.mark.parametrize("turn", [0.0, 0.3])
def test_steps_alternate_and_end_side_by_side(turn: float) -> None:
    """4.2 s hold five steps of 0.6 s between two stands of 0.5 s: four go on, the fifth closes."""
    t = np.arange(211) / 50
    timing = Timing(hold=0.5, single=0.4, double=0.2)
    plan = planner.stepping(STANCE, t, timing, length=0.2, turn=turn, lift=0.05, first=1)
    lifted = plan.feet[:, :, 2] > 0.03 + 1e-9
    assert not lifted.all(axis=1).any()
    swings = [side for side in (0, 1) for _ in range(np.count_nonzero(np.diff(lifted[:, side].astype(int)) > 0))]
    assert swings == [0, 0, 1, 1, 1]
    assert lifted[:, 1].argmax() < lifted[:, 0].argmax()
    assert plan.feet[:, :, 2].max() == pytest.approx(0.08, abs=1e-3)
    apart = plan.feet[-1, 0] - plan.feet[-1, 1]
    np.testing.assert_allclose(np.linalg.norm(apart), 0.2, atol=1e-12)
    np.testing.assert_allclose(plan.feet_yaw[-1], 4 * turn, atol=1e-12)
    np.testing.assert_allclose(np.arctan2(-apart[0], apart[1]), 4 * turn, atol=1e-12)
    way = 0.2 * np.sum([[np.cos(k * turn), np.sin(k * turn)] for k in (1, 2, 3, 4)], axis=0)
    np.testing.assert_allclose(plan.zmp[-1] - plan.zmp[0], way, atol=1e-12)


def test_the_zero_moment_point_is_on_the_standing_foot_while_the_other_swings() -> None:
    t = np.arange(211) / 50
    plan = planner.stepping(STANCE, t, Timing(0.5, 0.4, 0.2), length=0.15, turn=0.0, lift=0.05, first=0)
    for side in (0, 1):
        swinging = plan.feet[:, side, 2] > 0.031
        np.testing.assert_allclose(plan.zmp[swinging], plan.feet[swinging, 1 - side, :2] + STANCE.sole, atol=1e-12)


def test_too_little_time_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"1.98 s leave no time for two steps of 0.60 s"):
        planner.stepping(STANCE, np.arange(100) / 50, Timing(0.5, 0.4, 0.2), length=0, turn=0, lift=0.05, first=0)
