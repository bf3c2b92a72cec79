"""Walking by hand: one environment with two joints and two feet."""

from __future__ import annotations

import math

import pytest
import torch

from functional_sac.tasks import locomotion_terms as terms
from functional_sac.tasks.locomotion_terms import Scene, Seen


def scene() -> Scene:
    seen = Seen(
        lin_vel=torch.tensor([[0.5, 0.1, 0.2]]),
        ang_vel=torch.tensor([[0.3, 0.4, -0.1]]),
        gravity=torch.tensor([[0.6, 0.0, -0.8]]),
        joint_pos=torch.tensor([[0.1, -0.2]]),
        joint_vel=torch.zeros(1, 2),
        base_height=torch.tensor([0.7]),
        foot_height=torch.tensor([[0.09, 0.0]]),
        foot_tilt=torch.tensor([[0.01, 0.02]]),
        foot_force=torch.tensor([[0.0, 300.0]]),
    )
    command, phase = torch.tensor([[0.8, 0.5, 0.4]]), torch.tensor([[0.0, 0.5]])
    return Scene(seen, command, phase, torch.tensor([[1.0, 0.0]]), torch.tensor([[0.5, 0.5]]))


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        (terms.track_lin_vel(scene(), 0.25), math.exp(-(0.3**2 + 0.4**2) / 0.25)),
        (terms.track_yaw_rate(scene(), 0.25), math.exp(-1.0)),
        (terms.vertical_velocity(scene()), 0.04),
        (terms.roll_pitch_rate(scene()), 0.25),
        (terms.tilt(scene()), 0.36),
        (terms.base_height(scene(), 0.3), 0.16),
        (terms.action_rate(scene()), 0.5),
        (terms.pose(scene(), torch.tensor([2.0, 50.0])), 2 * 0.01 + 50 * 0.04),
        (terms.pose_l1(scene()), 0.3),
        (terms.foot_tilt(scene()), 0.03),
        (terms.alive(scene()), 1.0),
    ],
)
def test_terms(found: torch.Tensor, expected: float) -> None:
    assert found.shape == (1,)
    assert float(found) == pytest.approx(expected, rel=1e-5)


def test_a_foot_swings_up_to_phase_0_and_down_to_phase_one_half() -> None:
    """3 t^2 - 2 t^3 is 5/32 at t = 1/4, 1/2 at t = 1/2 and 27/32 at t = 3/4."""
    phase = torch.tensor([0.0, 0.125, 0.25, 0.375, 0.5, 0.625, 0.75, 0.875])
    expected = [1.0, 27 / 32, 0.5, 5 / 32, 0.0, 5 / 32, 0.5, 27 / 32]
    assert terms.swing_targets(phase, 32.0).tolist() == pytest.approx([32 * x for x in expected])


def test_the_feet_of_the_gait() -> None:
    """Foot 0 is at its highest, 0.09 m, and foot 1 on the ground, as their phases ask."""
    found = scene()
    assert float(terms.foot_swing(found, 0.09, 0.005)) == pytest.approx(1.0)
    high = found._replace(seen=found.seen._replace(foot_height=torch.tensor([[0.09, 0.05]])))
    assert float(terms.foot_swing(high, 0.09, 0.005)) == pytest.approx(math.exp(-0.5))


def test_the_trot() -> None:
    """Stance is the phase below 0.6: both feet belong on the ground, and only foot 1 is there."""
    found = scene()
    assert float(terms.contact_phase(found, 0.1, 0.6)) == 0.5
    assert float(terms.swing_height(found, 0.1, 0.01, 0.6)) == 0.0
    swung = found._replace(phase=torch.tensor([[0.7, 0.2]]))
    assert float(terms.contact_phase(swung, 0.1, 0.6)) == 1.0
    assert float(terms.swing_height(swung, 0.19, 0.01, 0.6)) == pytest.approx(math.exp(-1.0) / 2)


def test_errors() -> None:
    found = {name: float(x) for name, x in terms.errors(scene()).items()}
    assert found == pytest.approx({"error_lin_vel": 0.5, "error_yaw_rate": 0.5})
