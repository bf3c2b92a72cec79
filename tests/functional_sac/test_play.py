"""Playing a snapshot: the evaluation of training again, for any number of environments, with nothing changed."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import tiny_runs
import torch
from PIL import Image

import functional_sac
from functional_sac import envs, evaluation, play, playing, trained
from functional_sac.evaluation import Result
from functional_sac.play import Settings
from functional_sl import keys
from functional_sl.run import cli, manifest

EPISODES = tiny_runs.TINY["eval_episodes"]


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A finished tiny run, in whose process every task is the short pendulum."""
    run_dir = tmp_path_factory.mktemp("runs") / "ä run"
    with tiny_runs.prepared():
        tiny_runs.run(run_dir)
        yield run_dir


def key(seed: int = 0) -> torch.Tensor:
    return keys.fold_in(keys.key(seed), evaluation.STREAM)


def test_the_numbers_are_those_of_training_and_nothing_changes(finished: Path) -> None:
    before = tiny_runs.files(finished)
    found = play.run(Settings(snapshot=str(finished), episodes=EPISODES, device="cpu"))
    record = tiny_runs.records(finished)[-1]
    assert found["env_steps"] == record["step"] == 60
    assert found["return_mean"] == record["eval_return_mean"] == sum(found["returns"]) / EPISODES
    assert found["length_mean"] == 10
    assert found["terminated"] == 0
    assert tiny_runs.files(finished) == before


def test_episodes_do_not_depend_on_those_beside_them(finished: Path) -> None:
    """Blocks of 3 in 7 episodes leave two to fill up. Products of more rows may round otherwise, by 1e-5 of a return
    over ten steps; blocks of one size give equal bits."""
    policy = trained.read(str(finished))
    env = trained.environment(policy)
    results = {n: playing.evaluate(policy, env, key(), 7, n) for n in (1, 3, 7)}
    assert results[7].returns.std() > 0
    for n in (1, 3):
        torch.testing.assert_close(results[n].returns, results[7].returns, rtol=1e-5, atol=1e-5)
        assert torch.equal(results[n].lengths, results[7].lengths)
    longer = playing.evaluate(policy, env, key(), 10, 3)
    assert torch.equal(longer.returns[:7], results[3].returns)
    assert not torch.equal(playing.evaluate(policy, env, key(1), 7, 7).returns, results[7].returns)


@pytest.mark.parametrize("form", ["run", "snapshots", "snapshot", "manifest", "slash", "link", "home", "relative"])
def test_snapshots_are_found_however_they_are_named(
    finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, form: str
) -> None:
    snapshot = finished / "snapshots" / "step_000000000060"
    monkeypatch.chdir("/")
    if form == "link":
        (tmp_path / "link").symlink_to(snapshot)
    if form == "home":
        monkeypatch.setenv("HOME", str(finished.parent))
    if form == "relative":
        monkeypatch.chdir(finished.parent)
    sources = {
        "run": finished,
        "snapshots": finished / "snapshots",
        "snapshot": snapshot,
        "manifest": snapshot / manifest.NAME,
        "slash": f"{snapshot}{os.sep}",
        "link": tmp_path / "link",
        "home": "~/ä run",
        "relative": "ä run",
    }
    assert trained.read(str(sources[form])).folder.samefile(snapshot)


def test_latest_is_the_newest_run_with_a_snapshot(
    finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(cli.UsageError, match=r"^latest: no run with a task and a valid snapshot under"):
        trained.find("latest")
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "good").symlink_to(finished)
    (tmp_path / "runs" / "damaged").mkdir()
    (tmp_path / "runs" / "damaged" / "run.json").write_text("{")
    assert trained.find("latest").samefile(finished / "snapshots" / "step_000000000060")


def test_what_cannot_be_played_is_told_in_one_line(
    finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def complaint(*argv: str) -> str:
        with pytest.raises(SystemExit) as end:
            play.main(argv)
        assert end.value.code == 2
        return capsys.readouterr().err

    assert "no snapshot given" in complaint()
    assert "no such folder" in complaint(str(tmp_path / "nowhere"))
    assert "this folder holds no run" in complaint(str(tmp_path))
    assert "episodes=0: must be positive" in complaint(str(finished), "--episodes=0")
    assert "learner=1" in complaint(str(finished), "--learner=1")
    assert "ends in .gif or .mp4" in complaint(str(finished), "--video=film.avi")
    assert "its folder is not there" in complaint(str(finished), f"--video={tmp_path}/no/film.gif")
    env = tiny_runs.short_pendulum()
    monkeypatch.setattr(envs, "make", lambda task, sim: env._replace(render=None))
    assert "cannot be drawn; leave --video out" in complaint(str(finished), f"--video={tmp_path}/film.gif")
    other = env._replace(spec=dataclasses.replace(env.spec, actor_dim=4))
    monkeypatch.setattr(envs, "make", lambda task, sim: other)
    assert "4 observations and 1 actions here, the policy 3 and 1" in complaint(str(finished))
    assert [*tmp_path.iterdir()] == []


def test_gymnasium_tasks_play_alike_in_blocks() -> None:
    """A policy that was never trained; rounding of other block sizes grows along 200 steps of a pendulum."""
    pytest.importorskip("gymnasium")
    from functional_sac import networks
    from functional_sac.envs import gym

    with contextlib.closing(gym.make("Pendulum-v1")) as env:
        params, stats = networks.init_actor(keys.key(3), 3, 1, 8, 1)
        policy = trained.Trained(Path(), {}, tiny_runs.config(), 0, params, stats)
        whole, blocks = (playing.evaluate(policy, env, key(), 5, n) for n in (5, 2))
    assert whole.returns.unique().numel() == 5
    assert whole.lengths.tolist() == [200] * 5
    torch.testing.assert_close(blocks.returns, whole.returns, rtol=1e-3, atol=1e-3)


def test_one_of_several_seeds(tmp_path: Path, finished: Path) -> None:
    tiny_runs.run(tmp_path / "run", num_seeds=2)
    means = tiny_runs.records(tmp_path / "run")[-1]["eval_return_seeds"]
    for learner, seed in ((0, 0), (1, 1)):
        settings = Settings(snapshot=str(tmp_path / "run"), episodes=EPISODES, learner=learner, device="cpu")
        found = play.run(settings)
        assert found["seed"] == seed
        assert found["return_mean"] == means[learner]


def test_figures_by_hand() -> None:
    """Returns 1, 2, 3, 6, one of four terminated, a fifth that did not end: mean 3, deviation sqrt(14 / 4)."""
    result = Result(
        returns=torch.tensor([1.0, 2.0, 3.0, 6.0, 0.0]),
        lengths=torch.tensor([5, 5, 5, 2, 0]),
        terminated=torch.tensor([False, False, False, True, False]),
    )
    found = playing.figures(result)
    assert (found["return_mean"], found["return_min"], found["return_max"]) == (3.0, 1.0, 6.0)
    assert found["return_std"] == pytest.approx(math.sqrt(14 / 4))
    assert (found["terminated"], found["episodes"], found["unfinished"]) == (0.25, 4, 1)
    low, high = found["return_interval"]
    assert 1.0 < low < 3.0 < high < 6.0
    with pytest.raises(ValueError, match="no episode ended"):
        playing.figures(Result(*(x[4:] for x in result)))


def test_the_interval_covers_the_mean() -> None:
    """Of 100 samples of 50 normal returns, about 95 % of the intervals hold the true mean; fewer than 85 % would be
    four standard deviations away."""
    generator = torch.Generator().manual_seed(0)
    samples = torch.randn(100, 50, generator=generator, dtype=torch.float64).numpy()
    intervals = [playing._spread(sample)["interval"] for sample in samples]
    assert sum(low <= 0 <= high for low, high in intervals) >= 85


def test_the_command_prints_a_table_and_films_without_a_display(finished: Path, tmp_path: Path) -> None:
    """A process of its own, in which nothing has been replaced: the whole pendulum."""
    root = Path(functional_sac.__file__).parent.parent
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, (str(root), os.environ.get("PYTHONPATH")))),
        "OMP_NUM_THREADS": "1",
    }
    environment.pop("DISPLAY", None)
    command = [sys.executable, "-m", "functional_sac.play", str(finished), "--episodes=3", "--video=film.gif"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=tmp_path, env=environment)
    *lines, last = done.stdout.splitlines()
    found = json.loads(last)
    assert len(found["returns"]) == 3
    assert lines[0].startswith("pendulum, 60 environment steps: /")
    assert f"{found['return_mean']:.2f}" in lines[2]
    assert lines[-1] == "3 episodes, 0.0 % terminated, the others ran out of time"
    with Image.open(tmp_path / "film.gif") as film:
        assert film.n_frames > 10
