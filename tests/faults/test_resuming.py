"""K5 and K7: what a resumed run finds again, and what it chooses among what it finds."""

from __future__ import annotations

import functools
import itertools
import json
import os
import shutil

import pytest
import tiny_runs
import torch
from equal import assert_bits_equal
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from functional_sac import evaluation, trained
from functional_sac.envs.env import Env
from functional_sl import loss_scale, schedules
from functional_sl.run import snapshot
from functional_sl.run.cli import UsageError
from functional_sl.run.manifest import SnapshotError

pytestmark = pytest.mark.usefixtures("tiny")
tiny, whole, run_dir = tiny_runs.tiny, tiny_runs.whole, tiny_runs.run_dir


def test_the_loss_scale_goes_on_where_it_was(tmp_path, monkeypatch):
    """A scale that starts at 2^24 and doubles after 4 good steps overflows again and again; broken where it did.

    A skipped step counts as an update, but neither for Adam nor for the schedule.
    """
    quick = functools.partial(loss_scale.dynamic, init_scale=2.0**24, growth_interval=4)
    monkeypatch.setattr(loss_scale, "dynamic", quick)
    sizes = {"compute_dtype": "float16", "log_every": 2, "snapshot_every": 6, "keep_snapshots": 99}
    run_dir = tmp_path / "run"
    tiny_runs.run(run_dir, **sizes)
    state, records = tiny_runs.state(run_dir), tiny_runs.records(run_dir)
    scales = [float(tiny_runs.state(run_dir, step)["learner/scale/scale"]) for step in tiny_runs.steps(run_dir)]
    changes = [b / a for a, b in itertools.pairwise(scales)]
    assert min(changes) < 1 < max(changes)
    assert min(scales) >= 1
    for part, updates in (("critic", 23), ("actor", 12)):
        skipped, taken = (int(state[f"learner/{part}/{name}"]) for name in ("gate/skipped", "opt/count"))
        assert skipped + taken == updates
        assert skipped > 2
    rate = schedules.warmup_cosine(3e-4, 3e-4, 1.5e-4, 0, 40)
    taken = [record["updates"] - record["skipped_critic"] for record in records if record["updates"]]
    expected = [float(rate(torch.tensor(count))) for count in taken]
    assert [record["learning_rate"] for record in records if record["updates"]] == expected
    for step in (48, 24):
        tiny_runs.resume(run_dir / "snapshots" / f"step_{step:012d}")
        assert_bits_equal(tiny_runs.state(run_dir), state)
        assert tiny_runs.records(run_dir) == records


def test_the_best_score_and_the_newest_number_survive_a_resume(tmp_path, monkeypatch):
    """Scores 1, 5, 3, then resumed: 4, 2, NaN, 5. The best stays that of step 20, the earlier of equal ones."""
    scores = iter([1.0, 5.0, 3.0, 4.0, 2.0, float("nan"), 5.0])
    original = evaluation.evaluate

    def evaluate(*args):
        result = original(*args)
        return result._replace(returns=torch.full_like(result.returns, next(scores)))

    monkeypatch.setattr(evaluation, "evaluate", evaluate)
    cadence = {"eval_every": 10, "snapshot_every": 10, "keep_snapshots": 2}
    tiny_runs.run(tmp_path, env_steps=30, **cadence)
    assert tiny_runs.steps(tmp_path) == [20, 30]
    foreign = tmp_path / "snapshots" / "step_99999"
    foreign.mkdir()
    (foreign / "weights.bin").write_bytes(b"1")
    tiny_runs.resume(tmp_path, env_steps=70)
    assert json.loads((tmp_path / "run.json").read_text())["attempts"][-1]["resume_step"] == 30
    # The best, the one from which the run went on, and the newest two.
    shutil.rmtree(foreign)
    assert tiny_runs.steps(tmp_path) == [20, 30, 60, 70]
    assert snapshot.best(tmp_path).name == "step_000000000020"
    assert snapshot.latest(tmp_path).name == "step_000000000070"


DAMAGES = {
    "a flipped byte": lambda part: part.write_bytes(part.read_bytes()[:-1] + bytes([part.read_bytes()[-1] ^ 1])),
    "the last 100 bytes cut": lambda part: os.truncate(part, part.stat().st_size - 100),
    "no manifest": lambda part: (part.parent / "manifest.json").unlink(),
    "a part gone": lambda part: part.unlink(),
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_a_damaged_snapshot_is_named_and_the_older_one_taken(run_dir, whole, damage, caplog):
    """From the run's folder the run goes on at 40 and ends as before; play takes 40 too; the one itself is refused."""
    newest = run_dir / "snapshots" / "step_000000000060"
    (part,) = newest.glob("learner-*.safetensors")
    damage(part)
    assert trained.find(str(run_dir)).name == "step_000000000040"
    with pytest.raises((UsageError, SnapshotError), match=r"step_000000000060.*(damaged|not there|expected|no finish)"):
        trained.read(str(newest))
    with pytest.raises(UsageError, match=r"step_000000000060"):
        tiny_runs.resume(newest, env_steps=80)
    caplog.clear()
    tiny_runs.resume(run_dir)
    assert newest.name in caplog.text
    assert json.loads((run_dir / "run.json").read_text())["attempts"][-1]["resume_step"] == 40
    assert_bits_equal(tiny_runs.state(run_dir), tiny_runs.state(whole))


def failing(steps: int) -> Env:
    """Returns the short pendulum that raises in its step of that number."""
    env, count = tiny_runs.short_pendulum(), itertools.count(1)

    def step(state, action):
        if next(count) == steps:
            raise OSError("the arm is off")
        return env.step(state, action)

    return env._replace(step=step)


def test_a_crash_between_snapshots_leaves_one_value_a_step(tmp_path):
    """Snapshot at 20, a crash in the step to 32, resumed to 60: 22 to 30 are there once, also for TensorBoard."""
    sizes = {"log_every": 2, "eval_every": 60}
    with tiny_runs.prepared(failing(16)), pytest.raises(OSError, match="the arm is off"):
        tiny_runs.run(tmp_path / "run", **sizes)
    assert [record["step"] for record in tiny_runs.records(tmp_path / "run")] == [*range(2, 32, 2)]
    tiny_runs.resume(tmp_path / "run")
    tiny_runs.run(tmp_path / "straight", **sizes)
    records = tiny_runs.records(tmp_path / "run")
    assert records == tiny_runs.records(tmp_path / "straight")
    assert [record["step"] for record in records] == [*range(2, 62, 2)]
    board = EventAccumulator(str(tmp_path / "run" / "tensorboard"))
    board.Reload()
    values = [(event.step, event.value) for event in board.Scalars("reward_divisor")]
    assert [step for step, _ in values] == [record["step"] for record in records if record["updates"]]
    assert_bits_equal(tiny_runs.state(tmp_path / "run"), tiny_runs.state(tmp_path / "straight"))
