"""Closed loops in a counting world: what each controller sees and does, and what an episode returns."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from functional_sl import keys
from functional_sl.sources import demonstrations, episodes, worlds
from functional_sl.sources.demonstrations import Expert


class Seen(NamedTuple):
    actor: Tensor


class Step(NamedTuple):
    observation: Seen
    reward: Tensor
    terminated: Tensor
    truncated: Tensor


def world() -> Any:
    """Environment i counts from 10 i; its task ends after 3 + i steps, and 6 steps are the limit; reward = action."""

    def observe(state: tuple[Tensor, Tensor]) -> Seen:
        return Seen((10.0 * state[0] + state[1])[:, None])

    def init(key: Tensor, n: int) -> tuple[Any, Seen]:
        state = torch.arange(n), torch.zeros(n)
        return state, observe(state)

    def step(state: tuple[Tensor, Tensor], action: Tensor) -> tuple[Any, Step]:
        which, count = state[0], state[1] + 1
        terminated = count == 3 + which
        truncated = (count == 6) & ~terminated
        state = which, torch.where(terminated | truncated, 0, count)
        return state, Step(observe(state), action[:, 0], terminated, truncated)

    spec = SimpleNamespace(actor_dim=1, action_dim=1, max_episode_steps=6, control_dt=0.5)
    return SimpleNamespace(spec=spec, init=init, step=step)


def half(observation: Tensor) -> Tensor:
    return torch.full_like(observation, 0.5)


def test_only_the_first_episode_counts() -> None:
    found = worlds.rollout(world(), worlds.memoryless(half), keys.key(0), 5)
    assert found.lengths.tolist() == [3, 4, 5, 6, 6]
    assert found.terminated.tolist() == [True, True, True, True, False]
    assert worlds.returns(found).tolist() == [1.5, 2.0, 2.5, 3.0, 3.0]
    assert found.observation[:, 0, 0].tolist() == [0, 1, 2, 0, 1, 2]


def test_a_rollout_stops_when_all_episodes_have_ended() -> None:
    assert len(worlds.rollout(world(), worlds.memoryless(half), keys.key(0), 2).reward) == 4


def test_a_receding_controller_plans_every_second_step_from_its_history() -> None:
    seen = []

    def plan(past: Tensor) -> Tensor:
        seen.append(past[4, :, 0].tolist())
        return past.sum(1, keepdim=True) + torch.tensor([0.0, 1000.0, 2000.0])[None, :, None]

    found = worlds.rollout(world(), worlds.receding(plan, history=3, execute=2), keys.key(0), 5)
    assert seen[1:] == [[40.0, 40.0, 40.0], [40.0, 41.0, 42.0], [42.0, 43.0, 44.0]]
    assert found.action[:, 4, 0].tolist() == [120.0, 1120.0, 123.0, 1123.0, 129.0, 1129.0]


def test_success_is_zero_for_random_and_one_for_the_expert() -> None:
    expert = worlds.memoryless(half)
    found = worlds.success(world(), expert, expert, keys.key(0), 4)
    assert found["success"] == 1.0
    assert found["return"] == found["expert_return"] == pytest.approx((1.5 + 2.0 + 2.5 + 3.0) / 4)
    draw = keys.split(keys.key(0))[1]
    assert worlds.success(world(), worlds.uniform(draw, 1), expert, keys.key(0), 4)["success"] == 0.0


def test_demonstrations_hold_the_undisturbed_answer_to_what_was_seen() -> None:
    expert = Expert(lambda x: torch.tanh(x / 50), (("count", "1"),), ())
    disturbed = worlds.rollout(world(), worlds.noisy(expert.act, keys.key(3), 0.3), keys.key(0), 4)
    gaps = disturbed.action - expert.act(disturbed.observation)
    assert float(gaps.abs().mean()) > 0.05
    found = demonstrations.collect(world(), expert, keys.key(1), 4, 0.3, {"world": "counting"})
    episodes.check(found, "made")
    assert found.lengths.tolist() == [3, 4, 5, 6]
    assert found.terminated.all()
    assert found.values["observation"][:4, 0].tolist() == [0.0, 1.0, 2.0, 10.0]
    assert torch.equal(found.values["action"], expert.act(found.values["observation"]))
    assert [feature.channels for feature in found.schema.features] == [(("count", "1"),), (("action_0", ""),)]
    assert found.schema.about["noise"] == 0.3


def test_names_of_worlds_and_experts_are_checked() -> None:
    with pytest.raises(ValueError, match="returns a OrderedDict without 'spec'"):
        worlds.load("collections:OrderedDict")
    with pytest.raises(ValueError, match="'json:dumps': asks for the argument obj"):
        worlds.load("json:dumps")
    with pytest.raises(ValueError, match="is float; an expert is a function"):
        demonstrations.load_expert("math:pi")
    assert demonstrations.load_expert("torch:tanh").act is torch.tanh
