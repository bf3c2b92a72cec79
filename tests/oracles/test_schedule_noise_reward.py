"""Learning rate, exploration noise and reward scaling against the official code's numbers."""

from __future__ import annotations

import flashsac_official as oracle
import pytest
import torch

from functional_sac import distributions, networks, noise, reward_scale
from functional_sl import schedules


@pytest.fixture(params=oracle.SEEDS)
def arrays(request: pytest.FixtureRequest) -> oracle.Arrays:
    return oracle.load(request.param)


@pytest.mark.parametrize("run", oracle.RUNS)
def test_learning_rate(arrays: oracle.Arrays, run: str) -> None:
    recorded, config = oracle.beneath(arrays, f"lr/{run}"), oracle.config(run)
    schedule = schedules.warmup_cosine(
        config.lr_init, config.lr_peak, config.lr_end, config.lr_warmup_updates, config.lr_decay_updates
    )
    steps = torch.arange(121)
    oracle.check(schedule(steps), recorded["values"], oracle.ARITHMETIC)
    oracle.check(schedule(steps), recorded["optimizer_lr"], oracle.ARITHMETIC)
    oracle.check(schedule(recorded["extra_steps"]), recorded["extra_values"], oracle.ARITHMETIC)


def test_zeta(arrays: oracle.Arrays) -> None:
    """The cases hold u = 0, u just below 1, and every u that equals a cumulative value or lies one ulp below it."""
    oracle.check(noise.zeta_cdf(2.0, 16), arrays["zeta/cdf"], oracle.ARITHMETIC)
    oracle.check(noise.repeats(arrays["zeta/u"], arrays["zeta/cdf"]), arrays["zeta/n"], oracle.EXACT)


def test_exploration(arrays: oracle.Arrays) -> None:
    recorded = oracle.beneath(arrays, "explore")
    policy, cdf = oracle.actor(arrays), noise.zeta_cdf(2.0, 16)
    state = noise.init(4, 3)._replace(noise=recorded["initial_noise"])
    for step, observation in enumerate(recorded["observation"]):
        state = noise.redraw(state, recorded["candidate_noise"][step], recorded["u"][step], cdf)
        (mean, log_std), _ = networks.actor(*policy, observation, training=False)
        oracle.check(state.noise, recorded["noise"][step], oracle.EXACT)
        oracle.check(state.count, recorded["count"][step : step + 1], oracle.EXACT)
        oracle.check(state.length, recorded["n"][step : step + 1], oracle.EXACT)
        action = distributions.sample(mean, log_std, state.noise).action
        oracle.check(action, recorded["action"][step], oracle.FORWARD)
        oracle.check(torch.tanh(mean), recorded["deterministic_action"][step], oracle.FORWARD)


def test_reward_scale(arrays: oracle.Arrays) -> None:
    """Steps 0 and 5 divide by the largest return, the others by the spread."""
    recorded = oracle.beneath(arrays, "rn")
    done = (recorded["terminated"] + recorded["truncated"]) > 0.5
    probe = recorded["probe_reward"]
    state = reward_scale.init(5)
    unscaled = recorded["before_any_update/probe_normalized"]
    oracle.check(probe / reward_scale.denominator(state, 5.0), unscaled, oracle.ARITHMETIC)
    for step, reward in enumerate(recorded["reward"]):
        state = reward_scale.update(state, reward, done[step], gamma=0.97)
        divisor = reward_scale.denominator(state, 5.0)
        actual = {
            "G_r": state.returns,
            "G_r_max": state.max_abs,
            "mean": state.mean,
            "var": state.var,
            "count": state.count,
            "normalized": reward / divisor,
            "probe_normalized": probe / divisor,
        }
        for name, found in actual.items():
            bound = oracle.EXACT if name == "count" else oracle.ARITHMETIC
            oracle.check(found, torch.atleast_1d(recorded[name][step]), bound, f"{name} after step {step}")
