"""K1: the numbers of every episode, not of the first alone, wherever the environment lives."""

from __future__ import annotations

import contextlib

import pytest
import tiny_runs
from counting import count
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from functional_sac import envs

# Two environments, 60 steps: return and length of every episode, and how many end.
KINDS = {
    "torch, truncated": (lambda: count(3), 6.0),
    "torch, terminated": (lambda: count(9, ends_at=3), 6.0),
    "torch, both at once": (lambda: count(3, ends_at=3), 6.0),
    "gymnasium, SameStep": (lambda: envs.make("gym_probes:threes_same_step", "gym"), 3.0),
    "gymnasium, NextStep": (lambda: envs.make("gym_probes:threes_next_step", "gym"), 3.0),
}


@pytest.mark.parametrize(("make", "total"), KINDS.values(), ids=KINDS)
def test_every_episode_is_reported_by_its_own_return_and_length(tmp_path, make, total):
    """A record every vector step: 20 episodes of three steps, in the records and in TensorBoard's own reader."""
    if make is KINDS["gymnasium, SameStep"][0] or make is KINDS["gymnasium, NextStep"][0]:
        pytest.importorskip("gymnasium")
    with contextlib.closing(make()) as env, tiny_runs.prepared(env):
        tiny_runs.run(tmp_path, log_every=1, eval_every=60)
    ended = [record for record in tiny_runs.records(tmp_path) if record["train_episodes"]]
    assert sum(record["train_episodes"] for record in ended) == 20
    assert {(r["train_return_mean"], r["train_length_mean"]) for r in ended} == {(total, 3.0)}
    board = EventAccumulator(str(tmp_path / "tensorboard"))
    board.Reload()
    assert [event.step for event in board.Scalars("train_return_mean")] == [record["step"] for record in ended]
    assert {event.value for event in board.Scalars("train_return_mean")} == {total}
    assert {event.value for event in board.Scalars("train_length_mean")} == {3.0}
    assert {r["eval_return_mean"] for r in tiny_runs.records(tmp_path) if "eval_return_mean" in r} == {total}
