"""K2: every kind of storage holds whole transitions of one episode, with the n-step sums of a hand table."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from counting import count

from functional_sac import cycle, iteration, replay
from functional_sac.config import TrainConfig
from functional_sl import keys

GAMMA = 0.9
SMALL = TrainConfig(
    batch_size=8, actor_width=4, critic_width=4, num_blocks=1, bins=5, lr_decay_updates=50, learning_starts=9,
    num_envs=3, env_steps=120, updates_per_step=1, gamma=GAMMA,
)  # fmt: skip


@pytest.mark.parametrize("n_step", [1, 2, 3, 7])
@pytest.mark.parametrize("capacity", [13, 40, 1000])
@pytest.mark.parametrize(("limit", "ends_at", "critic_dim"), [(5, None, 0), (9, 5, 2), (2, 2, 0)])
def test_sampled_rows_are_those_of_the_table(limit, ends_at, critic_dim, capacity, n_step):
    """Rewards t + 1 in episodes of `length` steps, starts 100 apart, 60 vector steps; 10,000 samples each.

    From step t with m = min(n, length - t) steps left: the reward sums gamma^i (t + 1 + i), the successor is m ahead
    in the same episode, and the flags are those of its end. With n = 3 from t = 0: 1 + 1.8 + 2.43 = 5.23; where the
    episode ends after two steps: 2.8.
    """
    env, length = count(limit, ends_at=ends_at, critic_dim=critic_dim), ends_at or limit
    config = dataclasses.replace(SMALL, n_step=n_step, replay_capacity=capacity)
    loop = iteration.make_iteration(config, env, cycle.make_learner(config, env.spec))
    state = loop.init(keys.key(0))
    for _ in range(60):
        state = loop.step(state, True)
    batch = replay.gather(state.replay, replay.indices(state.replay, keys.key(1), (10_000,)), replay.fields(env.spec))
    now, start = batch.observation.actor.unbind(-1)
    t = now - start
    m = (length - t).clamp(max=n_step)
    table = torch.tensor([[sum(GAMMA**i * (t + 1 + i) for i in range(m)) for m in range(n_step + 1)] for t in range(9)])
    torch.testing.assert_close(batch.reward, table[t.long(), m.long()], rtol=1e-6, atol=0)
    assert torch.equal(batch.next_observation.actor, torch.stack([now + m, start], -1))
    assert torch.equal(batch.next_observation.critic, (now + m).unsqueeze(-1).expand(-1, critic_dim))
    over = t + m == length
    assert torch.equal(batch.terminated, over & (ends_at is not None))
    assert torch.equal(batch.truncated, over & (ends_at is None))
    assert {*t.tolist()} == {*range(length)}
