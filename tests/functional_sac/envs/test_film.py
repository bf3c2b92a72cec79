"""Pictures of robots: what MuJoCo draws where it has an OpenGL, and the sketch that says why where it has none."""

from __future__ import annotations

import contextlib
import math
import subprocess
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import tiny_runs
import torch
from torch import Tensor

pytest.importorskip("mujoco")

import mujoco

from functional_sac import envs, play
from functional_sac.envs import film, sketch
from functional_sac.tasks.settings import Settings
from functional_sl import keys, sim
from functional_sl.sim.contract import SimState, Simulator
from functional_sl.sim.robots import g1, go2

NONE = ("", "MuJoCo finds no OpenGL to draw with (egl: nothing)")


@pytest.fixture(scope="module")
def simulator() -> Iterator[Simulator]:
    with contextlib.closing(sim.make(g1.robot(), threads=1)) as found:
        yield found


@pytest.fixture
def pictures(simulator: Simulator) -> Iterator[film.Pictures]:
    """Of MuJoCo."""
    name, reason = film.backend()
    if not name:
        pytest.skip(reason)
    with contextlib.closing(film.Pictures(g1.robot(), simulator.model)) as found:
        yield found


def standing(simulator: Simulator, *places: tuple[float, float, float]) -> SimState:
    """Robots in their standing pose, moved by `places`."""
    state = simulator.init(len(places))
    qpos = state.qpos.clone()
    qpos[:, :3] += torch.tensor(places)
    return simulator.reset(state, torch.ones(len(places), dtype=torch.bool), qpos, state.qvel)


def blue(picture: np.ndarray) -> np.ndarray:
    """Returns which pixels are as blue as only the reference is, [H, W]."""
    red, _, blue = np.moveaxis(picture.astype(int), 2, 0)
    return blue - red > 60


def reference(state: SimState) -> tuple[Tensor, Tensor]:
    return state.qpos, state.body_pos


def test_the_camera_goes_with_the_robot_over_the_floor(pictures: film.Pictures, simulator: Simulator) -> None:
    """The floor repeats itself every metre, so a robot that has gone one metre is the same picture."""
    state = standing(simulator, (0.0, 0.0, 0.0), (1.0, 1.0, 0.0), (0.5, 0.0, 0.0), (0.0, 0.0, 0.2))
    first, far, off, high = (pictures.draw(state, i).astype(int) for i in range(4))
    assert first.shape == (film.HEIGHT, film.WIDTH, 3)
    assert pictures.sketched == ""
    # Edges round differently, which changes single pixels.
    assert (np.abs(first - far) > 8).mean() < 0.01 < (np.abs(first - off) > 8).mean()
    dark = [np.flatnonzero((picture.max(2) < 90).any(1)) for picture in (first, high)]
    assert dark[1][0] < dark[0][0] - 20
    assert not blue(first).any()


@pytest.mark.parametrize("side", [0.5, -0.5])
def test_the_reference_stands_at_its_own_place(pictures: film.Pictures, simulator: Simulator, side: float) -> None:
    """A pinhole camera of 45 degrees that looks along `AZIMUTH`, and so has y to the right of the picture."""
    state = standing(simulator, (0.0, 0.0, 0.0), (0.0, side, 0.0))
    found = blue(pictures.draw(state, 0, reference(SimState(*(leaf[1:] for leaf in state)))))
    angle, height = math.radians(film.AZIMUTH), float(simulator.model.default_qpos[2])
    focal = film.HEIGHT / 2 / math.tan(math.radians(22.5))
    column = film.WIDTH / 2 - focal * side * math.cos(angle) / (film.DISTANCE * height + side * math.sin(angle))
    assert found.sum() > 1000
    assert float(np.flatnonzero(found.any(0)).mean()) == pytest.approx(column, abs=20)


def test_pictures_can_be_closed_and_taken_up_again(pictures: film.Pictures, simulator: Simulator) -> None:
    state = simulator.init(1)
    first = pictures.draw(state, 0)
    pictures.close()
    pictures.close()
    assert np.array_equal(pictures.draw(state, 0), first)


@pytest.mark.parametrize("robot", [g1.robot(), go2.robot()], ids=["g1", "go2"])
def test_drawn_links_change_neither_the_robot_nor_its_mass(robot) -> None:
    """A leg of the Go2 gets four links, hip to tip, and three joints; the head gets a neck."""
    with contextlib.closing(sim.make(robot, threads=1)) as simulator:
        model = simulator.model
    before = robot.spec.compile()
    drawn = film.scene(robot, model, sketch.links(robot, model))
    after = robot.spec.compile()
    assert (after.ngeom, after.nlight, after.ntex) == (before.ngeom, before.nlight, before.ntex)
    assert drawn.nq == before.nq
    assert drawn.body_subtreemass[0] == pytest.approx(before.body_subtreemass[0], rel=1e-9)
    assert int((drawn.geom_conaffinity > 0).sum()) == int((before.geom_conaffinity > 0).sum())
    if robot.name == "go2":
        assert drawn.ngeom - before.ngeom == 4 * (4 + 3) + 1


def test_meshes_are_drawn_as_they_are(tmp_path: Path) -> None:
    """A user's model: the Go2 with one triangle mesh, in a file beside it."""
    (tmp_path / "part.obj").write_text("v 0 0 0\nv 1 0 0\nv 0 1 0\nv 0 0 1\nf 1 3 2\nf 1 2 4\nf 2 3 4\nf 1 4 3\n")
    spec = go2.robot().spec.copy()
    spec.add_mesh(name="part", file=str(tmp_path / "part.obj"))
    spec.body("base").add_geom(type=mujoco.mjtGeom.mjGEOM_MESH, meshname="part", contype=0, conaffinity=0, mass=0)
    spec.compile()
    (tmp_path / "go2.xml").write_text(spec.to_xml())
    robot = go2.robot(xml_path=tmp_path / "go2.xml")
    with contextlib.closing(sim.make(robot, threads=1)) as simulator:
        drawn = film.scene(robot, simulator.model, sketch.links(robot, simulator.model))
    assert drawn.ngeom == robot.spec.compile().ngeom


def fail(*args: object) -> None:
    raise RuntimeError("the driver is gone")


@pytest.mark.parametrize(
    ("name", "stand_in", "reason"),
    [("backend", lambda: NONE, NONE[1]), ("_Renderer", fail, "RuntimeError: the driver is gone")],
    ids=["none", "refused"],
)
def test_without_opengl_a_sketch_is_drawn_and_says_why(name: str, stand_in, reason: str, monkeypatch) -> None:
    monkeypatch.setattr(film, "backend", lambda: ("mujoco.egl", ""))
    monkeypatch.setattr(film, name, stand_in)
    with contextlib.closing(envs.make("g1_motion_tracking", "mujoco", Settings(motion="squat", threads=1))) as env:
        state, _ = env.init(keys.key(0), 2)
        assert env.sketched() == ""
        picture = env.render(state, 1)
        assert env.sketched() == reason
        robot = g1.robot()
        with contextlib.closing(sim.make(robot, threads=1)) as simulator:
            model = simulator.model
        places = sketch.points(model, state.physics.sim, 1)
        # An episode begins where the reference is.
        ghost = state.physics.sim.body_pos[1].numpy()
        height = float(model.default_qpos[2])
        expected = sketch.draw(sketch.links(robot, model), places, height, ghost)
        assert np.abs(picture.astype(int) - expected).mean() < 2


def test_what_is_chosen_and_does_not_work_is_named(monkeypatch) -> None:
    monkeypatch.setenv("MUJOCO_GL", "round")
    name, reason = film.backend.__wrapped__()
    assert name == ""
    assert "(round: RuntimeError: invalid value for environment variable MUJOCO_GL: round)" in reason


def test_both_that_need_no_screen_are_tried(monkeypatch) -> None:
    tried = []

    def run(command: list[str], env: dict[str, str], **how: object) -> subprocess.CompletedProcess[str]:
        tried.append(env["MUJOCO_GL"])
        if tried[-1] == "egl":
            raise subprocess.TimeoutExpired(command, 60.0)
        return subprocess.CompletedProcess(command, 0, "mujoco.osmesa\n")

    monkeypatch.delenv("MUJOCO_GL", raising=False)
    monkeypatch.setattr(film.sys, "platform", "linux")
    monkeypatch.setattr(film.subprocess, "run", run)
    assert film.backend.__wrapped__() == ("mujoco.osmesa", "")
    assert tried == ["egl", "osmesa"]


def test_a_run_and_a_playback_say_that_they_are_sketched(tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.setattr(film, "backend", lambda: NONE)
    np.savez(tmp_path / "stand.npz", qpos=np.tile(g1.robot().default_qpos, (6, 1)), fps=50.0)
    how = {"task": "g1_motion_tracking", "sim": "mujoco", "motion": str(tmp_path / "stand.npz"), "sim_threads": 1}
    sizes = {"num_envs": 2, "env_steps": 10, "learning_starts": 8, "eval_episodes": 1}
    rare = dict.fromkeys(("log_every", "eval_every", "snapshot_every"), 100)
    tiny_runs.run(tmp_path / "run", **how, **sizes, **rare, tensorboard=False)
    torch.use_deterministic_algorithms(False)
    assert capsys.readouterr().err.count(f"policy.gif shows a sketch of the robot: {NONE[1]}") == 1
    told = {"snapshot": str(tmp_path / "run"), "episodes": 1, "device": "cpu", "video": str(tmp_path / "film.gif")}
    found = play.run(play.Settings(**told))
    assert found["sketched"] == NONE[1]
    assert (tmp_path / "film.gif").stat().st_size > 0
