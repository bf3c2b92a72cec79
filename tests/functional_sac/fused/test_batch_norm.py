"""Batch norm forward and backward, of a common input and behind a product, against torch's."""

from __future__ import annotations

import pytest
import torch
from devices import DEVICES

from functional_sac.fused import batch_norm
from functional_sl import keys


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("shape", "given"), [((3, 37, 20), 12), ((1, 1500, 18), 1500), ((5, 40, 1000), 20)])
@pytest.mark.parametrize("add", [False, True])
def test_batch_norm_is_torchs(device: str, dtype: torch.dtype, shape: tuple, given: int, add: bool) -> None:
    """Means of 5 beside spreads of 1. BF16 within two roundings, 2^-7; float32 sums of 1500 rows to 1e-4."""
    draw = iter(keys.split(keys.key(0), 5))
    x = (keys.normal(next(draw), shape) + 5).to(dtype)
    scale, bias = (keys.uniform(next(draw), (shape[0], shape[2])) + 0.5 * i for i in (1, 0))
    dy, rest = keys.normal(next(draw), shape).to(dtype), keys.normal(next(draw), shape).to(dtype)
    dy[:, given:] = 0
    tolerance = {"rtol": 2**-7, "atol": 2**-5} if dtype == torch.bfloat16 else {"rtol": 1e-4, "atol": 1e-4}
    # Moments of several norms lie in one tensor.
    moments = [torch.full((shape[0], shape[2] + 8), -7.0, device=device) for _ in range(2)]
    given_x = [t.to(device) for t in (x, scale, bias)]
    views, whole = [t[:, 4:-4] for t in moments], torch.full(shape, 9.0, dtype=dtype, device=device)
    y = batch_norm.forward(*given_x, rest.to(device) if add else None, *views, 1e-5)
    back = batch_norm.backward(dy[:, :given].to(device), *given_x, *views, whole)
    assert torch.equal(whole.cpu(), dy)
    assert all((t[:, :4] == -7).all() and (t[:, -4:] == -7).all() for t in moments)
    for n in range(shape[0]):
        leaves = [t[n].float().requires_grad_() for t in (x, scale, bias)]
        normal, mean, inverse = torch.native_batch_norm(*leaves, None, None, True, 0.0, 1e-5)
        expected = torch.autograd.grad(torch.relu(normal), leaves, dy[n].float())
        out = torch.relu(normal) + rest[n].float() if add else torch.relu(normal)
        got = [t[n].float().cpu() for t in (y, *views, *back)]
        torch.testing.assert_close(got[:1] + got[3:4], [out.detach(), expected[0]], **tolerance)
        torch.testing.assert_close(got[1:3] + got[4:], [mean, inverse, *expected[1:]], rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("rows", "features", "width", "count"), [(37, 5, 8, 4), (1500, 45, 48, 1), (300, 64, 64, 2)])
def test_batch_norm_of_a_common_input_is_torchs(
    device: str, dtype: torch.dtype, rows: int, features: int, width: int, count: int
) -> None:
    """As above; columns behind the features stay zero.

    The gradients are those through a product behind it: whole tensors, to a few roundings.
    """
    draw = iter(keys.split(keys.key(0), 5))
    x = torch.nn.functional.pad(keys.normal(next(draw), (rows, features)) + 5, (0, width - features))
    scale, bias = (keys.uniform(next(draw), (count, features)) + 0.5 * i for i in (1, 0))
    d, w = keys.normal(next(draw), (count, rows, 64)).to(dtype), keys.normal(next(draw), (count, 64, width)).to(dtype)
    tolerance = {"rtol": 2**-7, "atol": 2**-7} if dtype == torch.bfloat16 else {"rtol": 1e-4, "atol": 1e-4}
    moments = [torch.empty(count, features, device=device) for _ in range(2)]
    affine = [t.to(device) for t in (scale, bias)]
    y, z = batch_norm.common(x.to(device), *affine, *moments, dtype, 1e-5)
    back = batch_norm.common_backward(d.to(device), z, *affine, w.to(device))
    assert (y.dtype, y.shape) == (dtype, (count, rows, width))
    assert not y[..., features:].any()
    assert not back[2][..., features:].any()
    for n in range(count):
        leaves = [t.float().requires_grad_() for t in (scale[n].clone(), bias[n].clone(), w[n, :, :features])]
        normal, *stats = torch.native_batch_norm(x[:, :features], *leaves[:2], None, None, True, 0.0, 1e-5)
        expected = torch.autograd.grad(normal @ leaves[2].T, leaves, d[n].float())
        got = [t[n, ..., :features].float().cpu() for t in (y, *moments, *back)]
        torch.testing.assert_close(got[0], normal.detach(), **tolerance)
        torch.testing.assert_close(got[1:3], stats, rtol=1e-3, atol=1e-3)
        for a, b in zip(got[3:], expected, strict=True):
            assert (a - b).norm() <= (2**-7 if dtype == torch.bfloat16 else 1e-4) * b.norm()


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
