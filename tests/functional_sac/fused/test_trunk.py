"""Trunks of the sizes for which a GPU has kernels of its own, there and on a CPU."""

from __future__ import annotations

import torch
from devices import needs_gpu

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
