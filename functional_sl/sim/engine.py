"""MuJoCo's module, or one line that says why it is not there."""

from __future__ import annotations

import os
from types import ModuleType


def mujoco(reason: str) -> ModuleType:
    """Returns the module `mujoco`.

    Args:
      reason: what needs it, the beginning of the error's line.

    Raises:
      ModuleNotFoundError: if it is not installed.
      ImportError: if it finds nothing to draw with where `MUJOCO_GL` tells it to look.
    """
    try:
        import mujoco
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(f"{reason}: pip install '.[mujoco]' in the checkout", name=error.name) from error
    except Exception as error:
        # What fails depends on the platform that is named: an attribute, a library, a value.
        how = f"MUJOCO_GL={os.environ.get('MUJOCO_GL', '')!r} ({type(error).__name__}: {error})"
        remedy = "unset MUJOCO_GL, or install the OpenGL library that it names"
        raise ImportError(f"{reason}, which does not start with {how}: {remedy}") from error
    return mujoco
