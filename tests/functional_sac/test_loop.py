"""The host's clock: what is written when, that looking changes nothing, and how a run ends."""

from __future__ import annotations

import itertools
import os
import signal
import types

import pytest
import tiny_runs
import torch
from equal import assert_bits_equal

from functional_sac import loop
from functional_sl.run import runlog

pytestmark = pytest.mark.usefixtures("tiny")
tiny = tiny_runs.tiny


def column(run_dir, name):
    return {record["step"]: record[name] for record in tiny_runs.records(run_dir) if name in record}


@pytest.mark.parametrize("changes", [{}, {"num_seeds": 2}], ids=["one seed", "two seeds"])
def test_looking_changes_nothing(tmp_path, changes):
    """No evaluation, or one after every other step: the same final bits."""
    tiny_runs.run(tmp_path / "blind", eval_episodes=0, log_every=1000, **changes)
    looks = {"eval_every": 4, "eval_episodes": 3, "log_every": 1, "snapshot_every": 8, "tensorboard": False}
    tiny_runs.run(tmp_path / "looking", **looks, **changes)
    assert_bits_equal(tiny_runs.state(tmp_path / "looking"), tiny_runs.state(tmp_path / "blind"))
    assert len(column(tmp_path / "looking", "eval_return_mean")) == 15
    assert column(tmp_path / "blind", "eval_return_mean") == {}


def test_intervals_count_environment_steps(tmp_path):
    """7 environments, every 20 steps, to 90: the first multiples of 7 past 20, 40, 60, 80, and the end, 91."""
    summary = tiny_runs.run(tmp_path, num_envs=7, env_steps=90, eval_every=20, log_every=40, keep_snapshots=9)
    assert list(column(tmp_path, "eval_return_mean")) == tiny_runs.steps(tmp_path) == [21, 42, 63, 84, 91]
    assert summary["env_steps"] == 91


def test_the_last_step_is_written_down_once(tmp_path):
    tiny_runs.run(tmp_path, env_steps=40)
    assert list(column(tmp_path, "updates")) == [10, 20, 30, 40]
    assert list(column(tmp_path, "eval_return_mean")) == tiny_runs.steps(tmp_path) == [20, 40]


EDGES = {
    "one environment": ({"num_envs": 1, "env_steps": 30}, 15),
    "a batch of 2": ({"batch_size": 2}, 23),
    "one episode": ({"eval_episodes": 1}, 23),
    "K 3, period 2": ({"updates_per_step": 3}, 69),
    "one transition": ({"num_envs": 1, "learning_starts": 1, "env_steps": 4, "batch_size": 2}, 4),
    "bfloat16": ({"compute_dtype": "bfloat16"}, 23),
    "UniLab's prior": ({"reward_prior": "unilab", "random_warmup": False}, 23),
    "no reward scale": ({"scale_rewards": False, "deterministic": False}, 23),
}


@pytest.mark.parametrize(("changes", "updates"), EDGES.values(), ids=EDGES)
def test_small_numbers(tmp_path, changes, updates):
    summary = tiny_runs.run(tmp_path, **changes)
    assert summary["updates"] == updates
    state = tiny_runs.state(tmp_path)
    assert (state["learner/updates"], state["run.rank0/env_steps"]) == (updates, summary["env_steps"])
    # The actor takes part in updates 0, 2, 4, ...: half of them, rounded up.
    assert state["learner/actor/opt/count"] + state["learner/actor/gate/skipped"] == -(-updates // 2)
    assert torch.isfinite(state["learner/actor/params/mean_w"]).all()
    if changes.get("eval_episodes") == 1:
        assert summary["eval_return_std"] == 0.0


def test_seeds_are_independent_runs(tmp_path):
    """Seed 5 + i of three equals the single run of seed 5 + i.

    Batched matrix products add in another order: 1.2e-7 after 5 updates here, 7e-7 after 23.
    """
    tiny_runs.run(tmp_path / "all", seed=5, num_seeds=3, env_steps=24)
    together, means = tiny_runs.state(tmp_path / "all"), []
    for i in range(3):
        summary = tiny_runs.run(tmp_path / str(i), seed=5 + i, env_steps=24)
        for name, alone in tiny_runs.state(tmp_path / str(i)).items():
            torch.testing.assert_close(together[name][i], alone, rtol=0, atol=2e-6, msg=name)
        means.append(summary["eval_return_mean"])
    last = tiny_runs.records(tmp_path / "all")[-1]
    assert last["eval_return_seeds"] == pytest.approx(means, abs=1e-3)
    assert last["eval_return_mean"] == pytest.approx(sum(means) / 3, abs=1e-3)
    assert len(set(means)) == 3


def kill_at(monkeypatch, step, number):
    """Sends a signal to this process while the records of `step` are written."""
    write = runlog.RunLog.write

    def writing(self, at, *args):
        if at == step:
            os.kill(os.getpid(), number)
        write(self, at, *args)

    monkeypatch.setattr(runlog.RunLog, "write", writing)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_stopped_run_goes_on_as_if_nothing_had_been(tmp_path, monkeypatch, capsys, number):
    tiny_runs.run(tmp_path / "straight")
    with monkeypatch.context() as patch:
        kill_at(patch, 30, number)
        summary = tiny_runs.run(tmp_path / "run")
    # The signal came while step 30 was written down; the next vector step sees it.
    assert (summary["stopped"], summary["env_steps"], summary["updates"]) == (number.name, 32, 9)
    assert f"{number.name}: stopped after a snapshot; go on with --resume={tmp_path / 'run'}" in capsys.readouterr().err
    assert tiny_runs.steps(tmp_path / "run") == [20, 32]
    assert list(column(tmp_path / "run", "updates")) == [10, 20, 30]
    assert "stopped" not in tiny_runs.resume(tmp_path / "run")
    assert_bits_equal(tiny_runs.state(tmp_path / "run"), tiny_runs.state(tmp_path / "straight"))
    assert tiny_runs.records(tmp_path / "run") == tiny_runs.records(tmp_path / "straight")


def test_a_signal_after_the_last_step_finds_a_finished_run(tmp_path, monkeypatch):
    kill_at(monkeypatch, 60, signal.SIGTERM)
    summary = tiny_runs.run(tmp_path)
    assert "stopped" not in summary
    assert summary["eval_return_mean"] is not None


def test_rates_tell_of_this_attempt_and_do_not_spike(tmp_path, monkeypatch):
    """Every look at the clock finds a second gone, and a record has 10 steps and, from the 2nd on, 3 or 5 updates."""
    monkeypatch.setattr(loop, "time", types.SimpleNamespace(monotonic=itertools.count().__next__))
    tiny_runs.run(tmp_path, env_steps=40)
    summary = tiny_runs.resume(tmp_path, env_steps=60)
    host = [record["host"] for record in runlog.effective(tmp_path)]
    assert [values["env_steps_per_s"] for values in host] == [10.0] * 6
    assert [values["updates_per_s"] for values in host] == [0.0, 3.0, 5.0, 5.0, 5.0, 5.0]
    # 20 steps and 10 updates in 3 s; the seconds are those of both attempts.
    assert (summary["env_steps_per_s"], summary["updates_per_s"]) == (6.7, 3.33)
    elapsed = [values["elapsed_s"] for values in host]
    assert elapsed == sorted(elapsed)
    assert [values["attempt"] for values in host] == [0, 0, 0, 0, 1, 1]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:`torch.jit.*:DeprecationWarning")
def test_a_compiled_run_learns_the_same(tmp_path):
    """Inductor contracts multiplications with additions: 1e-5 after 8 updates."""
    for compiles in ("true", "false"):
        tiny_runs.run(tmp_path / compiles, compile=compiles, env_steps=30)
    eager = tiny_runs.state(tmp_path / "false")
    for name, leaf in tiny_runs.state(tmp_path / "true").items():
        torch.testing.assert_close(leaf, eager[name], rtol=1e-5, atol=1e-5, msg=name)
