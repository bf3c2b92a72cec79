"""Checks of settings, the fields of a frozen dataclass: one ValueError of one form, `name=value: rule`.

This module imports no torch, so that `--help` is quick.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Sequence
from typing import Any


def require(config: Any, condition: bool, names: Sequence[str], rule: str) -> None:
    """Refuses fields that cannot be meant, and floats among them that are not finite.

    Args:
      config: the settings.
      condition: whether the fields can be meant.
      names: of the fields that it is about.
      rule: what holds for them.

    Raises:
      ValueError: names the fields, their values and the rule.
    """
    values = [getattr(config, name) for name in names]
    if not condition or any(isinstance(v, float) and not math.isfinite(v) for v in values):
        raise ValueError(f"{', '.join(f'{n}={v}' for n, v in zip(names, values, strict=True))}: {rule}")


def integers(config: Any, *, least: int = 1, but: Collection[str] = ()) -> None:
    """Refuses the first field that holds an integer, alone or in a tuple, below `least`.

    Args:
      config: the settings.
      least: the smallest that may be meant.
      but: names of the fields that are not looked at.

    Raises:
      ValueError: as `require`.
    """
    for name in (field.name for field in dataclasses.fields(config) if field.name not in but):
        value = getattr(config, name)
        numbers = value if isinstance(value, tuple) else (value,)
        if any(type(n) is int and n < least for n in numbers):
            raise ValueError(f"{name}={value}: must be at least {least}")
