"""What needs a reward: FlashSAC as pure functions over one state pytree."""

from __future__ import annotations

import importlib
from types import ModuleType

_MODULES = (
    "acting",
    "config",
    "cycle",
    "distributions",
    "envs",
    "evaluation",
    "iteration",
    "loop",
    "losses",
    "networks",
    "noise",
    "opening",
    "plan",
    "presets",
    "replay",
    "reporting",
    "reward_scale",
    "train",
    "transition",
    "updates",
    "value",
)


def __getattr__(name: str) -> ModuleType:
    """Imports a module of the package when it is first asked for, so that importing the package costs nothing."""
    if name in _MODULES:
        return importlib.import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    """Returns the table of contents."""
    return sorted(_MODULES)
