"""Packing in one pass, against casting, `wire.sentinel` and `wire.pack`."""

from __future__ import annotations

import pytest
import torch
from torch import library

from functional_sl import packing, tree, wire

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"))]


def gradients(device: str) -> dict[str, torch.Tensor]:
    """Returns leaves of two types; some of them are views with gaps, or lie column by column."""
    draw = torch.randn(9000, generator=torch.Generator().manual_seed(0)).to(device)
    return {
        "a": draw[:14].view(2, 7),
        "b": draw[:2400].view(2, 30, 40).bfloat16()[..., :38],
        "c": draw[3],
        "d": draw[:600].view(30, 20).t(),
        "e": draw[:9000].view(2, 9, 500).bfloat16(),
        "f": draw[:18].view(6, 3)[:, 1:2],
    }


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("bad", [None, *"abcdef"])
@pytest.mark.parametrize(("loss", "number"), [(1.0, torch.nan), (torch.nan, torch.inf), (2.0, -torch.inf)])
def test_the_packed_vector_has_the_bits_of_the_wires(device: str, bad: str | None, loss: float, number: float) -> None:
    grads = gradients(device)
    if bad:
        grads[bad].select(0, -1).fill_(number) if grads[bad].ndim else grads[bad].fill_(number)
    wide = {name: leaf.float() for name, leaf in grads.items()}
    layout, value = wire.layout(wide), torch.tensor(loss, device=device)
    packed = packing.pack(layout, grads, value)
    assert tree.bits_equal(packed, wire.pack(layout, wide, wire.sentinel(value, wide)))
    assert packed[-1].item() == float(bad is not None or loss != loss)
    assert tree.bits_equal(packing.sentinel(layout, grads, value), packed[-1])


def test_another_shape_is_refused() -> None:
    grads = gradients("cpu")
    layout = wire.layout({name: leaf.float() for name, leaf in grads.items()})
    with pytest.raises(ValueError, match=r"leaf 'a' is \(7, 2\), not \(2, 7\)"):
        packing.pack(layout, grads | {"a": grads["a"].t()}, torch.tensor(0.0))


def test_the_op_is_what_a_compiler_takes_it_for() -> None:
    leaves, checks = tree.leaves(gradients("cpu")), ("test_schema", "test_faketensor")
    library.opcheck(packing._pack, (leaves, torch.tensor(0.0), torch.float32), test_utils=checks)
    library.opcheck(packing._not_finite, (leaves, torch.float32), test_utils=checks)
