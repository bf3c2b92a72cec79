"""Names, order, selection, bit equality and memory of trees, against plain Python and torch."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch
from equal import assert_bits_equal

from functional_sl import tree


class Pair(NamedTuple):
    first: torch.Tensor
    rest: tuple[torch.Tensor, ...]


def arange(*shape: int, start: int = 0) -> torch.Tensor:
    return torch.arange(start, start + torch.Size(shape).numel(), dtype=torch.float32).reshape(shape)


def example(start: int = 0) -> dict:
    return {"b": Pair(arange(2, start=start), (arange(3, start=start),)), "a": [arange(2, 2, start=start)]}


def test_leaves_come_in_sorted_order_however_a_dict_was_built() -> None:
    x, y = torch.ones(1), torch.zeros(1)
    one, other = {"b": x, "a": y}, {"a": y, "b": x}
    assert [leaf.item() for leaf in tree.leaves(one)] == [0.0, 1.0]
    assert tree.names(one) == tree.names(other) == ["a", "b"]
    assert tree.digest(one) == tree.digest(other)
    leaves, structure = tree.flatten(one)
    assert_bits_equal(tree.unflatten(structure, leaves), other)


def test_names() -> None:
    x = torch.zeros(())
    nested = {"params": Pair(x, (x, x)), "a/b": {"~": x, "~1": x}, "a": {"b": x}, "lr.w": x, "größe": [x], "空": {}}
    names = tree.names(nested)
    assert set(names) == {
        "params/first", "params/rest/0", "params/rest/1", "a~1b/~0", "a~1b/~01", "a/b", "lr.w", "größe/0",
    }  # fmt: skip
    assert len(names) == len(set(names)) == len(tree.leaves(nested))
    assert tree.names(x) == [""]
    assert tree.named(example())["b/rest/0"].tolist() == [0, 1, 2]


@pytest.mark.parametrize("keys", [(1, "1"), (True, "True"), (1.0, "1.0")])
def test_names_that_would_be_shared_are_refused(keys: tuple) -> None:
    twice = {"w": {key: torch.zeros(1) for key in keys}}
    for function in (tree.names, tree.named, tree.digest):
        with pytest.raises(ValueError, match=f"w/{keys[1]}"):
            function(twice)


def test_leaf_by_leaf_arithmetic() -> None:
    a, b = example(), example(10)
    for actual, x, y in zip(tree.leaves(tree.add(a, b)), tree.leaves(a), tree.leaves(b), strict=True):
        assert torch.equal(actual, x + y)
    for actual, x in zip(tree.leaves(tree.lerp(a, b, 0.25)), tree.leaves(a), strict=True):
        assert torch.equal(actual, x + 2.5)
    assert tree.size(a) == 2 + 3 + 4
    # 0 + 1, then 0 + 1 + 4, then 0 + 1 + 4 + 9.
    assert tree.norm(a).item() == pytest.approx(20**0.5, rel=1e-6)
    assert tree.norm([arange(3)]).item() == pytest.approx(5**0.5, rel=1e-6)
    assert all(not x.any() for x in tree.leaves(tree.zeros_like(a)))
    assert_bits_equal(tree.to(a, "cpu"), a)
    with pytest.raises(ValueError, match=r"[Kk]ey"):
        tree.add({"a": arange(2)}, {"b": arange(2)})


def test_stack_and_index_are_inverses() -> None:
    stacked = tree.stack([example(), example(5)])
    assert stacked["b"].first.tolist() == [[0, 1], [5, 6]]
    assert_bits_equal(tree.index(stacked, 1), example(5))


def test_concatenate_joins_along_an_axis() -> None:
    assert_bits_equal(tree.concatenate([{"a": arange(2)}, {"a": arange(3, start=2)}]), {"a": arange(5)})
    rows = tree.concatenate(({"a": arange(2, 2)}, {"a": arange(2, 1)}), axis=1)
    assert rows["a"].tolist() == [[0, 1, 0], [2, 3, 1]]


@pytest.mark.parametrize("condition", [True, False])
def test_where_takes_one_side_whole(condition: bool) -> None:
    """Also the NaNs of the chosen side, and none of the other's."""
    new, old = example(), example(10)
    new["b"].first[0], old["b"].rest[0][1] = float("nan"), float("nan")
    shared = torch.ones(2)
    new["s"] = old["s"] = shared
    chosen = tree.where(torch.tensor(condition), new, old)
    assert_bits_equal(chosen, new if condition else old)
    assert chosen["s"] is shared


def test_where_rows_takes_each_row_from_one_side() -> None:
    rows = torch.tensor([True, False])
    new, old = {"v": arange(2), "m": arange(2, 2)}, {"v": arange(2, start=10), "m": torch.full((2, 2), float("nan"))}
    chosen = tree.where_rows(rows, new, old)
    assert chosen["v"].tolist() == [0, 11]
    assert_bits_equal(chosen["m"], torch.stack([new["m"][0], old["m"][1]]))


def test_clone_is_contiguous_and_apart() -> None:
    buffer = arange(3, 4)
    source = {"t": buffer.T, "e": arange(1).expand(5), "v": buffer[0]}
    copy = tree.clone(source)
    assert_bits_equal(copy, source)
    assert all(leaf.is_contiguous() for leaf in tree.leaves(copy))
    assert set(tree.overlapping([source, copy])) == {"0/t", "0/v"}
    assert tree.overlapping(copy) is None
    buffer.zero_()
    assert copy["v"].tolist() == [0, 1, 2, 3]


def test_copy_into_keeps_addresses() -> None:
    target, source = example(), example(20)
    addresses = [leaf.data_ptr() for leaf in tree.leaves(target)]
    tree.copy_into(target, source)
    assert [leaf.data_ptr() for leaf in tree.leaves(target)] == addresses
    assert_bits_equal(target, source)
    with pytest.raises(ValueError, match=r"[Kk]ey"):
        tree.copy_into({"a": arange(2)}, {"b": arange(2)})


NAN = torch.tensor(0x7FC00000, dtype=torch.int32).view(torch.float32)


@pytest.mark.parametrize(
    ("a", "b", "equal"),
    [
        (torch.tensor(0.0), torch.tensor(-0.0), False),
        (NAN, NAN.clone(), True),
        (NAN, (NAN.view(torch.int32) + 1).view(torch.float32), False),
        (torch.tensor(1.0), torch.tensor(1.0, dtype=torch.float64), False),
        (torch.zeros(2), torch.zeros(2, 1), False),
        (torch.zeros(0), torch.zeros(0), True),
        (torch.tensor([True, False]), torch.tensor([True, True]), False),
        (torch.ones(3, dtype=torch.bfloat16), torch.ones(3, dtype=torch.bfloat16), True),
        (arange(2, 3).T, arange(2, 3).T.contiguous(), True),
        ((arange(1), arange(1)), [arange(1), arange(1)], False),
        ({"a": arange(1)}, {"b": arange(1)}, False),
    ],
)
def test_bits_equal(a: tree.Tree, b: tree.Tree, equal: bool) -> None:
    assert tree.bits_equal(a, b) is equal
    assert (tree.digest(a) == tree.digest(b)) is (equal or isinstance(a, tuple))  # a digest knows names, not types


def test_the_failure_names_the_leaf() -> None:
    changed = example()
    changed["b"].rest[0][1] += 1
    with pytest.raises(AssertionError, match=r"leaves 'b/rest/0': bits differ, by up to 1\."):
        assert_bits_equal(changed, example())


def test_overlapping() -> None:
    buffer = arange(10)
    assert tree.overlapping({"a": buffer[:4], "b": buffer[4:], "c": buffer[4:4]}) is None
    assert tree.overlapping({"a": buffer[:5], "b": buffer[4:]}) == ("a", "b")
    assert tree.overlapping({"a": buffer, "z": arange(2), "b": buffer[3:5], "c": buffer[7:]}) == ("a", "b")
    assert tree.overlapping({"a": buffer, "b": buffer}) == ("a", "b")
    # The spans of two columns cross, though no element is in both.
    assert tree.overlapping(list(buffer.reshape(5, 2).T)) == ("0", "1")


def test_the_digest_sees_names_types_shapes_and_bits() -> None:
    base = {"a": torch.tensor([0.0, 1.0])}
    others = [
        {"b": torch.tensor([0.0, 1.0])},
        {"a": torch.tensor([-0.0, 1.0])},
        {"a": torch.tensor([[0.0, 1.0]])},
        {"a": torch.tensor([0.0, 1.0]).view(torch.int32)},
    ]
    assert len({tree.digest(values) for values in (base, *others)}) == 5
    assert tree.digest({"a": torch.tensor([[0.0, 5.0], [1.0, 5.0]])[:, 0]}) == tree.digest(base)
