"""A compiled function against the same function run eagerly."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch
from equal import assert_bits_equal
from torch import Tensor

from functional_sl import capture, tree


class Moments(NamedTuple):
    count: Tensor
    sums: dict[str, Tensor]


def fn(state: Moments, inputs: tuple[Tensor, Tensor]) -> tuple[Moments, dict[str, Tensor]]:
    x, weight = inputs
    sums = {"z": state.sums["z"] + x.square().sum(), "a": state.sums["a"] + weight * x.sum()}
    return Moments(state.count + 1, sums), {"mean": x.mean(), "norm": tree.norm(sums)}


def start() -> Moments:
    return Moments(torch.tensor(2**31 - 2), {"z": torch.tensor(0.5), "a": torch.tensor(-1.0)})


def check(compiled: capture.Function) -> tuple[Moments, Moments]:
    state = eager = start()
    for i in range(3):
        inputs = (torch.linspace(-1, 2 + i, 7), torch.tensor(0.25 * i))
        before = tree.clone((state, inputs))
        new, metrics = compiled(state, inputs)
        eager, expected = fn(eager, inputs)
        assert_bits_equal((state, inputs), before)
        torch.testing.assert_close(metrics, expected)
        assert isinstance(new, Moments)
        state = new
    assert state.count == 2**31 + 1
    return state, eager


@pytest.fixture
def traced() -> capture.Function:
    """The function compiled without the code generation, which takes long and rounds differently."""
    compiled = capture.compiled(fn, "aot_eager")
    compiled(start(), (torch.zeros(7), torch.tensor(1.0)))
    return compiled


def test_state_travels_from_call_to_call(traced: capture.Function) -> None:
    assert_bits_equal(*check(traced))


def test_another_structure_is_refused(traced: capture.Function) -> None:
    other = start()._replace(sums={"z": torch.tensor(0.5), "b": torch.tensor(-1.0)})
    with pytest.raises(ValueError, match="compile the function anew"):
        traced(other, (torch.zeros(7), torch.tensor(1.0)))


@pytest.mark.slow
def test_generated_code() -> None:
    """Sums in another order: float32's default tolerance."""
    torch.testing.assert_close(*check(capture.compiled(fn)))
