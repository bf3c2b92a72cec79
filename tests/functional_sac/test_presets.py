"""Presets against the settings that their sources publish."""

from __future__ import annotations

import dataclasses

import pytest

from functional_sac import presets
from functional_sac.config import TrainConfig


@pytest.mark.parametrize("name", presets.PRESETS)
def test_presets_are_valid_and_hold_no_default(name: str) -> None:
    changed = presets.PRESETS[name]
    config, default = TrainConfig(**changed), TrainConfig()
    types = {f.name: type(f.default) for f in dataclasses.fields(TrainConfig)}
    for field, value in changed.items():
        assert getattr(config, field) == value != getattr(default, field), field
        assert type(value) is types[field], field


def test_official() -> None:
    """arXiv 2604.04539 and the authors' code, GPU settings."""
    published = {
        "gamma": 0.99, "n_step": 1, "batch_size": 2048, "updates_per_step": 2, "actor_update_period": 2,
        "actor_count": "global", "critic_first": False, "tau": 0.01, "actor_width": 128, "critic_width": 256,
        "num_blocks": 2, "bins": 101, "min_value": -5.0, "max_value": 5.0, "lr_init": 3e-4, "lr_peak": 3e-4,
        "lr_end": 1.5e-4, "lr_warmup_updates": 0, "initial_temperature": 0.01, "target_sigma": 0.15,
        "return_bound": 5.0, "noise_mu": 2.0, "noise_max_repeat": 16, "replay_capacity": 10_000_000,
        "learning_starts": 100_000, "num_envs": 1024, "env_steps": 50_000_000,
    }  # fmt: skip
    config = TrainConfig(**presets.PRESETS["official"])
    assert {name: getattr(config, name) for name in published} == published


def test_unilab() -> None:
    """The critic first, the actor counted within a cycle, and what else its FlashSAC does differently."""
    config = TrainConfig(**presets.PRESETS["unilab"])
    assert config.critic_first
    assert config.actor_count == "cycle"
    assert config.noise_per_env
    assert not config.random_warmup
    assert config.reward_prior == "unilab"
    assert config.n_step == 1


def test_the_default_preset_exists_and_is_small() -> None:
    config = TrainConfig(**presets.PRESETS[presets.DEFAULT])
    assert presets.DEFAULT == "small"
    assert config.env_steps <= 20_000
    assert config.task == "pendulum"
