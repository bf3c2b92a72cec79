"""Named settings for `--preset`: what differs from the defaults of `TrainConfig`."""

from __future__ import annotations

# The official GPU settings are the defaults of the dataclasses; this names them.
OFFICIAL: dict[str, object] = {}

# UniLab's FlashSAC: the critic first, the actor counted within a cycle, noise repeats per environment that an
# episode's end redraws, the policy from the first step on, a reward prior of weight 1e-4, one-step targets, a decay
# that does not follow the run's length, BF16 products.
UNILAB: dict[str, object] = {
    "gamma": 0.97,
    "critic_first": True,
    "actor_count": "cycle",
    "noise_per_env": True,
    "random_warmup": False,
    "reward_prior": "unilab",
    "lr_decay_updates": 500_000,
    "compute_dtype": "bfloat16",
    "replay_capacity": 1_048_576,
    "learning_starts": 2048,
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

PRESETS = {"small": SMALL, "official": OFFICIAL, "unilab": UNILAB}
DEFAULT = "small"
