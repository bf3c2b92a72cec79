from __future__ import annotations

from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from functional_sl import tree, wire


class Group(NamedTuple):
    w: Tensor
    blocks: dict[str, Tensor]


def group(dtype: torch.dtype = torch.float32) -> Group:
    return Group(
        torch.arange(6, dtype=dtype).view(2, 3),
        {"b": torch.tensor(6.0, dtype=dtype), "a": torch.full((2,), 7, dtype=dtype)},
    )


def test_layout_describes_the_group_in_leaf_order():
    layout = wire.layout(group())
    assert layout.names == ("w", "blocks/a", "blocks/b")
    assert layout.shapes == ((2, 3), (2,), ())
    assert (layout.sizes, layout.size, layout.dtype) == ((6, 2, 1), 9, torch.float32)
    assert {layout: 1}[wire.layout(tree.zeros_like(group()))] == 1


def test_pack_puts_the_sentinel_last_and_unpack_inverts_it():
    flat = wire.pack(wire.layout(group()), group(), torch.tensor(1.0))
    assert flat.tolist() == [0, 1, 2, 3, 4, 5, 7, 7, 6, 1]
    for packed in (flat, flat[:-1]):
        again = wire.unpack(packed, group())
        assert tree.bits_equal(again, group())
        assert again.w.untyped_storage().data_ptr() == flat.untyped_storage().data_ptr()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_pack_keeps_the_dtype_of_the_group(dtype):
    layout = wire.layout(group(dtype), "bfloat16")
    assert wire.pack(layout, group(dtype), torch.tensor(0.0)).dtype == layout.travels_as == dtype


@pytest.mark.parametrize(
    ("size", "dtype", "asked", "travels_as"),
    [
        (1023, torch.float32, "bfloat16", torch.float32),  # its packed vector has 1024 elements, the group has not
        (1024, torch.float32, "bfloat16", torch.bfloat16),
        (1024, torch.float32, "float32", torch.float32),
        (1024, torch.float64, "bfloat16", torch.float64),
        (1024, torch.float16, "bfloat16", torch.float16),
    ],
)
def test_bfloat16_is_for_float32_groups_of_1024(size, dtype, asked, travels_as):
    assert (
        wire.layout({"w": torch.zeros(size - 3, dtype=dtype), "b": torch.zeros(3, dtype=dtype)}, asked).travels_as
        == travels_as
    )


@pytest.mark.parametrize(
    ("template", "wire_dtype", "text"),
    [
        ({"a": torch.zeros(2), "b": torch.zeros(2, dtype=torch.float64)}, "float32", "leaf 'b' is torch.float64"),
        ({"a": torch.zeros(2), "count": torch.zeros((), dtype=torch.int64)}, "float32", "leaf 'count' is torch.int64"),
        ({"a": {"b": 1.0}}, "float32", "leaf 'a/b' is float"),
        ({"a": {}}, "float32", "no leaves"),
        ({"a": torch.zeros(2)}, "float16", "wire_dtype is 'float16'"),
    ],
)
def test_layout_names_what_it_cannot_take(template, wire_dtype, text):
    with pytest.raises(ValueError, match=text):
        wire.layout(template, wire_dtype)


@pytest.mark.parametrize("bad", [group()._replace(w=torch.zeros(3, 2)), group()._replace(w=torch.zeros(2, 3).double())])
def test_pack_names_a_leaf_that_is_not_the_layouts(bad):
    with pytest.raises(ValueError, match=r"leaf 'w' is torch.float\d\d"):
        wire.pack(wire.layout(group()), bad, torch.tensor(0.0))


def test_unpack_refuses_another_length():
    with pytest.raises(ValueError, match=r"shape \(11,\).*needs \[9\]"):
        wire.unpack(torch.zeros(11), group())


def test_digest_tells_layouts_apart():
    base = {"w": torch.zeros(2, 3)}
    others = [
        ({"v": torch.zeros(2, 3)}, "float32"),
        ({"w": torch.zeros(3, 2)}, "float32"),
        ({"w": torch.zeros(2, 3, dtype=torch.float64)}, "float32"),
        (base, "bfloat16"),
    ]
    digests = {wire.digest(wire.layout(*other)) for other in [(base, "float32"), *others]}
    assert len(digests) == 5
    assert wire.digest(wire.layout({"w": torch.ones(2, 3)})) in digests


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_sentinel_marks_a_loss_or_a_gradient_that_is_not_finite(bad):
    finite = group(torch.float64)
    assert wire.sentinel(torch.tensor(2.0), finite).item() == 0.0
    assert wire.sentinel(torch.tensor(bad), finite).item() == 1.0
    hit = wire.sentinel(
        torch.tensor(2.0), finite._replace(blocks={"a": torch.tensor([0.0, bad]).double(), "b": finite.blocks["b"]})
    )
    assert (hit.item(), hit.dtype, hit.shape) == (1.0, torch.float64, ())
    assert wire.sentinel(torch.tensor(2.0), torch.tensor([1.0, bad])).item() == 1.0


@pytest.mark.parametrize(
    ("dtype", "exponent", "squares"),
    [(torch.float32, 48, 31), (torch.bfloat16, 48, 31), (torch.float64, 496, 31), (torch.float16, 9, None)],
)
def test_sums_of_numbers_below_the_limit_are_finite(dtype, exponent, squares):
    """Of 100 ranks, added one by one and rounded every time; and of 2^31 squares."""
    limit = wire.limit(dtype)
    number = torch.tensor(limit, dtype=dtype)
    assert number.item() == limit == 2.0**exponent
    total = number.clone()
    for _ in range(99):
        total = total + number
    assert total.isfinite()
    if squares:
        assert (number.square() * 2.0**squares).isfinite()
        assert not (number.square() * 2.0**33).isfinite()


@pytest.mark.parametrize(("number", "raised"), [(2.0**48, 1.0), (-(2.0**48), 1.0), (2.0**48 - 2.0**24, 0.0)])
def test_sentinel_marks_a_gradient_that_is_too_large(number, raised):
    given = group()._replace(w=torch.tensor([[0.0, number]]))
    assert wire.sentinel(torch.tensor(2.0**60), given).item() == raised


def round_trip(gradients: Group, loss: Tensor) -> tuple[Tensor, list[Tensor]]:
    flat = wire.pack(wire.layout(gradients), gradients, wire.sentinel(loss, gradients))
    return flat, [2 * leaf for leaf in tree.leaves(wire.unpack(flat, gradients))]


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_packing_compiles_without_a_break(backend):
    torch._dynamo.reset()
    compiled = torch.compile(round_trip, fullgraph=True, dynamic=False, backend=backend)
    for loss in (torch.tensor(1.0), torch.tensor(float("nan"))):
        assert tree.bits_equal(compiled(group(), loss), round_trip(group(), loss))


def test_packing_under_vmap_equals_one_by_one():
    torch._dynamo.reset()
    groups = tree.stack([group(), tree.map(lambda x: x + 10, group())])
    losses = torch.tensor([1.0, float("inf")])
    mapped = torch.func.vmap(round_trip)
    results = [
        mapped(groups, losses),
        torch.compile(mapped, fullgraph=True, dynamic=False, backend="aot_eager")(groups, losses),
    ]
    for i in range(2):
        assert all(
            tree.bits_equal(tree.index(result, i), round_trip(tree.index(groups, i), losses[i])) for result in results
        )
