"""A block forward, every step from what the step before returned, against float64; on a GPU at the kernels' sizes."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch
from devices import needs_gpu
from torch import Tensor

from functional_sac.fused import block_forward
from functional_sl import keys

EPS = 1e-5

# Device, networks, rows, width, networks that train. On a GPU: a learner's, the fewest rows, and parts that are odd.
LARGE = [(4, 4096, 256, 2), (1, 128, 256, 1), (2, 128, 256, 1), (4, 128, 256, 2), (3, 1920, 256, 3), (1, 8192, 256, 1)]
CASES = [("cpu", 3, 24, 8, 2), ("cpu", 1, 7, 12, 1), *(pytest.param("cuda", *case, marks=needs_gpu) for case in LARGE)]
PAIRS = [("cpu", 3, 24, 8, 2), pytest.param("cuda", 4, 4096, 256, 2, marks=needs_gpu)]


class Case(NamedTuple):
    """What a block is given, and the number of networks that train."""

    h: Tensor
    leaves: list[Tensor]
    norms: list[tuple[Tensor, Tensor]]  # views of moments of all norms, as in a trunk
    trained: int


def case(device: str, networks: int, rows: int, width: int, trained: int) -> Case:
    draw = iter(keys.split(keys.key(0), 10))

    def normal(*shape: int) -> Tensor:
        return keys.normal(next(draw), (networks, *shape))

    leaves = []
    for out, features in ((4 * width, width), (width, 4 * width)):
        leaves += [(normal(out, features) / features**0.5).bfloat16(), 1 + 0.2 * normal(out), 0.2 * normal(out)]
    h = (normal(rows, width) + 0.5).bfloat16().to(device)
    moments = [torch.zeros(networks, 3 + 5 * width, device=device) for _ in range(2)]
    norms = [tuple(t[:, at] for t in moments) for at in (slice(3, 3 + 4 * width), slice(3 + 4 * width, None))]
    return Case(h, [leaf.to(device) for leaf in leaves], norms, trained)


def forward(c: Case) -> list[Tensor]:
    return block_forward.forward(c.h, c.leaves, *c.norms, EPS, c.trained)


def rectified(x: Tensor, scale: Tensor, bias: Tensor, mean: Tensor, inverse_std: Tensor) -> Tensor:
    centred = (x.double() - mean.double().unsqueeze(1)) * (inverse_std.double() * scale.double()).unsqueeze(1)
    return torch.relu(centred + bias.double().unsqueeze(1))


def roundings(found: Tensor, expected: Tensor, size: Tensor | float = 0.0) -> None:
    """Asserts that a BF16 result is within a rounding, 2^-8, of itself and of a term of that size."""
    assert ((found.double() - expected).abs() <= 0.004 * (found.double().abs() + size) + 2e-4).all()


@pytest.mark.parametrize(("device", "networks", "rows", "width", "trained"), CASES)
def test_every_step(device: str, networks: int, rows: int, width: int, trained: int) -> None:
    c = case(device, networks, rows, width, trained)
    w1, scale1, bias1, w2, scale2, bias2 = c.leaves
    first, inner, second, new = forward(c)
    assert [t.dtype for t in (first, inner, second, new)] == [torch.bfloat16] * 4
    assert inner.shape == (trained, rows, 4 * width)
    roundings(first, c.h.double() @ w1.double().mT)
    for x, (mean, inverse_std) in zip((first, second), c.norms, strict=True):
        var, average = torch.var_mean(x.double(), 1, correction=0)
        torch.testing.assert_close(mean.double(), average, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(inverse_std.double(), torch.rsqrt(var + EPS), rtol=1e-4, atol=0)
    expected = rectified(first, scale1, bias1, *c.norms[0])
    roundings(inner, expected[:trained])
    roundings(second[:trained], inner.double() @ w2[:trained].double().mT)
    # Of the other networks, an activation up to 8 may have been rounded to the other side.
    roundings(second[trained:], expected[trained:].bfloat16().double() @ w2[trained:].double().mT, 2.0)
    change = rectified(second, scale2, bias2, *c.norms[1])
    roundings(new, change + c.h.double(), change)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
@pytest.mark.parametrize(("device", "networks", "rows", "width", "trained"), PAIRS)
def test_what_is_not_finite_stays_in_its_network(
    device: str, networks: int, rows: int, width: int, trained: int, bad: float
) -> None:
    """One number of the input leaves nothing finite: the gate must see it."""
    c = case(device, networks, rows, width, trained)
    c.h[1, rows - 3, 2] = bad
    first, inner, second, new = forward(c)
    assert not first[1, rows - 3].isfinite().any()
    assert first[1].isfinite().sum() == (rows - 1) * 4 * width
    assert inner[1].isnan().all()
    assert second[1].isnan().all()
    assert new[1].isnan().all()
    assert not any(moment[1].isfinite().any() for norm in c.norms for moment in norm)
    others = [n for n in range(networks) if n != 1]
    assert all(t[others].isfinite().all() for t in (first, second, new, *c.norms[0], *c.norms[1]))
    assert inner[0].isfinite().all()


@pytest.mark.parametrize(("device", "networks", "rows", "width", "trained"), PAIRS)
def test_the_same_input_gives_the_same_bits(device: str, networks: int, rows: int, width: int, trained: int) -> None:
    c = case(device, networks, rows, width, trained)

    def results() -> list[Tensor]:
        for norm in c.norms:
            for moment in norm:
                moment.fill_(torch.nan)
        return [*forward(c), *(moment.clone() for norm in c.norms for moment in norm)]

    once = results()
    for _ in range(5):
        assert all(map(torch.equal, results(), once))


@needs_gpu
def test_a_captured_block_is_the_block() -> None:
    c, other = (case("cuda", *LARGE[0]) for _ in range(2))
    other.h.add_(1)
    forward(c)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = forward(c)
    c.h.copy_(other.h)
    graph.replay()
    assert all(map(torch.equal, found, forward(other)))


def test_kernels_are_for_a_hopper_gpu_whole_tiles_and_one_width() -> None:
    hopper = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
    device = "cuda" if hopper else "cpu"
    for rows, width, expected in ((128, 256, True), (4096, 256, True), (100, 256, False), (128, 128, False)):
        c = case(device, 1, rows, width, 1)
        fits = block_forward.fits(c.h, c.leaves[0], c.leaves[3])
        assert fits == (expected and hopper and block_forward.kernels is not None)
        assert not block_forward.fits(c.h.half(), c.leaves[0].half(), c.leaves[3].half())
    if hopper:
        import triton

        assert block_forward.kernels or not triton.__version__.startswith(block_forward.VERSIONS)


@pytest.mark.skipif(block_forward.kernels is None, reason="needs Triton with Gluon")
@pytest.mark.parametrize(("networks", "rows", "taken"), [(4, 4096, 16), (4, 2048, 8), (2, 4096, 8), (1, 128, 2)])
def test_tiles_divide_the_rows(networks: int, rows: int, taken: int) -> None:
    kernels = block_forward.kernels
    assert kernels.tiles(networks, rows) == taken
    for parts in range(1, kernels.NARROW_PARTS + 2):
        size = kernels.WIDE_ROWS * kernels.tiles(networks, parts * kernels.NARROW_ROWS)
        assert parts * kernels.NARROW_ROWS % size == 0
        assert kernels.divide(networks, parts * kernels.NARROW_ROWS) == (
            parts <= 32 or (parts % 2 == 0 and parts <= 64)
        )
        assert not kernels.divide(networks, parts * kernels.NARROW_ROWS - 64)
