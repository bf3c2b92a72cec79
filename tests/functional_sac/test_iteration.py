"""Acting, storing and learning over an environment that counts."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable

import pytest
import torch
from counting import count
from equal import assert_bits_equal

from functional_sac import acting, cycle, iteration, noise, plan, replay, reward_scale
from functional_sac.config import TrainConfig
from functional_sac.envs.env import Env
from functional_sac.iteration import Iteration, TrainState
from functional_sl import keys, tree

SMALL = TrainConfig(
    batch_size=8, actor_width=4, critic_width=4, num_blocks=1, bins=5, lr_decay_updates=50, replay_capacity=100,
    learning_starts=9, num_envs=3, env_steps=60, updates_per_step=1,
)  # fmt: skip


def build(env: Env, **changes: object) -> tuple[TrainConfig, Iteration]:
    config = dataclasses.replace(SMALL, **changes)
    return config, iteration.make_iteration(config, env, cycle.make_learner(config, env.spec))


def stored(state: TrainState, env: Env) -> object:
    return replay.gather(state.replay, torch.arange(int(state.replay.size)), replay.fields(env.spec))


@pytest.mark.parametrize("critic_dim", [0, 3])
@pytest.mark.parametrize("capacity", [20, 100])
@pytest.mark.parametrize(("limit", "ends_at"), [(4, None), (9, 4), (4, 4)], ids=["truncated", "terminated", "both"])
def test_stored_transitions(limit: int, ends_at: int | None, capacity: int, critic_dim: int) -> None:
    """Next is the observation plus one in every row, also where an episode ended; the flags are right."""
    env = count(limit, ends_at=ends_at, critic_dim=critic_dim)
    _, loop = build(env, replay_capacity=capacity)
    state, starts = loop.init(keys.key(0)), set()
    for step in range(1, 14):
        shown = state.observation
        state = loop.step(state, step < 6)
        assert (state.done == (step % 4 == 0)).all()
        # After an episode the policy sees the new one's start, else the successor.
        expected = state.observation.actor[:, 1] if step % 4 == 0 else shown.actor[:, 0] + 1
        assert torch.equal(state.observation.actor[:, 0], expected)
        starts |= {*shown.actor[:, 1].tolist()}
    batch = stored(state, env)
    assert len(batch.reward) == min(capacity, 39)
    now, after = batch.observation.actor, batch.next_observation.actor
    assert torch.equal(after[:, 0], now[:, 0] + 1)
    assert torch.equal(after[:, 1], now[:, 1])
    assert torch.equal(batch.reward, after[:, 0] - after[:, 1])
    ended = batch.reward == 4
    assert torch.equal(batch.terminated, ended & (ends_at is not None))
    assert torch.equal(batch.truncated, ended & (ends_at is None))
    assert torch.equal(batch.next_observation.critic, after[:, :1].expand(-1, critic_dim))
    assert len(starts) > 9  # three environments, four episodes: other starts
    # Finished episodes of return 1 + 2 + 3 + 4.
    assert [x.item() for x in state.episodes] == [9, 90.0, 36]
    assert state.env_steps == 39


def test_n_step_rows_reach_three_steps_ahead() -> None:
    env = count(100)
    _, loop = build(env, n_step=3, gamma=0.5)
    state = loop.init(keys.key(0))
    for _ in range(10):
        state = loop.step(state, True)
    batch = stored(state, env)
    assert len(batch.reward) == 24
    assert torch.equal(batch.next_observation.actor[:, 0], batch.observation.actor[:, 0] + 3)
    t = batch.observation.actor[:, 0] - batch.observation.actor[:, 1]
    torch.testing.assert_close(batch.reward, (t + 1) + 0.5 * (t + 2) + 0.25 * (t + 3))


def test_the_reward_scale_sees_every_reward_once() -> None:
    """Episodes of 4, rewards 1 to 4, gamma 0.5; the return is dropped before the last reward is added."""
    config, loop = build(count(4), gamma=0.5)
    state, expected = loop.init(keys.key(0)), reward_scale.init(3)
    for step in range(9):
        state = loop.step(state, False)
        done = torch.full((3,), step % 4 == 3)
        expected = reward_scale.update(expected, torch.full((3,), step % 4 + 1.0), done, config.gamma)
    assert_bits_equal(state.scale, expected)
    # 1, 2.5, 4.25, 4, then 3, 3.5, 4.75, 4, then 3.
    assert state.scale.max_abs == 4.75


@pytest.mark.parametrize(
    ("given", "count", "eps"), [("official", 0.0, 1e-4), ("unilab", 1e-4, 0.0)], ids=["official", "unilab"]
)
def test_reward_priors(given: str, count: float, eps: float) -> None:
    assert iteration.reward_prior(dataclasses.replace(SMALL, reward_prior=given)) == (count, eps)


def test_random_and_exploring_actions() -> None:
    """Random actions are uniform draws and leave the noise alone; the policy's are tanh(mean + std noise)."""
    env = count(100)
    _, loop = build(env)
    state = loop.init(keys.key(0))
    key, first, second = keys.split(state.key, 3)
    random = loop.step(state._replace(replay=tree.clone(state.replay)), True)
    assert_bits_equal(stored(random, env).action, keys.uniform(first, (3, 1), -1.0, 1.0))
    assert_bits_equal(random.noise, state.noise)
    assert_bits_equal(random.key, key)
    policy = loop.step(state, False)
    held = noise.update(state.noise, first, second, noise.zeta_cdf(2.0, 16))
    assert_bits_equal(policy.noise, held)
    actor = state.sac.actor
    expected = acting.explore(actor.params, actor.stats, state.observation.actor, held.noise)
    assert_bits_equal(stored(policy, env).action, expected)
    # Every number finite, and by running statistics: each environment's action is its own.
    alone = acting.explore(actor.params, actor.stats, state.observation.actor[:1], held.noise[:1])
    torch.testing.assert_close(expected[:1], alone, rtol=0, atol=1e-6)


def test_warm_up_then_learning() -> None:
    """9 rows on 3 environments: steps 1 to 3 are random, from step 3 on every step learns."""
    config, loop = build(count(100))
    state, pattern = loop.init(keys.key(0)), []
    for inserted in range(5):
        turn = plan.turn(config, inserted, learned=bool(state.sac.updates > 0))
        before = state.noise
        state = loop.step(state, turn.random)
        assert tree.bits_equal(before, state.noise) == turn.random
        if turn.learn:
            state = loop.learn(state, inserted % 2)
        learned = inserted >= 2
        assert state.metrics["critic_loss"].isfinite() == state.metrics["actor_loss"].isfinite() == learned
        pattern.append((turn.random, turn.learn))
    assert pattern == [(True, False), (True, False), (True, True), (False, True), (False, True)]
    assert state.sac.updates == 3


@pytest.mark.parametrize("per_env", [True, False])
def test_an_episode_end_restarts_noise_per_environment(per_env: bool) -> None:
    """Long repeats are in force everywhere, and only environment 1 has just begun an episode."""
    _, loop = build(count(100), noise_per_env=per_env)
    state = loop.step(loop.init(keys.key(0)), False)
    done = torch.tensor([False, True, False])
    held = state.noise._replace(length=torch.full_like(state.noise.length, 50))
    after = loop.step(state._replace(noise=held, done=done), False).noise
    changed = (after.noise != held.noise).any(-1)
    assert torch.equal(changed, done if per_env else torch.zeros(3, dtype=torch.bool))
    assert after.count.tolist() == ([2, 1, 2] if per_env else 2)


def test_a_step_is_pure_but_for_the_replay_rows() -> None:
    _, loop = build(count(4))
    state = loop.init(keys.key(0))
    assert tree.overlapping(state) is None
    for step in range(5):
        before = tree.clone(state._replace(replay=state.replay._replace(rows=torch.zeros(0))))
        new = loop.step(state, step < 2)
        assert_bits_equal(state._replace(replay=state.replay._replace(rows=torch.zeros(0))), before)
        assert tree.overlapping(new) is None
        state = new


def test_seeds_by_vmap_equal_single_runs() -> None:
    """Three iterations of three seeds; batched products may round differently: 1e-4 after three updates."""
    env = count(2, weight=1.0)
    _, loop = build(env, updates_per_step=2, learning_starts=0)
    singles = [loop.init(keys.key(seed)) for seed in range(3)]
    stacked = tree.stack(singles)
    step, learn = (torch.func.vmap(f, (0, None)) for f in (loop.step, loop.learn))
    for i in range(3):
        stacked = learn(step(stacked, i == 0), 0)
        singles = [loop.learn(loop.step(single, i == 0), 0) for single in singles]
    torch.testing.assert_close(stacked, tree.stack(singles), rtol=1e-4, atol=1e-4)
    starts = stacked.observation.actor[..., 1]
    assert len(set(starts.reshape(-1).tolist())) == 9


@pytest.mark.parametrize("seeds", [1, 2])
def test_overlapped_learning_draws_from_the_replay_before_the_step(seeds: int) -> None:
    """The same as learning first from the state in which the policy has acted already."""
    _, loop = build(count(4, weight=1.0), learning_starts=0)

    def mapped(fn: Callable, **static: bool) -> Callable:
        bound = functools.partial(fn, **static)
        return torch.func.vmap(bound) if seeds > 1 else bound

    learn = mapped(loop.learn, phase=0)
    state = loop.init(keys.key(0)) if seeds == 1 else tree.stack([loop.init(keys.key(i)) for i in range(seeds)])
    for _ in range(9):
        state = mapped(loop.step, random=True)(state)
    acted, action = mapped(loop.act, random=False)(tree.clone(state))
    stepped = mapped(loop.env.step)(acted.env, action)
    expected = mapped(loop.store)(learn(acted), action, *stepped)
    regions = loop if seeds == 1 else dataclasses.replace(loop, learner=loop.learner._replace(cycle=_cycle(loop)))
    found = iteration.overlapped(regions, mapped, tree.clone(state), False, 0)
    assert_bits_equal(found, expected)
    late = learn(mapped(loop.step, random=False)(tree.clone(state)))
    assert not tree.bits_equal(found.sac.critic.params, late.sac.critic.params)


@pytest.mark.parametrize("capacity", [8, 10, 100])
def test_dropped_calls_of_an_overlapped_iteration_change_nothing(capacity: int) -> None:
    """As a capture's warm-ups are dropped, whose rows lie in the replay already; on a full one they overwrite."""
    config = dataclasses.replace(SMALL, replay_capacity=capacity, learning_starts=0)
    env = count(4, weight=1.0)
    loop = iteration.make_iteration(config, env, cycle.make_learner(config, env.spec, reserved=config.num_envs))
    state = loop.init(keys.key(0))
    for _ in range(5):
        state = loop.step(state, True)

    def call(state: TrainState) -> TrainState:
        return iteration.overlapped(loop, functools.partial, state, False, 0)

    once, warmed = call(tree.clone(state)), tree.clone(state)
    for _ in range(2):
        call(warmed)
    assert_bits_equal(call(warmed), once)


def _cycle(loop: Iteration) -> Callable:
    return lambda *arguments: torch.func.vmap(loop.learner.cycle, (0, 0, 0, None))(*arguments)


def test_env_steps_pass_two_to_the_31() -> None:
    _, loop = build(count(4))
    state = loop.init(keys.key(0))._replace(env_steps=torch.tensor(2**31 - 2))
    assert loop.step(state, True).env_steps == 2**31 + 1
