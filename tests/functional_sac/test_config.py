"""Settings that cannot be meant are refused with their names and values; those at the edge pass."""

from __future__ import annotations

import dataclasses
import math

import pytest

from functional_sac.config import SACConfig, TrainConfig, task_settings
from functional_sac.tasks.settings import Settings

NUMBERS = [f.name for f in dataclasses.fields(SACConfig) if isinstance(f.default, float)]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"gamma": 0.0}, "gamma=0.0"),
        ({"gamma": 1.001}, "gamma=1.001"),
        ({"tau": 0.0}, "tau=0.0"),
        ({"n_step": 0}, "n_step=0"),
        ({"batch_size": 1}, "batch_size=1: batch norm needs at least 2 rows"),
        ({"updates_per_step": 0}, "updates_per_step=0"),
        ({"actor_update_period": 0}, "actor_update_period=0"),
        ({"bins": 1}, "bins=1"),
        ({"min_value": 5.0}, "min_value=5.0, max_value=5.0"),
        ({"lr_peak": 0.0}, "lr_peak=0.0"),
        ({"lr_init": -1e-9}, "lr_init=-1e-09"),
        ({"target_sigma": 0.0}, "target_sigma=0.0"),
        ({"bc_alpha": -0.1}, "bc_alpha=-0.1"),
        ({"noise_max_repeat": 0}, "noise_max_repeat=0"),
        ({"learning_starts": -1}, "learning_starts=-1"),
        ({"batch_size": 4096, "replay_capacity": 1024}, "batch_size=4096, replay_capacity=1024"),
        ({"batch_size": 8, "learning_starts": 9, "replay_capacity": 8}, "learning_starts=9, replay_capacity=8"),
        ({"lr_warmup_updates": 11, "lr_decay_updates": 10}, "lr_warmup_updates=11, lr_decay_updates=10"),
    ],
)  # fmt: skip
def test_the_algorithm_names_what_it_refuses(given: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SACConfig(**given)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("name", NUMBERS)
def test_a_number_that_is_not_finite_is_refused(name: str, value: float) -> None:
    with pytest.raises(ValueError, match=f"{name}={value}"):
        SACConfig(**{name: value})


@pytest.mark.parametrize(
    "given",
    [
        {"gamma": 1.0, "tau": 1.0, "batch_size": 2, "bins": 2},
        {"learning_starts": 0, "noise_mu": 0.0, "bc_alpha": 0.0},
        {"replay_capacity": 4096, "batch_size": 4096, "learning_starts": 4096},
        {"lr_warmup_updates": 10, "lr_decay_updates": 10},
        {"lr_warmup_updates": 10, "lr_decay_updates": 0},
    ],
)
def test_the_edges_pass(given: dict) -> None:
    config = SACConfig(**given)
    assert {name: getattr(config, name) for name in given} == given


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"num_envs": 0}, "num_envs=0"),
        ({"num_seeds": 0}, "num_seeds=0"),
        ({"seed": -1}, "seed=-1"),
        ({"eval_every": -5}, "eval_every=-5"),
        ({"keep_snapshots": 0}, "keep_snapshots=0"),
        ({"batch_size": 4, "learning_starts": 5, "replay_capacity": 5, "num_envs": 6}, "num_envs=6, replay_capacity=5"),
        ({"env_steps": 99_999}, "learning_starts=100000, batch_size=2048, env_steps=99999"),
        ({"learning_starts": 0, "env_steps": 2047}, "batch_size=2048, env_steps=2047"),
        ({"n_step": 3, "num_envs": 1024, "env_steps": 102_000}, "n_step=3, num_envs=1024, env_steps=102000"),
        ({"overlap": True, "num_envs": 1024, "env_steps": 101_000}, "num_envs=1024, env_steps=101000, overlap=True"),
        ({"overlap": True, "num_envs": 50, "replay_capacity": 99, "learning_starts": 9, "batch_size": 8}, "overlap"),
        ({"resume": "a", "init_from": "b"}, "resume=a, init_from=b"),
        ({"task": "g1_walk_flat", "num_seeds": 2}, "num_seeds=2, task=g1_walk_flat: .* one seed a process"),
        ({"geometry": "cheap"}, "geometry=cheap, task=pendulum: only g1_motion_tracking, g1_walk_flat, go2_joystick"),
        ({"task": "g1_walk_flat", "motion": "walk"}, "motion=walk, task=g1_walk_flat: only g1_motion_tracking can"),
        ({"task": "g1_walk_flat", "sim": "mujoco", "sim_contacts": 9}, "sim_contacts=9, sim=mujoco: only --sim=mjwarp"),
        ({"task": "g1_walk_flat", "sim": "mjwarp", "sim_threads": 2}, "sim_threads=2, sim=mjwarp: only --sim=mujoco"),
        ({"task": "g1_walk_flat", "sim_threads": 0}, "sim_threads=0: must be positive"),
        ({"threads": 10**8}, "threads=100000000: must be at most 1024"),
        ({"critic_width": 2**15}, "critic_width=32768: must lie below 32768"),
    ],
)  # fmt: skip
def test_the_run_names_what_it_refuses(given: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TrainConfig(**given)


def test_every_setting_of_a_robot_task_has_a_flag() -> None:
    """What no flag tells keeps the default of `Settings`."""
    told = {"task_preset": "beyondmimic", "motion": "walk", "motion_sampling": "uniform", "robot_xml": "g1.xml"}
    told |= {"geometry": "full", "sim_contacts": 9, "sim_constraints": 8, "sim_threads": 2}
    found = task_settings(TrainConfig(task="g1_motion_tracking", **told))
    assert list(dataclasses.asdict(found).values()) == [*told.values()]
    assert task_settings(TrainConfig(task="g1_walk_flat")) == Settings()


def test_a_config_is_a_frozen_value() -> None:
    config = TrainConfig()
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.gamma = 0.5
    assert {TrainConfig(), config, dataclasses.replace(config, seed=1)} == {config, TrainConfig(seed=1)}
    with pytest.raises(ValueError, match=r"gamma=2\.0"):
        dataclasses.replace(config, gamma=2.0)


def test_every_setting_says_what_it_is() -> None:
    """The help is one sentence; a setting counted in environment steps says so."""
    for field in dataclasses.fields(TrainConfig):
        text = field.metadata["help"]
        assert text[0].isupper(), field.name
        assert text.endswith((".", "...")), field.name
        if field.name in {"env_steps", "eval_every", "log_every", "snapshot_every", "noise_max_repeat"}:
            assert "environment steps" in text.lower(), field.name
