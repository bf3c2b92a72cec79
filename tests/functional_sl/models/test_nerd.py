"""Frames, operators, features and widths of Neural Robot Dynamics against hand-made numbers."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from functional_sl import keys, tree
from functional_sl.models import articulation, nerd, transformer
from functional_sl.models.articulation import ANT, CARTPOLE, DOUBLE_PENDULUM, Contacts
from functional_sl.models.nerd import Convention, Statistics
from functional_sl.models.normalizer import Normalizer

HALF = math.sqrt(0.5)
TOL = {"rtol": 0.0, "atol": 1e-12}  # float64: a few roundings of numbers below 10


def vector(*numbers: float) -> Tensor:
    return torch.tensor(numbers, dtype=torch.float64)


def free_body(frame: str = "body") -> Convention:
    return Convention(floating=True, continuous=(), frame=frame)


def random_states(c: Convention, count: int, seed: int = 0) -> Tensor:
    state = keys.normal(keys.key(seed), (count, c.size), torch.float64)
    if c.floating:
        state[:, 3:7] = torch.nn.functional.normalize(state[:, 3:7], dim=-1)
    return state


def test_a_quarter_turn_by_hand() -> None:
    """The base at (1, 2, 0) looks along +y, so its x-axis is the world's y, and its y-axis the world's -x.

    Its velocity there is (0, 3, 0) and it turns by (0, 0, 2); the point at the world's origin moves with
    v + x cross omega = (0, 3, 0) + (1, 2, 0) x (0, 0, 2) = (0, 3, 0) + (4, -2, 0) = (4, 1, 0).
    """
    state = vector(1, 2, 0, 0, 0, HALF, HALF, 0, 0, 2, 4, 1, 0)
    own = nerd.to_frame(free_body(), state, state)
    torch.testing.assert_close(own, vector(0, 0, 0, 0, 0, 0, 1, 0, 0, 2, 3, 0, 0), **TOL)
    # A body one metre ahead of it, along the world's y, with the same orientation and no velocity.
    ahead = vector(1, 3, 0, 0, 0, HALF, HALF, 0, 0, 0, 0, 0, 0)
    seen = nerd.to_frame(free_body(), ahead, state)
    torch.testing.assert_close(seen, vector(1, 0, 0, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0), **TOL)
    moved = nerd.to_frame(free_body("translation"), state, state)
    torch.testing.assert_close(moved, vector(0, 0, 0, 0, 0, HALF, HALF, 0, 0, 2, 0, 3, 0), **TOL)
    assert torch.equal(nerd.to_frame(free_body("world"), state, state), state)


@pytest.mark.parametrize("frame", nerd.FRAMES)
@pytest.mark.parametrize("robot", [CARTPOLE, DOUBLE_PENDULUM, ANT], ids=lambda robot: robot.name)
def test_a_change_taken_in_any_frame_leads_to_the_next_state(robot: articulation.Robot, frame: str) -> None:
    c = nerd.convention(robot, frame)
    state, following = random_states(c, 50), random_states(c, 50, seed=1)
    change = nerd.relative(c, nerd.to_frame(c, state, state), nerd.to_frame(c, following, state))
    reached = nerd.from_frame(c, nerd.advance(c, nerd.to_frame(c, state, state), change), state)
    gaps = nerd.errors(robot, reached, following)
    assert max(float(gap.max()) for gap in gaps.values()) < 1e-7  # the angle of a rotation near none: sqrt of 1e-16
    first = 7 if c.floating else len(c.continuous)
    rates = slice(first + len(c.continuous) if c.floating else first, None)
    torch.testing.assert_close(reached[:, rates], following[:, rates], **TOL)


def test_operators_in_order() -> None:
    assert nerd.operators(nerd.convention(CARTPOLE, "world")) == [("sub", 0, 1), ("wrap", 1, 2), ("sub", 2, 4)]
    assert nerd.operators(nerd.convention(DOUBLE_PENDULUM, "body")) == [("wrap", 0, 2), ("sub", 2, 4)]
    assert nerd.operators(nerd.convention(ANT, "body")) == [("sub", 0, 3), ("quaternion", 3, 7), ("sub", 7, 29)]


def test_wrap_at_half_a_turn() -> None:
    angles = vector(math.pi, -math.pi, 3 * math.pi, math.pi + 0.1, -math.pi - 0.1, 0.0, 20.0)
    expected = vector(math.pi, math.pi, math.pi, -math.pi + 0.1, math.pi - 0.1, 0.0, 20.0 - 6 * math.pi)
    torch.testing.assert_close(nerd.wrap(angles), expected, **TOL)
    c = nerd.convention(CARTPOLE, "world")
    before, after = vector(0, math.pi - 0.1, 0, 0), vector(0, -math.pi + 0.2, 0, 0)
    assert math.isclose(nerd.relative(c, before, after)[1], 0.3, rel_tol=1e-12)
    assert math.isclose(nerd.relative(c, after, before)[1], -0.3, rel_tol=1e-12)
    torch.testing.assert_close(nerd.advance(c, before, vector(0, 0.3, 0, 0)), after, **TOL)


def test_quaternion_changes_have_one_sign_and_are_normalised() -> None:
    """From a half turn about z less 0.1 rad on by 0.2 rad: the scalar part changes sign, the change does not."""

    def about_z(angle: float, sign: float = 1.0) -> Tensor:
        turn = (0, 0, sign * math.sin(angle / 2), sign * math.cos(angle / 2))
        return vector(0, 0, 0, *turn, *[0] * 6)

    c = free_body("world")
    for sign in (1.0, -1.0):
        change = nerd.relative(c, about_z(3.0), about_z(3.2, sign))
        torch.testing.assert_close(change[3:7], vector(0, 0, math.sin(0.1), math.cos(0.1)), **TOL)
    change = nerd.relative(c, about_z(3.0), about_z(3.2)) * 7.0
    torch.testing.assert_close(nerd.advance(c, about_z(3.0), change)[3:7], about_z(3.2)[3:7], **TOL)


def test_a_quaternions_length_is_put_right() -> None:
    """A length of 1.001 would be cubed by the frame's own: 1.003 after one step, 1e12 after twenty."""
    c = free_body()
    state = random_states(c, 5)
    state[:, 3:7] *= 1.001
    following = nerd.from_frame(c, nerd.to_frame(c, state, state), state)
    torch.testing.assert_close(following[:, 3:7], state[:, 3:7] / 1.001, **TOL)


def test_rotations_agree_with_matrices() -> None:
    q = random_states(free_body(), 20)[:, 3:7]
    v = keys.normal(keys.key(3), (20, 3), torch.float64)
    torch.testing.assert_close(nerd.rotate(q, v), (articulation.rotation(q) @ v[..., None])[..., 0], **TOL)
    both = articulation.rotation(nerd.multiply(q, q.flip(0)))
    torch.testing.assert_close(both, articulation.rotation(q) @ articulation.rotation(q.flip(0)), **TOL)


@pytest.mark.parametrize(
    ("robot", "frame", "width"), [(ANT, "body", 215), (DOUBLE_PENDULUM, "body", 37), (CARTPOLE, "world", 6)]
)
def test_network_widths(robot: articulation.Robot, frame: str, width: int) -> None:
    """State + 7 a slot + joints + 3 for gravity: 29 + 175 + 8 + 3, 4 + 28 + 2 + 3, and 4 + 2."""
    c = nerd.convention(robot, frame)
    state = random_states(c, 2)
    contacts = slots = None
    if robot.ground:
        contacts = articulation.ground_contacts(robot, state, vector(0, 0, 1).expand(2, 3), vector(0, 0))
        slots = articulation.thickness(robot, state)
    actuation = torch.zeros(2, len(robot.joints), dtype=torch.float64)
    assert nerd.features(c, state, actuation, contacts, slots, vector(0, 0, -1)).shape == (2, width)


def test_contacts_stand_in_the_base_frame_behind_the_gate() -> None:
    """The quarter turn of above: the ground's point (1, 3, -1) is one metre ahead and one below.

    The first slot is near (0.05 < 0.12), the second too far (0.13 > 0.12), the third near for its thickness
    (0.13 < 4 * 0.05).
    """
    state = vector(1, 2, 0, 0, 0, HALF, HALF, 0, 0, 2, 4, 1, 0)
    contacts = Contacts(
        normals=vector(0, 1, 0).expand(3, 3), points=vector(1, 3, -1).expand(3, 3), depths=vector(0.05, 0.13, 0.13)
    )
    found = nerd.features(free_body(), state, state[:0], contacts, vector(0.02, 0.02, 0.05), vector(0, 0, -1))
    near, far = [1, 0, 0], [0, 0, 0]
    expected = vector(*near, *far, *near, 1, 0, -1, *far, 1, 0, -1, 0.05, 0, 0.13, 0, 0, -1)
    torch.testing.assert_close(found[13:], expected, **TOL)


def test_contacts_of_a_hanging_pendulum() -> None:
    """Hanging 1 + 1 m down over a plane 2.05 m below, the tip's sphere of 0.1 m overlaps it by 0.05 m."""
    depths = articulation.ground_contacts(DOUBLE_PENDULUM, vector(0, 0, 0, 0), vector(0, 0, 1), vector(-2.05)[0]).depths
    torch.testing.assert_close(depths, vector(1.95, 0.95, 0.95, -0.05), **TOL)
    # The upper link swings out to the side (+x moves to where -z goes about y: -x), the lower one hangs on.
    turned = articulation.ground_contacts(
        DOUBLE_PENDULUM, vector(math.pi / 2, -math.pi / 2, 0, 0), vector(0, 0, 1), vector(-2.05)[0]
    )
    torch.testing.assert_close(turned.points[3], vector(-1, 0, -2.05), **TOL)
    torch.testing.assert_close(turned.depths, vector(1.95, 1.95, 1.95, 0.95), **TOL)


def make_model(active: list[bool]) -> tuple[dict, Statistics]:
    architecture = transformer.Architecture(6, 4, 8, 1, 2, 5)
    ones = torch.ones
    statistics = Statistics(
        Normalizer(torch.zeros(6), ones(6)), Normalizer(torch.arange(4.0), 2 * ones(4)), torch.tensor(active)
    )
    return transformer.init(keys.key(0), architecture), statistics


def test_an_inactive_target_is_predicted_by_its_constant() -> None:
    params, statistics = make_model([True, False, True, True])
    change = nerd.change(params, statistics, torch.randn(3, 5, 6), 2)
    assert bool((change[..., 1] == 1.0).all())  # the mean of that target
    assert len(change[..., 0].unique()) == 15


def test_a_roll_out_is_repeated_prediction() -> None:
    """The bundle's function on the last frames, one after another, walks the same way, bit by bit."""
    params, statistics = make_model([True] * 4)
    c = nerd.convention(CARTPOLE, "world")
    start, actuation = torch.randn(3, 4), torch.randn(3, 7, 2)
    rolled = nerd.roll_out(params, statistics, c, CARTPOLE, start, actuation, (start, start), heads=2, history=4)
    flat = tree.named(nerd.tensors(params, statistics))
    states = start[:, None]
    for step in range(7):
        first = max(0, step - 3)
        inputs = {
            "states": states[:, first:],
            "joint_acts": actuation[:, first : step + 1],
            "gravity_dir": torch.tensor([0.0, 0.0, -1.0]).expand(3, step + 1 - first, 3),
        }
        predicted = nerd.predict(flat, inputs, **c._asdict(), heads=2)["next_states"]
        states = torch.cat([states, predicted[:, -1:]], 1)
    assert torch.equal(states, rolled)


def test_errors_by_hand() -> None:
    """A quarter turn, a step of 3-4-5 and joints off by 0.1 and, the short way round, 0.2 rad."""
    true = torch.zeros(29, dtype=torch.float64)
    true[6] = 1.0
    other = true.clone()
    other[:2], other[3:7] = vector(3, 4), -vector(0, 0, HALF, HALF)
    other[7:15] = 0.1
    gaps = nerd.errors(ANT, other, true)
    torch.testing.assert_close(torch.stack([*gaps.values()]), vector(5, math.pi / 2, 0.1), **TOL)
    gaps = nerd.errors(CARTPOLE, vector(1, math.pi - 0.1, 0, 0), vector(3, -math.pi + 0.1, 0, 0))
    torch.testing.assert_close(torch.stack([*gaps.values()]), vector(2, 0.2), **TOL)
