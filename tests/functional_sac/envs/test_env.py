"""Episodes by arithmetic: a task that counts, with a time limit of 3."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from functional_sac.envs.env import Env, EnvSpec, Task, autoreset
from functional_sac.transition import Observation, critic_view, symmetric
from functional_sl import keys, tree

NUM_ENVS = 3


class Count(NamedTuple):
    start: Tensor  # [N]
    value: Tensor  # [N]


def counting(ends: int = 100) -> Env:
    """The observation is start + t for a random integer start; the reward is the action that the task received."""

    def reset(key: Tensor) -> Count:
        start = keys.uniform(key, (1,), 0.0, 2.0**20)[:, 0].floor()
        return Count(start=start, value=start)

    def step(physics: Count, action: Tensor) -> tuple[Count, Tensor, Tensor]:
        value = physics.value + 1.0
        return Count(physics.start, value), action[:, 0], value - physics.start >= ends

    def observe(physics: Count) -> Observation:
        return Observation(actor=physics.value[:, None], critic=torch.stack(physics, dim=-1))

    spec = EnvSpec("count", actor_dim=1, critic_dim=2, action_dim=1, max_episode_steps=3, control_dt=1.0)
    return autoreset(Task(spec, reset, step, observe))


def play(env: Env, actions: Tensor, seed: int = 0) -> tuple[list[Observation], list]:
    """Returns the observations before each step and the time steps, for actions [T, N, D]."""
    state, observation = env.init(keys.key(seed), actions.shape[1])
    observations, steps = [], []
    for action in actions:
        observations.append(observation)
        state, timestep = env.step(state, action)
        steps.append(timestep)
        observation = timestep.observation
    return observations, steps


@pytest.mark.parametrize(
    ("ends", "length", "terminates"),
    [(100, 3, False), (3, 3, True), (2, 2, True)],
    ids=["time limit", "end on the limit", "end before the limit"],
)
def test_nine_steps_hold_whole_episodes(ends: int, length: int, terminates: bool) -> None:
    observations, steps = play(counting(ends), torch.full((9, NUM_ENVS, 1), 0.5))
    starts = observations[0].actor
    for t, (before, timestep) in enumerate(zip(observations, steps, strict=True)):
        in_episode = t % length + 1
        assert torch.equal(timestep.final_observation.actor, before.actor + 1.0)
        assert torch.equal(timestep.final_observation.actor, starts + in_episode)
        assert torch.equal(timestep.final_observation.critic, torch.cat((starts, starts + in_episode), dim=-1))
        done = in_episode == length
        assert timestep.terminated.tolist() == [done and terminates] * NUM_ENVS
        assert timestep.truncated.tolist() == [done and not terminates] * NUM_ENVS
        assert timestep.episode_length.tolist() == [in_episode] * NUM_ENVS
        assert timestep.episode_return.tolist() == [0.5 * in_episode] * NUM_ENVS
        if done:
            starts = timestep.observation.actor
            assert not torch.isin(starts, timestep.final_observation.actor).any()
            assert torch.equal(timestep.observation.critic, torch.cat((starts, starts), dim=-1))
        else:
            assert tree.bits_equal(timestep.observation, timestep.final_observation)


def test_environments_end_on_their_own() -> None:
    env = counting()
    state, _ = env.init(keys.key(0), 2)
    state = state._replace(episode_length=torch.tensor([0, 2]), episode_return=torch.tensor([0.0, 5.0]))
    state, timestep = env.step(state, torch.ones(2, 1))
    assert timestep.truncated.tolist() == [False, True]
    assert timestep.episode_return.tolist() == [1.0, 6.0]
    assert state.episode_return.tolist() == [1.0, 0.0]
    assert state.episode_length.tolist() == [1, 0]


def test_every_start_differs() -> None:
    starts = set()
    for seed in (0, 1):
        observations, _ = play(counting(), torch.zeros(9, 4, 1), seed)
        starts |= {float(x) for t in (0, 3, 6) for x in observations[t].actor[:, 0]}
    assert len(starts) == 2 * 4 * 3


def test_a_start_depends_on_the_episode_not_on_how_the_last_one_went() -> None:
    early, _ = play(counting(ends=2), torch.zeros(5, 2, 1))
    late, _ = play(counting(), torch.zeros(7, 2, 1))
    for episode in range(3):
        assert torch.equal(early[2 * episode].actor, late[3 * episode].actor)


def test_environment_i_starts_from_the_folded_key() -> None:
    _, observation = counting().init(keys.key(7), 4)
    expected = keys.uniform(keys.fold_in(keys.key(7), 2), (1,), 0.0, 2.0**20).floor()
    assert torch.equal(observation.actor[2], expected)


def test_actions_are_clamped_and_a_nan_ends_its_own_environments_episode() -> None:
    actions = torch.tensor([[5.0, 0.0], [-5.0, torch.nan], [0.25, 0.0], [0.0, 0.0]])[..., None]
    _, steps = play(counting(), actions)
    assert [float(s.reward[0]) for s in steps] == [1.0, -1.0, 0.25, 0.0]
    assert [float(s.episode_return[0]) for s in steps] == [1.0, 0.0, 0.25, 0.0]
    assert [bool(s.episode_return[1].isnan()) for s in steps] == [False, True, False, False]
    assert [int(s.episode_length[1]) for s in steps] == [1, 2, 1, 2]


def test_no_leaf_is_shared_and_no_input_is_written() -> None:
    env = counting()
    key, action = keys.key(0), torch.full((NUM_ENVS, 1), 2.0)
    state, observation = env.init(key, NUM_ENVS)
    assert tree.overlapping((key, state, observation)) is None
    inputs = (state, action)
    for _ in range(3):
        before = tree.clone(inputs)
        outputs = env.step(*inputs)
        assert tree.bits_equal(inputs, before)
        assert tree.overlapping((inputs, outputs)) is None
        assert all(x.is_contiguous() for x in tree.leaves(outputs))
        inputs = (outputs[0], action)


@pytest.mark.parametrize("shape", [(NUM_ENVS,), (NUM_ENVS, 2), (NUM_ENVS + 1, 1), (1, NUM_ENVS, 1)])
def test_a_wrong_action_shape_is_named(shape: tuple[int, ...]) -> None:
    env = counting()
    state, _ = env.init(keys.key(0), NUM_ENVS)
    with pytest.raises(ValueError, match=r"count: the action has shape .* take \(3, 1\)"):
        env.step(state, torch.zeros(shape))


def test_wrong_arguments_of_init_are_named() -> None:
    env = counting()
    with pytest.raises(ValueError, match=r"count: init got a key of shape \(2, 2\)"):
        env.init(keys.split(keys.key(0), 2), 1)
    with pytest.raises(ValueError, match=r"torch\.float32"):
        env.init(torch.zeros(2), 1)
    with pytest.raises(ValueError, match="count: num_envs is 0"):
        env.init(keys.key(0), 0)


@pytest.mark.parametrize(
    ("field", "value"),
    [("actor_dim", 0), ("critic_dim", -1), ("action_dim", 0), ("max_episode_steps", 0), ("control_dt", 0.0)],
)
def test_an_impossible_spec_is_refused(field: str, value: float) -> None:
    good = {"task": "x", "actor_dim": 1, "critic_dim": 0, "action_dim": 1, "max_episode_steps": 1, "control_dt": 0.1}
    EnvSpec(**good)
    with pytest.raises(ValueError, match=f"x: {field} is {value}"):
        EnvSpec(**{**good, field: value})


def test_the_critic_view_of_a_symmetric_observation_is_the_actors() -> None:
    actor, critic = torch.ones(2, 3), torch.zeros(2, 4)
    assert symmetric(actor).critic.shape == (2, 0)
    assert critic_view(symmetric(actor)) is actor
    assert critic_view(Observation(actor, critic)) is critic


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        ({"observe": lambda p: symmetric(torch.zeros(len(p.t), 3))}, r"observe\(...\).actor is torch.float32 \(2, 3\)"),
        ({"observe": lambda p: symmetric(torch.zeros(len(p.t), 1).double())}, "actor is torch.float64"),
        ({"step": lambda p, a: (p, torch.zeros(2, 1), torch.zeros(2, dtype=torch.bool))}, r"the reward is .* \(2, 1\)"),
        ({"step": lambda p, a: (p, torch.zeros(2), torch.zeros(2))}, "terminated is torch.float32"),
    ],
    ids=["width", "type", "reward", "terminated"],
)
def test_a_task_that_breaks_its_spec_is_named(wrong: dict, named: str) -> None:
    class Clock(NamedTuple):
        t: Tensor

    parts = {
        "reset": lambda key: Clock(torch.zeros(len(key))),
        "step": lambda p, a: (p, torch.zeros(2), torch.zeros(2, dtype=torch.bool)),
        "observe": lambda p: symmetric(p.t.unsqueeze(-1)),
    }
    env = autoreset(Task(EnvSpec("clock", 1, 0, 1, 5, 0.1), **{**parts, **wrong}))
    with pytest.raises(ValueError, match=f"clock: .*{named}"):
        env.step(env.init(keys.key(0), 2)[0], torch.zeros(2, 1))
