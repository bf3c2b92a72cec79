"""Losses, their intermediate quantities and every gradient against one official update of each network alone."""

from __future__ import annotations

import dataclasses
import functools

import flashsac_official as oracle
import pytest
import torch
from torch import Tensor

from functional_sac import distributions, losses, networks, value
from functional_sac.losses import CriticStats

ATOMS = value.support(-5.0, 5.0, 21)


@pytest.fixture(params=oracle.SEEDS)
def arrays(request: pytest.FixtureRequest) -> oracle.Arrays:
    return oracle.load(request.param)


def log_temperature(arrays: oracle.Arrays) -> Tensor:
    return arrays["init/temperature/log_temp"].reshape(())


def bellman_targets(
    log_probs: Tensor, reward: Tensor, terminated: Tensor, entropy_term: Tensor, discount: float
) -> Tensor:
    one = functools.partial(value.bellman_target, atoms=ATOMS, discount=discount)
    return torch.func.vmap(one)(torch.exp(log_probs), reward, terminated, entropy_term)


def test_target_entropy(arrays: oracle.Arrays) -> None:
    found = [distributions.target_entropy(dim, 0.15) for dim in arrays["target_entropy/action_dim"].tolist()]
    oracle.check(torch.tensor(found), arrays["target_entropy/value"], oracle.ARITHMETIC)


@pytest.mark.parametrize(("gamma", "n"), [(0.97, 1), (0.97, 3), (1.0, 1)])
def test_projection_edges(arrays: oracle.Arrays, gamma: float, n: int) -> None:
    """Ten rows: on a bin, terminal at and over both ends, a large entropy, a reward of 100."""
    edge = oracle.beneath(arrays, "td_edge")
    found = bellman_targets(edge["log_probs"], edge["reward"], edge["done"] > 0.5, edge["entropy_term"], gamma**n)
    oracle.check(found, edge[f"target_probs_g{gamma}_n{n}"], oracle.FORWARD)


def test_critic_target(arrays: oracle.Arrays) -> None:
    """The target distribution step by step, from the parts that the critic's loss composes."""
    batch, recorded = oracle.batch(arrays, 0), oracle.beneath(arrays, "iso/critic")
    (mean, log_std), _ = networks.actor(*oracle.actor(arrays), batch.next_observation.actor, training=False)
    policy = distributions.sample(mean, log_std, arrays["batch/0/eps_next"])
    temperature = torch.exp(log_temperature(arrays))
    entropy_term = temperature * policy.log_prob
    # The log-probability may be off by its own bound; the term is that times the temperature.
    oracle.check(entropy_term, recorded["entropy_term"], oracle.Bound(oracle.LOG_PROB.absolute * temperature.item()))

    log_probs, _ = losses.ensemble(
        *oracle.critic(arrays, "init/target"),
        torch.cat([batch.observation.critic, batch.next_observation.critic]),
        torch.cat([batch.action, policy.action]),
        training=True,
        dtype=torch.float32,
    )
    after = log_probs[:, 12:]
    next_qs = value.expectation(after, ATOMS)
    chosen = value.pessimistic(after, ATOMS)
    oracle.check(next_qs, recorded["next_qs"], oracle.FORWARD)
    oracle.check(next_qs.argmin(0), recorded["min_index"], oracle.EXACT)
    oracle.check(chosen, recorded["selected_log_prob"], oracle.FORWARD)

    goal = bellman_targets(chosen, batch.reward, batch.terminated, entropy_term, 0.97)
    oracle.check(goal, recorded["target_probs"], oracle.FORWARD)


def test_critic(arrays: oracle.Arrays) -> None:
    params, online = oracle.critic(arrays)
    target, target_stats = oracle.critic(arrays, "init/target")
    functions = losses.make_losses(oracle.config(), 3)
    batch = oracle.batch(arrays, 0)
    policy = functions.next_policy(*oracle.actor(arrays), batch, arrays["batch/0/eps_next"])
    goal = functions.critic_goal(target, target_stats, policy, log_temperature(arrays), batch)
    grads, (loss, aux) = torch.func.grad_and_value(functions.critic, has_aux=True)(
        params, CriticStats(online, target_stats), goal
    )
    recorded = oracle.beneath(arrays, "iso/critic")
    oracle.check(loss, recorded["loss"], oracle.LOSS)
    oracle.check(aux.metrics["max_entropy_bonus"], recorded["max_entropy_bonus"], oracle.ENTROPY_BONUS)
    by_name = oracle.named_params(oracle.CRITIC, grads)
    expected = oracle.beneath(recorded, "grad")
    assert by_name.keys() == expected.keys()
    oracle.check_all(by_name, expected, oracle.CRITIC_GRADIENT)
    for network, stats in (("critic", aux.stats.online), ("target", aux.stats.target)):
        moved = oracle.beneath(arrays, f"fwd/{network}/train/stats_after")
        oracle.check_all(oracle.named_stats(params, stats), moved, oracle.FORWARD)


def actor_gradient(arrays: oracle.Arrays, bc_alpha: float) -> tuple[oracle.Arrays, Tensor, losses.Aux]:
    config = dataclasses.replace(oracle.config(), bc_alpha=bc_alpha)
    grads, (loss, aux) = torch.func.grad_and_value(losses.make_losses(config, 3).actor, has_aux=True)(
        *oracle.actor(arrays),
        *oracle.critic(arrays),
        log_temperature(arrays),
        oracle.batch(arrays, 0),
        arrays["batch/0/eps_actor"],
    )
    return oracle.named_params(oracle.ACTOR, grads), loss, aux


def test_actor(arrays: oracle.Arrays) -> None:
    grads, loss, aux = actor_gradient(arrays, bc_alpha=0.0)
    recorded = oracle.beneath(arrays, "iso/actor")
    oracle.check(loss, recorded["loss"], oracle.LOSS)
    oracle.check(aux.metrics["entropy"], recorded["entropy"], oracle.LOG_PROB)
    oracle.check(aux.metrics["mean_action"], recorded["mean_action"], oracle.FORWARD)
    oracle.check(aux.metrics["q"], recorded["qs"].amin(0).mean().reshape(1), oracle.FORWARD)
    expected = oracle.beneath(recorded, "grad")
    assert grads.keys() == expected.keys()
    oracle.check_all(grads, expected, oracle.ACTOR_GRADIENT)
    moved = oracle.beneath(arrays, "fwd/actor/train/stats_after")
    oracle.check_all(oracle.named_stats(oracle.actor(arrays)[0], aux.stats), moved, oracle.FORWARD)


def test_actor_values(arrays: oracle.Arrays) -> None:
    """Both critics judge the policy's action by their running statistics."""
    recorded, batch = oracle.beneath(arrays, "iso/actor"), oracle.batch(arrays, 0)
    observation = torch.cat([batch.observation.actor, batch.next_observation.actor])
    (mean, log_std), _ = networks.actor(*oracle.actor(arrays), observation, training=True)
    action = distributions.sample(mean, log_std, arrays["batch/0/eps_actor"]).action[:12]
    log_probs, _ = losses.ensemble(
        *oracle.critic(arrays), batch.observation.critic, action, training=False, dtype=torch.float32
    )
    oracle.check(action, recorded["action"], oracle.FORWARD)
    oracle.check(value.expectation(log_probs, ATOMS), recorded["qs"], oracle.FORWARD)


def test_behaviour_cloning(arrays: oracle.Arrays) -> None:
    recorded = oracle.beneath(arrays, "iso/actor_bc")
    grads, loss, _ = actor_gradient(arrays, bc_alpha=recorded["alpha"].item())
    oracle.check(loss, recorded["loss"], oracle.LOSS)
    oracle.check_all(grads, oracle.beneath(recorded, "grad"), oracle.ACTOR_GRADIENT)


def test_temperature(arrays: oracle.Arrays) -> None:
    loss = losses.make_losses(oracle.config(), 3).temperature
    grad, (found, aux) = torch.func.grad_and_value(loss, has_aux=True)(
        log_temperature(arrays), (), arrays["iso/actor/entropy"].reshape(())
    )
    recorded = oracle.beneath(arrays, "iso/temperature")
    oracle.check(found, recorded["loss"], oracle.LOSS)
    oracle.check(grad, recorded["grad"], oracle.LOSS)
    oracle.check(aux.metrics["temperature"], recorded["value"], oracle.ARITHMETIC)
    oracle.check(distributions.target_entropy(3, 0.15), recorded["target_entropy"], oracle.ARITHMETIC)
