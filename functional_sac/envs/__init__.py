"""Environments behind one contract (`env.Env`), and `make`, which finds one by task and simulator."""

from __future__ import annotations

from functional_sac.envs.env import Env


def make(task: str, sim: str = "auto") -> Env:
    """Returns the environment of a task.

    Args:
      task: a task's name.
      sim: `classic` for the embedded pure-torch tasks; `auto` takes the first simulator that has the task.

    Raises:
      ValueError: for an unknown task (with the nearest name) or a simulator that has no such task.
    """
    from functional_sac.envs import classic

    if sim not in ("auto", "classic"):
        raise ValueError(f"sim={sim!r}: no task runs on it; use --sim=classic")
    return classic.make(task)
