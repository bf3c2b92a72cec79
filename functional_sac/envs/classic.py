"""The classic control tasks by name: pure torch, no simulator, on CPU and inside a CUDA graph alike."""

from __future__ import annotations

import difflib
from collections.abc import Callable

from functional_sac.envs.cartpole import cartpole_balance, cartpole_swingup
from functional_sac.envs.env import Env
from functional_sac.envs.pendulum import pendulum
from functional_sac.envs.reacher import reacher, reacher_asymmetric

TASKS: dict[str, Callable[[], Env]] = {
    "cartpole_balance": cartpole_balance,
    "cartpole_swingup": cartpole_swingup,
    "pendulum": pendulum,
    "reacher": reacher,
    "reacher_asymmetric": reacher_asymmetric,
}


def make(task: str) -> Env:
    """Builds the classic task of that name.

    Raises:
      ValueError: if there is none; names the nearest.
    """
    if task not in TASKS:
        nearest = difflib.get_close_matches(task, TASKS, n=1, cutoff=0.0)[0]
        raise ValueError(f"there is no task {task!r}; did you mean {nearest!r}? The tasks are: {', '.join(TASKS)}")
    return TASKS[task]()
