"""The scripted experts solve their tasks, and name what they see and do."""

from __future__ import annotations

import pytest
import torch

from functional_sac.envs import classic, experts
from functional_sl import keys
from functional_sl.sources import worlds


@pytest.mark.parametrize("task", ["pendulum", "reacher", "cartpole_swingup"])
def test_an_expert_solves_its_task(task: str) -> None:
    world, expert = classic.make(task), getattr(experts, task)
    found = worlds.returns(worlds.rollout(world, worlds.memoryless(expert.act), keys.key(1), 32))
    assert float(found.mean()) > world.spec.solved_return
    assert (len(expert.observation), len(expert.action)) == (world.spec.actor_dim, world.spec.action_dim)


@pytest.mark.parametrize("task", ["pendulum", "reacher", "cartpole_swingup"])
def test_an_expert_answers_each_observation_alone(task: str) -> None:
    expert, dims = getattr(experts, task), classic.make(task).spec
    observation = 3.0 * keys.normal(keys.key(2), (9, dims.actor_dim))
    found = expert.act(observation)
    assert found.shape == (9, dims.action_dim)
    assert float(found.abs().max()) <= 1.0
    alone = torch.cat([expert.act(row[None]) for row in observation])
    torch.testing.assert_close(found, alone, rtol=1e-5, atol=1e-6)
