"""Gradients of weights, at once or later, against sums that are exact."""

from __future__ import annotations

import pytest
import torch
from devices import DEVICES

from functional_sac.fused import weight_gradients
from functional_sl import keys


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


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("networks", "rows", "widths"), [(2, 12, (8, 6)), (2, 192, (1024, 256)), (2, 256, (256, 1024)), (5, 64, (512, 384))]
)
def test_all_of_them_later(device: str, dtype: torch.dtype, networks: int, rows: int, widths: tuple[int, int]) -> None:
    """Products of two layers, which have the widths the other way round, one of other widths, one of fewer rows."""
    shapes = [(rows, *widths), (rows, *widths[::-1]), (rows, 16, 24), (rows, *widths), (rows // 2, *widths[::-1])]
    pairs = [
        [whole(2 * i + j, networks, count, width).to(device, dtype) for j, width in enumerate(shape)]
        for i, (count, *shape) in enumerate(shapes)
    ]
    with weight_gradients.later(torch.device(device)) as later:
        found = [later(*pair) for pair in pairs]
    for gradient, (dy, x) in zip(found, pairs, strict=True):
        assert gradient.dtype == torch.float32
        assert torch.equal(gradient.cpu(), torch.einsum("nbo,nbk->nok", dy.float().cpu(), x.float().cpu()))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("networks", "rows", "widths"), [(2, 12, (8, 6)), (2, 1024, (256, 320)), (1, 192, (128, 64))])
def test_parts_of_a_shared_input_add_up(
    device: str, dtype: torch.dtype, networks: int, rows: int, widths: tuple[int, int]
) -> None:
    dy, x = whole(0, networks, rows, widths[0]).to(dtype), whole(1, 1, rows, widths[1]).to(dtype)
    given = dy.to(device), x.to(device)
    found = weight_gradients.in_parts(*given)
    kernel = weight_gradients.KERNELS and weight_gradients.weight_gradient_kernels.fits_in_parts(*given)
    assert (found.shape[1] > 1) == (kernel and rows == 1024)
    assert (found.shape[0], *found.shape[2:]) == (networks, *widths)
    assert torch.equal(found.sum(1).cpu(), torch.einsum("nbo,bk->nok", dy.float(), x[0].float()))
