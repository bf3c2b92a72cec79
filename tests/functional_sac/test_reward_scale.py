"""The running return's moments against numpy in float64."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from equal import assert_bits_equal

from functional_sac import reward_scale
from functional_sl import tree

GAMMA = 0.99


def rollout(steps: int, envs: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    reward = 3 + torch.randn(steps, envs, generator=generator)
    return reward, torch.rand(steps, envs, generator=generator) < 0.1


@pytest.mark.parametrize(("prior", "eps"), [(0.0, 1e-4), (1e-4, 0.0)], ids=["official", "unilab"])
def test_against_pooled_moments(prior: float, eps: float) -> None:
    """The moments of all returns seen, plus a prior of mean 0 and variance 1: 300 float32 steps stay within 1e-5."""
    reward, done = rollout(300, 5)
    state, returns, seen = reward_scale.init(5, prior_count=prior), np.zeros(5), []
    for r, d in zip(reward, done, strict=True):
        state = reward_scale.update(state, r, d, GAMMA, old_count_eps=eps)
        returns = np.where(d, 0.0, GAMMA * returns) + r.double().numpy()
        seen.append(returns)
    pool = np.concatenate(seen)
    # Weighted by 1e-4, or by the 1e-4 beside the old count, the start is gone after 1500 returns.
    np.testing.assert_allclose(state.returns, returns, rtol=1e-5)
    np.testing.assert_allclose(state.mean, pool.mean(), rtol=1e-5)
    np.testing.assert_allclose(state.var, pool.var(), rtol=1e-4)
    assert state.max_abs.item() == pytest.approx(np.abs(pool).max(), rel=1e-6)
    assert state.count.item() == pytest.approx(1500 + prior)


@pytest.mark.parametrize(("prior", "eps"), [(0.0, 1e-4), (1e-4, 0.0)], ids=["official", "unilab"])
def test_first_step_by_hand(prior: float, eps: float) -> None:
    """Two returns 1 and 3: mean 2, variance 1; what weighs the start is 1e-4 of 2 either way, to first order."""
    state = reward_scale.update(
        reward_scale.init(2, prior_count=prior),
        torch.tensor([1.0, 3.0]),
        torch.zeros(2).bool(),
        GAMMA,
        old_count_eps=eps,
    )
    weight = prior / (prior + 2)
    assert state.mean.item() == pytest.approx(2 * (1 - weight), rel=1e-6)
    # Official: (1 * 2 + 1 * 1e-4) / 2. UniLab: the prior's variance 1 and its distance 2 from the mean.
    variance = 1 + 5e-5 if eps else 1 + 4 * weight * (1 - weight)
    assert state.var.item() == pytest.approx(variance, rel=1e-6)


def test_an_episode_end_drops_the_return() -> None:
    """Reward 1, episodes of 5: the largest return is 1 + 0.99 + ... + 0.99^4 = 4.90099501; a leak tends to 100."""
    state = reward_scale.init(4)
    for step in range(1, 251):
        state = reward_scale.update(state, torch.ones(4), torch.full((4,), step % 5 == 0), GAMMA)
    assert state.max_abs.item() == pytest.approx(4.90099501, abs=1e-6)
    assert state.count == 1000


def test_environments_have_their_own_return() -> None:
    state = reward_scale.init(4)
    for step in range(1, 20):
        done = torch.tensor([step % 5 == 0, step % 7 == 0, False, False])
        state = reward_scale.update(state, torch.tensor([1.0, 1.0, 1.0, 100.0]), done, GAMMA)
    # Dropped at steps 15 and 14, before the reward is added: 5 and 6 terms; the others have 19.
    expected = [sum(GAMMA**k for k in range(n)) for n in (5, 6, 19, 19)]
    np.testing.assert_allclose(state.returns, np.multiply(expected, [1, 1, 1, 100]), rtol=1e-6)


def test_denominator_is_the_larger_of_spread_and_bound() -> None:
    state = reward_scale.init(1)
    assert reward_scale.denominator(state, 5.0).item() == pytest.approx(1.0)
    spread = state._replace(var=torch.tensor(9.0), max_abs=torch.tensor(14.0))
    assert reward_scale.denominator(spread, 5.0).item() == pytest.approx(3.0)
    bound = state._replace(var=torch.tensor(9.0), max_abs=torch.tensor(50.0))
    assert reward_scale.denominator(bound, 5.0).item() == pytest.approx(10.0)
    still = state._replace(var=torch.tensor(0.0))
    assert reward_scale.denominator(still, 5.0).item() == pytest.approx(1e-4)


def test_one_environment_is_enough() -> None:
    """The variance of one return is 0, not NaN."""
    state = reward_scale.init(1)
    for r in (1.0, 2.0):
        state = reward_scale.update(state, torch.tensor([r]), torch.tensor([True]), GAMMA)
    assert [state.mean.item(), state.count.item()] == [1.5, 2.0]
    assert state.var.item() == pytest.approx(0.25, rel=1e-3)


def test_pure_and_the_same_under_vmap() -> None:
    reward, done = rollout(4, 3)
    states = [reward_scale.init(3), reward_scale.init(3, prior_count=1.0)]
    stacked, before = tree.stack(states), tree.clone(states)
    step = torch.func.vmap(lambda s, r, d: reward_scale.update(s, r, d, GAMMA), (0, None, None))
    for r, d in zip(reward, done, strict=True):
        stacked = step(stacked, r, d)
    singles = []
    for state in states:
        for r, d in zip(reward, done, strict=True):
            state = reward_scale.update(state, r, d, GAMMA)
        singles.append(state)
    assert_bits_equal(states, before)
    torch.testing.assert_close(stacked, tree.stack(singles), rtol=1e-6, atol=0)
