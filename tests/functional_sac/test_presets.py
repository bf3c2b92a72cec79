"""Presets against the settings that their sources publish."""

from __future__ import annotations

import dataclasses

import pytest

from functional_sac import plan, presets, request, tasks
from functional_sac.config import TrainConfig
from functional_sl.run import cli


@pytest.mark.parametrize("name", presets.PRESETS)
def test_presets_are_valid_and_hold_no_default(name: str) -> None:
    changed = presets.PRESETS[name]
    config, default = TrainConfig(**changed), TrainConfig()
    types = {f.name: type(f.default) for f in dataclasses.fields(TrainConfig)}
    for field, value in changed.items():
        assert getattr(config, field) == value, field
        assert (value == getattr(default, field)) == (name == "official"), field
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


def test_every_preset_is_refused_on_the_run_of_another() -> None:
    """A resume compares the fields that a preset names with those of its run: each names one in which they differ."""
    for name, preset in presets.PRESETS.items():
        for other, settings in presets.PRESETS.items():
            run = dataclasses.asdict(plan.settle(TrainConfig(**settings), 1))
            differing = {field for field in preset.keys() - request.MAY_CHANGE if preset[field] != run[field]}
            assert bool(differing) == (name != other), (name, other)


def test_unilab() -> None:
    """The critic first, the actor counted within a cycle, and what else its FlashSAC does differently."""
    config = TrainConfig(**presets.PRESETS["unilab"])
    assert config.critic_first
    assert config.actor_count == "cycle"
    assert config.noise_per_env
    assert not config.random_warmup
    assert config.reward_prior == "unilab"
    assert config.n_step == 1


@pytest.mark.parametrize(
    ("name", "published"),
    [
        (
            "g1_tracking",
            {"num_envs": 2048, "batch_size": 2048, "updates_per_step": 6, "gamma": 0.99, "learning_starts": 200_704,
             "replay_capacity": 1_048_576, "env_steps": 51_200_000},
        ),
        (
            "g1_walk",
            {"num_envs": 4096, "batch_size": 2048, "updates_per_step": 8, "gamma": 0.97, "learning_starts": 200_704,
             "replay_capacity": 1_048_576, "env_steps": 20_480_000},
        ),
        (
            "go2_joystick",
            {"num_envs": 1024, "batch_size": 2048, "updates_per_step": 2, "gamma": 0.97, "learning_starts": 51_200,
             "replay_capacity": 4_194_304, "env_steps": 4_096_000},
        ),
    ],
)  # fmt: skip
def test_robot_tasks(name: str, published: dict) -> None:
    """UniLab's settings, with 6 updates a cycle of tracking where its owner has 4."""
    config = TrainConfig(**presets.PRESETS[name])
    assert presets.TASK_PRESETS[config.task] == name
    both = {"tau": 0.05, "compute_dtype": "bfloat16", "lr_decay_updates": 500_000, "critic_first": True}
    both |= {"n_step": 1, "lr_peak": 3e-4, "lr_end": 1.5e-4, "snapshot_replay": False}
    assert {key: getattr(config, key) for key in both | published} == both | published


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("", "small"),
        ("--task=cartpole_swingup --device=cuda", "small"),
        ("--task=g1_motion_tracking --sim=mjwarp", "g1_tracking"),
        ("--task=g1_walk_flat --device=cuda", "g1_walk"),
        ("--task=go2_joystick_flat --sim=mjwarp --device=auto", "go2_joystick"),
        ("--task=g1_motion_tracking", "robot_small"),
        ("--task=g1_motion_tracking --sim=mujoco", "robot_small"),
        ("--task=g1_motion_tracking --sim=mjwarp --device=cpu", "robot_small"),
        ("--task=g1_motion_tracking --sim=mjwarp --preset=small", "small"),
    ],
)
def test_a_robot_task_brings_its_preset(line: str, expected: str) -> None:
    choice = {"presets": presets.PRESETS, "default_preset": presets.default}
    parsed = cli.parse(TrainConfig, [*line.split(), "--seed=3"], program="x", **choice)
    flags = {name: getattr(parsed.config, name) for name in ("task", "sim", "device")}
    assert parsed.config == TrainConfig(**presets.PRESETS[expected] | flags | {"seed": 3})
    assert "gamma" not in parsed.given or expected == "small"


def test_every_robot_task_has_a_preset() -> None:
    assert presets.TASK_PRESETS.keys() == tasks.TASKS.keys()


def test_the_default_preset_exists_and_is_small() -> None:
    config = TrainConfig(**presets.PRESETS[presets.DEFAULT])
    assert presets.DEFAULT == "small"
    assert config.env_steps <= 20_000
    assert config.task == "pendulum"
