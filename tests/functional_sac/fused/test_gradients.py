"""Gradients that are written out against `torch.func.grad` of the losses."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from functional_sac import losses, updates
from functional_sac.config import SACConfig
from functional_sac.distributions import Sample
from functional_sac.envs.env import EnvSpec
from functional_sac.fused import gradients
from functional_sac.transition import Observation, Transition
from functional_sl import keys, tree
from functional_sl.parallel.collectives import single
from functional_sl.step import Aux

CONFIG = SACConfig(
    batch_size=12, actor_width=8, critic_width=8, num_blocks=2, bins=11, lr_decay_updates=50, bc_alpha=0.1
)
SPEC = EnvSpec("probe", actor_dim=5, critic_dim=7, action_dim=3, max_episode_steps=10, control_dt=0.1)


def batch(dtype: torch.dtype) -> Transition:
    """Returns 12 transitions, some of them terminal."""
    draw = iter(keys.split(keys.key(4), 9))

    def normal(*shape: int) -> torch.Tensor:
        return keys.normal(next(draw), shape).to(dtype)

    return Transition(
        Observation(normal(12, 5), normal(12, 7)), normal(12, 3).tanh(), normal(12), normal(12) > 1, normal(12) > 9,
        Observation(normal(12, 5), normal(12, 7)),
    )  # fmt: skip


def start(dtype: torch.dtype, **changes: object) -> tuple[losses.Losses, updates.SACState]:
    """Returns losses and a state in which no statistic and no affine map is at its first value."""
    config = dataclasses.replace(CONFIG, **changes)
    made = updates.make_updates(config, SPEC, single())
    state, noise = made.init(keys.key(1)), iter(keys.split(keys.key(2), 200))

    def moved(x: torch.Tensor) -> torch.Tensor:
        return (x + 0.1 * keys.uniform(next(noise), tuple(x.shape))).to(dtype) if x.is_floating_point() else x

    return made.loss, tree.map(moved, state)


# Products and batch norm add in another order: float64 to 1e-11, float32 to 2e-5, in BF16 a few roundings of 2^-8.
KINDS = [("float32", torch.float64, 1e-11), ("float32", torch.float32, 2e-5), ("bfloat16", torch.float32, 0.1)]


def agree(found: tuple, expected: tuple, tolerance: float) -> None:
    """Compares trees leaf by leaf, relative to the largest number of a leaf; matrices may be in the products' type."""
    for name, a in tree.named(found).items():
        b = tree.named(expected)[name]
        assert a.shape == b.shape, name
        assert a.dtype in (b.dtype, torch.bfloat16), name
        assert (a - b).abs().max() <= tolerance * b.abs().max().clamp_min(1e-3), name


SHAPES = [{}, {"num_blocks": 1, "critic_width": 5, "actor_width": 9, "bins": 7, "bc_alpha": 0.0, "n_step": 3}]


@pytest.mark.parametrize(("products", "dtype", "tolerance"), KINDS)
@pytest.mark.parametrize("changes", SHAPES, ids=["even", "odd"])
def test_the_critics_gradient(products: str, dtype: torch.dtype, tolerance: float, changes: dict) -> None:
    loss, state = start(dtype, compute_dtype=products, **changes)
    values, noise = batch(dtype), keys.normal(keys.key(5), (12, 3)).to(dtype)
    policy = loss.next_policy(state.actor.params, state.actor.stats, values, noise)
    frozen = (policy, state.temperature.params, values)
    goal = loss.critic_goal(state.target, state.critic.stats.target, *frozen)
    grads, (value, aux) = torch.func.grad_and_value(loss.critic, has_aux=True)(
        state.critic.params, state.critic.stats, goal
    )
    found = gradients.Gradients(loss).critic(state.critic.params, state.critic.stats, state.target, *frozen)
    agree(found, (grads, value, aux), tolerance)


@pytest.mark.parametrize(("products", "dtype", "tolerance"), KINDS)
@pytest.mark.parametrize("changes", SHAPES, ids=["even", "odd"])
def test_the_actors_gradient(products: str, dtype: torch.dtype, tolerance: float, changes: dict) -> None:
    loss, state = start(dtype, compute_dtype=products, **changes)
    values, noise = batch(dtype), keys.normal(keys.key(5), (24, 3)).to(dtype)
    frozen = (state.critic.params, state.critic.stats.online, state.temperature.params, values, noise)
    grads, (value, aux) = torch.func.grad_and_value(loss.actor, has_aux=True)(
        state.actor.params, state.actor.stats, *frozen
    )
    written = gradients.Gradients(loss)
    forward = written.actor_forward(state.actor.params, values, noise)
    own, loss_value, (stats, metrics, _) = written.actor(state.actor.params, state.actor.stats, forward, *frozen)
    metrics |= losses.behaviour(Sample(forward.seen[:, -3:], forward.log_prob))
    agree((own, loss_value, Aux(stats, metrics)), (grads, value, aux), tolerance)


@pytest.mark.parametrize(("products", "dtype", "tolerance"), KINDS)
@pytest.mark.parametrize("changes", SHAPES, ids=["even", "odd"])
def test_the_next_policy(products: str, dtype: torch.dtype, tolerance: float, changes: dict) -> None:
    loss, state = start(dtype, compute_dtype=products, **changes)
    given = (state.actor.params, state.actor.stats, batch(dtype), keys.normal(keys.key(5), (12, 3)).to(dtype))
    agree(gradients.Gradients(loss).next_policy(*given), loss.next_policy(*given), tolerance)


def three_updates(made: updates.Updates, state: updates.SACState) -> updates.SACState:
    values = batch(torch.float32)
    for i in range(3):
        noise = keys.normal(keys.key(6 + i), (36, 3))
        policy = updates.PolicyPart(state.actor, state.temperature, state.scale, state.actor_copies)
        critic = (state.critic.params, state.critic.stats.online)
        policy, _ = made.policy(policy, *critic, values, noise[:24], state.critic_copies)
        state = state._replace(**policy._asdict())
        part = updates.CriticPart(state.critic, state.target, state.scale, state.critic_copies)
        sample = made.next_policy(state.actor.params, state.actor.stats, values, noise[24:], state.actor_copies)
        part, _ = made.critics(part, sample, state.temperature.params, values)
        state = state._replace(**part._asdict())
    return state


def test_three_fused_updates_are_three_updates() -> None:
    """In float32, from one state; the largest parameter is about 1."""
    states = []
    for fast in (False, True):
        made = updates.make_updates(CONFIG, SPEC, single(), fast)
        state = three_updates(made, made.init(keys.key(1)))
        states.append((state.actor.params, state.critic.params, state.target, state.actor.stats, state.critic.stats))
    torch.testing.assert_close(states[1], states[0], rtol=0, atol=2e-5)


@pytest.mark.parametrize("products", ["float32", "bfloat16"])
def test_copies_of_the_weights_follow_them(products: str) -> None:
    made = updates.make_updates(dataclasses.replace(CONFIG, compute_dtype=products), SPEC, single(), True)
    state = made.init(keys.key(1))
    plain, copied = three_updates(made, state), three_updates(made, made.copies(state))
    assert plain.actor_copies == plain.critic_copies == ()
    assert tree.bits_equal(copied, made.copies(plain))
    assert copied.actor_copies[2].dtype == copied.critic_copies[2].dtype == getattr(torch, products)


@pytest.mark.parametrize("number", [torch.nan, torch.inf])
@pytest.mark.parametrize("where", ["reward", "observation", "next_observation"])
def test_numbers_that_are_not_finite_close_the_gate(where: str, number: float) -> None:
    made = updates.make_updates(CONFIG, SPEC, single(), True)
    state, values = made.init(keys.key(1)), batch(torch.float32)
    broken = tree.clone(values)
    for leaf in tree.leaves(getattr(broken, where)):
        leaf.reshape(-1)[0] = number
    part = updates.CriticPart(state.critic, state.target, state.scale)
    sample = made.next_policy(state.actor.params, state.actor.stats, broken, keys.normal(keys.key(3), (12, 3)))
    after, _ = made.critics(part, sample, state.temperature.params, broken)
    assert tree.bits_equal((after.critic.params, after.target), (part.critic.params, part.target))
    assert after.critic.gate.skipped == 1


@pytest.mark.parametrize("number", [torch.nan, torch.inf])
@pytest.mark.parametrize("where", ["observation", "noise", "critic", "statistics"])
def test_numbers_that_are_not_finite_close_the_policys_gate(where: str, number: float) -> None:
    made = updates.make_updates(CONFIG, SPEC, single(), True)
    state = made.init(keys.key(1))
    values, noise = tree.clone(batch(torch.float32)), keys.normal(keys.key(3), (24, 3))
    critic, stats = tree.clone((state.critic.params, state.critic.stats.online))
    places = {"observation": values.observation.actor, "noise": noise, "critic": critic.w, "statistics": stats.mean}
    places[where].view(-1)[0] = number
    part = updates.PolicyPart(state.actor, state.temperature, state.scale)
    after, _ = made.policy(part, critic, stats, values, noise)
    assert tree.bits_equal(after.actor[:3], part.actor[:3])
    assert after.actor.gate.skipped == 1


def test_float16_is_refused() -> None:
    with pytest.raises(ValueError, match="float16"):
        updates.make_updates(dataclasses.replace(CONFIG, compute_dtype="float16"), SPEC, single(), True)
