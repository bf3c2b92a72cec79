"""No episode, no number: nothing is a fake 0, a warning or a line that is no JSON."""

from __future__ import annotations

import dataclasses
import json
import math

import pytest
import tiny_runs
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from functional_sac import train
from functional_sac.envs import pendulum
from functional_sac.envs.env import Env, Task, autoreset
from functional_sl.run import snapshot


def env_of(limit: int, worst: float = -math.inf) -> Env:
    """Returns a pendulum with that time limit, whose reward is infinite where it would be below `worst`."""
    spec = dataclasses.replace(pendulum.pendulum().spec, max_episode_steps=limit)

    def step(physics, action):
        new, reward, ended = pendulum.step(physics, action)
        return new, torch.where(reward < worst, -math.inf, reward), ended

    return autoreset(Task(spec, pendulum.reset, step, pendulum.observe, pendulum.render))


def lines(run_dir) -> list[dict]:
    def refuse(constant):
        raise AssertionError(constant)

    return [json.loads(line, parse_constant=refuse) for line in (run_dir / "metrics.jsonl").read_bytes().splitlines()]


def tags(run_dir) -> set[str]:
    board = EventAccumulator(str(run_dir / "tensorboard"))
    board.Reload()
    return set(board.Tags()["scalars"])


def test_episodes_that_do_not_end_have_no_mean(tmp_path):
    with tiny_runs.prepared(env_of(limit=1000)):
        summary = tiny_runs.run(tmp_path, eval_episodes=0)
    records = lines(tmp_path)
    assert [record["train_episodes"] for record in records] == [0] * 6
    assert {record["train_return_mean"] for record in records} == {None}
    assert "train_return_mean" not in tags(tmp_path)
    assert summary["eval_return_mean"] is None
    assert snapshot.best(tmp_path) is None


def test_infinite_rewards_are_null_by_name_and_no_score(tmp_path, capsys):
    with tiny_runs.prepared(env_of(limit=10, worst=-1.0)):
        train.main(tiny_runs.flags(run_dir=tmp_path))
    records = lines(tmp_path)
    assert records[-1]["eval_return_mean"] is None
    assert records[-1]["nonfinite"]["eval_return_mean"] == "-inf"
    assert (records[-1]["skipped_critic"], records[-1]["refused_steps"] > 0) == (0, True)
    assert "eval_return_mean" not in tags(tmp_path)
    assert "updates" in tags(tmp_path)
    assert snapshot.best(tmp_path) is None
    last = json.loads(capsys.readouterr().out.splitlines()[-1], parse_constant=pytest.fail)
    assert (last["eval_return_mean"], last["nonfinite"]["eval_return_mean"]) == (None, "-inf")
    # Not one such step was stored, so no update saw any.
    assert all(torch.isfinite(leaf).all() for name, leaf in tiny_runs.state(tmp_path).items() if "/params/" in name)
