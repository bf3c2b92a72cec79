"""The gate's decision and its counters against a Python loop."""

from __future__ import annotations

import pytest
import torch
from equal import assert_bits_equal

from functional_sl import gate, tree

OPEN, CLOSED = torch.tensor(True), torch.tensor(False)


@pytest.mark.parametrize(
    ("sentinels", "is_open"),
    [(0.0, True), (1.0, False), (3.0, False), (torch.nan, False), ([0.0, 0.0], True), ([0.0, 2.0], False)],
)
def test_is_open(sentinels: float | list[float], is_open: bool) -> None:
    ok = gate.is_open(torch.tensor(sentinels))
    assert ok.shape == ()
    assert ok.dtype == torch.bool
    assert ok == is_open


def test_counters_follow_a_series() -> None:
    series = (torch.rand(200, generator=torch.Generator().manual_seed(0)) < 0.6).tolist()
    state, skipped, consecutive = gate.init(), 0, 0
    assert_bits_equal(state, gate.GateState(torch.tensor(0), torch.tensor(0)))
    for ok in series:
        state = gate.update(state, OPEN if ok else CLOSED)
        skipped, consecutive = skipped + (not ok), 0 if ok else consecutive + 1
        assert_bits_equal(state, gate.GateState(torch.tensor(skipped), torch.tensor(consecutive)))
    assert 40 < skipped < 120


def test_counters_pass_two_to_the_31() -> None:
    state = gate.GateState(torch.tensor(2**31 - 1), torch.tensor(2**31 - 1))
    assert_bits_equal(gate.update(state, CLOSED), gate.GateState(torch.tensor(2**31), torch.tensor(2**31)))
    assert_bits_equal(gate.update(state, OPEN), gate.GateState(torch.tensor(2**31 - 1), torch.tensor(0)))


def test_update_is_pure_and_maps_over_seeds() -> None:
    state = gate.GateState(torch.tensor([1, 5]), torch.tensor([1, 0]))
    before = tree.clone(state)
    after = torch.func.vmap(gate.update)(state, torch.tensor([True, False]))
    assert_bits_equal(after, gate.GateState(torch.tensor([1, 6]), torch.tensor([0, 1])))
    assert_bits_equal(state, before)
