"""Samplers are functions of key alone."""

from __future__ import annotations

import pytest
import torch

from functional_sl import data, keys

ROWS = {"x": torch.arange(12.0).reshape(6, 2), "i": torch.arange(6)}


def test_rows_are_drawn_with_replacement_from_the_key_alone() -> None:
    batch = data.uniform(ROWS, keys.key(1), 5000)
    assert torch.equal(batch["x"][:, 0], 2.0 * batch["i"])
    counts = torch.bincount(batch["i"], minlength=6)
    # 833 each, standard deviation 26.
    assert counts.min() > 700
    assert counts.max() < 970
    assert torch.equal(data.uniform(ROWS, keys.key(1), 5000)["i"], batch["i"])
    assert not torch.equal(data.uniform(ROWS, keys.key(2), 5000)["i"], batch["i"])


@pytest.mark.parametrize("size", [1, 4, 6, 7])
def test_in_order_gives_every_row_once(size: int) -> None:
    batches = list(data.in_order(ROWS, size))
    assert torch.cat([batch["i"] for batch in batches]).tolist() == list(range(6))
    assert {len(batch["i"]) for batch in batches[:-1]} <= {size}


def test_rows_must_match() -> None:
    with pytest.raises(ValueError, match="leaf 'x' has 6 rows, expected 5"):
        data.size({"a": torch.zeros(5), "x": torch.zeros(6)})
    for empty in ({}, {"a": torch.zeros(0, 3)}, {"a": torch.tensor(1.0)}):
        with pytest.raises(ValueError, match="at least one row"):
            data.size(empty)
