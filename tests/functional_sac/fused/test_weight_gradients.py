"""Gradients of weights, one by one and several at once, against sums that are exact."""

from __future__ import annotations

import pytest
import torch

from functional_sac.fused import weight_gradients
from functional_sl import keys

CUDA = pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"))


def whole(number: int, *shape: int) -> torch.Tensor:
    """Returns whole numbers so small that float32 adds up thousands of products exactly, in any order."""
    return keys.randint(keys.key(number), shape, -9, 9).float()


def test_rows_in_parts_add_up() -> None:
    dy, x = whole(0, 2, 64, 5), whole(1, 2, 64, 3)
    expected = torch.einsum("nbo,nbk->nok", dy, x)
    for parts in (1, 4, 16):
        assert torch.equal(weight_gradients.summed_by_parts(dy, x, parts), expected)
    shared = x[:1].expand(2, -1, -1)
    assert torch.equal(weight_gradients.summed_by_parts(dy, shared, 4), torch.einsum("nbo,nbk->nok", dy, shared))


@pytest.mark.parametrize("device", ["cpu", CUDA])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("networks", "rows", "widths", "count"),
    [(2, 12, (8, 6), 3), (2, 192, (1024, 256), 4), (2, 256, (256, 1024), 2), (5, 64, (512, 384), 3)],
)
def test_several_at_once(
    device: str, dtype: torch.dtype, networks: int, rows: int, widths: tuple[int, int], count: int
) -> None:
    """Every second product has the widths the other way round, as the two layers of a block have."""
    pairs = [
        tuple(
            whole(2 * i + j, networks, rows, width).to(device, dtype)
            for j, width in enumerate(widths[:: 1 - 2 * (i % 2)])
        )
        for i in range(count)
    ]
    for found, (dy, x) in zip(weight_gradients.weight_gradients(pairs), pairs, strict=True):
        assert found.dtype == torch.float32
        assert torch.equal(found.cpu(), torch.einsum("nbo,nbk->nok", dy.float().cpu(), x.float().cpu()))
