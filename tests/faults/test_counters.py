"""Counts grow by exactly the right amount past 2**24 and 2**31."""

from __future__ import annotations

import json

import pytest
import tiny_runs
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from functional_sac import opening

STEPS, UPDATES = 2**31 - 6, 2**24


pytestmark = pytest.mark.usefixtures("tiny")
tiny = tiny_runs.tiny


def old_run(folder) -> None:
    """Makes a run that has taken almost 2**31 environment steps, with 2**24 updates."""
    sizes = {"env_steps": STEPS + 26, "log_every": 2, "eval_every": 2**40, "snapshot_every": 10}
    config = tiny_runs.config(folder, **sizes, compile="false")
    with opening.open_run(config) as run:
        (state,) = run.states
        for _ in range(8):
            state, _ = run.iterate(state, random=True, phase=None)
        many = torch.tensor(UPDATES)
        sac = state.sac._replace(updates=many)
        for name in ("actor", "critic", "temperature"):
            part = getattr(sac, name)
            sac = sac._replace(**{name: part._replace(opt=part.opt._replace(count=many.clone()))})
        buffer = state.replay._replace(steps=torch.tensor(STEPS // 2))
        state = state._replace(sac=sac, replay=buffer, env_steps=torch.tensor(STEPS))
        opening.save(run, (state,), STEPS, None)


def test_counts_past_32_bits_and_past_exact_float32(tmp_path):
    """13 vector steps of 2, each with one update; the actor takes part in 7 of them."""
    old_run(tmp_path)
    summary = tiny_runs.resume(tmp_path)
    assert (summary["env_steps"], summary["updates"]) == (STEPS + 26, UPDATES + 13)
    state = tiny_runs.state(tmp_path)
    expected = {
        "run.rank0/env_steps": STEPS + 26,
        "replay.rank0/steps": STEPS // 2 + 13,
        "learner/updates": UPDATES + 13,
        "learner/critic/opt/count": UPDATES + 13,
        "learner/actor/opt/count": UPDATES + 7,
        "learner/temperature/opt/count": UPDATES + 7,
    }
    assert {name: (state[name].dtype, int(state[name])) for name in expected} == {
        name: (torch.int64, value) for name, value in expected.items()
    }
    steps = [STEPS + 2 * k for k in range(1, 14)]
    records = tiny_runs.records(tmp_path)
    assert [record["step"] for record in records] == steps
    assert [record["updates"] for record in records] == [UPDATES + k for k in range(1, 14)]
    # The schedule is long over.
    assert {record["learning_rate"] for record in records} == {1.5e-4}
    assert all(isinstance(json.loads(json.dumps(record["step"])), int) for record in records)
    board = EventAccumulator(str(tmp_path / "tensorboard"))
    board.Reload()
    assert [event.step for event in board.Scalars("critic_loss")] == steps


def test_names_of_snapshots_sort_by_their_number(tmp_path):
    old_run(tmp_path)
    tiny_runs.resume(tmp_path)
    names = sorted(path.name for path in (tmp_path / "snapshots").iterdir())
    assert names == [f"step_{step:012d}" for step in tiny_runs.steps(tmp_path)]
    assert tiny_runs.steps(tmp_path)[-1] == STEPS + 26
