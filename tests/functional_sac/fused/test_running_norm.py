"""Batch norm by running statistics, its ReLU and its residual against torch's and their derivative."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from functional_sac import networks
from functional_sac.fused import running_norm
from functional_sl import keys

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"))]


# BF16 within two roundings, 2^-7.
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 2**-7)])
@pytest.mark.parametrize(("shape", "add"), [((2, 37, 20), True), ((1, 70, 130), False)])
def test_it_is_torchs(device: str, dtype: torch.dtype, tolerance: float, shape: tuple, add: bool) -> None:
    """The statistics lie among those of other layers, as `Stats` has them."""
    draw, (networks_, _, features) = iter(keys.split(keys.key(0), 6)), shape
    x, dy, rest = (keys.normal(next(draw), shape).to(dtype) for _ in range(3))
    scale, bias = (keys.uniform(next(draw), (networks_, features)) + 0.5 * i for i in (1, -1))
    mean, var = (keys.uniform(next(draw), (2, networks_, 3 * features)) + 0.1)[..., features : 2 * features]
    given = [t.to(device) for t in (scale, bias, mean, var)]
    found = running_norm.forward(x.to(device), *given, rest.to(device) if add else None).float().cpu()
    back = running_norm.backward(dy.to(device), x.to(device), *given).float().cpu()
    for n in range(networks_):
        leaf = x[n].float().requires_grad_()
        y = torch.relu(F.batch_norm(leaf, mean[n], var[n], scale[n], bias[n], eps=networks.BN_EPS))
        (dx,) = torch.autograd.grad(y, leaf, dy[n].float())
        expected = y.detach() + (rest[n].float() if add else 0.0)
        torch.testing.assert_close([found[n], back[n]], [expected, dx], rtol=tolerance, atol=tolerance)
    x[0, 3, 4] = torch.nan
    assert running_norm.forward(x.to(device), *given, None).isnan().sum() == 1
