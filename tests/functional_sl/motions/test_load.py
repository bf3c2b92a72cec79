"""Files of three layouts give back the motion that was written into them; bad ones say what is wrong."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
import torch

pytest.importorskip("mujoco")

from functional_sl.motions import clip as clips
from functional_sl.motions import load
from functional_sl.sim.robots import g1

ROBOT = g1.robot()
# Isaac Lab lists the joints of the G1 by their depth in the tree of bodies; these come first.
ISAAC = [
    "left_hip_pitch", "right_hip_pitch", "waist_yaw", "left_hip_roll", "right_hip_roll", "waist_roll",
    "left_hip_yaw", "right_hip_yaw", "waist_pitch", "left_knee", "right_knee", "left_shoulder_pitch",
]  # fmt: skip


def motion(frames: int = 9) -> clips.MotionClip:
    generator = torch.Generator().manual_seed(3)
    low, high = torch.tensor([link.joint.range for link in g1.LINKS if link.joint]).T
    joints = low + (high - low) * torch.rand(frames, 29, generator=generator)
    base = torch.randn(frames, 7, generator=generator)
    base[:, 3:] /= base[:, 3:].norm(dim=1, keepdim=True)
    return clips.make(torch.cat((base, joints), dim=1), 40.0, "random", 29)


CLIP = motion()
BODIES = clips.kinematics(CLIP, ROBOT)


def beyondmimic(**changes) -> dict:
    held = {
        "fps": np.array([40]), "joint_pos": CLIP.joint_pos.numpy(),
        "body_pos_w": BODIES.body_pos.numpy(), "body_quat_w": BODIES.body_quat.numpy(),
    }  # fmt: skip
    return {name: value for name, value in (held | changes).items() if value is not None}


def with_world() -> dict:
    quat = np.zeros((9, 1, 4))
    quat[..., 0] = 1
    held = beyondmimic()
    return held | {
        "body_pos_w": np.concatenate((np.zeros((9, 1, 3)), held["body_pos_w"]), axis=1),
        "body_quat_w": np.concatenate((quat, held["body_quat_w"]), axis=1),
    }


def shuffled() -> dict:
    order = np.random.default_rng(0).permutation(30)
    held = beyondmimic()
    return held | {
        "body_pos_w": held["body_pos_w"][:, order], "body_quat_w": held["body_quat_w"][:, order],
        "body_names": np.array(ROBOT.body_names)[order],
    }  # fmt: skip


def named_joints() -> dict:
    order = np.random.default_rng(1).permutation(29)
    return beyondmimic(joint_pos=CLIP.joint_pos.numpy()[:, order], joint_names=np.array(ROBOT.joint_names)[order])


def named_joints_behind_the_base() -> dict:
    order = np.random.default_rng(2).permutation(29)
    qpos = np.concatenate((CLIP.qpos.numpy()[:, :7], CLIP.joint_pos.numpy()[:, order]), axis=1)
    return {"joint_pos": qpos, "fps": [40], "joint_names": np.array(ROBOT.joint_names)[order]}


def tracked_bodies_alone() -> dict:
    held = beyondmimic()
    return held | {"body_pos_w": held["body_pos_w"][:, ::2], "body_quat_w": held["body_quat_w"][:, ::2]}


def isaac() -> dict:
    columns = [ROBOT.joint_names.index(name) for name in load._breadth_first(ROBOT)]
    return beyondmimic(joint_pos=CLIP.joint_pos.numpy()[:, columns])


LAYOUTS = {
    "qpos": lambda: {"qpos": CLIP.qpos.numpy(), "fps": 40},
    "joint_pos of 36": lambda: {"joint_pos": CLIP.qpos.numpy(), "fps": 40.0},
    "beyondmimic": beyondmimic,
    "with the world": with_world,
    "other body order": shuffled,
    "joints by name": named_joints,
    "qpos with joints by name": named_joints_behind_the_base,
    "some bodies": tracked_bodies_alone,
    "isaac's joint order": isaac,
}


def write(path: Path, held: dict) -> Path:
    np.savez(path, **held)
    return path


@pytest.mark.parametrize("layout", LAYOUTS)
def test_npz_layouts_hold_the_same_motion(tmp_path: Path, layout: str) -> None:
    found = load.load(write(tmp_path / "dance.npz", LAYOUTS[layout]()))
    assert (found.name, found.fps) == ("dance", 40.0)
    torch.testing.assert_close(found.qpos, CLIP.qpos * sign(found.qpos), rtol=0, atol=1e-5)


def sign(found: torch.Tensor) -> torch.Tensor:
    """1, and the sign of the base quaternion relative to the clip's: both mean one rotation."""
    ones = torch.ones_like(found)
    ones[:, 3:7] = torch.sign((found[:, 3:7] * CLIP.qpos[:, 3:7]).sum(1, keepdim=True))
    return ones


def test_isaac_order() -> None:
    assert [name.removesuffix("_joint") for name in load._breadth_first(ROBOT)[: len(ISAAC)]] == ISAAC


def test_lafan_csv_has_the_scalar_last_and_30_fps(tmp_path: Path) -> None:
    columns = CLIP.qpos[:, [0, 1, 2, 4, 5, 6, 3, *range(7, 36)]].numpy()
    path = tmp_path / "walk1_subject1.csv"
    np.savetxt(path, columns, delimiter=",", fmt="%.8f")
    found = load.load(path)
    assert (found.name, found.fps) == ("walk1_subject1", 30.0)
    torch.testing.assert_close(found.qpos, CLIP.qpos, rtol=0, atol=1e-6)
    assert load.load(path, fps=120.0).fps == 120.0


def test_saving_and_loading_gives_the_clip_back(tmp_path: Path) -> None:
    load.save(tmp_path / "random.npz", CLIP)
    found = load.load(tmp_path / "random.npz")
    torch.testing.assert_close(found.qpos, CLIP.qpos * sign(found.qpos), rtol=0, atol=1e-6)
    with np.load(tmp_path / "random.npz") as held:
        assert held["body_ang_vel_w"].shape == (9, 30, 3)
        np.testing.assert_array_equal(held["joint_vel"], BODIES.qvel[:, 6:].numpy())


def nan(column: int) -> np.ndarray:
    qpos = CLIP.qpos.numpy().copy()
    qpos[4, column] = np.nan
    return qpos


@pytest.mark.parametrize(
    ("held", "message"),
    [
        ({"qpos": CLIP.qpos.numpy()}, "holds no fps; give the frame rate of the recording, such as fps=30"),
        ({"qpos": CLIP.qpos.numpy(), "fps": 0}, "fps is 0.0; give the frame rate"),
        ({"qpos": nan(20), "fps": 50}, "frame 4, column 20 is nan; cut these frames out"),
        ({"qpos": CLIP.qpos.numpy()[:, :30], "fps": 50}, "(9, 30); the robot takes [frames, 36]"),
        (beyondmimic(joint_pos=CLIP.joint_pos.numpy()[:, :23]), "joint_pos has 23 columns; the g1 has 29 joints"),
        (beyondmimic(joint_pos=nan(20)[:, 7:]), "frame 4, column 20 is nan"),
        (beyondmimic(body_quat_w=np.zeros((9, 30, 4))), "base quaternion of frame 0 has length 0.000"),
        ({name: value[:0] for name, value in beyondmimic().items()} | {"fps": 50}, "0 frame; velocities need"),
        (beyondmimic(body_pos_w=None), "base is read from body_pos_w [9, bodies, 3], which is missing"),
        (beyondmimic(body_quat_w=np.ones((9, 4))), "body_quat_w [9, bodies, 4], which is of shape (9, 4)"),
        (beyondmimic(body_names=np.array(["pelvic"] * 30)), "body_names lacks 'pelvis'"),
        (beyondmimic(joint_names=np.array(["knee"] * 29)), "29 entries and lacks 'left_hip_pitch_joint'"),
        (beyondmimic(joint_names=np.array([*ROBOT.joint_names, "neck"])), "has 30 entries; the g1 has 29 joints"),
        (beyondmimic(joint_pos=CLIP.joint_pos.numpy()[:, ::-1]), "cm from body_pos_w; store joint_names"),
        ({"fps": 50, "poses": np.ones(3)}, "no array qpos or joint_pos, only fps, poses"),
        ({"qpos": np.array([None, {}], dtype=object), "fps": 50}, "cannot be read as an .npz file of plain arrays"),
    ],
)  # fmt: skip
def test_a_bad_npz_is_one_sentence_that_names_the_file(tmp_path: Path, held: dict, message: str) -> None:
    path = write(tmp_path / "bad.npz", held)
    with pytest.raises(ValueError, match=re.escape(message)) as caught:
        load.load(path)
    assert f"motion {path}: " in str(caught.value)


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.csv", "1,2,3\n4,5,6\n", "(2, 3); the robot takes [frames, 36]"),
        ("a.csv", "x,y,z\n1,2,3\n", "not a table of numbers"),
        ("a.csv", ",".join(["0.0"] * 36) + "\n" + ",".join(["0.0"] * 36), "quaternion of frame 0 has length 0.000"),
        ("a.npz", "no archive", "cannot be read as an .npz file"),
        ("a.pkl", "", "expected a .csv or .npz file"),
    ],
)  # fmt: skip
def test_a_bad_file_is_one_sentence_that_names_it(tmp_path: Path, name: str, text: str, message: str) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(ValueError, match=re.escape(message)) as caught:
        load.load(tmp_path / name)
    assert f"motion {tmp_path / name}: " in str(caught.value)


def test_a_missing_file_is_named() -> None:
    with pytest.raises(FileNotFoundError, match=r"nowhere\.csv does not exist"):
        load.load("nowhere.csv")
