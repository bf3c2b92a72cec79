"""Named settings for `--preset`: what differs from the defaults of `TrainConfig`, which are the official ones."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from functional_sac.config import TrainConfig

# What UniLab's FlashSAC does: the critic first, the actor counted within a cycle, noise repeats per environment that an
# episode's end redraws, the policy from the first step on, a reward prior of weight 1e-4, one-step targets, a decay
# that does not follow the run's length, BF16 products.
_UNILAB: dict[str, object] = {
    "critic_first": True,
    "actor_count": "cycle",
    "noise_per_env": True,
    "random_warmup": False,
    "reward_prior": "unilab",
    "lr_decay_updates": 500_000,
    "compute_dtype": "bfloat16",
}
UNILAB: dict[str, object] = _UNILAB | {"gamma": 0.97, "replay_capacity": 1_048_576, "learning_starts": 2048}

# UniLab's settings for its robot tasks, for a rank with a GPU. Without the replay, of gigabytes, snapshots are small.
_ON_GPU: dict[str, object] = _UNILAB | {"tau": 0.05, "snapshot_replay": False}
G1_TRACKING: dict[str, object] = _ON_GPU | {
    "task": "g1_motion_tracking",
    "num_envs": 2048,
    "updates_per_step": 6,
    "replay_capacity": 512 * 2048,
    "learning_starts": 98 * 2048,
    "env_steps": 25_000 * 2048,
    "eval_every": 5_000 * 2048,
    "snapshot_every": 5_000 * 2048,
}
G1_WALK: dict[str, object] = _ON_GPU | {
    "task": "g1_walk_flat",
    "gamma": 0.97,
    "num_envs": 4096,
    "updates_per_step": 8,
    "replay_capacity": 256 * 4096,
    "learning_starts": 49 * 4096,
    "env_steps": 5_000 * 4096,
    "eval_every": 1_000 * 4096,
    "snapshot_every": 1_000 * 4096,
}
GO2_JOYSTICK: dict[str, object] = _ON_GPU | {
    "task": "go2_joystick_flat",
    "gamma": 0.97,
    "replay_capacity": 4096 * 1024,
    "learning_starts": 50 * 1024,
    "env_steps": 4_000 * 1024,
    "eval_every": 800 * 1024,
    "snapshot_every": 800 * 1024,
}

# Sizes at which two CPU cores learn the classic tasks within minutes.
SMALL: dict[str, object] = {
    "gamma": 0.97,
    "batch_size": 128,
    "updates_per_step": 1,
    "tau": 0.05,
    "actor_width": 32,
    "critic_width": 64,
    "num_blocks": 1,
    "lr_init": 1e-3,
    "lr_peak": 1e-3,
    "lr_end": 5e-5,
    "replay_capacity": 100_000,
    "learning_starts": 1000,
    "num_envs": 4,
    "env_steps": 16_000,
}

# The official GPU settings are the defaults of the config. Those are named that another preset sets, so that a resumed
# run that has others refuses the preset; but for the two that a run settles or may change.
OFFICIAL: dict[str, object] = {
    field.name: field.default
    for field in dataclasses.fields(TrainConfig)
    if field.name in _UNILAB | SMALL and field.name not in ("env_steps", "lr_decay_updates")
}

# Sizes at which two CPU cores take a robot through a run within minutes; it learns to stand for longer, not to walk.
ROBOT_SMALL: dict[str, object] = SMALL | {
    "actor_width": 64,
    "critic_width": 64,
    "replay_capacity": 20_000,
    "num_envs": 16,
    "env_steps": 64_000,
    "eval_episodes": 8,
}

PRESETS = {
    "small": SMALL,
    "official": OFFICIAL,
    "unilab": UNILAB,
    "g1_tracking": G1_TRACKING,
    "g1_walk": G1_WALK,
    "go2_joystick": GO2_JOYSTICK,
    "robot_small": ROBOT_SMALL,
}
DEFAULT = "small"

# The presets of robot tasks on a GPU; on a CPU they take `robot_small`.
TASK_PRESETS = {
    "g1_motion_tracking": "g1_tracking",
    "g1_walk_flat": "g1_walk",
    "go2_joystick_flat": "go2_joystick",
}


def default(values: Mapping[str, object]) -> str:
    """Returns the preset of a command line that names none.

    Args:
      values: what it says of `task`, `sim` and `device`, among others. Whether there is a GPU is not looked up.
    """
    if values.get("task") not in TASK_PRESETS:
        return DEFAULT
    device = values.get("device", "auto")
    on_gpu = device == "cuda" or (device == "auto" and values.get("sim") == "mjwarp")
    return TASK_PRESETS[values["task"]] if on_gpu else "robot_small"
