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
      task: a task's name, or `package.module:function` of a function that returns an `Env` (or, with `auto`
        and `gym`, what `gym.make` takes).
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
    return _own(task, sim)


def _own(task: str, sim: str) -> Env | HostEnv:
    """Returns what a function of the user's makes; with `auto`, of gymnasium's kind too."""
    vector = loading.required(loading.load(task), task) == ["num_envs"]
    env = None if vector else loading.load_function(task)()
    if isinstance(env, (Env, HostEnv)):
        return env
    foreign = vector or any(kind.__module__.partition(".")[0] == "gymnasium" for kind in type(env).__mro__)
    if foreign and sim == "auto":
        from functional_sac.envs import gym

        if not vector:
            env.close()
        return gym.make(task)
    found = "takes num_envs" if vector else f"returned a {type(env).__name__}"
    hint = "; leave out --sim, or give --sim=gym" if foreign else ""
    raise ValueError(f"task {task!r} {found}; it must return a functional_sac.envs.env.Env{hint}")
