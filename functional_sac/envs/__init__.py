"""Environments behind one contract (`env.Env`), and `make`, which finds one by task and simulator."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable
from typing import TYPE_CHECKING

from functional_sac import tasks
from functional_sac.envs.env import Env
from functional_sac.envs.host import HostEnv
from functional_sl import sim as simulators
from functional_sl.run import loading

if TYPE_CHECKING:
    import torch

    from functional_sac.envs.robot import Region
    from functional_sac.tasks.settings import Settings

_GYMNASIUM_ID = re.compile(r"(.*:)?[\w/.-]+-v\d+")


def make(
    task: str,
    sim: str = "auto",
    settings: Settings | None = None,
    device: torch.device | str = "cpu",
    wrap: Callable[[Region], Region] = lambda region: region,
) -> Env | HostEnv:
    """Returns the environment of a task.

    Args:
      task: a task's name, or `package.module:function` of a function that returns an `Env` (with `gym`: see
        `gym.make`).
      sim: `classic` for the embedded pure-torch tasks, `gym` for gymnasium's, `mujoco` or `mjwarp` for robots; `auto`
        takes the first simulator that has the task, for robots `mjwarp` on a GPU.
      settings: of a robot task.
      device: of a robot task's simulator; other environments follow the key of `init`.
      wrap: what is done to the pure parts of a robot task's step, see `robot.build`.

    Raises:
      ValueError: for an unknown task (with the nearest name) or a simulator that has no such task.
    """
    known = ("auto", "classic", "gym", *simulators.SIMULATORS)
    if sim not in known:
        raise ValueError(f"sim={sim!r}: no task runs on it; use one of {', '.join(known)}")
    near = difflib.get_close_matches(task, tasks.TASKS, 1, 0.8)
    if sim in simulators.SIMULATORS and task not in tasks.TASKS:
        hint = f"did you mean {near[0]!r}?" if near else f"its tasks are {', '.join(tasks.TASKS)}"
        raise ValueError(f"sim={sim!r}: no task {task!r} runs on it; {hint}")
    if task in tasks.TASKS and sim in ("auto", *simulators.SIMULATORS):
        from functional_sac.envs import robot

        return robot.make(task, sim, settings, device, wrap)
    if sim == "gym" or (sim == "auto" and _GYMNASIUM_ID.fullmatch(task)):
        from functional_sac.envs import gym

        return gym.make(task)
    if ":" not in task:
        if sim == "auto" and near:
            raise ValueError(f"there is no task {task!r}; did you mean {near[0]!r}?")
        from functional_sac.envs import classic

        return classic.make(task)
    env = loading.load(task)()
    if not isinstance(env, (Env, HostEnv)):
        raise ValueError(f"task {task!r} returned a {type(env).__name__}; it must return a functional_sac.envs.env.Env")
    return env
