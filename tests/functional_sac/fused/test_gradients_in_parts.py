"""Gradients that leave for the other ranks block by block: the numbers of those that leave in one."""

from __future__ import annotations

import contextlib
import dataclasses

import pytest
import torch
from equal import assert_bits_equal
from ranks import run_ranks

from functional_sac import cycle, losses, updates
from functional_sac.config import SACConfig
from functional_sac.envs.env import EnvSpec
from functional_sac.fused import gradients
from functional_sac.fused.alignment import BLOCK_LEAVES, INPUT_LEAVES
from functional_sac.transition import Transition, symmetric
from functional_sl import keys, packing, tree
from functional_sl.parallel import collectives
from functional_sl.parallel.lockstep import Lockstep
from functional_sl.parallel.world import world

# Blocks of more than 1024 elements, which may travel in BF16; what lies before them has fewer.
CONFIG = SACConfig(
    batch_size=8, actor_width=16, critic_width=16, num_blocks=2, bins=11, lr_init=1e-3, lr_peak=1e-3,
    lr_decay_updates=50,
)  # fmt: skip
SPEC = EnvSpec("probe", actor_dim=3, critic_dim=0, action_dim=1, max_episode_steps=10, control_dt=0.1)
WIRES = ("float32", "bfloat16")


@pytest.fixture(autouse=True)
def _small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packing, "SMALLEST", 1)


def batch(seed: int, bad: bool = False) -> tuple[Transition, torch.Tensor]:
    """Returns 8 transitions, of which one has a reward of NaN if bad, and noise for an update."""
    drawn = zip(keys.split(keys.key(seed), 4), (3, 1, 1, 3), strict=True)
    observation, action, reward, after = (keys.normal(key, (8, width)) for key, width in drawn)
    reward[3] = torch.nan if bad else reward[3]
    no = torch.zeros(8, dtype=torch.bool)
    values = Transition(symmetric(observation), torch.tanh(action), reward[:, 0], no, no, symmetric(after))
    return values, keys.normal(keys.key(1000 + seed), (24, 1))


def updated(across: collectives.Collectives, rank: int, wire: str) -> list[dict[str, torch.Tensor]]:
    """Three fused updates of a rank, of which the second has a bad reward on rank 1; the shared leaves after each."""
    learner = cycle.make_learner(dataclasses.replace(CONFIG, dp_gradient_wire_dtype=wire), SPEC, across, fused=True)
    state, after = learner.init(keys.key(0)), []
    for k in range(3):
        values, noise = batch(10 * k + rank, (k, rank) == (1, 1))
        state, _ = learner.update(state, values, noise[:16], noise[16:], True)
        after.append({name: leaf for name, leaf in tree.named(state).items() if "/stats/" not in name})
    return after


def in_lockstep(wire: str) -> tuple[list, list]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)  # as `run_ranks` does: sums depend on it
    with contextlib.closing(Lockstep(2)) as lockstep, torch.no_grad():
        found = lockstep.map(lambda rank: updated(lockstep.collectives, rank, wire), (0, 1))
    torch.set_num_threads(before)
    return found


def on_a_rank() -> list:
    with world("cpu", timeout_s=60.0) as here, torch.no_grad(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(packing, "SMALLEST", 1)
        return [updated(collectives.over(here), here.rank, wire) for wire in WIRES]


@pytest.mark.parametrize("network", ["critic", "actor"])
def test_parts_are_the_gradient_from_its_end(network: str) -> None:
    loss = losses.make_losses(CONFIG, SPEC.action_dim)
    written, state = gradients.Gradients(loss), cycle.make_learner(CONFIG, SPEC).init(keys.key(0))
    values, noise = batch(0)
    if network == "critic":
        policy = loss.next_policy(state.actor.params, state.actor.stats, values, noise[16:])
        frozen = (state.target, policy, state.temperature.params, values)
    else:
        forward = written.actor_forward(state.actor.params, values, noise[:16])
        critic = (state.critic.params, state.critic.stats.online)
        frozen = (forward, *critic, state.temperature.params, values, noise[:16])
    own, sent = getattr(state, network), []
    given = (own.params, own.stats, *frozen)
    found, value, _ = getattr(written, network)(*given, send=lambda leaves, loss: sent.append((leaves, loss)))
    assert_bits_equal(found, getattr(written, network)(*given)[0])
    assert all(torch.equal(loss, value) for _, loss in sent)
    last, first = (leaves for leaves, _ in sent)
    leaves = tree.leaves(found)
    assert [len(leaves) - len(first) - len(last), len(first)] == [INPUT_LEAVES, BLOCK_LEAVES]
    assert_bits_equal([*first, *last], leaves[INPUT_LEAVES:])


def test_ranks_that_reduce_in_parts_are_those_that_reduce_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """In float32; one rank's bad reward holds back the critics of both."""
    first, second = in_lockstep("float32")
    assert_bits_equal(first, second)
    assert [int(after["critic/gate/skipped"]) for after in first] == [0, 1, 1]
    assert [int(after["actor/gate/skipped"]) for after in first] == [0, 0, 0]
    through_trunk = gradients.through_trunk
    monkeypatch.setattr(gradients, "through_trunk", lambda *given: through_trunk(*given[:-1], None))
    assert_bits_equal(in_lockstep("float32")[0], first)


@pytest.mark.parametrize("region", ["policy", "critics"])
def test_an_update_in_parts_is_one_graph(region: str) -> None:
    """Dynamo follows it without a break; what other ranks would add is left out."""
    made = updates.make_updates(CONFIG, SPEC, collectives.over_sums(2, lambda x: x, lambda x: x), fused=True)
    state, (values, noise) = made.init(keys.key(0)), batch(0)
    if region == "policy":
        part = updates.PolicyPart(state.actor, state.temperature, state.scale)
        given = (part, state.critic.params, state.critic.stats.online, values, noise[:16])
    else:
        sample = made.next_policy(state.actor.params, state.actor.stats, values, noise[16:])
        part = updates.CriticPart(state.critic, state.target, state.scale)
        given = (part, sample, state.temperature.params, values)
    update = getattr(made, region)
    with torch.no_grad():
        found, expected = torch.compile(update, fullgraph=True, backend="eager")(*given), update(*given)
    assert_bits_equal(found, expected)


def test_processes_are_simulated_ranks() -> None:
    found = run_ranks(2, on_a_rank)
    assert_bits_equal(found, [list(of_rank) for of_rank in zip(*map(in_lockstep, WIRES), strict=True)])
