"""Degenerate statistics: what is constant, nearly so, or far from zero stays finite and keeps one rule."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from functional_sl import keys
from functional_sl.models import normalizer
from functional_sl.models.normalizer import Normalizer

NOISE = keys.normal(keys.key(0), (1000,), torch.float64)
ONCE = torch.full((1000,), 7.0, dtype=torch.float64).index_fill(0, torch.tensor([17]), 8.0)
CHANNELS = {
    "constant 0": torch.zeros(1000, dtype=torch.float64),
    "constant 7": torch.full((1000,), 7.0, dtype=torch.float64),
    "constant 0.1": torch.full((1000,), 0.1, dtype=torch.float32).double(),
    "large constant": torch.full((1000,), 1e12 / 3, dtype=torch.float32).double(),
    "constant but for one row": ONCE,
    "1e6 with 1e-2": 1e6 + 1e-2 * NOISE,
    "ordinary": 3.0 - 2.0 * NOISE,
}
X = torch.stack(list(CHANNELS.values()), -1)


def test_statistics_are_those_of_two_passes_in_float64() -> None:
    found, x = normalizer.fit(X), X.numpy()
    varies = x.std(0) > 1e-6
    np.testing.assert_allclose(found.mean, x.mean(0), rtol=1e-7)
    np.testing.assert_allclose(found.std[varies], x.std(0)[varies], rtol=1e-6)
    # All of 7.0 but one 8.0 of 1000: variance 0.001 * 0.999.
    assert float(found.std[4]) == pytest.approx((0.001 * 0.999) ** 0.5, rel=1e-6)
    assert float(found.std[5]) == pytest.approx(1e-2 * float(NOISE.std(correction=0)), rel=1e-3)


@pytest.mark.parametrize("eps", [0.0, 1e-5])
def test_a_constant_maps_to_zero_and_back_to_itself(eps: float) -> None:
    found = normalizer.fit(X, eps=eps)
    row = X[0].float()
    assert normalizer.constant(X).tolist() == [True] * 4 + [False] * 3
    assert found.std[:4].tolist() == [1.0] * 4
    there = normalizer.normalize(found, row)
    assert there[:4].tolist() == [0.0] * 4
    assert normalizer.denormalize(found, there)[:4].tolist() == row[:4].tolist()
    away = normalizer.normalize(found, row + 0.1)
    torch.testing.assert_close(away[:3], torch.full((3,), 0.1), rtol=0, atol=1e-6)
    assert bool(torch.isfinite(away).all())


def test_eps_is_added_to_the_variance_of_what_varies() -> None:
    x = torch.tensor([[0.0], [2.0]])  # variance 1
    assert float(normalizer.fit(x, eps=0.21).std) == pytest.approx(1.21**0.5)
    assert float(normalizer.fit(x, floor=1.5).std) == 1.0


def test_one_row_is_constant_and_masked_rows_do_not_count() -> None:
    assert normalizer.fit(X[:1]).std.tolist() == [1.0] * X.shape[1]
    x = torch.stack((X, torch.full_like(X, torch.nan)), 1)  # [1000, 2, D]
    mask = torch.tensor([True, False]).expand(1000, 2)
    found, expected = normalizer.fit(x, mask), normalizer.fit(X)
    assert torch.equal(found.mean, expected.mean)
    assert torch.equal(found.std, expected.std)


def test_no_valid_row_and_values_that_are_not_finite_are_errors() -> None:
    with pytest.raises(ValueError, match="no valid row"):
        normalizer.fit(X, torch.zeros(1000, dtype=torch.bool))
    with pytest.raises(ValueError, match=r"channels \[2\]"):
        normalizer.fit(X.index_fill(1, torch.tensor([2]), torch.inf))


def test_normalising_is_the_affine_map() -> None:
    n = Normalizer(torch.tensor([1.0, 2.0]), torch.tensor([2.0, 4.0]))
    assert normalizer.normalize(n, torch.tensor([[5.0, 0.0]])).tolist() == [[2.0, -0.5]]
    assert normalizer.denormalize(n, torch.tensor([[2.0, -0.5]])).tolist() == [[5.0, 0.0]]
