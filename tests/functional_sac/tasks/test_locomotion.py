"""Commands, starts, gait, curriculum and pushes of the walking tasks."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

pytest.importorskip("mujoco")

from functional_sac.tasks import joystick, locomotion, walk
from functional_sac.tasks import task as tasks
from functional_sac.tasks.locomotion import Own
from functional_sac.tasks.locomotion_terms import Scene, Seen
from functional_sac.tasks.task import Outcome, RobotTask
from functional_sac.tasks.walk import Curriculum
from functional_sl import keys
from functional_sl.sim import rotation
from functional_sl.sim.robots import g1, go2, robot


@pytest.fixture(scope="module", params=["walk", "joystick"])
def task(request: pytest.FixtureRequest) -> RobotTask:
    made = {"walk": (walk, g1), "joystick": (joystick, go2)}
    module, of = made[request.param]
    return module.make(robot.facts(of.robot()))


@pytest.fixture(scope="module")
def walking() -> RobotTask:
    return walk.make(robot.facts(g1.robot()))


@pytest.fixture(scope="module")
def trotting() -> RobotTask:
    return joystick.make(robot.facts(go2.robot()))


def test_commands() -> None:
    uniform = torch.tensor([[0.0, 0.0, 0.0], [1.0, 1.0, 1.0], [0.475, 0.75, 0.5], [0.5, 0.5, 1.0]])
    expected = torch.tensor([[-0.6, -0.4, -0.8], [1.0, 0.4, 0.8], [0.16, 0.2, 0.0], [0.2, 0.0, 0.8]])
    assert torch.allclose(locomotion.command(uniform), expected, atol=1e-6)
    # Lengths 0.72, 1.08, 0.256 and 0.2.
    expected[3, :2] = 0.0
    assert torch.allclose(locomotion.command(uniform, 0.21), expected, atol=1e-6)


def test_a_start(task: RobotTask) -> None:
    own, qpos, qvel = task.start((), keys.uniform(keys.key(0), (400, task.start_draws)))
    assert (qpos[:, :2].abs() <= 0.5).all()
    assert (qvel[:, :6].abs() <= 0.5).all()
    assert not qvel[:, 6:].any()
    assert torch.equal(qpos[:, 7:], task.default_pose.expand(400, -1))
    assert len(set(qpos[:, 2].tolist())) == 1
    heading = rotation.yaw(qpos[:, 3:7])
    assert heading.min() < -3.0
    assert heading.max() > 3.0
    assert 0 <= own.phase.min() < 0.05
    assert 0.95 < own.phase.max() < 1


def test_the_tables(walking: RobotTask, trotting: RobotTask) -> None:
    assert [part.size for part in walking.actor] == [3, 3, 29, 29, 29, 3, 2]
    assert [part.scale for part in (*walking.actor, *walking.privileged)] == [0.25, 1, 1, 0.05, 1, 1, 2 * math.pi, 2]
    assert [part.size for part in trotting.actor] == [3, 3, 12, 12, 12, 3, 4]
    assert [part.size for part in (*walking.privileged, *trotting.privileged)] == [3, 3]
    for found in (walking, trotting):
        assert {part.name: part.noise for part in found.actor if part.noise} == {"joint_pos": 0.01, "joint_vel": 0.1}
    assert [term.weight for term in walking.terms] == [2.0, 1.5, -1.0, -10.0, -5.0, -0.5, -25.0, 5.0, 10.0]
    assert [term.weight for term in trotting.terms] == [1.0, 0.2, -5.0, -0.1, -20.0, -0.02, -0.4, 1.5, 4.0]
    assert (walking.action_scale == 1.0).all()
    assert (trotting.action_scale == 0.4).all()


def test_the_pose_of_waist_and_arms_weighs_most() -> None:
    model = robot.facts(g1.robot())
    (pose,) = [term for term in walk.reward_table(model) if term.name == "pose"]
    found = dict(zip(model.joint_names, pose.function.keywords["weights"].tolist(), strict=True))
    leg = [found[f"left_{part}_joint"] for part in ("hip_pitch", "hip_roll", "hip_yaw", "knee", "ankle_pitch")]
    assert leg == pytest.approx([0.01, 2.0, 5.0, 0.01, 5.0])
    assert found["waist_yaw_joint"] == found["right_elbow_joint"] == 50.0


def test_the_gait_and_the_command_move_on(trotting: RobotTask) -> None:
    """2 Hz at 50 steps a second: 0.04 of a period a step; a new command at step 1000 alone."""
    own = Own(torch.zeros(2, 3), torch.tensor([0.5, 0.98]))
    found = trotting.advance(own, torch.tensor([999, 1000]), torch.ones(2, trotting.step_draws))
    assert found.phase.tolist() == pytest.approx([0.54, 0.02], abs=1e-6)
    assert found.command[0].tolist() == [0.0, 0.0, 0.0]
    assert found.command[1].tolist() == pytest.approx([1.0, 0.4, 0.8])
    feet = trotting.view(own, None, None).phase
    assert feet[0].tolist() == pytest.approx([0.5, 0.0, 0.0, 0.5])


def fallen(gravity: tuple[float, float, float], height: float) -> Scene:
    nothing = torch.zeros(1, 1)
    seen = Seen(*[nothing] * 9)._replace(gravity=torch.tensor([gravity]), base_height=torch.tensor([height]))
    return Scene(seen, *[nothing] * 4)


@pytest.mark.parametrize(("degrees", "height", "ends"), [(64, 0.7, False), (66, 0.7, True), (0, 0.29, True)])
def test_a_walk_ends_with_a_fall(walking: RobotTask, degrees: float, height: float, ends: bool) -> None:
    tilt = math.radians(degrees)
    scene = fallen((math.sin(tilt), 0.0, -math.cos(tilt)), height)
    assert walking.terminated(scene).tolist() == [ends]


@pytest.mark.parametrize(("degrees", "ends"), [(59, False), (61, True)])
def test_a_trot_ends_by_tilt_alone(trotting: RobotTask, degrees: float, ends: bool) -> None:
    tilt = math.radians(degrees)
    assert trotting.terminated(fallen((0.0, math.sin(tilt), -math.cos(tilt)), 0.0)).tolist() == [ends]


def test_only_penalties_are_scaled(walking: RobotTask) -> None:
    found = walking.weights(Curriculum(torch.tensor(0.1), torch.tensor(0.0)))
    assert found.tolist() == pytest.approx([1, 1, 0.1, 0.1, 0.1, 0.1, 0.1, 1, 1])
    scene = fallen((0.6, 0.0, -0.8), 0.7)
    tilt = [term.name for term in walking.terms].index("tilt")
    values = {term.name: term.weight * term.function(scene) for term in walking.terms if term.name == "tilt"}
    weighted = walking._replace(terms=walking.terms[tilt : tilt + 1], weights=lambda shared: torch.tensor([0.1]))
    assert torch.allclose(tasks.rewards(weighted, None, scene), 0.1 * values["tilt"])


def outcome(done: list[bool], length: list[int]) -> Outcome:
    ended = torch.tensor(done)
    return Outcome(ended, ended, torch.tensor(length))


def numbers(state: Curriculum) -> list[float]:
    return [float(x) for x in state]


def test_the_curriculum() -> None:
    """Eight environments: a window of int(8000 / 4096) = 1 episode, so the mean is that of the last batch."""

    def learn(scale: float, mean: float, lengths: list[int], done: int) -> list[float]:
        ended = [i < done for i in range(8)]
        start = Curriculum(torch.tensor(scale), torch.tensor(mean))
        return numbers(walk.learn(start, outcome(ended, lengths)))

    assert learn(0.1, 500.0, [800, 900] * 4, 2) == pytest.approx([0.1001, 850.0])
    assert learn(0.1, 500.0, [100] * 8, 1) == pytest.approx([0.0999, 100.0])
    assert learn(0.1, 500.0, [400] * 8, 8) == pytest.approx([0.1, 400.0])
    assert learn(0.1, 900.0, [800] * 8, 0) == pytest.approx([0.1, 900.0])
    assert learn(1 / 8, 900.0, [1000] * 8, 8) == pytest.approx([1 / 8, 1000.0])
    assert learn(1 / 16, 100.0, [10] * 8, 8) == pytest.approx([1 / 16, 10.0])


def test_many_environments_average_over_a_window() -> None:
    """4096 environments: one episode of 1000 moves a mean of 500 by a thousandth of the way."""
    done: Tensor = torch.zeros(4096, dtype=torch.bool)
    done[0] = True
    start = Curriculum(torch.tensor(0.1), torch.tensor(500.0))
    found = walk.learn(start, Outcome(done, done, torch.full((4096,), 1000)))
    assert numbers(found) == pytest.approx([0.1, 500.5])


def test_a_push_comes_every_fifteen_seconds(trotting: RobotTask) -> None:
    uniform = torch.ones(3, trotting.step_draws)
    uniform[2, locomotion.COMMAND_DRAWS :] = 0.0
    mask, added = trotting.push(torch.tensor([749, 750, 750]), uniform)
    assert mask.tolist() == [False, True, True]
    assert added[:, :3].tolist() == [[1.0, 1.0, 0.5], [1.0, 1.0, 0.5], [-1.0, -1.0, -0.5]]
    assert added.shape == (3, 18)
    assert not added[:, 3:].any()
