"""MuJoCo's module, or one line that says why it is not there."""

from __future__ import annotations

import importlib
import os
from types import ModuleType


def mujoco(reason: str, *modules: str) -> ModuleType:
    """Returns the module `mujoco`.

    Args:
      reason: what needs it, the beginning of the error's line.
      modules: of it that are imported too, such as `rollout`.

    Raises:
      ModuleNotFoundError: if it is not installed, or has no such module.
      ImportError: if it does not start with what `MUJOCO_GL` names.
    """
    try:
        found = importlib.import_module("mujoco")
        for name in modules:
            importlib.import_module(f"mujoco.{name}")
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(f"{reason}: pip install '.[mujoco]' in the checkout", name=error.name) from error
    except Exception as error:
        chosen = os.environ.get("MUJOCO_GL")
        if not chosen:
            raise
        # What fails depends on the platform that is named: an attribute, a library, a value.
        how = f"MUJOCO_GL={chosen!r} ({type(error).__name__}: {error})"
        remedy = "unset MUJOCO_GL, or install the OpenGL library that it names"
        raise ImportError(f"{reason}, which does not start with {how}: {remedy}") from error
    return found
