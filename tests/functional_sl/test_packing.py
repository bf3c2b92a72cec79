"""Packing in one pass, against casting, `wire.sentinel` and `wire.pack`."""

from __future__ import annotations

import pytest
import torch
from torch import library

from functional_sl import packing, tree, wire

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"))]


@pytest.fixture(autouse=True)
def _small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packing, "SMALLEST", 1)


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


def packed(
    grads: dict[str, torch.Tensor], loss: torch.Tensor, wire_dtype: str = "float32", parts: int = 1
) -> tuple[list[torch.Tensor], torch.Tensor, torch.Tensor, list[torch.Tensor]]:
    """Returns what arrives where nothing is added, and what has been sent."""
    layout, sent = wire.layout(tree.map(lambda x: x.float(), grads), wire_dtype), []

    def begin(x: torch.Tensor):
        sent.append(x)
        return lambda: x

    group, leaves = packing.Parts(layout, begin), tree.leaves(grads)
    for last in range(6, 6 // parts, -6 // parts):
        group.send(leaves[last - 6 // parts : last], loss)
    return *group.finish(grads, loss), sent


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("bad", [None, *"abcdef"])
@pytest.mark.parametrize(("loss", "number"), [(1.0, torch.nan), (torch.nan, torch.inf), (2.0, -torch.inf)])
@pytest.mark.parametrize(("wire_dtype", "parts"), [("float32", 1), ("bfloat16", 1), ("float32", 3), ("bfloat16", 2)])
def test_what_travels_has_the_bits_of_the_wires(
    device: str, bad: str | None, loss: float, number: float, wire_dtype: str, parts: int
) -> None:
    """In halves every part has 1024 elements. 11 pieces have a sentinel, and those of every part but the last one."""
    grads = gradients(device)
    if bad:
        grads[bad].select(0, -1).fill_(number) if grads[bad].ndim else grads[bad].fill_(number)
    wide, value = tree.map(lambda x: x.float(), grads), torch.tensor(loss, device=device)
    layout = wire.layout(wide, wire_dtype)
    expected = wire.pack(layout, wide, wire.sentinel(value, wide)).to(layout.travels_as)
    leaves, sentinels, own, sent = packed(grads, value, wire_dtype, parts=parts)
    assert [leaf.shape for leaf in leaves] == [leaf.shape for leaf in grads.values()]
    flat = torch.cat([leaf.reshape(-1) for leaf in leaves])
    torch.testing.assert_close(flat, expected[:-1], rtol=0, atol=0, equal_nan=True)
    assert own == sentinels.amax() == expected[-1] == float(bad is not None or loss != loss)
    assert own.dtype == sentinels.dtype == layout.travels_as
    assert sum(len(x) for x in sent) == layout.size + len(sentinels)
    assert len(sentinels) == 11 + parts - 1
    single = packing.sentinel(layout, grads, value)
    assert (single, single.dtype) == (own.float(), torch.float32)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.parametrize("wire_dtype", ["float32", "bfloat16"])
def test_a_gradient_must_stay_below_the_limit(device: str, wire_dtype: str, parts: int) -> None:
    grads, loss = gradients(device), torch.tensor(0.0, device=device)
    limit = torch.tensor(2.0**48)
    for leaf, number, raised in [("a", limit, 1), ("d", -limit, 1), ("d", limit.nextafter(loss.cpu()), 0)]:
        given = grads | {leaf: grads[leaf].clone().fill_(number.item())}
        assert packed(given, loss, wire_dtype, parts)[2] == raised
        layout = wire.layout(tree.map(lambda x: x.float(), given))
        assert packing.sentinel(layout, given, loss) == raised


@pytest.mark.parametrize("device", DEVICES)
def test_a_small_part_travels_as_its_group_does(device: str) -> None:
    grads, loss = gradients(device), torch.tensor(0.0, device=device)
    leaves, sentinels, _, sent = packed(grads, loss, "bfloat16", parts=6)
    assert {x.dtype for x in (*leaves, sentinels, *sent)} == {torch.bfloat16}
    assert min(len(x) for x in sent) < wire.BFLOAT16_MINIMUM


@pytest.mark.parametrize("device", DEVICES)
def test_a_leaf_without_elements_has_no_piece(device: str) -> None:
    grads, loss = gradients(device), torch.tensor(0.0, device=device)
    leaves, sentinels, own, _ = packed(grads | {"c": torch.zeros(0, 4, device=device)}, loss)
    assert (leaves[2].shape, len(sentinels), own.item()) == ((0, 4), 10, 0)


def test_small_parts_wait_for_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    """From the end the leaves have 6, 9000, 600, 1, 2280 and 14 elements; what is left at the end always goes."""
    grads, loss = gradients("cpu"), torch.tensor(0.0)
    expected, *_ = packed(grads, loss, parts=6)
    for smallest, sizes in [(6, [6, 9000, 600, 2281, 14]), (7, [9006, 600, 2281, 14]), (9007, [9606, 2295])]:
        monkeypatch.setattr(packing, "SMALLEST", smallest)
        leaves, sentinels, _, sent = packed(grads, loss, parts=6)
        assert tree.bits_equal(leaves, expected)
        assert [len(x) for x in sent] == [*sizes[:-1], sizes[-1] + len(sentinels)]


def test_another_shape_is_refused() -> None:
    grads = gradients("cpu")
    layout = wire.layout(tree.map(lambda x: x.float(), grads))
    with pytest.raises(ValueError, match=r"leaf 'a' is \(7, 2\), not \(2, 7\)"):
        packing.sentinel(layout, grads | {"a": grads["a"].t()}, torch.tensor(0.0))
    with pytest.raises(ValueError, match=r"leaf 'f' is \(5, 1\), not \(6, 1\)"):
        packing.Parts(layout, lambda x: lambda: x).send([grads["f"][:5]], torch.tensor(0.0))


def test_leaves_that_no_group_has_are_refused() -> None:
    grads, loss = gradients("cpu"), torch.tensor(0.0)
    leaves = tree.leaves(grads)
    parts = packing.Parts(wire.layout(tree.map(lambda x: x.float(), grads)), lambda x: lambda: x)
    with pytest.raises(ValueError, match="7 leaves are sent, of 6 that are left"):
        parts.send([leaves[0], *leaves], loss)
    parts.send(leaves[1:], loss)
    for given in (leaves[:2], []):
        with pytest.raises(ValueError, match=f"{len(given)} leaves are sent, of 1 that are left"):
            parts.send(given, loss)


def test_the_ops_are_what_a_compiler_takes_them_for() -> None:
    leaves, checks = tree.leaves(gradients("cpu")), ("test_schema", "test_faketensor")
    given = (leaves, torch.tensor(0.0), torch.float32, torch.bfloat16)
    library.opcheck(packing._pack, given, test_utils=checks)
    library.opcheck(packing._pack_part, given, test_utils=checks)
    library.opcheck(packing._look, (leaves, torch.float32), test_utils=checks)
