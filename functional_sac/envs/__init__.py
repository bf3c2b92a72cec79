"""Environments behind one contract (`env.Env`), and `make`, which finds one by task and simulator."""

from __future__ import annotations

from functional_sac.envs.env import Env
from functional_sl.run import loading


def make(task: str, sim: str = "auto") -> Env:
    """Returns the environment of a task.

    Args:
      task: a task's name, or `package.module:function` of a function that returns an `Env`.
      sim: `classic` for the embedded pure-torch tasks; `auto` takes the first simulator that has the task.

    Raises:
      ValueError: for an unknown task (with the nearest name) or a simulator that has no such task.
    """
    if sim not in ("auto", "classic"):
        raise ValueError(f"sim={sim!r}: no task runs on it; use --sim=classic")
    if ":" not in task:
        from functional_sac.envs import classic

        return classic.make(task)
    env = loading.load(task)()
    if not isinstance(env, Env):
        raise ValueError(f"task {task!r} returned a {type(env).__name__}; it must return a functional_sac.envs.env.Env")
    return env
