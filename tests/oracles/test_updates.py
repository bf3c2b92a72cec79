"""Three whole updates against the official learner: parameters, statistics, optimizers, metrics, learning rates."""

from __future__ import annotations

import flashsac_official as oracle
import pytest
import torch

from functional_sac import cycle
from functional_sl import schedules, tree


def learning_rates(run: str, state: cycle.SACState) -> oracle.Arrays:
    config = oracle.config(run)
    schedule = schedules.warmup_cosine(
        config.lr_init, config.lr_peak, config.lr_end, config.lr_warmup_updates, config.lr_decay_updates
    )
    return {network: schedule(getattr(state, network).opt.count) for network in ("actor", "critic", "temperature")}


@pytest.mark.parametrize("seed", oracle.SEEDS)
def test_settings(seed: int) -> None:
    arrays, config, spec = oracle.load(seed), oracle.config(), oracle.SPEC
    widths = [config.actor_width, config.critic_width, config.num_blocks, config.bins, config.batch_size]
    assert [spec.actor_dim, spec.critic_dim, spec.action_dim, *widths] == arrays["meta/dims"].tolist()
    numbers = [config.gamma, config.tau, config.min_value, config.max_value, config.return_bound, config.target_sigma]
    assert torch.equal(torch.tensor(numbers), arrays["meta/gamma_tau_vmin_vmax_gmax_sigma"])
    for u in range(3):
        batch = oracle.batch(arrays, u)
        assert torch.equal(batch.observation.actor, arrays[f"batch/{u}/actor_observation"])
        assert torch.equal(batch.next_observation.actor, arrays[f"batch/{u}/actor_next_observation"])


@pytest.mark.parametrize("run", oracle.RUNS)
@pytest.mark.parametrize("seed", oracle.SEEDS)
def test_three_updates(seed: int, run: str) -> None:
    arrays = oracle.load(seed)
    learner, state = oracle.learner(run), oracle.state(arrays)
    for u in range(3):
        recorded = oracle.beneath(arrays, f"seq/{run}/u{u}")
        (with_actor,) = cycle.with_actor(oracle.config(run), phase=u)
        oracle.check_all(learning_rates(run, state), oracle.beneath(recorded, "lr_used"), oracle.ARITHMETIC)
        before = state
        state, metrics = learner.update(
            state, oracle.batch(arrays, u), *oracle.noises(arrays, f"batch/{u}"), with_actor
        )
        oracle.check_all(learning_rates(run, state), oracle.beneath(recorded, "lr_next"), oracle.ARITHMETIC)
        oracle.check_metrics(metrics, oracle.beneath(recorded, "info"))
        full = oracle.beneath(recorded, "full")
        oracle.check_all(
            oracle.snapshot(state),
            full or oracle.beneath(recorded, "probe"),
            oracle.state_bound,
            probe=not full,
        )
        # The record leaves out what an update without the actor does not touch.
        for network in ("actor", "temperature"):
            untouched = tree.bits_equal(getattr(before, network), getattr(state, network))
            assert untouched != with_actor
    assert state.updates.item() == 3
    assert torch.equal(state.key, before.key)
