"""The environment that a config asks for: in training, in evaluations and in playback."""

from __future__ import annotations

import dataclasses
import os
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from functional_sac import envs, tasks
from functional_sac.config import TrainConfig, task_settings
from functional_sac.envs.env import Env, EnvState, TimeStep
from functional_sac.envs.host import HostEnv
from functional_sl.run import cli


def make(
    config: TrainConfig,
    device: torch.device | str = "cpu",
    wrap: Callable[..., Any] = lambda region: region,
    *,
    sim: str | None = None,
    **settings: Any,
) -> Env | HostEnv:
    """Returns the environment of a run.

    Args:
      config: the run.
      device: of a robot task's simulator.
      wrap: what is done to the pure parts of a robot task's step, see `envs.make`.
      sim: the simulator; the run's own by default.
      **settings: fields of the robot task's `Settings` in place of the run's.

    Raises:
      cli.UsageError: if an extra is not installed, or a file of a robot task cannot be read.
      ValueError: as `envs.make`.
    """
    sim = sim or config.sim
    if config.task not in tasks.TASKS:
        try:
            return envs.make(config.task, sim)
        except ModuleNotFoundError as error:
            raise cli.UsageError(str(error)) from error
    told = dataclasses.replace(task_settings(config), **settings)
    # MuJoCo's threads do not change its numbers.
    told = dataclasses.replace(told, threads=told.threads or _share_of_cores())
    try:
        return envs.make(config.task, sim, told, device, wrap)
    except (ImportError, OSError) as error:
        raise cli.UsageError(f"--task={config.task} --sim={sim}: {error}") from error


def for_evaluation(config: TrainConfig, device: torch.device | str = "cpu", **how: Any) -> Env | HostEnv:
    """Returns the environment in which a run's policy is evaluated: motions are followed from their first frames.

    Args:
      config: the run.
      device: as in `make`.
      **how: as in `make`.
    """
    return make(config, device, **how, **({"sampling": "start"} if samples(config) else {}))


def for_facts(config: TrainConfig) -> Env | HostEnv:
    """Returns the environment of a run for what it says of itself: a robot's is the same on any simulator and motion.

    Args:
      config: the run.
    """
    return make(config, **({"sim": "mujoco", "motion": "squat"} if config.task in tasks.TASKS else {}))


def samples(config: TrainConfig) -> bool:
    """Tells whether episodes of the run's task begin anywhere in motions."""
    return config.task in tasks.TASKS and "sampling" in tasks.TASKS[config.task].settings


def one_at_a_time(env: Env) -> Env:
    """Returns the environment for ranks that are threads: its simulator, which has scratch memory, serves one."""
    lock = threading.Lock()

    def step(state: EnvState, action: Tensor) -> tuple[EnvState, TimeStep]:
        with lock:
            return env.step(state, action)

    return env._replace(step=step)


def _share_of_cores() -> int:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, cores // int(os.environ.get("LOCAL_WORLD_SIZE", 1)))
