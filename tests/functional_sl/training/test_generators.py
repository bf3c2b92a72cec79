"""What Python, NumPy and torch draw after `write` is what they would have drawn after `read`."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch

from functional_sl import keys, tree
from functional_sl.training import generators

CPU = torch.device("cpu")


def draw() -> list[Any]:
    # One normal number each leaves a second one waiting.
    return [random.gauss(0, 1), random.random(), np.random.normal(), np.random.rand(), torch.rand(3).tolist()]  # noqa: NPY002


@pytest.mark.parametrize("warm", [0, 1, 2])
def test_the_states_come_back(warm: int) -> None:
    with generators.preserved(CPU):
        generators.seed(keys.key(3))
        for _ in range(warm):
            draw()
        states = generators.read(CPU)
        expected = [draw() for _ in range(3)]
        generators.seed(keys.key(4))
        assert draw() != expected[0]
        generators.write(states, CPU)
        assert [draw() for _ in range(3)] == expected


def test_shapes_are_fixed_and_preserved_leaves_no_trace() -> None:
    before = generators.read(CPU)
    with generators.preserved(CPU):
        draw()
        after = generators.read(CPU)
    assert tree.bits_equal(generators.read(CPU), before)
    assert [x.shape for x in after] == [x.shape for x in before]
