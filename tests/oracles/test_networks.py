"""Forward passes and weight normalisation against the official code's numbers."""

from __future__ import annotations

import flashsac_official as oracle
import pytest
import torch

from functional_sac import distributions, losses, networks, value
from functional_sac.networks import Actor, BatchNorm, Critic, Trunk
from functional_sl import tree

both_modes = pytest.mark.parametrize("training", [False, True], ids=["eval", "train"])


@pytest.fixture(params=oracle.SEEDS)
def arrays(request: pytest.FixtureRequest) -> oracle.Arrays:
    return oracle.load(request.param)


def stats_after(params: Actor | Critic, stats: networks.Stats) -> oracle.Arrays:
    return {f"stats_after/{name}": x for name, x in oracle.named_stats(params, stats).items()}


@both_modes
def test_actor(arrays: oracle.Arrays, training: bool) -> None:
    batch = oracle.batch(arrays, 0)
    params, stats = oracle.actor(arrays)
    observation = torch.cat([batch.observation.actor, batch.next_observation.actor])
    (mean, log_std), after = networks.actor(params, stats, observation, training=training)
    action, log_prob = distributions.sample(mean, log_std, arrays["batch/0/eps_actor"])
    actual = {"mean": mean, "std": torch.exp(log_std), "action": action, "log_prob": log_prob} | stats_after(
        params, after
    )
    recorded = oracle.beneath(arrays, "fwd/actor/train" if training else "fwd/actor/eval")
    oracle.check_all(actual, recorded, lambda name: oracle.LOG_PROB if name == "log_prob" else oracle.FORWARD)
    assert training or tree.bits_equal(after, stats)


def test_evaluation_action(arrays: oracle.Arrays) -> None:
    (mean, _), _ = networks.actor(*oracle.actor(arrays), oracle.batch(arrays, 0).observation.actor, training=False)
    oracle.check(torch.tanh(mean), arrays["fwd/actor/evaluation_action"], oracle.FORWARD)


@both_modes
@pytest.mark.parametrize("network", ["critic", "target"])
def test_critics(arrays: oracle.Arrays, network: str, training: bool) -> None:
    batch = oracle.batch(arrays, 0)
    (mean, log_std), _ = networks.actor(*oracle.actor(arrays), batch.next_observation.actor, training=False)
    policy = distributions.sample(mean, log_std, arrays["batch/0/eps_next"])
    action = torch.cat([batch.action, policy.action])
    oracle.check(action, arrays["fwd/critic/action"], oracle.FORWARD)

    params, stats = oracle.critic(arrays, f"init/{network}")
    observation = torch.cat([batch.observation.critic, batch.next_observation.critic])
    log_probs, after = losses.ensemble(params, stats, observation, action, training=training, dtype=torch.float32)
    atoms = value.support(-5.0, 5.0, 21)
    actual = {"log_prob": log_probs, "qs": value.expectation(log_probs, atoms)} | stats_after(params, after)
    mode = "train" if training else "eval"
    oracle.check_all(actual, oracle.beneath(arrays, f"fwd/{network}/{mode}"), oracle.FORWARD)
    assert training or tree.bits_equal(after, stats)


def test_support(arrays: oracle.Arrays) -> None:
    atoms = value.support(-5.0, 5.0, 21)
    oracle.check(atoms.reshape(1, 1, 21), arrays["init/critic/predictor/bin_values"], oracle.EXACT)


@pytest.mark.parametrize("network", ["actor", "critic"])
def test_project(arrays: oracle.Arrays, network: str) -> None:
    """The record holds some perturbed tensors; the others are normalised already, so that they must stay."""
    names, read = {"actor": (oracle.ACTOR, oracle.actor), "critic": (oracle.CRITIC, oracle.critic)}[network]
    initial = read(arrays)[0]
    perturbed = oracle.beneath(arrays, f"prenorm/{network}")
    assert any((perturbed[name] - arrays[f"init/{network}/{name}"]).abs().max() > 0.01 for name in perturbed)
    params = tree.map(lambda name, x: perturbed.get(name, x), names, initial)
    projected = oracle.named_params(names, networks.project(params))
    oracle.check_all(projected, oracle.named_params(names, initial), oracle.ARITHMETIC)


def test_project_edges(arrays: oracle.Arrays) -> None:
    """A zero row, a row of norm 2e-9 and scales of 1e-5, placed where each rule holds in a network without blocks."""
    before, after = (
        {
            name: oracle.beneath(arrays, f"norm_edge/{name}/{when}")
            for name in ("linear", "bn", "rms", "ens_bn", "ens_rms")
        }
        for when in ("before", "after")
    )
    linear, rms = before["linear"]["weight"], before["rms"]["weight"]
    norm = BatchNorm(before["bn"]["weight"], before["bn"]["bias"])
    actor = networks.project(Actor(Trunk(norm, linear, (), rms), linear, linear[:, 0], linear, linear[:, 0]))
    for found in (actor.trunk.w, actor.mean_w, actor.std_w):
        oracle.check(found, after["linear"]["weight"], oracle.ARITHMETIC)
    oracle.check(actor.mean_b, linear[:, 0], oracle.EXACT)
    oracle.check(actor.std_b, linear[:, 0], oracle.EXACT)
    oracle.check_all(dict(zip(("weight", "bias"), actor.trunk.norm, strict=True)), after["bn"], oracle.ARITHMETIC)
    oracle.check(actor.trunk.post_scale, after["rms"]["weight"], oracle.ARITHMETIC)

    pair = linear.expand(2, -1, -1)
    norm = BatchNorm(before["ens_bn"]["weight"], before["ens_bn"]["bias"])
    critic = networks.project(Critic(Trunk(norm, pair, (), before["ens_rms"]["weight"]), pair, pair[..., 0]))
    for found in (critic.trunk.w, critic.w):
        oracle.check(found, after["linear"]["weight"].expand(2, -1, -1), oracle.ARITHMETIC)
    oracle.check(critic.b, pair[..., 0], oracle.EXACT)
    oracle.check_all(dict(zip(("weight", "bias"), critic.trunk.norm, strict=True)), after["ens_bn"], oracle.ARITHMETIC)
    oracle.check(critic.trunk.post_scale, after["ens_rms"]["weight"], oracle.ARITHMETIC)
