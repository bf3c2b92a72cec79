"""Generated motions reach their targets, keep their balance and the robot's limits, and vary with the seed."""

from __future__ import annotations

import numpy as np
import pytest
import torch

mujoco = pytest.importorskip("mujoco")

from functional_sl.motions import catalog, check, generate, load  # noqa: E402
from functional_sl.motions.gaits import GAITS  # noqa: E402
from functional_sl.sim.robots import g1  # noqa: E402
from functional_sl.sim.robots import robot as robots  # noqa: E402

ROBOT = g1.robot()


@pytest.fixture(scope="module", params=[*((name, 0) for name in generate.NAMES), ("walk", 1), ("step", 2)])
def made(request: pytest.FixtureRequest) -> generate.Generated:
    return generate.trace(*request.param, seconds=5.0, robot=ROBOT)


def test_the_robot_can_carry_it_out(made: generate.Generated) -> None:
    assert made.clip.qpos.shape == (250, 36)
    assert made.error.max() < 1e-3
    report = check.check(made.clip, ROBOT)
    assert report.outside == 0.0
    assert report.margin.min() > 0.01
    assert report.airborne == 0.0
    assert report.depth < 1e-4
    assert report.speed < 7.0
    assert report.excess < 0


def test_feet_and_centre_of_mass_are_where_the_plan_has_them(made: generate.Generated) -> None:
    """Read from MuJoCo anew, and that the clip begins and ends at rest."""
    model = robots.compiled(ROBOT)
    data = mujoco.MjData(model)
    for frame in (0, 60, 125, 190, 249):
        data.qpos[:] = made.clip.qpos[frame].numpy()
        mujoco.mj_kinematics(model, data)
        mujoco.mj_comPos(model, data)
        for side, name in enumerate(("left_ankle_roll_link", "right_ankle_roll_link")):
            np.testing.assert_allclose(data.body(name).xpos, made.plan.feet[frame, side], atol=1e-5)
            assert data.body(name).xmat[8] > 1 - 1e-6  # level
        np.testing.assert_allclose(data.subtree_com[1], [*made.com[frame], made.plan.com_height[frame]], atol=1e-5)
    moved = torch.diff(made.clip.joint_pos, dim=0).abs() * 50
    assert moved[[0, -1]].max() < 0.05


def test_what_the_motions_do() -> None:
    """Walking gets ahead, squatting sinks, waving lifts the right hand above the shoulder."""
    clips = {name: generate.generate(name, seconds=5.0, robot=ROBOT) for name in ("walk", "squat", "wave")}
    assert clips["walk"].qpos[-1, 0] - clips["walk"].qpos[0, 0] > 0.5
    assert np.ptp(clips["squat"].qpos[:, 2].numpy()) > 0.08
    model = robots.compiled(ROBOT)
    data = mujoco.MjData(model)
    data.qpos[:] = clips["wave"].qpos[125].numpy()
    mujoco.mj_kinematics(model, data)
    heights = {body: data.body(body).xpos[2] for body in ("right_wrist_yaw_link", "left_wrist_yaw_link", "torso_link")}
    assert heights["right_wrist_yaw_link"] > heights["torso_link"] + 0.25 > heights["left_wrist_yaw_link"]


def test_a_seed_is_a_style_within_its_bounds() -> None:
    assert generate.drawn("walk", 0) == (False, {key: r.usual for key, r in GAITS["walk"].style.items()})
    assert generate.drawn("walk", 3) == generate.drawn("walk", 3)
    sides = set()
    for seed in range(1, 30):
        mirrored, style = generate.drawn("walk", seed)
        sides.add(mirrored)
        assert all(
            GAITS["walk"].style[key].low <= value <= GAITS["walk"].style[key].high for key, value in style.items()
        )
    assert sides == {True, False}


def test_the_same_seed_gives_the_same_bits() -> None:
    first, again, other = (generate.generate("squat", seed, seconds=2.0, robot=ROBOT) for seed in (4, 4, 5))
    assert torch.equal(first.qpos, again.qpos)
    assert not torch.equal(first.qpos, other.qpos)
    assert first.name == "squat:4"


@pytest.mark.parametrize(
    ("name", "seconds", "message"),
    [("wafe", 5.0, "the nearest name is 'wave'"), ("walk", 2.0, "no time for two steps")],
)
def test_errors(name: str, seconds: float, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        generate.generate(name, seconds=seconds, robot=ROBOT)


def test_a_request_names_motions_files_and_folders(tmp_path) -> None:
    folder = tmp_path / "recordings"
    folder.mkdir()
    squat = generate.generate("squat", seconds=1.0, robot=ROBOT)
    load.save(folder / "b.npz", squat)
    load.save(folder / "a.npz", squat)
    request = f"wave:2, {folder / 'b.npz'},{folder}"
    found = catalog.read(request, ROBOT, seconds=1.0)
    assert [clip.name for clip in found] == ["wave:2", "b", "a", "b"]
    torch.testing.assert_close(found[1].qpos, squat.qpos, rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        ("", "no motion is asked for"),
        ("walk:x", "seed behind the colon"),
        ("jump", "no motion 'jump' can be generated"),
    ],
)
def test_a_bad_request(request_: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        catalog.read(request_, ROBOT)


def test_an_empty_folder_is_an_error(tmp_path) -> None:
    with pytest.raises(ValueError, match=r"holds no .csv or .npz file"):
        catalog.read(str(tmp_path), ROBOT)
