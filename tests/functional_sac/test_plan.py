"""The host's arithmetic against a walk through the run, one vector step at a time."""

from __future__ import annotations

import dataclasses
import math

import pytest

from functional_sac import plan
from functional_sac.config import TrainConfig

SMALL = TrainConfig(batch_size=4, learning_starts=10, num_envs=4, env_steps=100, replay_capacity=1000)


def run(**changes: object) -> TrainConfig:
    return dataclasses.replace(SMALL, **changes)


def walk(config: TrainConfig) -> list[tuple[int, plan.Due]]:
    """Returns the count and what was due after every vector step of a run that `loop` would make."""
    steps, before = [], 0
    while before < config.env_steps:
        now = before + config.num_envs
        steps.append((now, plan.due(config, before, now, last=now >= config.env_steps)))
        before = now
    return steps


def due_at(config: TrainConfig, what: str) -> list[int]:
    return [now for now, due in walk(config) if getattr(due, what)]


def test_intervals_count_environment_steps() -> None:
    """7 environments, every 1000 steps, stop at 4500: the first multiples of 7 past each thousand, and the end."""
    config = run(num_envs=7, env_steps=4500, eval_every=1000, snapshot_every=1000, log_every=1000)
    expected = [1001, 2002, 3003, 4004, 4501]
    for what in ("evaluate", "snapshot", "log"):
        assert due_at(config, what) == expected
    assert plan.vector_steps(config) == 643


@pytest.mark.parametrize(
    ("env_steps", "every", "expected"),
    [
        (4000, 1000, [1000, 2000, 3000, 4000]),  # the end is a multiple: once
        (16, 1, [4, 8, 12, 16]),  # shorter than a vector step
        (14, 100, [16]),  # longer than the run
        (20, 6, [8, 12, 20]),  # 18 is crossed by the last step
    ],
)
def test_odd_intervals(env_steps: int, every: int, expected: list[int]) -> None:
    config = run(env_steps=env_steps, snapshot_every=every, eval_every=every, log_every=every)
    assert due_at(config, "snapshot") == due_at(config, "evaluate") == due_at(config, "log") == expected


def test_an_evaluation_is_logged_and_none_can_be_had() -> None:
    config = run(eval_every=40, log_every=1000, snapshot_every=1000)
    assert due_at(config, "log") == due_at(config, "evaluate") == [40, 80, 100]
    without = run(eval_every=40, log_every=50, snapshot_every=1000, eval_episodes=0)
    assert due_at(without, "evaluate") == []
    assert due_at(without, "log") == [52, 100]


@pytest.mark.parametrize("n_step", [1, 3])
@pytest.mark.parametrize("learning_starts", [0, 1, 4, 10, 12])
@pytest.mark.parametrize("num_envs", [1, 3, 4])
@pytest.mark.parametrize("overlap", [False, True])
def test_learning_starts_when_the_replay_holds_enough(
    n_step: int, learning_starts: int, num_envs: int, overlap: bool
) -> None:
    """A replay gives its first rows after n vector steps; a cycle beside a step has those before it."""
    changes = {"learning_starts": learning_starts, "num_envs": num_envs, "updates_per_step": 3, "overlap": overlap}
    config = run(n_step=n_step, **changes)
    inserted = updates = 0
    for _ in range(plan.vector_steps(config)):
        turn = plan.turn(config, inserted, learned=updates > 0)
        rows = max(0, inserted + 1 - overlap - (n_step - 1)) * num_envs
        assert turn.learn == (rows >= max(learning_starts, 1))
        # The first step that learns is still taken at random: its action comes before the update.
        assert turn.random == (updates == 0)
        inserted, updates = inserted + 1, updates + 3 * turn.learn
    assert updates == plan.total_updates(config) > 0
    assert 0 <= inserted * num_envs - config.env_steps < num_envs


def test_ranks_share_the_steps_and_each_fills_its_replay() -> None:
    """100 steps on 3 ranks of 4: 9 vector steps; each rank has 10 rows after the third, so 7 cycles of 2."""
    assert plan.vector_steps(SMALL, 3) == 9
    assert plan.total_updates(SMALL, 3) == plan.settle(SMALL, 3).lr_decay_updates == 14
    assert plan.total_updates(SMALL, 100) == 0


def test_warm_up_of_a_thousand_on_eight() -> None:
    config = run(learning_starts=1000, num_envs=8, env_steps=2000)
    assert plan.next_learning_step(config) == 125
    assert not plan.turn(config, 123, learned=False).learn
    assert plan.turn(config, 124, learned=False) == plan.Turn(random=True, learn=True)


def test_who_acts() -> None:
    assert not plan.turn(run(random_warmup=False), 0, learned=False).random
    # A resumed run that refills its replay.
    assert plan.turn(SMALL, 0, learned=True) == plan.Turn(random=False, learn=False)


def test_the_clock_moves_by_what_was_done() -> None:
    """2 environments on 2 ranks, 3 updates a cycle of 2 variants, rows for a cycle after the third vector step."""
    config, clock, told = run(num_envs=2, updates_per_step=3, learning_starts=6, batch_size=2), plan.Clock(), []
    for _ in range(5):
        random, phase = plan.iteration(config, clock, phases=2)
        clock = plan.tick(config, clock, learned=phase is not None, ranks=2)
        told.append((random, phase, clock.env_steps, clock.updates))
    assert told == [(True, None, 4, 0), (True, None, 8, 0), (True, 0, 12, 3), (False, 1, 16, 6), (False, 0, 20, 9)]
    # Of 4 environments' vector step one only begins an episode: 7 steps, and the replay may lack a vector step.
    clock = plan.tick(run(learning_starts=12), plan.Clock(4, 0, 1), learned=False, idle=1)
    assert clock == plan.Clock(7, 0, 2, 1)
    assert plan.iteration(run(learning_starts=12), clock, 1) == (True, None)
    assert plan.iteration(run(learning_starts=12), clock._replace(idle=0), 1) == (True, 0)


def test_settle() -> None:
    """25 vector steps, the third of which has 10 rows: 23 cycles of 2 updates."""
    config = plan.settle(SMALL)
    assert config.lr_decay_updates == 46
    assert (config.eval_every, config.log_every, config.snapshot_every) == (10, 1, 20)
    assert plan.settle(config) == config
    assert [f.name for f in dataclasses.fields(config) if getattr(config, f.name) != getattr(SMALL, f.name)] == [
        "lr_decay_updates", "eval_every", "log_every", "snapshot_every",
    ]  # fmt: skip
    given = run(lr_decay_updates=7, eval_every=3, log_every=2, snapshot_every=5)
    assert plan.settle(given) == given
    assert plan.settle(run(lr_warmup_updates=500)).lr_decay_updates == 500


def test_settled_defaults_are_shares_of_the_run() -> None:
    config = plan.settle(TrainConfig())
    assert len(due_at(config, "evaluate")) == 10
    assert len(due_at(config, "snapshot")) == 5
    assert abs(len(due_at(config, "log")) - 200) <= 10
    assert config.lr_decay_updates == 2 * (math.ceil(50_000_000 / 1024) - math.ceil(100_000 / 1024) + 1)
