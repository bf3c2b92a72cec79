"""The tables of motion tracking, and where episodes begin, on a motion that stands still."""

from __future__ import annotations

import math

import pytest
import torch

pytest.importorskip("mujoco")

from functional_sac.tasks import task as tasks
from functional_sac.tasks import tracking
from functional_sac.tasks.motions import JOINT_NOISE, POSE_NOISE, VELOCITY_NOISE, Own
from functional_sac.tasks.sampling import Sampling
from functional_sac.tasks.task import Outcome
from functional_sl import keys
from functional_sl.motions import library as libraries
from functional_sl.motions.clip import MotionClip
from functional_sl.sim import rotation
from functional_sl.sim.contract import RobotModel
from functional_sl.sim.robots import g1, robot

FRAMES = (60, 40)


@pytest.fixture(scope="module")
def model() -> RobotModel:
    return robot.facts(g1.robot())


@pytest.fixture(scope="module")
def library() -> libraries.MotionLibrary:
    """Two clips: one stands at the origin, one at x = 2 m."""
    built = g1.robot()
    pose = torch.tensor(built.default_qpos)
    clips = [pose.repeat(frames, 1) for frames in FRAMES]
    clips[1][:, 0] = 2.0
    return libraries.build([MotionClip(qpos, 50.0, f"stand{i}") for i, qpos in enumerate(clips)], built, 50.0)


ACTOR = [58, 3, 6, 3, 3, 29, 29, 29]


@pytest.mark.parametrize(
    ("preset", "noise", "privileged"),
    [("unilab", [0, 0, 0, 0.1, 0.2, 0.01, 1.5, 0], 129), ("beyondmimic", [0, 0.25, 0.05, 0.5, 0.2, 0.01, 0.5, 0], 126)],
)
def test_the_observation_table(
    model: RobotModel, library: libraries.MotionLibrary, preset: str, noise: list[float], privileged: int
) -> None:
    task = tracking.make(model, library, preset)
    assert [part.size for part in task.actor] == ACTOR
    assert [part.noise for part in task.actor] == noise
    assert sum(part.size for part in task.privileged) == privileged
    said = tasks.describe(task)
    assert [part["name"] for part in said["observation"]][:3] == ["command", "anchor_pos", "anchor_ori"]
    assert said["default_pose"][3] == pytest.approx(0.669)


def test_the_reward_tables(model: RobotModel) -> None:
    unilab = {term.name: term.weight for term in tracking.reward_table("unilab", model)}
    assert list(unilab.values()) == [1.0, 0.5, 2.0, 1.0, 1.0, 1.0, -0.1, -2.0, -0.1]
    assert sum(weight for weight in unilab.values() if weight > 0) == 6.5
    mimic = {term.name: term.weight for term in tracking.reward_table("beyondmimic", model)}
    assert list(mimic.values()) == [0.5, 0.5, 1.0, 1.0, 1.0, 1.0, -0.1, -10.0, -0.1]
    assert unilab.keys() - mimic.keys() == {"low_bodies"}
    assert mimic.keys() - unilab.keys() == {"touching_bodies"}


def test_action_scales(model: RobotModel, library: libraries.MotionLibrary) -> None:
    """A quarter of effort over stiffness: 0.25 * 88 / 40.179 = 0.5475 at the hip's pitch."""
    assert tracking.make(model, library).action_scale.tolist() == [2.0] * 29
    found = dict(
        zip(model.joint_names, tracking.make(model, library, "beyondmimic").action_scale.tolist(), strict=True)
    )
    expected = {"left_hip_pitch": 0.5475, "left_knee": 0.3507, "waist_roll": 0.4386, "right_wrist_yaw": 0.0745}
    assert {name: found[f"{name}_joint"] for name in expected} == pytest.approx(expected, abs=1e-4)
    one = tasks.target(tracking.make(model, library), torch.full((1, 29), 0.5))
    assert torch.allclose(one, model.default_joint_pos + 1.0)


def test_a_start_lies_about_its_frame(model: RobotModel, library: libraries.MotionLibrary) -> None:
    task = tracking.make(model, library)
    uniform = keys.uniform(keys.key(0), (500, task.start_draws))
    own, qpos, qvel = task.start(task.shared(), uniform)
    assert set(own.last.tolist()) == {59, 99}
    assert own.frame.min() >= 0
    assert torch.equal(own.frame, own.first)
    assert torch.equal(own.last == 99, own.frame >= 60)
    off = qpos - library.qpos[own.frame]
    assert (off[:, :3].abs() <= torch.tensor(POSE_NOISE[:3]) + 1e-6).all()
    assert off[:, :3].abs().amax(0).tolist() == pytest.approx(POSE_NOISE[:3], rel=0.05)
    euler = rotation.to_vector(qpos[:, 3:7])
    assert (euler.norm(dim=1) <= math.hypot(*POSE_NOISE[3:])).all()
    assert euler[:, 2].abs().max() > 0.15
    lower, upper = model.joint_range.unbind(1)
    assert (off[:, 7:].abs() <= JOINT_NOISE + 1e-6).all()
    assert (qpos[:, 7:] >= lower).all()
    assert (qpos[:, 7:] <= upper).all()
    assert (qvel[:, :3].abs() <= torch.tensor(VELOCITY_NOISE[:3]) + 1e-6).all()
    world = rotation.rotate(qpos[:, 3:7], qvel[:, 3:6])
    assert (world.abs() <= torch.tensor(VELOCITY_NOISE[3:]) + 1e-5).all()
    assert not qvel[:, 6:].any()


def test_numbers_in_the_middle_start_exactly_on_the_frame(model: RobotModel, library: libraries.MotionLibrary) -> None:
    task = tracking.make(model, library, mode="start")
    uniform = torch.full((2, task.start_draws), 0.5)
    uniform[:, 0] = torch.tensor([0.1, 0.9])
    own, qpos, qvel = task.start(task.shared(), uniform)
    assert own.frame.tolist() == [0, 60]
    assert torch.allclose(qpos, library.qpos[[0, 60]], atol=1e-6)
    assert not qvel.any()


def test_a_clip_ends_in_time(model: RobotModel, library: libraries.MotionLibrary) -> None:
    """An episode from frame 57 of 0 .. 59 is judged by the frames 57, 58 and 59."""
    task = tracking.make(model, library)
    own = Own(*(torch.tensor([x]) for x in (57, 57, 59)))
    assert task.possible_length(own).tolist() == [3]
    expired = []
    for _ in range(3):
        expired.append(bool(task.expired(own)))
        own = task.advance(own, torch.tensor([1]), torch.zeros(1, 0))
    assert expired == [False, False, True]
    assert own.frame.tolist() == [59]


@pytest.mark.parametrize(("mode", "moves"), [("adaptive", True), ("uniform", False)])
def test_only_adaptive_sampling_learns(
    model: RobotModel, library: libraries.MotionLibrary, mode: str, moves: bool
) -> None:
    task = tracking.make(model, library, mode=mode)
    yes, own = torch.tensor([True]), Own(*(torch.tensor([x]) for x in (0, 0, 59)))
    found: Sampling = task.learn(task.shared(), own, Outcome(yes, yes, torch.tensor([1])))
    assert found.failures.tolist() == pytest.approx([0.001 * moves, 0.0, 0.0])


def test_a_library_that_does_not_fit_is_refused(model: RobotModel, library: libraries.MotionLibrary) -> None:
    with pytest.raises(ValueError, match="30 frames a second; g1 is controlled at 50"):
        tracking.make(model, library, fps=30.0)
    with pytest.raises(ValueError, match=r"the motions have \(36, 29\) positions and bodies; g1 has \(36, 30\)"):
        tracking.make(model, library._replace(body_pos=library.body_pos[:, 1:]))
