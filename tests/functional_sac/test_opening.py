"""A run goes on as if it had never ended, and what cannot be met is refused before a file is touched."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest
import tiny_runs
import torch
from equal import assert_bits_equal
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from functional_sac import opening, reporting
from functional_sac.plan import Clock
from functional_sl import tree
from functional_sl.run import runlog
from functional_sl.run.cli import UsageError

pytestmark = pytest.mark.usefixtures("tiny")
tiny, whole, run_dir = tiny_runs.tiny, tiny_runs.whole, tiny_runs.run_dir


def snapshot_of(run_dir: Path, step: int) -> Path:
    return run_dir / "snapshots" / f"step_{step:012d}"


VARIANTS = {
    "K 3": {"updates_per_step": 3},
    "UniLab's noise and count, n 3": {
        "n_step": 3, "noise_per_env": True, "critic_first": True, "actor_count": "cycle", "updates_per_step": 2,
    },
    "a replay that is full": {"replay_capacity": 17},
    "two seeds": {"num_seeds": 2},
    "float16": {"compute_dtype": "float16"},
    "seven environments": {"num_envs": 7},
    "a schedule with warm-up": {"lr_init": 1e-5, "lr_warmup_updates": 10, "lr_decay_updates": 30},
}  # fmt: skip


@pytest.mark.parametrize("changes", VARIANTS.values(), ids=VARIANTS)
def test_going_on_repeats_every_bit(tmp_path, changes):
    """A run goes on from its own snapshots before and after learning began; nothing in it can tell."""
    run_dir = tmp_path / "run"
    tiny_runs.run(run_dir, keep_snapshots=9, snapshot_every=14, **changes)
    state, records, steps = tiny_runs.state(run_dir), tiny_runs.records(run_dir), tiny_runs.steps(run_dir)
    assert steps[0] == 14
    assert records[1]["updates"] > 0
    for step in (steps[2], steps[0]):
        tiny_runs.resume(snapshot_of(run_dir, step))
        assert_bits_equal(tiny_runs.state(run_dir), state)
        assert tiny_runs.records(run_dir) == records
        assert tiny_runs.steps(run_dir) == steps


def test_a_longer_run_equals_a_straight_one(tmp_path):
    """20 steps and 40 more. The decay that the first half chose stays, and its warm-up does not come again."""
    free = {"lr_decay_updates": 0, "lr_init": 1e-5, "lr_warmup_updates": 2}
    tiny_runs.run(tmp_path / "broken", env_steps=20, **free)
    tiny_runs.resume(tmp_path / "broken", env_steps=60)
    tiny_runs.run(tmp_path / "straight", env_steps=60, **(free | {"lr_decay_updates": 3}))
    assert_bits_equal(tiny_runs.state(tmp_path / "broken"), tiny_runs.state(tmp_path / "straight"))
    assert tiny_runs.records(tmp_path / "broken") == tiny_runs.records(tmp_path / "straight")
    attempts = runlog.describe(tmp_path / "broken")["attempts"]
    assert [attempt["changes"] for attempt in attempts] == [{}, {"env_steps": ["20", "60"]}]


def test_the_notes_tell_what_a_resume_changes(run_dir):
    config = tiny_runs.config(resume=str(run_dir), env_steps=80)
    with opening.open_run(config, frozenset({"env_steps"})) as run:
        assert run.start.clock == Clock(60, 23, 30)
        assert run.start.notes == (
            f"resumed from {snapshot_of(run_dir, 60)} at 60 environment steps",
            "env_steps is 80 now; lr_decay_updates stays 40",
        )


def test_later_snapshots_are_set_aside_and_nothing_is_lost(run_dir):
    before = tiny_runs.files(run_dir / "snapshots")
    tiny_runs.resume(snapshot_of(run_dir, 20), keep_snapshots=1)
    aside = tiny_runs.files(run_dir / "snapshots" / "superseded")
    for step in (40, 60):
        name = f"step_{step:012d}"
        assert {n for n in aside if n.startswith(name)} == {n.replace(name, f"{name}.0") for n in before if name in n}
    assert 20 in tiny_runs.steps(run_dir)
    board = EventAccumulator(str(run_dir / "tensorboard"))
    board.Reload()
    assert [event.step for event in board.Scalars("updates")] == [r["step"] for r in tiny_runs.records(run_dir)]
    with pytest.raises(UsageError, match=r"superseded.*the run has gone on from an earlier snapshot; start a new run"):
        tiny_runs.resume(run_dir / "snapshots" / "superseded" / "step_000000000040.0")


PLACES = {
    "the run": "here/run",
    "a trailing slash": "here/run/",
    "the snapshots": "here/run/snapshots",
    "a snapshot": "here/run/snapshots/step_000000000060",
    "a manifest": "here/run/snapshots/step_000000000060/manifest.json",
    "a link to the run": "run link",
    "a link to a snapshot": "snapshot link",
    "from home": "~/here/run",
}


@pytest.mark.parametrize("place", PLACES.values(), ids=PLACES)
def test_a_moved_run_is_found_however_it_is_named(whole, tmp_path, monkeypatch, place):
    home = tmp_path / "of ü and space"
    shutil.copytree(whole, home / "here" / "run")
    (home / "run link").symlink_to("here/run")
    (home / "snapshot link").symlink_to("here/run/snapshots/step_000000000060")
    monkeypatch.chdir(home)
    monkeypatch.setenv("HOME", str(home))
    summary = tiny_runs.resume(place, env_steps=62)
    assert Path(summary["run_dir"]).samefile(home / "here" / "run")
    assert (summary["env_steps"], summary["updates"]) == (62, 24)
    assert tiny_runs.steps(home / "here" / "run") == [20, 40, 60, 62]


def test_latest_is_the_run_that_was_started_last(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(
        UsageError, match=r"--resume=latest: no run with a task and a valid snapshot under .*runs; give its path"
    ):
        tiny_runs.resume("latest")
    runs = [Path(tiny_runs.run(env_steps=20)["run_dir"]) for _ in range(2)]
    for run, seconds in zip(runs, (2000, 1000), strict=True):
        os.utime(run / "run.json", (seconds, seconds))
    assert [run.parent for run in runs] == [tmp_path / "runs"] * 2
    assert tiny_runs.resume("latest", env_steps=22)["run_dir"] == str(runs[0])


def test_without_the_replay_a_resume_refills_it(tmp_path):
    """Learning starts with the 8th vector step; so it goes on at 20 + 8 * 2."""
    run_dir = tmp_path / "run"
    tiny_runs.run(run_dir, env_steps=20, snapshot_replay=False)
    assert {name.partition("/")[0] for name in tiny_runs.state(run_dir)} == {"learner", "run.rank0"}
    before = tiny_runs.files(run_dir)
    with pytest.raises(UsageError, match=r"--env_steps=34: .* holds no replay, .* at 36 .*, nothing would be left"):
        tiny_runs.resume(run_dir, env_steps=34)
    assert tiny_runs.files(run_dir) == before
    config = tiny_runs.config(resume=str(run_dir), env_steps=35)
    with opening.open_run(config, frozenset({"env_steps"})) as run:
        assert "the snapshot holds no replay: it is filled anew, and learning goes on at 36" in run.start.notes[1]
        assert run.start.clock == Clock(20, 3, 0)
    tiny_runs.resume(run_dir, env_steps=60, log_every=2)
    learned = {record["step"]: record["updates"] for record in tiny_runs.records(run_dir)}
    assert [learned[step] for step in (20, 22, 34, 36, 60)] == [3, 3, 3, 4, 16]
    # The policy acts meanwhile: the noise that it holds moves, which a random phase would leave alone.
    assert tiny_runs.state(run_dir)["run.rank0/noise/count"] > 0


REFUSED = {
    "lr_decay_updates": (41, "lr_decay_updates 40 -> 41"),
    "lr_peak": (1e-3, "lr_peak 0.0003 -> 0.001"),
    "task": ("reacher", "task pendulum -> reacher"),
    "num_envs": (3, "num_envs 2 -> 3"),
    "num_seeds": (2, "num_seeds 1 -> 2"),
    "batch_size": (16, "batch_size 8 -> 16"),
    "seed": (1, "seed 0 -> 1"),
    "compute_dtype": ("bfloat16", "compute_dtype float32 -> bfloat16"),
    "env_steps": (60, "--env_steps=60: .* has 60 already; ask for more"),
    "run_dir": ("elsewhere", "--run_dir=elsewhere: a resumed run stays in its folder"),
    "init_from": ("elsewhere", "a run goes on or starts from other networks, not both"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_resume_that_would_be_another_run_is_refused_in_one_line(run_dir, name):
    value, words = REFUSED[name]
    before = tiny_runs.files(run_dir)
    with pytest.raises(ValueError, match=words) as caught:
        tiny_runs.resume(run_dir, **{"env_steps": 80, name: value})
    assert "\n" not in str(caught.value)
    assert tiny_runs.files(run_dir) == before


def test_a_run_that_is_at_its_end_is_drawn_again(run_dir, monkeypatch, capsys):
    """Its process may have been killed after the last snapshot, before pictures and summary."""
    state, records, kept = tiny_runs.state(run_dir), tiny_runs.records(run_dir), tiny_runs.steps(run_dir)
    drawn = []
    monkeypatch.setattr(reporting, "draw_curve", lambda *args: drawn.append("curve"))
    monkeypatch.setattr(reporting, "film", lambda *args: drawn.append("film"))
    summary = tiny_runs.resume(run_dir)
    assert drawn == ["curve", "film"]
    assert (summary["env_steps"], summary["updates"]) == (60, 23)
    assert summary["eval_return_mean"] == records[-1]["eval_return_mean"]
    assert "the run is at its end: its pictures are drawn anew" in capsys.readouterr().err
    assert_bits_equal(tiny_runs.state(run_dir), state)
    assert (tiny_runs.records(run_dir), tiny_runs.steps(run_dir)) == (records, kept)
    assert tiny_runs.resume(run_dir, env_steps=80)["env_steps"] == 80


def test_a_foreign_snapshot_is_not_picked_silently(run_dir, tmp_path, caplog):
    tiny_runs.run(tmp_path / "other", env_steps=80)
    shutil.copytree(snapshot_of(tmp_path / "other", 80), snapshot_of(run_dir, 80))
    with pytest.raises(UsageError, match=r"step_000000000080: is of run .*, but lies in run .*--init_from="):
        tiny_runs.resume(snapshot_of(run_dir, 80), env_steps=100)
    tiny_runs.resume(run_dir, env_steps=62)
    assert "skipped a snapshot" in caplog.text
    assert json.loads((run_dir / "run.json").read_text())["attempts"][-1]["resume_step"] == 60


@pytest.mark.parametrize("flag", ["resume", "init_from"])
@pytest.mark.parametrize(
    ("place", "words"),
    [("", "names no folder"), ("nowhere", "no such folder"), ("empty", "holds no run|no valid snapshot")],
)
def test_a_source_that_is_not_there_is_named(tmp_path, monkeypatch, flag, place, words):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    with pytest.raises(UsageError, match=f"{place or flag}.*({words})"):
        opening.open_run(tiny_runs.config(**{flag: place})).__enter__()
    assert [path.name for path in tmp_path.iterdir()] == ["empty"]


def test_a_taken_folder_is_refused_and_a_vacant_one_is_not(run_dir, tmp_path):
    before = tiny_runs.files(run_dir)
    with pytest.raises(UsageError, match=r"run: holds a run already; continue it with --resume or choose another"):
        tiny_runs.run(run_dir)
    assert tiny_runs.files(run_dir) == before
    with opening.open_run(tiny_runs.config(resume=str(run_dir), env_steps=80), frozenset({"env_steps"})):
        during = tiny_runs.files(run_dir)
        with pytest.raises(UsageError, match=r"run: a live process holds this run"):
            tiny_runs.resume(run_dir, env_steps=80)
        assert tiny_runs.files(run_dir) == during
    other = tmp_path / "other"
    other.mkdir()
    (other / "policy.gif").write_bytes(b"mine")
    with pytest.raises(UsageError, match=r"other: holds policy.gif of something else; choose another folder"):
        tiny_runs.run(other)
    assert tiny_runs.files(other) == {"policy.gif": b"mine"}
    (other / "policy.gif").rename(other / "log.txt")
    with opening.open_run(tiny_runs.config(other)) as run:
        assert run.log.run_dir == other


def test_init_from_takes_networks_statistics_and_temperature_only(run_dir, tmp_path):
    with opening.open_run(tiny_runs.config(tmp_path / "fresh", seed=7)) as run:
        (fresh,) = run.states
    with opening.open_run(tiny_runs.config(tmp_path / "new", seed=7, init_from=str(run_dir))) as run:
        (state,), start = run.states, run.start
    old = tiny_runs.state(run_dir)
    assert start == opening.Start(Clock())
    for name, mine in tiny_runs.named(state).items():
        taken = any(part in name for part in ("/params/", "/stats/", "/target/")) or name.endswith("temperature/params")
        source = old if taken else tiny_runs.named(fresh)
        assert tree.bits_equal(mine, source[name]), name
    with pytest.raises(UsageError, match=r"leaf '.*' is float32\[.*8.*\], expected float32\[.*16"):
        opening.open_run(tiny_runs.config(tmp_path / "wide", init_from=str(run_dir), actor_width=16)).__enter__()
    assert not (tmp_path / "wide").exists()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"seed": 2**32 - 1, "num_seeds": 2}, "seeds end at 2\\*\\*32 - 1"),
        ({"device": "cuda"}, "--device=cuda: torch sees no CUDA device; use --device=cpu"),
    ],
)
def test_what_cannot_be_met_is_refused_before_a_folder_is_made(tmp_path, monkeypatch, changes, words):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(UsageError, match=words):
        tiny_runs.run(tmp_path / "run", **changes)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("overlap", "expected"), [(False, 0), (True, 2)])
def test_an_overlapping_run_reserves_the_rows_of_its_environments(tmp_path, monkeypatch, overlap, expected):
    seen, original = [], opening.make_learner

    def make_learner(*arguments):
        seen.append(arguments[-1])
        return original(*arguments)

    monkeypatch.setattr(opening, "make_learner", make_learner)
    with tiny_runs.prepared():
        tiny_runs.run(tmp_path / "run", overlap=overlap, env_steps=20)
    assert seen == [expected]
