"""Products of float32 matrices against float64 ones, which a GPU's six BF16 products must come nearer than its own."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from devices import DEVICES

from functional_sac.fused import float32_products
from functional_sl import keys

HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9 and float32_products.KERNELS
on_hopper = pytest.mark.skipif(not HOPPER, reason="needs a Hopper GPU, Triton and a C compiler")
SHAPES = [(2, 2048, 1024, 256), (2, 2048, 256, 1024), (4, 2048, 320, 256), (1, 4096, 512, 128), (16, 128, 256, 512)]


def drawn(number: int, *shape: int, device: str = "cpu") -> torch.Tensor:
    return keys.normal(keys.key(number), shape).to(device)


@pytest.fixture(autouse=True)
def _small_ones_are_large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(float32_products, "LARGE", 2**20)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("networks", "rows", "depth", "features"),
    [(2, 128, 64, 128), (1, 256, 96, 192), (2, 64, 64, 320), (3, 7, 5, 2)],
)
@pytest.mark.parametrize("turned", [(False, False), (False, True), (True, False), (True, True)])
def test_either_operand_may_be_turned(
    device: str, networks: int, rows: int, depth: int, features: int, turned: tuple[bool, bool]
) -> None:
    a, b = drawn(0, networks, rows, depth, device=device), drawn(1, networks, depth, features, device=device)
    a, b = (t.mT.contiguous().mT if way else t for t, way in zip((a, b), turned, strict=True))
    onto = drawn(2, networks, rows, features, device=device)
    expected = a.double() @ b.double()
    torch.testing.assert_close(float32_products.product(a, b).double(), expected, rtol=0, atol=1e-4)
    expected += onto.double()
    assert float32_products.add_product(onto, a, b) is onto
    torch.testing.assert_close(onto.double(), expected, rtol=0, atol=1e-4)


@pytest.mark.skipif(not float32_products.KERNELS, reason="needs Triton and a C compiler")
@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        ((4, 4096, 256, 1024), (128, 128)),
        ((1, 4096, 128, 512), (128, 128)),  # 128 programs
        ((2, 2048, 1024, 256), (64, 64)),  # 64 of the largest, too few
        ((8, 320, 1024, 256), (64, 64)),  # not in whole ones of the largest
        ((2, 64, 64, 64), (64, 32)),
        ((2, 64, 16, 64), None),
        ((2, 2048, 104, 256), None),
    ],
)
def test_a_product_has_the_largest_tile_that_fills_a_gpu(
    sizes: tuple[int, ...], expected: tuple[int, int] | None
) -> None:
    found = float32_products.float32_product_kernels.tile(*sizes)
    assert (found and found[:2]) == expected


@on_hopper
@pytest.mark.parametrize(("networks", "rows", "depth", "features"), SHAPES)
def test_nearer_to_float64_than_sums_in_float32(networks: int, rows: int, depth: int, features: int) -> None:
    a, b = drawn(0, networks, rows, depth, device="cuda"), drawn(1, networks, depth, features, device="cuda")
    exact, found = a.double() @ b.double(), float32_products.product(a, b)
    error = (found - exact).square().mean()
    assert error < 0.5 * (torch.bmm(a, b) - exact).square().mean()
    assert torch.equal(found, float32_products.product(a, b))


@on_hopper
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_what_is_not_finite_stays_so_in_its_row_alone(bad: float) -> None:
    a, b = drawn(0, 2, 256, 1024, device="cuda"), drawn(1, 2, 1024, 256, device="cuda")
    clean = float32_products.product(a, b)
    a[1, 5, 7] = bad
    found = float32_products.product(a, b)
    assert not found[1, 5].isfinite().any()
    found[1, 5] = clean[1, 5]
    assert torch.equal(found, clean)


@on_hopper
@pytest.mark.parametrize(
    "setting", ["set_float32_matmul_precision('high')", "backends.cuda.matmul.fp32_precision = 'tf32'"]
)
def test_a_setting_that_allows_tf32_leaves_them_to_torch(setting: str) -> None:
    """In a process of its own: the older and the newer setting do not mix."""
    program = f"""
import torch
from functional_sac.fused import float32_products
a, b = torch.randn(2, 2048, 256, device="cuda"), torch.randn(2, 256, 1024, device="cuda")
assert not torch.equal(float32_products.product(a, b), torch.bmm(a, b))
torch.{setting}
assert torch.equal(float32_products.product(a, b), torch.bmm(a, b))
"""
    subprocess.run([sys.executable, "-c", program], check=True)


@pytest.mark.parametrize("device", DEVICES)
def test_where_a_compiler_traces_they_are_the_same(device: str) -> None:
    a, b, onto = (drawn(i, 2, *shape, device=device) for i, shape in enumerate([(256, 64), (64, 128), (256, 128)]))
    traced = torch.compile(float32_products.traced_product, backend="aot_eager", fullgraph=True)
    product = float32_products.product(a, b)
    assert torch.equal(traced(a, b), product)
    torch.testing.assert_close(traced(a, b, onto=onto), onto + product, rtol=1e-6, atol=1e-5)
