"""Trunks of sizes for which a GPU has kernels of its own, there and on a CPU; small ones as a compiler takes them."""

from __future__ import annotations

import pytest
import torch
from devices import DEVICES, needs_gpu
from equal import assert_bits_equal
from torch import library

from functional_sac.fused import trunk
from functional_sl import keys

WIDTH, INNER, FEATURES, ROWS = 256, 1024, 318, 2048


def given() -> tuple[torch.Tensor, torch.Tensor, list[torch.Tensor]]:
    """Returns an input, the gradient of two networks' output, and leaves of three networks in BF16."""
    draw = iter(keys.split(keys.key(0), 20))

    def normal(*shape: int) -> torch.Tensor:
        return keys.normal(next(draw), shape)

    def affine(features: int) -> list[torch.Tensor]:
        return [1 + 0.2 * normal(3, features), 0.2 * normal(3, features)]

    def matrix(out: int, features: int) -> torch.Tensor:
        return (normal(3, out, features) / features**0.5).bfloat16()

    leaves = [*affine(FEATURES), torch.nn.functional.pad(matrix(WIDTH, FEATURES), (0, 2))]
    for _ in range(2):
        leaves += [matrix(INNER, WIDTH), *affine(INNER), matrix(WIDTH, INNER), *affine(WIDTH)]
    x, dh = torch.nn.functional.pad(normal(ROWS, FEATURES), (0, 2)), normal(2, ROWS // 2, WIDTH).bfloat16()
    return x, dh, leaves


@needs_gpu
def test_activations_on_a_gpu_are_those_on_a_cpu() -> None:
    """In BF16, whole tensors within a few roundings of 2^-8."""
    x, _, leaves = given()
    found = trunk.forward(x.cuda(), [leaf.cuda() for leaf in leaves], 1e-5, 2)
    for a, b in zip(found, trunk.forward(x, leaves, 1e-5, 2), strict=True):
        assert (a.dtype, a.shape) == (b.dtype, b.shape)
        assert (a.cpu().float() - b.float()).norm() <= 0.01 * b.float().norm()


@needs_gpu
def test_gradients_on_a_gpu_are_those_on_a_cpu() -> None:
    """In BF16, from the same activations: whole leaves within a few roundings of 2^-8; block by block to 2^-20."""
    x, dh, leaves = given()
    on = [leaf.cuda() for leaf in leaves]
    kept = trunk.forward(x.cuda(), on, 1e-5, 2)
    found = trunk.backward(dh.cuda(), on, kept, [])
    expected = trunk.backward(dh, leaves, [t.cpu() for t in kept], [])
    for a, b in zip(found, expected, strict=True):
        assert (a.cpu() - b).norm() <= 0.02 * b.norm()
    flow, in_parts = dh.cuda(), []
    for index in (1, 0):
        flow, *of_block = trunk.backward_block(flow, on, kept, index, [])
        in_parts = of_block + in_parts
    in_parts = trunk.backward_input(flow, on, kept) + in_parts
    for a, b in zip(in_parts, found, strict=True):
        assert (a - b).norm() <= 2**-20 * b.norm()


@pytest.mark.parametrize("device", DEVICES)
def test_an_operator_agrees_with_its_shapes_and_changes_nothing(device: str) -> None:
    """In BF16: types and shapes by the fake kernels, inputs left alone, gradients of weights in float32.

    What is behind is whole numbers, which add up exactly.
    """
    draw = iter(keys.split(keys.key(0), 20))

    def normal(*shape: int) -> torch.Tensor:
        return keys.normal(next(draw), shape).to(device)

    leaves = [normal(3, 6), normal(3, 6), normal(3, 8, 16).bfloat16()]
    for _ in range(2):
        leaves += [normal(3, 32, 8).bfloat16(), normal(3, 32), normal(3, 32)]
        leaves += [normal(3, 8, 32).bfloat16(), normal(3, 8), normal(3, 8)]
    x = torch.nn.functional.pad(normal(24, 6), (0, 10))
    checks = ("test_schema", "test_faketensor")
    library.opcheck(trunk.forward, (x, leaves, 1e-5, 2), test_utils=checks)
    kept = trunk.forward(x, leaves, 1e-5, 2)
    dh = normal(2, 7, 8).bfloat16()
    dy, y, *parts = (
        keys.randint(keys.key(1), shape, -9, 9).to(x) for shape in ((2, 7, 16), (2, 7, 8), (6, 2, 3), (9,))
    )
    behind = [dy.bfloat16(), y.bfloat16(), *parts]
    library.opcheck(trunk.backward, (dh, leaves, kept, behind), test_utils=checks)
    library.opcheck(trunk.backward_block, (dh, leaves, kept, 1, behind), test_utils=checks)
    library.opcheck(trunk.backward_block, (dh, leaves, kept, 0, []), test_utils=checks)
    whole = trunk.backward_block(dh, leaves, kept, 1, [])[0]
    library.opcheck(trunk.backward_input, (whole, leaves, kept), test_utils=checks)
    found = trunk.backward(dh, leaves, kept, behind)
    assert [(t.shape, t.dtype) for t in found[:-3]] == [(t[1:].shape, torch.float32) for t in leaves]
    for of_behind in (found[-3:], trunk.backward_block(dh, leaves, kept, 1, behind)[-3:]):
        assert_bits_equal(of_behind, [torch.einsum("nbo,nbk->nok", dy, y), *(t.sum(0) for t in parts)])
