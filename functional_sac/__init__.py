"""What needs a reward: FlashSAC as pure functions over one state pytree."""

from __future__ import annotations

import importlib
from types import ModuleType

_MODULES = (
    "acting",
    "compiling",
    "config",
    "cuda_mps",
    "cycle",
    "distributions",
    "environment",
    "envs",
    "evaluation",
    "export",
    "foresight",
    "fused",
    "hosted",
    "iteration",
    "launch",
    "loop",
    "losses",
    "mps",
    "networks",
    "noise",
    "opening",
    "padding",
    "plan",
    "play",
    "playing",
    "policy",
    "presets",
    "replay",
    "replaying",
    "replicas",
    "reporting",
    "request",
    "restoring",
    "reward_scale",
    "tasks",
    "train",
    "trained",
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
