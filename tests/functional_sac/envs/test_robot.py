"""Robot tasks on the CPU's simulator, with motions that stand still and end soon."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import pytest
import torch

pytest.importorskip("mujoco")

from functional_sac import envs, presets
from functional_sac.config import TrainConfig
from functional_sac.cycle import make_learner
from functional_sac.envs import robot as robots
from functional_sac.envs.env import Env, EnvState, TimeStep, averages
from functional_sac.iteration import make_iteration
from functional_sac.tasks import joystick, tracking
from functional_sac.tasks.settings import Settings
from functional_sl import capture, keys, sim, tree
from functional_sl.motions import library
from functional_sl.motions.clip import MotionClip
from functional_sl.sim.robots import g1, go2

FRAMES = 6
NUM_ENVS = 3


def standing(frames: int = FRAMES, mode: str = "start", wrap=lambda region: region) -> Env:
    """The G1 that follows one clip of its standing pose."""
    robot = g1.robot()
    simulator = sim.make(robot, threads=1)
    clip = MotionClip(torch.tensor(robot.default_qpos).repeat(frames, 1), 50.0, "stand")
    task = tracking.make(simulator.model, library.build([clip], robot, 50.0), mode=mode)
    return robots.build(task, simulator, wrap)


@pytest.fixture(scope="module")
def env() -> Iterator[Env]:
    found = standing()
    yield found
    found.close()


@pytest.fixture(scope="module")
def trot() -> Iterator[Env]:
    robot = go2.robot()
    simulator = sim.make(robot, threads=1)
    found = robots.build(joystick.make(simulator.model), simulator)
    yield found
    found.close()


def play(env: Env, steps: int, num_envs: int = NUM_ENVS, seed: int = 0) -> tuple[EnvState, list[TimeStep]]:
    """Returns the last state and all time steps of zero actions."""
    state, _ = env.init(keys.key(seed), num_envs)
    found = []
    for _ in range(steps):
        state, step = env.step(state, torch.zeros(num_envs, env.spec.action_dim))
        found.append(step)
    return state, found


@pytest.mark.parametrize(
    ("task", "sizes"),
    [("g1_motion_tracking", (160, 289, 29, 500)), ("g1_walk_flat", (98, 101, 29, 1000)),
     ("go2_joystick_flat", (49, 52, 12, 1000))],
)  # fmt: skip
def test_tasks_by_name(task: str, sizes: tuple[int, ...]) -> None:
    env = envs.make(task, "mujoco", Settings(motion="squat", threads=1))
    assert (env.spec.actor_dim, env.spec.critic_dim, env.spec.action_dim, env.spec.max_episode_steps) == sizes
    assert env.spec.control_dt == pytest.approx(0.02)
    _, observation = env.init(keys.key(0), 1)
    assert (observation.actor.shape, observation.critic.shape) == ((1, sizes[0]), (1, sizes[1]))
    picture = env.render(env.init(keys.key(0), 2)[0], 1)
    assert picture.shape[2] == 3
    assert len(set(picture.reshape(-1).tolist())) > 10
    env.close()


def test_an_episode_ends_in_time_with_its_clip_and_the_next_begins(env: Env) -> None:
    state, steps = play(env, 2 * FRAMES)
    for t, step in enumerate(steps):
        ends = t % FRAMES == FRAMES - 1
        assert step.truncated.tolist() == [ends] * NUM_ENVS
        assert not step.terminated.any()
        assert step.episode_length.tolist() == [t % FRAMES + 1] * NUM_ENVS
        assert tree.bits_equal(step.observation, step.final_observation) == (not ends)
    first = torch.stack([step.reward for step in steps[:FRAMES]])
    assert torch.allclose(steps[FRAMES - 1].episode_return, first.sum(0))
    assert state.episode_length.tolist() == [0] * NUM_ENVS
    found = averages({name: float(x) for name, x in env.metrics(state).items()}, {})
    assert found["episode/timeout"] == found["episode/completed"] == 1.0
    assert found["error_anchor_pos"] > 0.0
    rewards = [value for name, value in found.items() if name.startswith("reward/")]
    assert 0.02 * sum(rewards) == pytest.approx(float(torch.stack([x.reward for x in steps]).mean()), rel=1e-5)


def test_standing_still_is_worth_most_of_the_reward_at_first_and_falls() -> None:
    """Of 0.13 at most; the motors alone do not hold the robot upright."""
    env = standing(500)
    _, steps = play(env, 90, 8)
    env.close()
    assert 0.09 < float(steps[0].reward.mean()) < 0.13
    lengths = torch.cat([step.episode_length[step.terminated] for step in steps])
    assert len(lengths) >= 8
    assert 25 < float(lengths.double().mean()) < 80


def test_a_fall_at_the_end_of_the_clip_is_terminal(env: Env) -> None:
    state, _ = play(env, FRAMES - 1)
    physics = state.physics
    qpos = physics.sim.qpos.clone()
    qpos[0, 2] = 3.0
    lifted = physics.sim._replace(qpos=qpos)
    _, step = env.step(state._replace(physics=physics._replace(sim=lifted)), torch.zeros(NUM_ENVS, 29))
    assert step.terminated.tolist() == [True, False, False]
    assert step.truncated.tolist() == [False, True, True]


def test_only_the_actor_sees_noise(env: Env) -> None:
    """Columns 67 .. 69 are the base velocity, and the last three of the critic once more."""
    _, steps = play(env, 2)
    for step in steps:
        seen = step.observation
        off = seen.actor - seen.critic[:, :160]
        half = ((67, 0.0), (3, 0.1), (3, 0.2), (29, 0.01), (29, 1.5), (29, 0.0))
        width = torch.cat([torch.full((size,), x) for size, x in half])
        assert (off.abs() <= width + 1e-5).all()
        assert (off.abs() > 0).float().mean() > 0.99 * 64 / 160
        assert torch.equal(seen.critic[:, 67:70], seen.critic[:, -3:])
    noise = [step.observation.actor[:, 102:131] - step.observation.critic[:, 102:131] for step in steps]
    assert not torch.allclose(*noise, atol=0.1)


def test_actions_are_clamped_and_remembered(env: Env) -> None:
    state, observation = env.init(keys.key(0), 2)
    assert not observation.actor[:, 131:].any()
    _, step = env.step(state, torch.full((2, 29), 3.0))
    assert (step.observation.actor[:, 131:] == 1.0).all()


@pytest.mark.parametrize("name", ["env", "trot"])
def test_no_leaf_is_shared_and_no_input_is_written(name: str, request: pytest.FixtureRequest) -> None:
    env: Env = request.getfixturevalue(name)
    key = keys.key(0)
    inputs = (env.init(key, 2)[0], torch.full((2, env.spec.action_dim), 2.0))
    for _ in range(FRAMES + 1):
        before = tree.clone(inputs)
        outputs = env.step(*inputs)
        assert tree.bits_equal(inputs, before)
        assert tree.overlapping((inputs, outputs)) is None
        inputs = (outputs[0], inputs[1])


def test_a_nan_action_ends_its_own_environments_episode(env: Env) -> None:
    state, _ = play(env, 2)
    action = torch.zeros(NUM_ENVS, 29)
    _, sound = env.step(state, action)
    action[1, 3] = torch.nan
    state, step = env.step(state, action)
    assert step.reward.isnan().tolist() == [False, True, False]
    assert not (step.terminated | step.truncated).any()
    assert state.episode_length.tolist() == [3, 0, 3]
    assert step.observation.actor.isfinite().all()
    for i in (0, 2):
        assert tree.bits_equal(tree.index(step, i), tree.index(sound, i))
    found = {name: float(x) for name, x in env.metrics(state).items()}
    assert (found["diverged"], found["steps"], found["episodes"]) == (1.0, 8.0, 0.0)
    assert averages(found, {})["diverged"] == 1 / 8
    state, step = env.step(state, torch.zeros(NUM_ENVS, 29))
    assert step.reward.isfinite().all()


def test_one_environment_is_the_first_of_many(env: Env) -> None:
    """Vectorised functions may round another way at another width; physics amplifies it a little."""
    for one, many in zip(play(env, FRAMES + 2, 1)[1], play(env, FRAMES + 2, 5)[1], strict=True):
        first = tree.map(lambda x: x[:1], many)
        for a, b in zip(tree.leaves(one), tree.leaves(first), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-3)


def test_starts_differ_and_depend_on_the_key(env: Env) -> None:
    def starts(seed: int) -> set[float]:
        state, _ = env.init(keys.key(seed), 4)
        found = set(state.physics.sim.qpos[:, 0].tolist())
        for _ in range(2 * FRAMES):
            state, step = env.step(state, torch.zeros(4, 29))
            if step.truncated.all():
                found |= set(state.physics.sim.qpos[:, 0].tolist())
        return found

    assert len(starts(0)) == len(starts(0) | starts(0)) == 12
    assert len(starts(0) | starts(1)) == 24


def test_a_push_is_seen_in_the_true_successor(trot: Env) -> None:
    """At step 750 the base gains up to 1 m/s forward and aside; nothing ends."""
    state, _ = trot.init(keys.key(0), NUM_ENVS)
    length = torch.tensor([748, 749, 0])
    state = state._replace(episode_length=length)
    state, step = trot.step(state, torch.zeros(NUM_ENVS, 12))
    assert not (step.terminated | step.truncated).any()
    assert tree.bits_equal(step.observation, step.final_observation)
    quiet, without = trot.step(trot.init(keys.key(0), NUM_ENVS)[0], torch.zeros(NUM_ENVS, 12))
    gained = (state.physics.sim.qvel - quiet.physics.sim.qvel)[:, :3].abs()
    assert (gained[[0, 2]] == 0).all()
    assert 0.05 < float(gained[1].max()) <= 1.0
    assert (gained[1] <= torch.tensor([1.0, 1.0, 0.5])).all()
    velocities = (step.final_observation.critic[1, -3:], without.final_observation.critic[1, -3:])
    assert float((velocities[0] - velocities[1]).norm()) == pytest.approx(float(gained[1].norm()), rel=1e-3)


def test_worlds_beyond_a_capacity_are_counted() -> None:
    """Bits 4 and 1 of the engine: contacts, and rows of constraints."""
    simulator = sim.make(go2.robot(), threads=1)
    bits = torch.tensor([4, 0, 1], dtype=torch.int32)
    full = simulator._replace(step=lambda state, ctrl: simulator.step(state, ctrl)._replace(overflow=bits))
    env = robots.build(joystick.make(simulator.model), full)
    found = averages({name: float(x) for name, x in env.metrics(play(env, 2)[0]).items()}, {})
    assert (found["over_contacts"], found["over_constraints"]) == (1 / 3, 1 / 3)
    env.close()


def test_it_can_be_trained(env: Env) -> None:
    config = TrainConfig(**presets.SMALL | {"num_envs": 4, "learning_starts": 20, "batch_size": 16})
    config = dataclasses.replace(config, lr_decay_updates=100, env_steps=200)
    with torch.no_grad():
        learner = make_learner(config, env.spec)
        iteration = make_iteration(config, env, learner)
        state = iteration.init(keys.key(0))
        for i in range(15):
            state = iteration.step(state, i < 5)
            state = iteration.learn(state, i % learner.phases) if i >= 5 else state
    assert (int(state.env_steps), int(state.episodes.count), int(state.refused)) == (60, 8, 0)
    assert float(state.metrics["critic_loss"]) > 0
    assert averages({name: float(x) for name, x in env.metrics(state.env).items()}, {})["episode/completed"] == 1.0


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: envs.make("g1_walk_flatt", "mujoco"), "did you mean 'g1_walk_flat'"),
        (lambda: envs.make("g1_walk_flat", "mujuco"), "sim='mujuco': no task runs on it"),
        (lambda: envs.make("g1_walk_flat", "mujoco", Settings(geometry="round")), "geometry='round'"),
        (lambda: Settings(preset="unilap"), "preset='unilap'"),
        (lambda: Settings(sampling="random"), "sampling='random'"),
        (lambda: envs.make("g1_motion_tracking", "mujoco", Settings(motion="run")), "run"),
    ],
)
def test_what_cannot_be_made_is_named(call, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["aot_eager"])
def test_the_pure_parts_compile(env: Env, backend: str) -> None:
    compiled = standing(wrap=lambda region: capture.compiled(region, backend))
    for a, b in zip(play(env, FRAMES + 2)[1], play(compiled, FRAMES + 2)[1], strict=True):
        for x, y in zip(tree.leaves(a), tree.leaves(b), strict=True):
            torch.testing.assert_close(x, y, rtol=1e-3, atol=1e-3)
    compiled.close()


@pytest.mark.slow
def test_both_simulators_agree(env: Env) -> None:
    """Before the feet have met the floor often enough to tell the engines' roundings apart."""
    pytest.importorskip("mujoco_warp")
    robot = g1.robot()
    simulator = sim.make(robot, "mjwarp", "cpu")
    clip = MotionClip(torch.tensor(robot.default_qpos).repeat(FRAMES, 1), 50.0, "stand")
    task = tracking.make(simulator.model, library.build([clip], robot, 50.0), mode="start")
    warped = robots.build(task, simulator)
    for a, b in zip(play(env, FRAMES + 2)[1], play(warped, FRAMES + 2)[1], strict=True):
        assert torch.equal(a.truncated, b.truncated)
        for x, y in zip(tree.leaves(a), tree.leaves(b), strict=True):
            torch.testing.assert_close(x, y, rtol=5e-3, atol=5e-3)
    warped.close()
