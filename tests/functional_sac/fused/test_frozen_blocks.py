"""Products with what follows them in a block that is only read, against torch's and their derivative."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F
from devices import DEVICES
from torch import Tensor, library

from functional_sac.fused import frozen_block_tiles, frozen_blocks
from functional_sac.networks import BN_EPS, BatchNorm, Stats
from functional_sl import keys, tree

# Networks, rows, width and inner width; tiles do not divide the last ones.
SHAPES = [(2, 128, 128, 512), (1, 64, 128, 128), (2, 256, 256, 384), (2, 37, 20, 44)]


class Block(NamedTuple):
    """What a block is given: [N, ...]."""

    h: Tensor
    dh: Tensor
    w1: Tensor
    w2: Tensor
    first: tuple[BatchNorm, Stats]
    second: tuple[BatchNorm, Stats]


def block(shape: tuple[int, int, int, int], dtype: torch.dtype, device: str) -> Block:
    """Returns a block whose statistics lie among those of other layers, as `Stats` has them."""
    networks, rows, width, inner = shape
    draw = iter(keys.split(keys.key(0), 10))

    def normal(*size: int) -> Tensor:
        return keys.normal(next(draw), size)

    h, dh = (normal(networks, rows, width).to(dtype) for _ in range(2))
    w1, w2 = normal(networks, inner, width) / width**0.5, normal(networks, width, inner) / inner**0.5
    norms = [BatchNorm(normal(networks, size).clamp(-1.5, 1.5), normal(networks, size)) for size in (inner, width)]
    mean, var = normal(networks, inner + 3 + width), keys.uniform(next(draw), (networks, inner + 3 + width)) + 1
    stats = [Stats(mean[:, at], var[:, at]) for at in (slice(inner), slice(inner + 3, None))]
    made = Block(h, dh, w1.to(dtype), w2.to(dtype), *zip(norms, stats, strict=True))
    return tree.map(lambda t: t.to(device), made)


def scale_and_var(layer: tuple[BatchNorm, Stats]) -> tuple[Tensor, Tensor]:
    return layer[0].scale, layer[1].var


def torchs(x: Tensor, w: Tensor, layer: tuple[BatchNorm, Stats]) -> tuple[Tensor, Tensor, Tensor]:
    """Returns one network's product, what torch's norm and ReLU make of it, and what is near the ReLU's edge."""
    (norm, stats), raw = layer, F.linear(x.float(), w.float()).to(x.dtype).float().requires_grad_()
    value = F.batch_norm(raw, stats.mean, stats.var, norm.scale, norm.bias, eps=BN_EPS)
    return raw, torch.relu(value), value.detach().abs() <= 2**-5


# In BF16 a product may be rounded to the other side: 2^-8 of a number below 5, times a slope of at most 1.5.
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 5e-5), (torch.bfloat16, 2**-5)])
@pytest.mark.parametrize("shape", SHAPES)
def test_a_block_and_its_derivative(device: str, dtype: torch.dtype, tolerance: float, shape: tuple) -> None:
    """Each op by itself, on what the others returned."""
    t = block(shape, dtype, device)
    first, second = scale_and_var(t.first), scale_and_var(t.second)
    y = frozen_blocks.inner(t.h, t.w1, *t.first)
    h, passed = frozen_blocks.outer(y, t.w2, *t.second, t.h)
    d = frozen_blocks.masked(t.dh, passed, *second)
    inner_d = frozen_blocks.inner_backward(d, t.w2, y, *first)
    dh, below = frozen_blocks.outer_backward(inner_d, t.w1, t.dh, passed, *second)
    assert torch.equal(frozen_blocks.added(inner_d, t.w1, t.dh), dh)

    def close(found: Tensor, expected: Tensor) -> None:
        torch.testing.assert_close(found.float(), expected.float(), rtol=tolerance, atol=tolerance)

    close(below, frozen_blocks.masked(dh, passed, *second))
    for n in range(shape[0]):
        own = tree.map(lambda leaf, n=n: leaf[n], t)
        raw1, expected_y, edge1 = torchs(own.h, own.w1, own.first)
        raw2, change, edge2 = torchs(y[n], own.w2, own.second)
        close(y[n], expected_y)
        close(h[n], change.to(dtype) + own.h)
        assert (passed[n] == (change > 0))[~edge2].all()
        (expected,) = torch.autograd.grad(change, raw2, own.dh.float())
        close(d[n][~edge2], expected[~edge2])
        (expected,) = torch.autograd.grad(expected_y, raw1, (d[n].float() @ own.w2.float()).to(dtype).float())
        close(inner_d[n][~edge1], expected[~edge1])
        close(dh[n], inner_d[n].float() @ own.w1.float() + own.dh.float())


@pytest.mark.parametrize("device", DEVICES)
def test_nan_stays(device: str) -> None:
    """A row of NaN stays one, forward, and lets through, backward; no other row has any."""
    t = block(SHAPES[0], torch.bfloat16, device)
    t.h[1, 5, 3] = torch.nan
    y = frozen_blocks.inner(t.h, t.w1, *t.first)
    h, passed = frozen_blocks.outer(y, t.w2, *t.second, t.h)
    for found in (y, h):
        assert found[1, 5].isnan().all()
        assert found.isnan().sum() == found.shape[-1]
    assert passed[1, 5].all()
    d = frozen_blocks.inner_backward(t.dh, t.w2, y, *scale_and_var(t.first))
    assert (d[1, 5] != 0).all()


@pytest.mark.parametrize("device", DEVICES)
def test_an_operator_agrees_with_its_shapes_and_changes_nothing(device: str) -> None:
    t = block(SHAPES[0], torch.bfloat16, device)
    checks = ("test_schema", "test_faketensor")
    first, second = (*t.first[0], *t.first[1]), (*t.second[0], *t.second[1])
    library.opcheck(frozen_blocks._inner, (t.h, t.w1, *first), test_utils=checks)
    y = frozen_blocks.inner(t.h, t.w1, *t.first)
    library.opcheck(frozen_blocks._outer, (y, t.w2, *second, t.h), test_utils=checks)
    _, passed = frozen_blocks.outer(y, t.w2, *t.second, t.h)
    given = (t.dh, t.w2, y, *scale_and_var(t.first))
    library.opcheck(frozen_blocks._inner_backward, given, test_utils=checks)
    for mask in ((passed, *scale_and_var(t.second)), (None, None, None)):
        library.opcheck(frozen_blocks._outer_backward, (y, t.w1, t.dh, *mask), test_utils=checks)


@pytest.mark.parametrize("networks", [1, 2])
@pytest.mark.parametrize("rows", [64, 2048, 4096, 8192, 1000])
@pytest.mark.parametrize(("width", "inner"), [(128, 512), (256, 1024), (384, 1536), (100, 400)])
def test_tiles_divide_what_they_are_for(networks: int, rows: int, width: int, inner: int) -> None:
    for features, depth in ((inner, width), (width, inner)):
        tile = frozen_block_tiles.tile(networks, rows, features, depth)
        assert (tile is None) == (rows == 1000 or width == 100)
        if tile:
            assert (rows % tile.rows, features % tile.features, depth % tile.depth) == (0, 0, 0)
            # Of the 227 KiB that a program of an H200 may share.
            assert 2 * tile.stages * tile.depth * (tile.rows + tile.features) <= 227 * 2**10
