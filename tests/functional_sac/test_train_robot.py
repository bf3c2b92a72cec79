"""Robot tasks in whole runs on the CPU: records, resumes, ranks, playback and export, with a motion of 12 frames."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_runs
import torch
from equal import assert_bits_equal

pytest.importorskip("mujoco")

from functional_sac import environment, evaluation, play, playing, reporting, train, trained
from functional_sac.envs import robot as robots
from functional_sac.play import Settings
from functional_sac.tasks import tracking_terms
from functional_sl import bundle, keys
from functional_sl.run import cli, runlog
from functional_sl.sim.robots import g1

ROOT = Path(__file__).parents[2]
FRAMES = 12
TRACKING = {"task": "g1_motion_tracking", "sim": "mujoco", "tensorboard": False, "num_envs": 4, "env_steps": 96}
TRACKING |= {"log_every": 32, "eval_every": 1000, "snapshot_every": 1000, "sim_threads": 1}


@pytest.fixture(scope="module")
def motion(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A clip of the standing pose."""
    path = tmp_path_factory.mktemp("motions") / "stand.npz"
    np.savez(path, qpos=np.tile(g1.robot().default_qpos, (FRAMES, 1)), fps=50.0)
    return str(path)


@pytest.fixture
def undrawn() -> Iterator[None]:
    """Runs of this process draw nothing."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("draw_curve", "film", "draw_tracking"):
            patch.setattr(reporting, name, lambda *args: None)
        yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory, motion: str) -> Path:
    """A finished run with one record of all its steps."""
    run_dir = tmp_path_factory.mktemp("runs") / "run"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        tiny_runs.run(run_dir, **TRACKING | {"motion": motion, "log_every": 1000})
    torch.use_deterministic_algorithms(False)
    return run_dir


def test_a_record_tells_of_all_steps_since_the_last(finished: Path) -> None:
    """The replay holds them all, so its mean reward is dt times the sum of the terms."""
    (record,) = tiny_runs.records(finished)
    terms = [value for name, value in record.items() if name.startswith("reward/")]
    reward = tiny_runs.state(finished)["replay.rank0/rows"][:96, -3].double().mean()
    assert len(terms) == 9
    assert 0.02 * sum(terms) == pytest.approx(float(reward), rel=1e-5)
    assert record["error_anchor_pos"] > 0
    assert record["train_episodes"] > 4
    assert 0 < record["episode/completed"] <= 1
    assert record["diverged"] == record["over_contacts"] == 0
    assert {f"error_body_pos/{body}" for body in tracking_terms.BODIES} < record.keys()


def test_a_finished_run_has_its_pictures_and_small_snapshots(finished: Path) -> None:
    assert {"learning_curve.png", "policy.gif", "tracking_error.png"} < {path.name for path in finished.iterdir()}
    (own,) = finished.glob("snapshots/*/run.rank0*")
    # 4 environments of about 540 numbers of the simulator, 449 of the observation and 80 of the noise, and names.
    assert own.stat().st_size < 4 * 1100 * 4 + 16_000


def test_playback_begins_with_the_first_frame_and_repeats_the_evaluation(finished: Path, tmp_path: Path) -> None:
    record, picture = tiny_runs.records(finished)[-1], tmp_path / "errors.png"
    found = play.run(Settings(snapshot=str(finished), episodes=2, device="cpu", tracking_error=str(picture)))
    assert found["return_mean"] == record["eval_return_mean"]
    assert found["length_max"] <= FRAMES
    assert picture.exists()
    # Standing robots have not moved far from a standing reference after a quarter of a second.
    assert set(found["tracking_error"]) == set(tracking_terms.BODIES)
    assert 0 < max(found["tracking_error"].values()) < 1
    with pytest.raises(cli.UsageError, match=r"ends in \.png"):
        play.run(Settings(snapshot=str(finished), device="cpu", tracking_error=str(tmp_path / "errors.txt")))


def test_episodes_in_blocks_begin_as_all_at_once(finished: Path) -> None:
    policy, key = trained.read(str(finished)), keys.fold_in(keys.key(0), evaluation.STREAM)
    with contextlib.closing(trained.environment(policy)) as env:
        state, observation = env.init(key, 5)
        assert (state.physics.memory.own.frame == 0).all()
        part, seen = playing._part(env, 3).init(key, 2)
        assert_bits_equal(part, robots.rows(state, 3))
        assert torch.equal(seen.actor, observation.actor[3:])
        assert_bits_equal(part.physics.memory.shared, state.physics.memory.shared)
        whole, blocks = (playing.evaluate(policy, env, key, 5, n) for n in (5, 2))
        torch.testing.assert_close(blocks.returns, whole.returns, rtol=1e-3, atol=1e-3)
        assert torch.equal(blocks.lengths, whole.lengths)


def test_the_bundle_says_what_a_robot_needs(finished: Path, tmp_path: Path) -> None:
    policy = trained.read(str(finished))
    with contextlib.closing(trained.facts(policy)) as env:
        bundle.save(trained.portable(policy, env), tmp_path / "policy.safetensors")
    about = bundle.load(tmp_path / "policy.safetensors").about
    order, robot = about["inputs"]["observation"]["order"], about["robot"]
    assert (len(order), order[0], order[58], order[-1]) == (160, "command_0", "anchor_pos_0", "last_action_28")
    assert about["outputs"]["action"]["order"][0] == robot["joints"][0] == "left_hip_pitch_joint"
    assert (robot["action_scale"], len(robot["default_pose"])) == ([2.0] * 29, 29)
    assert robot["default_pose"][0] == pytest.approx(-0.312)
    assert robot["stiffness"][0] == pytest.approx(40.179, rel=1e-3)


def stop_at(patch: pytest.MonkeyPatch, step: int) -> None:
    """Sends SIGTERM to this process while the records of `step` are written; the next vector step ends the run."""
    write = runlog.RunLog.write

    def writing(self: runlog.RunLog, at: int, *args: Any) -> None:
        if at == step:
            os.kill(os.getpid(), signal.SIGTERM)
        write(self, at, *args)

    patch.setattr(runlog.RunLog, "write", writing)


@pytest.mark.usefixtures("undrawn")
@pytest.mark.parametrize("task", ["g1_motion_tracking", "g1_walk_flat"])
def test_a_stopped_run_goes_on_bit_by_bit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, motion: str, task: str
) -> None:
    """It stops a vector step past the record of step 32, in the middle of what the next record tells of."""
    changes = TRACKING | {"task": task, "eval_episodes": 0, "motion": motion if "tracking" in task else None}
    tiny_runs.run(tmp_path / "straight", **changes)
    with monkeypatch.context() as patch:
        stop_at(patch, 32)
        assert tiny_runs.run(tmp_path / "run", **changes)["env_steps"] == 36
    assert tiny_runs.resume(tmp_path / "run")["env_steps"] == 96
    assert_bits_equal(tiny_runs.state(tmp_path / "run"), tiny_runs.state(tmp_path / "straight"))
    assert tiny_runs.records(tmp_path / "run") == tiny_runs.records(tmp_path / "straight")


@pytest.mark.usefixtures("undrawn")
def test_two_processes_are_two_simulated_ranks(tmp_path: Path, motion: str) -> None:
    """What a user starts with two visible devices, on the CPU."""
    changes = TRACKING | {"motion": motion, "eval_episodes": 0, "snapshot_replay": False}
    flags = tiny_runs.flags(run_dir="run", **changes)
    env = {
        **os.environ,
        "CUDA_VISIBLE_DEVICES": "0,1",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH")))),
    }
    command = [sys.executable, "-W", "error", "-m", "functional_sac.train", "--preset=official", *flags]
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1])["env_steps"] == 96
    tiny_runs.run(tmp_path / "simulated", **changes, simulated_ranks=2)
    assert_bits_equal(tiny_runs.state(tmp_path / "run"), tiny_runs.state(tmp_path / "simulated"))
    records = tiny_runs.records(tmp_path / "run")
    assert records == tiny_runs.records(tmp_path / "simulated")
    # Of all ranks: a record has 4 vector steps of 8 environments.
    assert [record["step"] for record in records] == [32, 64, 96]


def test_a_missing_simulator_is_one_line_with_its_remedy(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "mujoco_warp", None)
    monkeypatch.delitem(sys.modules, "functional_sl.sim.mjwarp_backend", raising=False)
    with pytest.raises(SystemExit) as end:
        train.main(["--task=g1_walk_flat", "--sim=mjwarp", "--device=cpu", f"--run_dir={tmp_path}/run"])
    *_, line = capsys.readouterr().err.splitlines()
    assert end.value.code == 2
    assert "--task=g1_walk_flat --sim=mjwarp: " in line
    assert "pip install '.[mjwarp]' in the checkout" in line
    assert [*tmp_path.iterdir()] == []


@pytest.mark.usefixtures("undrawn")
def test_dropped_contacts_are_told_once_with_the_flag_to_raise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, motion: str, capsys: pytest.CaptureFixture[str]
) -> None:
    make = environment.envs.make

    def overflowing(*args: Any) -> Any:
        env = make(*args)
        return env._replace(metrics=lambda state: (m := env.metrics(state)) | {"over_contacts": m["steps"] / 2})

    monkeypatch.setattr(environment.envs, "make", overflowing)
    tiny_runs.run(tmp_path, **TRACKING | {"motion": motion, "eval_episodes": 0})
    assert [record["over_contacts"] for record in tiny_runs.records(tmp_path)] == [0.5] * 3
    assert capsys.readouterr().err.count("give a higher --sim_contacts") == 1


@pytest.mark.slow
@pytest.mark.usefixtures("undrawn")
def test_a_run_on_warps_cpu_device_counts_what_it_drops(
    tmp_path: Path, motion: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two feet on the floor make four contacts, so room for one a world is not enough; its kernels take a minute."""
    pytest.importorskip("mujoco_warp")
    changes = {"sim": "mjwarp", "motion": motion, "eval_episodes": 0, "sim_threads": None, "sim_contacts": 1}
    tiny_runs.run(tmp_path, **TRACKING | changes)
    assert tiny_runs.records(tmp_path)[0]["over_contacts"] > 0
    assert "give a higher --sim_contacts" in capsys.readouterr().err
