"""K4: the reward scale's running return ends with its episode, and batch norm's statistics follow their rule."""

from __future__ import annotations

import contextlib
import dataclasses

import pytest
import tiny_runs
import torch
from equal import assert_bits_equal

from functional_sac import cycle, iteration
from functional_sac.config import TrainConfig
from functional_sac.envs import pendulum
from functional_sac.envs.env import Env, Task, autoreset
from functional_sac.losses import Losses
from functional_sac.transition import symmetric
from functional_sl import keys, tree
from functional_sl.parallel.collectives import mean_over_ranks
from functional_sl.parallel.lockstep import Lockstep

SMALL = TrainConfig(
    batch_size=64, actor_width=4, critic_width=4, num_blocks=1, bins=5, lr_decay_updates=200, replay_capacity=400,
    learning_starts=9, num_envs=4, env_steps=1000, updates_per_step=1,
)  # fmt: skip


def ones(limit: int, ends_at: int | None = None, rich: int | None = None) -> Env:
    """Returns an environment with reward 1, and 100 in the environment that `rich` names; it sees 50 + its step."""
    spec = dataclasses.replace(pendulum.pendulum().spec, actor_dim=1, max_episode_steps=limit)

    def step(t, action):
        t = t + 1
        reward = torch.ones_like(t)
        if rich is not None:
            reward = torch.where(torch.arange(len(t)) == rich, 100.0, reward)
        return t, reward, torch.zeros_like(t).bool() if ends_at is None else t >= ends_at

    return autoreset(Task(spec, lambda key: torch.zeros(len(key)), step, lambda t: symmetric(50 + t.unsqueeze(-1))))


def build(env: Env, **changes):
    config = dataclasses.replace(SMALL, **changes)
    loop = iteration.make_iteration(config, env, cycle.make_learner(config, env.spec))
    return loop, loop.init(keys.key(0))


@pytest.mark.parametrize(("limit", "ends_at"), [(5, None), (9, 5), (5, 5)], ids=["truncated", "terminated", "both"])
def test_the_return_that_scales_rewards_ends_with_its_episode(limit, ends_at):
    """Reward 1, episodes of 5, 1000 steps: at most 1 + 0.99 + ... + 0.99^4 = 4.90099501, where a leak tends to 100.

    By the official rule the past is dropped before an episode's last reward is added, so that reward opens the next
    sum of five. An environment that earns 100 times as much has a return of its own.
    """
    loop, state = build(ones(limit, ends_at))
    other, rich = build(ones(limit, ends_at, rich=3))
    for _ in range(250):
        state, rich = loop.step(state, True), other.step(rich, True)
    assert state.scale.max_abs.item() == pytest.approx(4.90099501, abs=1e-6)
    assert_bits_equal(rich.scale.returns[:3], state.scale.returns[:3])
    assert rich.scale.max_abs.item() == pytest.approx(490.099501, abs=1e-4)
    # What is logged is not scaled.
    assert [x.item() for x in state.episodes] == [200, 1000.0, 1000]


def test_a_resumed_run_scales_by_the_same_return(tmp_path):
    """Snapshots fall into the middle of episodes of 7 steps."""
    with tiny_runs.prepared(ones(7)):
        tiny_runs.run(tmp_path / "straight")
        tiny_runs.run(tmp_path / "broken", env_steps=20)
        tiny_runs.resume(tmp_path / "broken", env_steps=60)
    assert tiny_runs.state(tmp_path / "broken", 20)["run.rank0/scale/returns"].max() > 1
    assert_bits_equal(tiny_runs.state(tmp_path / "broken"), tiny_runs.state(tmp_path / "straight"))


def test_the_targets_statistics_follow_their_rule():
    """100 updates on observations 50 ... 53 and successors 51 ... 54, of mean 52: 52 (1 - 0.99^100), as online.

    The official target normalises by the batch and moves its own statistics, by the same rule on the same input. The
    means of batches of 128 with deviation 1.2 lie 0.1 around 52, and their average far closer.
    """
    loop, state = build(ones(4))
    for _ in range(50):
        state = loop.step(state, True)
    for i in range(100):
        state = loop.learn(state, i % 2)
    online, target = state.sac.critic.stats
    # The first features of all are the observation's.
    assert_bits_equal(target.mean[:, 0], online.mean[:, 0])
    assert_bits_equal(target.var[:, 0], online.var[:, 0])
    gain = 1 - 0.99**100
    assert target.mean[0, 0].item() == pytest.approx(52 * gain, abs=0.1)
    assert state.sac.actor.stats.mean[0].item() == pytest.approx(52 * (1 - 0.99**50), abs=0.1)
    # Behind the first layer the two see parameters of their own.
    assert not tree.bits_equal(target.mean, online.mean)


def test_the_goal_depends_on_no_call_before_it():
    """Called twice with the same statistics, the target gives the same goal: it normalises by the batch alone."""
    loop, state = build(ones(4))
    for _ in range(20):
        state = loop.step(state, True)
    state, goals = loop.learn(state, 0), []
    with pytest.MonkeyPatch.context() as patch:
        original = Losses.critic_goal
        patch.setattr(
            Losses, "critic_goal", lambda *a: goals.append(original(*a)) or goals.append(original(*a)) or goals[0]
        )
        before = tree.clone(state)
        loop.learn(state, 1)
    assert_bits_equal(goals[0], goals[1])
    assert_bits_equal(state, before)


def test_averaging_the_ranks_statistics_twice_changes_nothing():
    """Of 2 ranks exactly, of 3 to the rounding of a division by 3."""
    for ranks, tolerance in ((2, 0.0), (3, 2e-7)):
        stats = tuple({"mean": 10.0**rank + keys.normal(keys.key(rank), (50,))} for rank in range(ranks))
        with contextlib.closing(Lockstep(ranks)) as lockstep:
            once = lockstep.map(lambda x: mean_over_ranks(lockstep.collectives, x), stats)
            twice = lockstep.map(lambda x: mean_over_ranks(lockstep.collectives, x), once)
        assert all(tree.bits_equal(x, once[0]) for x in once)
        expected = sum(x["mean"].double() for x in stats) / ranks
        torch.testing.assert_close(once[0]["mean"].double(), expected, rtol=1e-6, atol=0)
        torch.testing.assert_close(twice[0], once[0], rtol=tolerance, atol=0)
