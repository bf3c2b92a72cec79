"""One rank's bad numbers hold back one optimizer on all ranks, and reward moments are those of the joined data."""

from __future__ import annotations

import contextlib

import pytest
import tiny_runs
import torch
from equal import assert_bits_equal
from ranks import run_ranks

from functional_sac import cycle, losses, reward_scale
from functional_sac.transition import Transition, symmetric
from functional_sl import keys, tree
from functional_sl.parallel import collectives
from functional_sl.parallel.lockstep import Lockstep
from functional_sl.parallel.world import world

POISONS = {
    # What is added to the actor's loss, by whether the rank is poisoned and a parameter.
    "loss": lambda bad, p: torch.where(bad, torch.nan, 0.0) * (1 + 0 * p),
    "gradient": lambda bad, p: torch.sqrt(0 * p + torch.where(bad, 0.0, 1.0)) - torch.where(bad, 0.0, 1.0),
    "loss with finite derivatives": lambda bad, p: torch.where(bad, torch.inf, 0.0),
    "reward": lambda bad, p: 0.0,  # which reaches the critics alone
}


def poisoned_updates(across: collectives.Collectives, rank: int, case: str):
    """Three updates of which the second is poisoned on rank 1; returns the named leaves after each."""
    config, spec = tiny_runs.config(), tiny_runs.short_pendulum().spec
    made = losses.make_losses(config, spec.action_dim)

    class Poisoned(losses.Losses):
        def actor(self, params, stats, critic, critic_stats, log_temperature, batch, noise):
            value, aux = super().actor(params, stats, critic, critic_stats, log_temperature, batch, noise)
            return value + POISONS[case](batch.observation.actor[0, 0] > 50, params.mean_b.sum()), aux

    with pytest.MonkeyPatch.context() as patch, torch.no_grad():
        patch.setattr(losses, "make_losses", lambda *args: Poisoned(made.config, made.dtype, made.entropy_goal))
        learner = cycle.make_learner(config, spec, across)
    state, after = learner.init(keys.key(0)), []
    for k in range(3):
        batch, noise = random_batch(10 * k + rank, case if (k, rank) == (1, 1) else "")
        state, _ = learner.update(state, batch, noise[:16], noise[16:], True)
        # The batch-norm statistics of two ranks meet at the end of a cycle only.
        after.append({name: leaf for name, leaf in tree.named(state).items() if "/stats/" not in name})
    return after


def random_batch(seed: int, case: str):
    drawn = zip(keys.split(keys.key(seed), 4), (3, 1, 1, 3), strict=True)
    observation, action, reward, after = (keys.normal(key, (8, width)) for key, width in drawn)
    if case == "reward":
        reward[3] = torch.nan
    elif case:
        observation[0, 0] = 60.0
    no = torch.zeros(8, dtype=torch.bool)
    batch = Transition(symmetric(observation), torch.tanh(action), reward[:, 0], no, no, symmetric(after))
    return batch, keys.normal(keys.key(1000 + seed), (24, 1))


def poisoned_rank(case: str):
    with world("cpu", timeout_s=60.0) as here, torch.no_grad():
        return poisoned_updates(collectives.over(here), here.rank, case)


@pytest.mark.parametrize("case", POISONS)
def test_one_poisoned_rank_holds_back_that_optimizer_everywhere(case):
    with contextlib.closing(Lockstep(2)) as lockstep, torch.no_grad():
        first, second = lockstep.map(lambda rank: poisoned_updates(lockstep.collectives, rank, case), (0, 1))
    assert_bits_equal(first, second)
    before, during, end = first
    hit, spared = ("critic", "actor") if case == "reward" else ("actor", "critic")
    held = [name for name in before if name.startswith((f"{hit}/params", f"{hit}/opt"))]
    held += [name for name in before if name.startswith("target") and hit == "critic"]
    assert held
    assert all(tree.bits_equal(before[name], during[name]) for name in held)
    assert [during[f"{hit}/gate/{name}"] for name in ("skipped", "consecutive")] == [1, 1]
    # The other optimizers and the count go on, and so does this one with the next batch.
    assert not tree.bits_equal(before[f"{spared}/params/trunk/w"], during[f"{spared}/params/trunk/w"])
    counts = {hit: 2, spared: 3, "temperature": 3}
    assert {name: int(end[f"{name}/opt/count"]) for name in counts} == counts
    assert [int(end[f"{hit}/gate/{name}"]) for name in ("skipped", "consecutive")] == [1, 0]
    assert end["updates"] == 3
    assert all(leaf.isfinite().all() for leaf in end.values())


def test_poisoned_processes_equal_simulated_ones():
    before = torch.get_num_threads()
    torch.set_num_threads(1)  # as `run_ranks` does: sums depend on it
    with contextlib.closing(Lockstep(2)) as lockstep, torch.no_grad():
        simulated = lockstep.map(lambda rank: poisoned_updates(lockstep.collectives, rank, "gradient"), (0, 1))
    torch.set_num_threads(before)
    assert_bits_equal(tuple(run_ranks(2, poisoned_rank, "gradient")), simulated)


def test_reward_moments_are_those_of_one_process_on_the_joined_data():
    """Rewards around 1 on 3 environments and around 100 on 5, for 200 steps; float32 moments: 1e-6."""
    noise = keys.normal(keys.key(0), (200, 8))
    level = torch.tensor([1.0] * 3 + [100.0] * 5)
    rewards, done = level + noise, noise > 2

    def run(columns: slice, across: collectives.Collectives | None = None):
        state = reward_scale.init(len(level[columns]))
        for reward, ends in zip(rewards[:, columns], done[:, columns], strict=True):
            state = reward_scale.update(state, reward, ends, 0.9, collectives=across)
        return state

    with contextlib.closing(Lockstep(2)) as lockstep:
        first, second = lockstep.map(lambda c: run(c, lockstep.collectives), (slice(3), slice(3, 8)))
    joined = run(slice(8))
    assert_bits_equal(first._replace(returns=()), second._replace(returns=()))
    assert torch.equal(torch.cat([first.returns, second.returns]), joined.returns)
    assert first.count == joined.count == 1600
    assert torch.equal(first.max_abs, joined.max_abs)
    torch.testing.assert_close(first[2:4], joined[2:4], rtol=1e-6, atol=0)
