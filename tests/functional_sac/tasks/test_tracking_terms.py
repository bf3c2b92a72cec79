"""Robot and reference by hand: one environment, fourteen bodies, all upright and at rest unless a test says more."""

from __future__ import annotations

import functools
import math

import pytest
import torch
from torch import Tensor

from functional_sac.tasks import tracking_terms as terms
from functional_sac.tasks.tracking_terms import ANCHOR, BODIES, Reference, Scene, Seen
from functional_sl.sim import rotation

JOINTS = 2


def frames(**changes: Tensor) -> Reference:
    """Body i stands at x = i / 10, 1 m above the floor."""
    pos = torch.zeros(1, len(BODIES), 3)
    pos[0, :, 0] = torch.arange(len(BODIES)) / 10
    pos[0, :, 2] = 1.0
    quat = torch.tensor([1.0, 0.0, 0.0, 0.0]).expand(1, len(BODIES), 4)
    still = torch.zeros(1, len(BODIES), 3)
    joints = torch.zeros(1, JOINTS)
    return Reference(joints, joints, pos, quat, still, still)._replace(**changes)


def seen(reference: Reference, force: tuple[float, ...] = (0.0,)) -> Seen:
    return Seen(*reference, torch.zeros(1, 3), torch.zeros(1, 3), torch.tensor([force]))


def scene(robot: Reference, reference: Reference, **changes: Tensor) -> Scene:
    nothing = torch.zeros(1, JOINTS)
    return terms.compare(reference, seen(robot), nothing, nothing)._replace(**changes)


def turned(found: Reference, about: tuple[float, float, float], bodies: slice = slice(None)) -> Reference:
    """Turns bodies in their place by a rotation vector."""
    quat = found.body_quat.clone()
    quat[:, bodies] = rotation.multiply(
        rotation.from_vector(torch.tensor(about)).expand_as(quat[:, bodies]), quat[:, bodies]
    )
    return found._replace(body_quat=quat)


def moved(found: Reference, by: tuple[float, float, float], bodies: slice = slice(None)) -> Reference:
    pos = found.body_pos.clone()
    pos[:, bodies] += torch.tensor(by)
    return found._replace(body_pos=pos)


EXACT = functools.partial(pytest.approx, rel=1e-5, abs=1e-6)


def test_a_perfect_robot_has_all_of_the_reward_and_no_error() -> None:
    found = scene(frames(), frames())
    assert [float(x) for x in terms.errors(found).values()] == pytest.approx([0.0] * len(terms.ERRORS), abs=1e-6)
    for kernel in (
        terms.anchor_position, terms.anchor_orientation, terms.body_position, terms.body_orientation,
        terms.body_linear_velocity, terms.body_angular_velocity,
    ):  # fmt: skip
        assert float(kernel(found, 0.3)) == 1.0


def test_place_and_heading_count_for_the_anchor_alone() -> None:
    """The robot stands 0.3 m beside the reference, everything turned by 0.4 rad about the anchor."""
    reference = frames()
    centre = reference.body_pos[:, ANCHOR : ANCHOR + 1]
    turn = rotation.from_yaw(torch.tensor(0.4))
    pos = centre + rotation.rotate(turn, reference.body_pos - centre)
    robot = moved(turned(reference._replace(body_pos=pos), (0.0, 0.0, 0.4)), (0.0, 0.3, 0.0))
    found = scene(robot, reference)
    assert float(found.anchor_distance) == EXACT(0.3)
    assert float(found.anchor_angle) == EXACT(0.4)
    assert float(terms.anchor_position(found, 0.3)) == EXACT(math.exp(-1))
    assert float(terms.anchor_orientation(found, 0.4)) == EXACT(math.exp(-1))
    assert float(terms.body_position(found, 0.3)) == EXACT(1.0)
    assert float(terms.body_orientation(found, 0.4)) == pytest.approx(1.0, abs=1e-5)
    assert float(found.end_height.abs().max()) == EXACT(0.0)


def test_heights_are_those_of_the_world() -> None:
    """A robot 0.2 m too low: an error of every body, though x and y are re-anchored."""
    found = scene(moved(frames(), (0.7, 0.0, -0.2)), frames())
    assert float(found.anchor_height) == EXACT(0.2)
    assert found.end_height.tolist() == [[EXACT(0.2)] * 4]
    assert found.body_distance.tolist() == [[EXACT(0.2)] * 14]
    assert float(terms.body_position(found, 0.2)) == EXACT(math.exp(-1))


def test_one_body_counts_a_fourteenth() -> None:
    robot = moved(frames(), (0.0, 0.0, 0.3), slice(3, 4))
    found = scene(robot, frames())
    assert float(terms.body_position(found, 0.3)) == EXACT(math.exp(-1 / 14))
    assert float(terms.errors(found)["error_body_pos"]) == EXACT(0.3 / 14)
    assert float(terms.errors(found)["error_body_pos/left_ankle_roll_link"]) == EXACT(0.3)
    assert found.end_height.tolist() == [[EXACT(-0.3), 0.0, 0.0, 0.0]]
    found = scene(turned(frames(), (0.4, 0.0, 0.0), slice(3, 4)), frames())
    assert float(terms.body_orientation(found, 0.4)) == EXACT(math.exp(-1 / 14))


def test_velocities_are_compared_in_the_world() -> None:
    """A robot that faces the other way and moves alike has no error."""
    fast = torch.zeros(1, 14, 3)
    fast[..., 0] = 2.0
    found = scene(turned(frames(), (0.0, 0.0, math.pi))._replace(body_lin_vel=fast), frames(body_lin_vel=fast))
    assert float(terms.body_linear_velocity(found, 1.0)) == 1.0
    found = scene(frames(body_lin_vel=fast / 2, body_ang_vel=fast), frames(body_lin_vel=fast))
    assert float(terms.body_linear_velocity(found, 1.0)) == EXACT(math.exp(-1))
    assert float(terms.body_angular_velocity(found, 2.0)) == EXACT(math.exp(-1))


def test_tilt_compares_how_far_gravity_turns() -> None:
    """Upright, gravity's vertical component is -1; rolled by 90 degrees it is 0; heading makes no difference."""
    rolled = turned(frames(), (math.pi / 2, 0.0, 0.0))
    assert float(scene(rolled, frames()).anchor_tilt) == EXACT(-1.0)
    assert float(scene(frames(), rolled).anchor_tilt) == EXACT(1.0)
    assert float(scene(turned(frames(), (0.0, 0.0, 2.0)), frames()).anchor_tilt) == EXACT(0.0)


def test_penalties() -> None:
    found = scene(
        frames(),
        frames(),
        action=torch.tensor([[0.5, -1.0]]),
        last_action=torch.tensor([[0.0, 1.0]]),
        joint_pos=torch.tensor([[1.2, -0.7]]),
        contact_force=torch.tensor([[0.5, 1.5, 40.0]]),
    )
    assert float(terms.action_rate(found)) == EXACT(0.25 + 4.0)
    limits = {"lower": torch.tensor([-1.0, -0.5]), "upper": torch.tensor([1.0, 0.5])}
    assert float(terms.joint_limits_squared(found, **limits)) == EXACT(0.2**2 + 0.2**2)
    assert float(terms.joint_limits(found, **limits)) == EXACT(0.4)
    assert float(terms.touching_bodies(found, 1.0)) == 2.0


def test_ankles_and_wrists_may_be_low() -> None:
    height = torch.full((1, 14), 0.04)
    found = scene(frames(), frames(), body_height=height)
    assert float(terms.low_bodies(found, 0.05)) == 10.0
    assert float(terms.low_bodies(found, 0.04)) == 0.0
    assert {BODIES[i] for i in terms.ENDS} == {
        f"{side}_{end}" for side in ("left", "right") for end in ("ankle_roll_link", "wrist_yaw_link")
    }
