"""Gymnasium environments behind the contract: what arrives, what is stored, what is refused."""

from __future__ import annotations

import dataclasses
import functools

import numpy as np
import pytest
import torch
from torch import Tensor

gymnasium = pytest.importorskip("gymnasium")

import gym_probes  # noqa: E402
from equal import assert_bits_equal  # noqa: E402
from gym_probes import F64, Bad, Count, Spaces, in_turn  # noqa: E402
from gymnasium import spaces  # noqa: E402
from gymnasium.vector import AutoresetMode  # noqa: E402

from functional_sac import cycle, envs, evaluation, hosted, iteration, networks, replay  # noqa: E402
from functional_sac.config import TrainConfig  # noqa: E402
from functional_sac.envs.host import HostEnv  # noqa: E402
from functional_sac.iteration import Iteration, TrainState  # noqa: E402
from functional_sl import capture, keys, tree  # noqa: E402

SMALL = TrainConfig(
    batch_size=8, actor_width=4, critic_width=4, num_blocks=1, bins=5, lr_decay_updates=50, replay_capacity=500,
    learning_starts=9, num_envs=3, env_steps=60, updates_per_step=1, gamma=0.5,
)  # fmt: skip
COUNTING = "gym_probes:Count-v0"


@pytest.fixture
def make(monkeypatch):
    """Makes an environment from a task's name or from environments in turn, and closes it."""
    made = []

    def call(*makers: object) -> HostEnv:
        name = makers[0]
        if not isinstance(name, str):
            monkeypatch.setattr(gym_probes, "task", in_turn(*makers))
            name = "gym_probes:task"
        made.append(envs.make(name, "gym"))
        return made[-1]

    yield call
    for env in made:
        env.close()


def run(env: HostEnv, steps: int, **changes: object) -> tuple[TrainState, Iteration, int, list[Tensor]]:
    """Takes vector steps with random actions, without learning; also counts idle environments and sees the actor's."""
    config = dataclasses.replace(SMALL, **changes)
    loop = iteration.make_iteration(config, env, cycle.make_learner(config, env.spec))
    act = functools.partial(functools.partial, loop.act)
    iterate = hosted.Hosted(capture.Eager(hosted.stages(lambda random: act(random=random), loop.store, None)), env)
    state, idle, seen = loop.init(keys.key(0)), 0, []
    for _ in range(steps):
        seen.append(state.observation.actor[:, 0].clone())
        state, counts = iterate(state, random=True, phase=None)
        idle += sum(counts)
    return state, loop, idle, seen


def stored(state: TrainState, env: HostEnv) -> object:
    return replay.gather(state.replay, torch.arange(int(state.replay.size)), replay.fields(env.spec))


@pytest.mark.parametrize("overlap", [False, True])
def test_overlapped_updates_draw_from_the_replay_before_the_step(make, overlap):
    """Three iterations against the same pure parts, called in the order that is meant."""
    env = make(functools.partial(Count, T=4))
    warm, loop, _, _ = run(env, 6, batch_size=4)
    act = functools.partial(functools.partial, loop.act)
    stages = hosted.stages(lambda random: act(random=random), loop.store, loop.learn)
    iterate = hosted.Hosted(capture.Eager(stages), env, overlap)
    found = expected = tree.clone(warm)
    made = []

    def recorded(state, action, meanwhile=lambda: None):
        made.append(HostEnv.advance(env, state, action, meanwhile))
        return made[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(env, "advance", recorded)
        for _ in range(3):
            found, _ = iterate(found, random=False, phase=0)
    for step in made:
        state, action = loop.act(expected, False)
        if overlap:
            expected = loop.store(loop.learn(state, 0), action, *step)
        else:
            expected = loop.learn(loop.store(state, action, *step), 0)
    assert_bits_equal(found, expected)


@pytest.mark.parametrize("ends_by", ["truncated", "terminated", "both"])
@pytest.mark.parametrize("kind", [Count, gym_probes.Reuse])
def test_true_successors_are_stored_and_reset_ones_acted_on(make, kind, ends_by):
    """Episodes of 4, nine steps: the seventh row of environment 0 is 102 -> 103; flags where an episode ended."""
    env = make(functools.partial(kind, T=4, ends_by=ends_by))
    state, _, _, seen = run(env, 9)
    assert [x[0].item() for x in seen] == [0, 1, 2, 3, 100, 101, 102, 103, 200]
    batch = stored(state, env)
    assert batch.observation.actor.reshape(9, 3)[:, 0].tolist() == [0, 1, 2, 3, 100, 101, 102, 103, 200]
    assert torch.equal(batch.next_observation.actor, batch.observation.actor + 1)
    ended = batch.next_observation.actor[:, 0] % 100 == 4
    assert torch.equal(batch.truncated, ended & (ends_by == "truncated"))
    assert torch.equal(batch.terminated, ended & (ends_by != "truncated"))
    assert [x.item() for x in state.episodes] == [6, 60.0, 24]


MODES = {
    # episodes of 3, 5, 7 in 60 vector steps: 20, 12, 8; a reset that takes a step makes them 4, 6, 8 long
    "same_step": (180, 20 + 12 + 8),
    "disabled": (180, 20 + 12 + 8),
    "next_step": (180 - 15 - 10 - 7, 15 + 10 + 7),
}


@pytest.mark.parametrize("n_step", [1, 3])
@pytest.mark.parametrize(("mode", "expected"), MODES.items(), ids=MODES)
def test_every_mode_of_autoreset(make, mode, expected, n_step):
    env = make(f"gym_probes:counts_{mode}")
    state, _, idle, _ = run(env, 60, n_step=n_step)
    rows, episodes = expected
    assert (state.env_steps, 180 - idle) == (rows, rows)
    assert state.episodes.count == episodes
    batch = stored(state, env)
    now, after = batch.observation.actor[:, 0], batch.next_observation.actor[:, 0]
    ahead = after - now
    if n_step == 1:
        assert len(now) == rows
        assert torch.equal(ahead, torch.ones(rows))
        assert torch.equal(batch.reward, after % 100)
    # Windows end with their episode, and none crosses into the next.
    left = torch.floor(now / 10_000) - now % 100
    assert torch.equal(ahead, left.clamp(max=n_step))
    assert torch.equal(batch.truncated, ahead == left)


def test_a_mode_that_is_not_named_is_refused(make):
    with pytest.raises(ValueError, match=r"SyncVectorEnv: metadata\['autoreset_mode'\] is None, .*AutoresetMode"):
        make("gym_probes:counts_unnamed")


@pytest.mark.parametrize(
    ("task", "episodes"),
    [("threes_same_step", 20), ("threes_disabled", 20), ("threes_next_step", 14), ("task", 20)],
)
def test_episode_statistics_hold_for_every_episode(make, task, episodes):
    """Episodes of 3, reward 1, two environments, 30 steps: 10 each, or 7 where a reset takes a step."""
    env = make(functools.partial(Count, T=3, reward=1.0)) if task == "task" else make(f"gym_probes:{task}")
    state, _ = env.init(keys.key(0), 2)
    ended = []
    for _ in range(30):
        state, step = env.step(state, torch.zeros(2, 1))
        done = step.terminated | step.truncated
        ended += zip(step.episode_return[done].tolist(), step.episode_length[done].tolist(), strict=True)
    assert ended == [(3.0, 3)] * episodes


def test_two_lengths_end_at_their_own(make):
    """Ten steps: two episodes of 5 and none of 50; the mean over what finished is 5."""
    state, *_ = run(make(*gym_probes.TWO_LENGTHS), 10, num_envs=2)
    assert [x.item() for x in state.episodes] == [2, 10.0, 10]


BAD = [
    *(("observation", value) for value in (np.nan, -np.inf, 2.0**48)),
    *(("reward", value) for value in (np.nan, np.inf, -1e25)),
]


@pytest.mark.parametrize("n_step", [1, 3])
@pytest.mark.parametrize(("where", "value"), BAD)
def test_a_number_that_is_not_finite_leaves_no_trace(make, where, value, n_step):
    """Environment 1 fails at step 2 of episodes 0, 2, ...: a row, a refused one, five of a whole episode."""
    faulty = functools.partial(Bad, k=2, where=where, value=value, T=5, start=1000.0)
    env = make(functools.partial(Count, T=5), faulty)
    state, *_ = run(env, 14, num_envs=2, n_step=n_step)
    # Two turns of 7 steps: 2 refused.
    assert (state.refused, state.env_steps) == (2, 28)
    # Environment 0: two of 5 steps; environment 1: its two whole ones. Each 1 + 2 + 3 + 4 + 5.
    assert [x.item() for x in state.episodes] == [4, 60.0, 20]
    batch = stored(state, env)
    assert all(torch.isfinite(x).all() for x in (*batch.observation, *batch.next_observation, batch.reward))
    now, after = batch.observation.actor[:, 0], batch.next_observation.actor[:, 0]
    mine = now >= 1000
    if n_step == 1:
        assert (mine.sum(), (~mine).sum()) == (12, 14)
    length = torch.where(mine & ((now - 1000) // 100 % 2 == 0), 1, 5)
    assert torch.equal(after - now, (length - now % 100).clamp(max=n_step))
    assert [torch.isfinite(x).all().item() for x in state.scale] == [True] * 5
    assert state.scale.count == 26


@pytest.mark.parametrize("mode", AutoresetMode)
def test_vector_environments_begin_anew_after_a_number_that_is_not_finite(make, monkeypatch, mode):
    monkeypatch.setattr(gym_probes, "task", lambda num_envs: gym_probes.bads(mode, num_envs))
    env = make("gym_probes:task")
    state, *_ = run(env, 8, num_envs=2)
    assert state.refused == 1
    batch = stored(state, env)
    now, after = batch.observation.actor[:, 0], batch.next_observation.actor[:, 0]
    assert torch.equal(after, now + 1)
    # 0 | refused | 100 ... 104 | 200: environment 0 was reset at once.
    expected = [0, 100, 101, 102, 103, 104] + ([] if mode == AutoresetMode.NEXT_STEP else [200])
    assert now[now < 900].tolist()[: len(expected)] == expected


def test_actions_reach_the_whole_box_and_nothing_else(make):
    """One affine map, in warm-up, exploration and evaluation; the replay holds the unit cube's side of it."""
    env = make("gym_probes:Box2-v0")
    config = dataclasses.replace(SMALL, num_envs=1)
    loop = iteration.make_iteration(config, env, cycle.make_learner(config, env.spec))
    state = loop.init(keys.key(0))
    for random in (True, False):
        for _ in range(100):
            state = loop.step(state, random)
    batch = stored(state, env)
    received = batch.next_observation.actor
    low, high = torch.tensor([0.0, -3.0]), torch.tensor([10.0, 1.0])
    torch.testing.assert_close(received, low + 0.5 * (batch.action + 1) * (high - low), rtol=1e-6, atol=1e-6)
    assert torch.equal(batch.reward, received[:, 0])
    random = received[:100]
    assert (random.min(0).values < low + 0.05 * (high - low)).all()
    assert (random.max(0).values > high - 0.05 * (high - low)).all()
    state, _ = env.init(keys.key(0), 3)
    corners = torch.tensor([[-1.0, 1.0], [2.0, -2.0], [0.0, 0.0]])
    assert env.step(state, corners)[1].observation.actor.tolist() == [[0.0, 1.0], [10.0, -3.0], [5.0, -1.0]]


@pytest.mark.parametrize("dtype", gym_probes.DTYPES)
def test_other_types_arrive_as_float32_numbers(make, dtype):
    env = make(functools.partial(F64, dtype=dtype))
    state, _, _, seen = run(env, 4)
    _, base, by = gym_probes.DTYPES[dtype]
    assert [x[0].item() for x in seen] == [base + by * t for t in range(4)]
    assert state.observation.actor.dtype == state.replay.rows.dtype == state.scale.mean.dtype == torch.float32


def test_a_dict_of_boxes_is_flattened_by_its_sorted_keys(make):
    env = make("gym_probes:Both-v0")
    assert env.init(keys.key(0), 1)[1].actor.tolist() == [[1.0, 0.0, 0.0, 0.0]]
    assert env.step(env.init(keys.key(0), 1)[0], torch.zeros(1, 1))[1].observation.actor.tolist() == [
        [1.0, 2.0, 2.0, 1.0]
    ]


HALF = spaces.Box(np.float32([0, -1]), np.float32([np.inf, 1]))
REFUSED = {
    "unbounded": ({"action": spaces.Box(-np.inf, np.inf, (2,))}, r"Box\(-inf, inf, .*without bounds.*TransformAction"),
    "one side": ({"action": HALF}, "without bounds"),
    "degenerate": ({"action": spaces.Box(np.float32([-1, 2]), np.float32([1, 2]))}, "component 1, so it does noth"),
    "discrete": ({"action": spaces.Discrete(2)}, r"action space Discrete\(2\): a Discrete has no continuous actions"),
    "integers": ({"action": spaces.Box(0, 5, (1,), np.int64)}, "integers are no continuous"),
    "seen discrete": ({"observation": spaces.Discrete(4)}, r"observation space Discrete\(4\).*FlattenObservation"),
    "seen tuple": ({"observation": spaces.Tuple([spaces.Discrete(4)])}, r"observation space Tuple\(.*FlattenObserv"),
    "in a dict": ({"observation": spaces.Dict({"a": spaces.Text(4)})}, r"at 'a': a Text is no array"),
    "nothing": ({"observation": spaces.Box(0, 1, (0,))}, "holds no number"),
}  # fmt: skip


@pytest.mark.parametrize(("changes", "words"), REFUSED.values(), ids=REFUSED)
def test_unsupported_spaces_are_refused_with_reason_and_remedy(make, changes, words):
    with pytest.raises(ValueError, match=rf"gym_probes:task: .*{words}"):
        make(functools.partial(Spaces, **changes))


@pytest.mark.parametrize(
    ("task", "words"),
    [
        ("CartPole-v1", r"CartPole-v1: unsupported action space Discrete\(2\)"),
        ("HalfCheeta-v5", "--task=HalfCheeta-v5 --sim=gym: Environment `HalfCheeta` doesn't exist.*`HalfCheetah`"),
        ("pendulum", "pendulum"),
        ("gym_probes:nothing", "has no 'nothing'"),
        ("gym_probes:observations", "has no 'observations'"),
        ("gym_probes:DTYPES", "is a dict, not a function"),
        ("gym_probes:vector", "asks for the argument mode, makers; give it a default"),
    ],
)
def test_what_is_no_task_is_named(task, words):
    with pytest.raises(ValueError, match=words):
        envs.make(task, "gym")


@pytest.mark.parametrize("task", ["gym_probes:Count", "gym_probes:threes_next_step"])
def test_auto_takes_functions_of_gymnasium_environments_and_classic_names_them(task):
    assert isinstance(envs.make(task), HostEnv)
    with pytest.raises(ValueError, match=r"returned a|takes num_envs.*leave out --sim, or give --sim=gym"):
        envs.make(task, "classic")


ODD_STEPS = {
    "old": (lambda *x: (*x[:3], {}), "returned 4 values; gymnasium's has 5"),
    "none": (lambda *_: None, "returned a NoneType"),
    "two rewards": (
        lambda o, r, *x: (o, np.ones(2), *x),
        r"the reward array\(.*; it must be one real",
    ),
    "no reward": (lambda o, r, *x: (o, None, *x), "the reward None"),
    "text": (lambda o, r, *x: (o, "1.0", *x), "the reward '1.0'"),
    "complex": (lambda o, *x: (o + 1j, *x), "an observation holds complex"),
}


@pytest.mark.parametrize(("changed", "words"), ODD_STEPS.values(), ids=ODD_STEPS)
def test_a_step_that_breaks_the_contract_is_named(make, changed, words):
    class Odd(Spaces):
        def step(self, action):
            return changed(*super().step(action))

    env = make(Odd)
    state, _ = env.init(keys.key(0), 1)
    with pytest.raises(ValueError, match=words):
        env.step(state, torch.zeros(1, env.spec.action_dim))


def test_an_observation_of_another_shape_is_named(make):
    env = make(functools.partial(Spaces, observation=spaces.Box(-1, 1, (3,))))
    with pytest.raises(ValueError, match=r"an observation has shape \(1,\); its space says \(3,\)"):
        env.init(keys.key(0), 1)


def starts(seed: int, ranks: range, num_envs: int) -> list[float]:
    """Returns the first observations of three episodes of every environment of every rank."""
    found = []
    for rank in ranks:
        env = envs.make("gym_probes:RandomStart-v0", "gym")
        config = dataclasses.replace(SMALL, num_envs=num_envs)
        loop = iteration.make_iteration(config, env, cycle.make_learner(config, env.spec))
        state = loop.init(keys.key(seed), rank)
        for t in range(12):
            found += state.observation.actor[:, 0].tolist() if t % 4 == 0 else []
            state = loop.step(state, True)
        env.close()
    return found


def test_no_two_episodes_start_alike():
    """Two ranks, four environments, three episodes: 24 starts; they repeat with the seed, and with no other."""
    found = starts(0, range(2), 4)
    assert len({x // 1000 for x in found}) == 24
    assert starts(0, range(2), 4) == found
    assert not set(starts(1, range(2), 4)) & set(found)
    # Environment i's starts do not depend on how many there are beside.
    narrow = np.reshape(starts(0, range(1), 1), (3, 1))
    assert np.array_equal(np.reshape(found[:12], (3, 4))[:, :1], narrow)


def test_returns_do_not_depend_on_the_environments_beside(make):
    pytest.importorskip("mujoco")
    env = make("Hopper-v5")
    policy = networks.init_actor(keys.key(1), env.spec.actor_dim, env.spec.action_dim, 8, 1)
    results = {n: evaluation.evaluate(env, *policy, keys.key(0), n) for n in (1, 3, 5)}
    for n in (1, 3):
        # Products of more rows round differently, and contacts enlarge that.
        torch.testing.assert_close(results[n].returns, results[5].returns[:n], rtol=1e-3, atol=1e-3)
    assert_bits_equal(evaluation.evaluate(env, *policy, keys.key(0), 5), results[5])
    assert len({*results[5].returns.tolist()}) == 5


@pytest.mark.parametrize(("where", "value"), BAD)
def test_an_evaluated_episode_that_breaks_has_no_finite_return(make, where, value):
    policy = networks.init_actor(keys.key(1), 1, 1, 8, 1)
    env = make(functools.partial(Count, T=5), functools.partial(Bad, where=where, value=value, T=5))
    result = evaluation.evaluate(env, *policy, keys.key(0), 2)
    words = "inf" if (where, value) == ("reward", np.inf) else "nan"
    assert [str(x) for x in result.returns.tolist()] == ["15.0", words]
    assert result.lengths.tolist() == [5, 2]


def test_resting_environments_take_no_step(make):
    env = make(functools.partial(Count, T=2), functools.partial(Count, T=4))
    with env.opened(keys.key(0), 2, episodes=1) as (state, _):
        for t in range(1, 6):
            state, step = env.step(state, torch.zeros(2, 1))
            assert step.observation.actor[:, 0].tolist() == [min(t, 2), min(t, 4)]
            assert (step.truncated | step.terminated).tolist() == [t == 2, t == 4]


@pytest.mark.parametrize("version", ["v4", "v5"])
@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        ("HalfCheetah", (17, 17, 6)), ("Hopper", (11, 11, 3)), ("Walker2d", (17, 17, 6)), ("Ant", (27, 105, 8)),
        ("Humanoid", (376, 348, 17)),
    ],
)  # fmt: skip
def test_mujoco_tasks(make, name, sizes, version):
    pytest.importorskip("mujoco")
    env = make(f"{name}-{version}")
    assert (env.spec.actor_dim, env.spec.action_dim) == (sizes[version == "v5"], sizes[2])
    assert env.spec.max_episode_steps == 1000
    state, observation = env.init(keys.key(0), 2)
    assert observation.critic.shape == (2, 0)
    state, step = env.step(state, torch.zeros(2, sizes[2]))
    assert torch.isfinite(step.observation.actor).all()
    assert not torch.equal(step.observation.actor[0], step.observation.actor[1])


def test_pictures_come_from_simulations_of_their_own(make):
    env = make(COUNTING)
    pictures = evaluation.frames(env, lambda x: torch.zeros(1, 1), keys.key(0))
    assert [p[0, 0, 0] for p in pictures] == [10, 11, 12, 13]
    assert pictures[0].shape == (40, 30, 3)
    assert len(evaluation.frames(env, lambda x: torch.zeros(1, 1), keys.key(0), every=2)) == 2
    assert len(evaluation.frames(env, lambda x: torch.zeros(1, 1), keys.key(0), most=3)) == 3
