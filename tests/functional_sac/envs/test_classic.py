"""The classic tasks against float64 mechanics, and the ways in which an environment may be run."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from equal import all_finite
from torch import Tensor
from torch.func import jacrev

from functional_sac.envs import cartpole, reacher
from functional_sac.envs.classic import TASKS, make
from functional_sl import keys, tree

ALL = sorted(TASKS)


def rollout(env, key: Tensor, actions: Tensor) -> tuple:
    """Returns the last state and the time steps stacked, for actions [T, N, D]."""
    state, _ = env.init(key, actions.shape[1])
    steps = []
    for action in actions:
        state, timestep = env.step(state, action)
        steps.append(timestep)
    return state, tree.stack(steps)


def random_actions(env, steps: int, num_envs: int) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return 2.0 * torch.rand(steps, num_envs, env.spec.action_dim, generator=generator) - 1.0


def double(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def rod(mass: float, velocity_at) -> Tensor:
    """The kinetic energy of a uniform rod; Simpson's rule is exact, as the speed squared is quadratic along it."""
    a, b, c = (velocity_at(s).square().sum() for s in (0.0, 0.5, 1.0))
    return 0.5 * mass * (a + 4.0 * b + c) / 6.0


def lagrange(lagrangian, q: Tensor, v: Tensor, force: Tensor) -> Tensor:
    """Solves d/dt (dL/dv) - dL/dq = force for the acceleration by differentiating the energies."""
    mixed, mass = jacrev(jacrev(lagrangian, argnums=1), argnums=(0, 1))(q, v)
    return torch.linalg.solve(mass, force + jacrev(lagrangian)(q, v) - mixed @ v)


def cartpole_energies(q: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Kinetic and potential energy from where the parts are; q = (position, angle)."""

    def point(s: float):
        return lambda q: torch.stack((q[0] + s * torch.sin(q[1]), s * torch.cos(q[1])))

    kinetic = 0.5 * 1.0 * v[0] ** 2 + rod(0.1, lambda s: jacrev(point(s))(q) @ v)
    return kinetic, 0.1 * 9.81 * point(0.5)(q)[1]


def arm_energy(q: Tensor, v: Tensor, payload: Tensor) -> Tensor:
    def point(first: float, second: float):
        return lambda q: sum(
            0.5 * s * torch.stack((torch.cos(a), torch.sin(a))) for s, a in ((first, q[0]), (second, q[0] + q[1]))
        )

    def speed(first: float, second: float) -> Tensor:
        return jacrev(point(first, second))(q) @ v

    links = rod(1.0, lambda s: speed(s, 0.0)) + rod(1.0, lambda s: speed(1.0, s))
    return links + 0.5 * payload * speed(1.0, 1.0).square().sum()


def test_cartpole_obeys_lagrange() -> None:
    states, forces = double(20, 4), 10.0 * double(20)
    q, v = states[:, :2], states[:, 2:]
    linear, angular = cartpole.acceleration(cartpole.Cartpole(q[:, 0], q[:, 1], v[:, 0], v[:, 1]), forces)
    for i in range(20):
        expected = lagrange(
            lambda q, v: cartpole_energies(q, v)[0] - cartpole_energies(q, v)[1],
            q[i],
            v[i],
            torch.stack((forces[i], forces[i] * 0.0)),
        )
        torch.testing.assert_close(torch.stack((linear[i], angular[i])), expected, rtol=1e-9, atol=1e-9)


def test_reacher_obeys_lagrange() -> None:
    q, v, torque, payload = double(20, 2), 3.0 * double(20, 2), 2.0 * double(20, 2), double(20).abs()
    actual = reacher.acceleration(reacher.Arm(angle=q, velocity=v, target=q, payload=payload), torque)
    damping = torch.tensor([0.8, 0.4], dtype=torch.float64)
    for i in range(20):
        expected = lagrange(lambda q, v, m=payload[i]: arm_energy(q, v, m), q[i], v[i], torque[i] - damping * v[i])
        torch.testing.assert_close(actual[i], expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(("dt", "tolerance"), [(0.01, 0.005), (0.002, 0.001)])
def test_a_free_cartpole_keeps_its_energy(dt: float, tolerance: float) -> None:
    """Over ten seconds, relative to the m g 2 l between hanging and upright; the error is of first order in dt."""
    x, angle, velocity, angular_velocity = torch.tensor([[0.0], [2.5], [0.0], [0.0]], dtype=torch.float64)
    state = cartpole.Cartpole(x, angle, velocity, angular_velocity)

    def energy(s) -> float:
        q, v = torch.cat((s.position, s.angle)), torch.cat((s.velocity, s.angular_velocity))
        return float(sum(cartpole_energies(q, v)))

    start, drift = energy(state), 0.0
    for i in range(round(10.0 / dt)):
        state = cartpole.advance(state, torch.zeros(1, dtype=torch.float64), dt)
        if i % 10 == 0:
            drift = max(drift, abs(energy(state) - start))
    assert drift < tolerance * 0.1 * 9.81 * 1.0


def test_a_wall_stops_the_cart_and_keeps_the_poles_momentum_about_the_hinge() -> None:
    before = cartpole.Cartpole(*torch.tensor([[1.795, -1.795, 0.0], [0.4] * 3, [2.0, -2.0, 2.0], [1.0] * 3]))
    free = before._replace(position=torch.zeros(3))
    hit, flown = (cartpole.advance(x, torch.zeros(3)) for x in (before, free))
    assert hit.position.tolist()[:2] == [pytest.approx(1.8), pytest.approx(-1.8)]
    assert hit.velocity.tolist()[:2] == [0.0, 0.0]
    assert tree.bits_equal(tree.map(lambda x: x[2], hit), tree.map(lambda x: x[2], flown))

    def momentum(s) -> Tensor:  # m l cos(angle) x' + 4/3 m l^2 angle'
        return 0.05 * torch.cos(s.angle) * s.velocity + 0.1 / 3.0 * s.angular_velocity

    torch.testing.assert_close(momentum(hit), momentum(flown))


def test_an_action_is_a_share_of_the_largest_force_held_for_two_substeps() -> None:
    def held(module, physics, effort: Tensor):
        return module.advance(module.advance(physics, effort, 0.01), effort, 0.01)

    cart_state, _ = make("cartpole_swingup").init(keys.key(0), 2)
    moved, _ = make("cartpole_swingup").step(cart_state, torch.tensor([[0.5], [-1.0]]))
    expected = held(cartpole, cart_state.physics, torch.tensor([5.0, -10.0]))
    torch.testing.assert_close(moved.physics, expected)

    arm_state, _ = make("reacher").init(keys.key(0), 2)
    moved, _ = make("reacher").step(arm_state, torch.tensor([[0.5, -1.0], [1.0, 0.25]]))
    expected = held(reacher, arm_state.physics, torch.tensor([[2.0, -2.0], [4.0, 0.5]]))
    torch.testing.assert_close(moved.physics, expected)


def test_the_tip_and_the_rewards_by_hand() -> None:
    right_angle = torch.tensor([[0.0, math.pi / 2.0]])
    torch.testing.assert_close(reacher.tip(right_angle), torch.tensor([[0.5, 0.5]]))
    arm = reacher.Arm(right_angle, torch.zeros(1, 2), torch.tensor([[0.5, 0.7]]), torch.zeros(1))
    # 0.2 m away is one half; both torques at full take a fifth off
    torch.testing.assert_close(reacher.reward(arm, torch.ones(1, 2)), torch.tensor([0.4]))
    # standing still in the middle is perfect; 2 m off keeps (1 + 0.1) / 2, full force 4 / 5; hanging is worth nothing
    still = cartpole.Cartpole(*torch.tensor([[0.0, 2.0, 0.0], [0.0, 0.0, math.pi], [0.0] * 3, [0.0] * 3]))
    torch.testing.assert_close(cartpole.reward(still, torch.tensor([0.0, 1.0, 0.0])), torch.tensor([1.0, 0.44, 0.0]))


def test_balance_terminates_where_the_pole_falls_and_truncates_where_it_stands() -> None:
    env = make("cartpole_balance")
    state, _ = env.init(keys.key(0), 3)
    physics = cartpole.Cartpole(*torch.tensor([[0.0, 0.0, 1.79], [0.49, 0.0, 0.0], [0.0, 0.0, 2.0], [2.0, 0.0, 0.0]]))
    state = state._replace(physics=physics, episode_length=torch.full((3,), 499))
    state, timestep = env.step(state, torch.zeros(3, 1))
    assert timestep.terminated.tolist() == [True, False, True]
    assert timestep.truncated.tolist() == [False, True, False]
    assert (state.physics.angle.abs() <= 0.05).all()


@pytest.mark.parametrize("name", ALL)
def test_a_task_keeps_its_spec(name: str) -> None:
    env = make(name)
    spec, actions = env.spec, random_actions(env, 30, 5)
    state, steps = rollout(env, keys.key(0), actions)
    assert spec.task == name
    for observation in (steps.observation, steps.final_observation):
        assert observation.actor.shape == (30, 5, spec.actor_dim)
        assert observation.critic.shape == (30, 5, spec.critic_dim)
    assert {x.dtype for x in (*steps.observation, *steps.final_observation, steps.reward)} == {torch.float32}
    assert all_finite((state, steps))
    low, high = (-(math.pi**2 + 0.1 * 8.0**2 + 0.001 * 2.0**2) - 1e-4, 0.0) if name == "pendulum" else (0.0, 1.0)
    assert ((steps.reward >= low) & (steps.reward <= high)).all()
    pictures = [env.render(state, i) for i in (0, 1)]
    assert all(p.shape == (200, 200, 3) and p.dtype == np.uint8 for p in pictures)
    assert (pictures[0] != pictures[1]).any()


def test_only_the_critic_sees_the_payload() -> None:
    state, observation = make("reacher_asymmetric").init(keys.key(0), 4)
    assert torch.equal(observation.critic, torch.cat((observation.actor, state.physics.payload[:, None]), dim=-1))
    assert len(set(state.physics.payload.tolist())) == 4
    assert not make("reacher").init(keys.key(0), 4)[0].physics.payload.any()


@pytest.mark.parametrize("name", ALL)
def test_one_environment_is_the_first_of_five(name: str) -> None:
    env = make(name)
    actions = random_actions(env, 3, 5)
    wide = rollout(env, keys.key(0), actions)[1]
    narrow = rollout(env, keys.key(0), actions[:, :1])[1]
    assert tree.bits_equal(narrow, tree.map(lambda x: x[:, :1], wide))


@pytest.mark.parametrize("name", ALL)
def test_vmapped_seeds_are_single_runs(name: str) -> None:
    env = make(name)
    seeds = torch.stack([keys.key(seed) for seed in range(3)])
    actions = random_actions(env, 2, 4)
    together = torch.func.vmap(lambda key: rollout(env, key, actions))(seeds)
    assert all(x.is_contiguous() for x in tree.leaves(together))
    for i in range(3):
        assert tree.bits_equal(tree.index(together, i), rollout(env, keys.key(i), actions))


@pytest.mark.parametrize("name", ["cartpole_balance", "reacher_asymmetric"])
def test_a_full_graph_is_the_eager_step(name: str) -> None:
    env = make(name)
    state, _ = env.init(keys.key(0), 4)
    state = state._replace(episode_length=torch.tensor([0, 10, 199, 499]))
    action = random_actions(env, 1, 4)[0]

    @torch.compile(fullgraph=True, backend="aot_eager")
    def flat_step(leaves: list[Tensor], action: Tensor) -> list[Tensor]:
        rebuilt = tree.unflatten(tree.flatten(state)[1], leaves)
        return tree.leaves(env.step(rebuilt, action))

    assert tree.bits_equal(flat_step(tree.leaves(state), action), tree.leaves(env.step(state, action)))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("name", ALL)
def test_a_cuda_graph_replays_the_eager_step(name: str) -> None:
    env = make(name)
    state, _ = env.init(keys.key(0).cuda(), 4)
    action = random_actions(env, 1, 4)[0].cuda()
    eager = env.step(state, action)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = env.step(state, action)
    graph.replay()
    assert tree.bits_equal(captured, eager)


def test_an_unknown_task_names_the_nearest() -> None:
    with pytest.raises(ValueError, match="'pendulm'; did you mean 'pendulum'"):
        make("pendulm")
