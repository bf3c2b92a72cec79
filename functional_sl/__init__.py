"""What is true of any gradient step: pytrees, keys, optimizers, the gated step, ranks, runs."""

from __future__ import annotations

import importlib
from types import ModuleType

_MODULES = (
    "bundle",
    "capture",
    "data",
    "export",
    "gate",
    "inspection",
    "kernels",
    "keys",
    "loss_scale",
    "models",
    "motions",
    "optim",
    "packing",
    "parallel",
    "programs",
    "recipe",
    "recipes",
    "report",
    "run",
    "schedules",
    "sim",
    "sources",
    "step",
    "streams",
    "threefry",
    "train",
    "training",
    "tree",
    "wire",
)


def __getattr__(name: str) -> ModuleType:
    """Imports a module of the package when it is first asked for, so that importing the package costs nothing."""
    if name in _MODULES:
        return importlib.import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    """Returns the table of contents."""
    return sorted(_MODULES)
