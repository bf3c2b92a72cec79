"""Whole episodes, the same for any number of environments, and nothing of the training touched."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from counting import count
from equal import assert_bits_equal

from functional_sac import acting, evaluation, networks
from functional_sac.envs import classic
from functional_sac.envs.env import Env
from functional_sac.networks import Actor, Stats
from functional_sl import capture, keys, tree


def policy(env: Env) -> tuple[Actor, Stats]:
    """A policy whose actions depend on what it sees: its statistics are not the initial ones."""
    params, stats = networks.init_actor(keys.key(1), env.spec.actor_dim, env.spec.action_dim, 8, 1)
    observation = env.init(keys.key(2), 64)[1].actor
    for _ in range(200):
        _, stats = networks.actor(params, stats, observation, training=True)
    return params, stats


@pytest.mark.parametrize(("limit", "ends_at", "steps"), [(6, None, 6), (6, 4, 4), (6, 6, 6)])
def test_episodes_end_by_limit_or_task(limit: int, ends_at: int | None, steps: int) -> None:
    """Rewards 1, 2, 3, ...: one episode each, whose successor does not count."""
    env = count(limit, ends_at=ends_at)
    result = evaluation.evaluate(env, *policy(env), keys.key(0), 5)
    assert result.returns.tolist() == [steps * (steps + 1) / 2] * 5
    assert result.lengths.tolist() == [steps] * 5
    assert result.terminated.tolist() == [ends_at is not None] * 5


def test_later_episodes_do_not_count() -> None:
    """An episode of 4 steps gives the same return whether the loop goes on for 5 steps more or not."""
    brief, long = count(4, weight=1.0), count(9, ends_at=4, weight=1.0)
    expected = evaluation.evaluate(brief, *policy(brief), keys.key(0), 5)
    result = evaluation.evaluate(long, *policy(brief), keys.key(0), 5)
    assert_bits_equal((result.returns, result.lengths), (expected.returns, expected.lengths))
    assert result.returns.std() > 0


def test_a_return_by_hand() -> None:
    """The reward is t plus the deterministic action, step by step for one environment."""
    env = count(5, weight=0.5)
    params, stats = policy(env)
    state, observation = env.init(keys.key(3), 1)
    total = 0.0
    for t in range(1, 6):
        (mean, _), _ = networks.actor(params, stats, observation.actor, training=False)
        action = torch.tanh(mean)
        assert_bits_equal(acting.deterministic(params, stats, observation.actor), action)
        total += t + 0.5 * action.item()
        state, step = env.step(state, action)
        observation = step.observation
    result = evaluation.evaluate(env, params, stats, keys.key(3), 1)
    assert result.returns.item() == pytest.approx(total, rel=1e-6)
    assert abs(total - 15) > 1e-3


@pytest.mark.parametrize("task", ["count", "cartpole_balance"])
def test_returns_do_not_depend_on_the_environments_beside(task: str) -> None:
    """Episode i starts from the key's child i; products of more rows may round differently, which 6 steps keep small
    and a cart-pole's episode enlarges: 1e-5 of the return, 1e-3 there."""
    env, tolerance = (count(6, weight=0.5), 1e-5) if task == "count" else (short(classic.make(task)), 1e-3)
    trained = policy(env)
    results = {n: evaluation.evaluate(env, *trained, keys.key(0), n) for n in (1, 3, 16)}
    widest = results[16]
    assert widest.returns.std() > 0
    for n in (1, 3):
        torch.testing.assert_close(results[n].returns, widest.returns[:n], rtol=tolerance, atol=tolerance)
        assert torch.equal(results[n].lengths, widest.lengths[:n])
    assert_bits_equal(evaluation.evaluate(env, *trained, keys.key(0), 16), widest)
    other = evaluation.evaluate(env, *trained, keys.key(1), 16)
    assert not torch.equal(other.returns, widest.returns)


def short(env: Env) -> Env:
    """Leaves the physics and evaluates its first 30 steps, counting what ended in them."""
    return env._replace(spec=dataclasses.replace(env.spec, max_episode_steps=30))


def test_nothing_is_touched() -> None:
    """Parameters, statistics, key and torch's own generators keep their bits; gradients are not recorded."""
    env = count(4, weight=1.0)
    trained, key = policy(env), keys.key(0)
    before, generator = tree.clone((trained, key)), torch.get_rng_state()
    result = evaluation.evaluate(env, *trained, key, 3)
    assert_bits_equal((trained, key), before)
    assert torch.equal(torch.get_rng_state(), generator)
    assert not any(leaf.requires_grad for leaf in result)


def test_frames_are_those_before_each_step() -> None:
    env = classic.make("pendulum")
    seen = []
    brief = env._replace(render=lambda state, i: seen.append(state.physics.angle.clone()) or env.render(state, i))
    pictures = evaluation.frames(brief, lambda observation: torch.zeros(1, 1), keys.key(0))
    assert len(pictures) == len(seen) == 200
    assert pictures[0].dtype == "uint8"
    assert pictures[0].shape[-1] == 3
    assert torch.equal(seen[0], env.init(keys.key(0), 1)[0].physics.angle)
    with pytest.raises(ValueError, match="'count' cannot be drawn"):
        evaluation.frames(count(3), lambda observation: torch.zeros(1, 1), keys.key(0))


class Owning(capture.Captured):
    """Stands in for a graph: owns its first state's buffers, and repeats its first function on them."""

    def __call__(self, state: tree.Tree) -> tuple[tree.Tree, tree.Tree]:
        if not self._owns(state):
            assert self._state is None, "a graph whose state is another one would be captured anew"
            assert tree.overlapping(state) is None
            assert all(leaf.is_contiguous() for leaf in tree.leaves(state))
            self._state = state
        new, outputs = self._fn(self._state)
        self._donate(new)
        return self._state, outputs

    def close(self) -> None:
        self._state = None


def test_kept_steps_serve_other_policies_and_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(capture, "Captured", Owning)
    env = count(4, weight=1.0)
    first = policy(env)
    second = (tree.map(lambda x: x + 0.1, first[0]), first[1])
    regions = evaluation.Regions(graph=True)
    for episodes in (3, 5, 3):
        for params, stats in (first, second):
            found = evaluation.evaluate(env, params, stats, keys.key(7), episodes, regions=regions)
            assert_bits_equal(found, evaluation.evaluate(env, params, stats, keys.key(7), episodes))
    regions.close()
    assert evaluation.evaluate(env, *first, keys.key(7), 3, regions=regions).lengths.tolist() == [4, 4, 4]
