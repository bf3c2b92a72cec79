"""Settings that cannot be meant are refused by name, value and rule."""

from __future__ import annotations

import dataclasses
import math

import pytest

from functional_sl.run import checks


@dataclasses.dataclass(frozen=True)
class Settings:
    steps: int = 4
    sizes: tuple[int, ...] = (2, 1)
    rate: float = 0.5
    shown: bool = False


def test_what_can_be_meant_passes() -> None:
    checks.require(Settings(), True, ("steps", "rate"), "never told")
    checks.integers(Settings())
    # Neither a bool nor a float is an integer, whatever it compares to.
    checks.integers(Settings(rate=-1.0), least=1)


@pytest.mark.parametrize("rate", [0.5, math.nan, math.inf])
def test_a_rule_is_told_with_the_fields_it_is_about(rate: float) -> None:
    with pytest.raises(ValueError, match=f"^steps=4, rate={rate}: must be in this order$"):
        checks.require(Settings(rate=rate), not math.isfinite(rate), ("steps", "rate"), "must be in this order")


@pytest.mark.parametrize(
    ("changes", "message"),
    [({"steps": 0}, "steps=0: must be at least 1"), ({"sizes": (3, -2)}, r"sizes=\(3, -2\): must be at least 1")],
)
def test_integers_have_a_least(changes: dict, message: str) -> None:
    with pytest.raises(ValueError, match=f"^{message}$"):
        checks.integers(Settings(**changes))
    checks.integers(Settings(**changes), but=tuple(changes))
    checks.integers(Settings(**changes), least=-2)
