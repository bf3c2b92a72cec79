"""Batch norm's backward pass behind a product, against torch's batch norm."""

from __future__ import annotations

import pytest
import torch
from devices import DEVICES

from functional_sac.fused import batch_norm
from functional_sl import keys


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(3, 37, 5, 20), (2, 2048, 64, 128), (1, 1024, 256, 1024)])
def test_backward_of_a_product_is_torchs(device: str, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    """Whole tensors, to a rounding of BF16 or 1e-3: an entry at the ReLU's corner may fall on either side of it."""
    (networks, rows, inner, features), draw = shape, iter(keys.split(keys.key(0), 5))
    x = (keys.normal(next(draw), (networks, rows, features)) + 5).to(dtype)
    d = keys.normal(next(draw), (networks, rows, inner)).to(dtype)
    w = (keys.normal(next(draw), (networks, inner, features)) / inner**0.5).to(dtype)
    scale, bias = (keys.uniform(next(draw), (networks, features)) + 0.5 * i for i in (1, 0))
    given = [t.to(device) for t in (d, w, x, scale, bias)]
    # Moments of several norms lie in one tensor.
    mean, inverse_std = (torch.empty(networks, features + 8, device=device)[:, 4:-4] for _ in range(2))
    batch_norm.forward(*given[2:], None, mean, inverse_std, 1e-5)
    found = batch_norm.backward_of_product(*given, mean, inverse_std)
    assert (found[0].dtype, found[0].shape) == (dtype, x.shape)
    again = batch_norm.backward_of_product(*given, mean, inverse_std)
    assert all(torch.equal(a, b) for a, b in zip(found, again, strict=True))
    for n in range(networks):
        leaves = [t[n].float().requires_grad_() for t in (x, scale, bias)]
        y = torch.relu(torch.native_batch_norm(*leaves, None, None, True, 0.0, 1e-5)[0])
        expected = torch.autograd.grad(y, leaves, (d[n].float() @ w[n].float()).to(dtype).float())
        for a, b in zip(found, expected, strict=True):
            assert (a[n].float().cpu() - b).norm() <= (2**-8 if dtype == torch.bfloat16 else 1e-3) * b.norm()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("place", ["x", "d"])
def test_numbers_that_are_not_finite_stay_in_their_columns(device: str, place: str) -> None:
    """One of x makes its column's gradients NaN; one of d is let through by the columns that are positive there."""
    x, d = (keys.normal(keys.key(i), (1, 2048, size)).bfloat16() for i, size in enumerate((128, 64)))
    w, ones = torch.ones(1, 64, 128, dtype=torch.bfloat16), torch.ones(1, 128)
    {"x": x, "d": d}[place][0, 3, 5] = torch.nan
    given = [t.to(device) for t in (d, w, x, ones, 0 * ones)]
    mean, inverse_std = (torch.empty(1, 128, device=device) for _ in range(2))
    batch_norm.forward(*given[2:], None, mean, inverse_std, 1e-5)
    dx, dscale, _ = batch_norm.backward_of_product(*given, mean, inverse_std)
    reached = torch.arange(128) == 5 if place == "x" else (x[0, 3].float() > mean[0].cpu())
    assert torch.equal(dscale[0].isnan().cpu(), reached)
    assert torch.equal(dx[0].isnan().all(0).cpu(), reached)
