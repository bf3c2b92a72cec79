from __future__ import annotations

import functools

import pytest
import torch
from ranks import run_ranks
from torch import Tensor
from torch.func import vmap

from functional_sl import tree, wire
from functional_sl.parallel import collectives
from functional_sl.parallel.world import world

WIRES = ("float32", "bfloat16")
BIG = 1500  # gradient elements: enough for the BF16 wire


def gradients(rank: int, seed: int = 0) -> tuple[dict[str, Tensor], Tensor]:
    draw = torch.Generator().manual_seed(100 * seed + rank)
    return {"w": torch.randn(BIG // 3, 3, generator=draw), "b": torch.randn((), generator=draw)}, torch.tensor(1.0)


def stacked(size: int, seed: int = 0) -> tuple[dict[str, Tensor], Tensor]:
    return tree.stack([gradients(rank, seed) for rank in range(size)])


def reduced(across: collectives.Collectives, wire_dtype: str, grads: dict[str, Tensor], loss: Tensor) -> Tensor:
    layout = wire.layout(grads, wire_dtype)
    mean, sentinel = across.reduce(wire.pack(layout, grads, wire.sentinel(loss, grads)), layout)
    return torch.cat([mean, sentinel.reshape(1)])


def reduce_constants(across: collectives.Collectives, value: Tensor) -> Tensor:
    return reduced(across, "bfloat16", {"w": value.expand(BIG)}, torch.tensor(1.0) + 0 * value)[:1]


def reduce_on_a_rank(constants: list[float]) -> dict[str, object]:
    """Everything that this file asks of one real rank, in one process group."""
    with world("cpu", timeout_s=60.0) as here:
        across = collectives.over(here)
        grads, loss = gradients(here.rank)
        results = {name: reduced(across, name, grads, loss) for name in WIRES}
        assert all(tree.bits_equal(results[name], reduced(across, name, grads, loss)) for name in WIRES)
        if here.size == 2:
            compiled = torch.compile(reduced, fullgraph=True, dynamic=False, backend="aot_eager")
            assert tree.bits_equal(results["bfloat16"], compiled(across, "bfloat16", grads, loss))
        bad_loss = torch.tensor(float("nan") if here.rank == here.size - 1 else 1.0)
        results["bad loss"] = reduced(across, "bfloat16", grads, bad_loss)
        overflow = {"w": grads["w"], "b": torch.tensor(float("inf") if here.rank == 0 else 0.0)}
        results["overflow"] = reduced(across, "bfloat16", overflow, loss)
        results["constants"] = reduce_constants(across, torch.tensor(constants[here.rank]))
        statistics = {"mean": torch.tensor([0.1, here.rank]), "count": torch.tensor(2**40 + here.rank)}
        results["sums"] = collectives.sum_over_ranks(across, statistics)
        results["means"] = collectives.mean_over_ranks(across, {"mean": torch.tensor([1.0, here.rank])})
        results["gather"] = across.gather(torch.tensor([here.rank, 0.1], dtype=torch.float64))
        assert across.size == here.size
        return results


@functools.cache
def ranks(size: int) -> list[dict[str, object]]:
    return run_ranks(size, reduce_on_a_rank, [1.0, 1.0, 0.0, 3.0][:size])


@pytest.mark.parametrize("size", [2, 3, 4])
def test_every_rank_holds_the_same_bytes(size):
    first, *others = ranks(size)
    assert all(tree.bits_equal(first, other) for other in others)


@pytest.mark.parametrize("name", WIRES)
def test_two_gloo_ranks_equal_two_simulated_ones_bit_for_bit(name):
    simulated = vmap(functools.partial(reduced, collectives.simulated(2), name))(*stacked(2))
    assert tree.bits_equal([result[name] for result in ranks(2)], list(simulated))


@pytest.mark.parametrize("size", [3, 4])
@pytest.mark.parametrize(("name", "epsilon"), [("float32", 2.0**-24), ("bfloat16", 2.0**-9)])
def test_more_gloo_ranks_equal_simulated_ones_up_to_the_order_of_the_sum(size, name, epsilon):
    simulated = vmap(functools.partial(reduced, collectives.simulated(size), name))(*stacked(size))[0]
    # Either order rounds size - 1 sums, each by at most epsilon of the sum of magnitudes so far; 1.1 for second order.
    magnitudes = wire.pack(
        wire.layout(gradients(0)[0]), tree.map(lambda x: x.abs().sum(0), stacked(size)[0]), torch.zeros(())
    )
    bound = 1.1 * 2 * (size - 1) * epsilon * magnitudes / size
    assert ((ranks(size)[0][name] - simulated).abs() <= bound).all()


@pytest.mark.parametrize("size", [2, 3, 4])
def test_the_sentinels_are_summed_not_averaged(size):
    result = ranks(size)[0]
    assert result["bfloat16"][-1] == 0
    assert result["bad loss"][-1] == 1  # one rank's loss is NaN; its derivatives are finite
    assert result["bad loss"].isfinite().all()
    assert result["overflow"][-1] == 1
    assert result["overflow"][0] == float("inf")  # leaf `b` comes first


def test_division_comes_after_the_restore():
    # The ranks hold 1, 1, 0: the sum 2 is exact in BF16, and 2 / 3 in FP32 is 0.6666667; in BF16 it is 0.66796875.
    expected = torch.tensor([2.0]) / 3.0
    assert tree.bits_equal(ranks(3)[0]["constants"], expected)
    values = torch.tensor([1.0, 1.0, 0.0])
    assert tree.bits_equal(vmap(functools.partial(reduce_constants, collectives.simulated(3)))(values)[2], expected)


def test_statistics_are_summed_in_their_own_dtype():
    sums = ranks(3)[0]["sums"]
    assert sums["count"].item() == 3 * 2**40 + 3  # beyond float32
    assert (sums["count"].dtype, sums["mean"].dtype) == (torch.int64, torch.float32)
    torch.testing.assert_close(sums["mean"], torch.tensor([0.3, 3.0]))
    assert ranks(4)[0]["means"]["mean"].tolist() == [1.0, 1.5]
    with pytest.raises(TypeError, match=r"not torch\.bfloat16"):
        collectives.single().sum(torch.zeros(2, dtype=torch.bfloat16))


def test_gathering_is_by_rank():
    expected = torch.tensor([[0, 0.1], [1, 0.1], [2, 0.1]], dtype=torch.float64)
    assert tree.bits_equal(ranks(3)[0]["gather"], expected)
    assert tree.bits_equal(vmap(collectives.simulated(3).gather)(expected)[1], expected)
    assert tree.bits_equal(collectives.single().gather(expected[0]), expected[:1])


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("name", WIRES)
def test_simulated_ranks_add_left_to_right_and_round_every_hop(size, name):
    grads, loss = stacked(size)
    wire_dtype = getattr(torch, name)
    parts = [torch.cat([grads["b"][r].reshape(1), grads["w"][r].reshape(-1)]).to(wire_dtype) for r in range(size)]
    total = parts[0]
    for part in parts[1:]:
        total = (total.double() + part.double()).to(wire_dtype)  # exact in float64, so rounded once
    expected = torch.cat([total.float() / size, torch.zeros(1)])
    results = vmap(functools.partial(reduced, collectives.simulated(size), name))(grads, loss)
    assert all(tree.bits_equal(result, expected) for result in results)


@pytest.mark.parametrize("name", WIRES)
def test_one_rank_rounds_as_the_wire_does_and_no_more(name):
    grads, loss = gradients(0)
    single = reduced(collectives.single(), name, grads, loss)
    assert tree.bits_equal(wire.unpack(single, grads), tree.map(lambda x: x.to(getattr(torch, name)).float(), grads))
    assert tree.bits_equal(single, reduced(collectives.simulated(1), name, grads, loss))
    assert tree.bits_equal(single, run_alone(name))


def run_alone(name: str) -> Tensor:
    with world("cpu", timeout_s=60.0, force_group=True) as here:
        return reduced(collectives.over(here), name, *gradients(0))


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiled_code_keeps_the_rounding(backend):
    torch._dynamo.reset()
    single = functools.partial(reduced, collectives.single(), "bfloat16")
    compiled = torch.compile(single, fullgraph=True, dynamic=False, backend=backend)
    assert tree.bits_equal(compiled(*gradients(0)), single(*gradients(0)))


@pytest.mark.parametrize("name", WIRES)
def test_seeds_around_ranks_equal_one_seed_at_a_time(name):
    torch._dynamo.reset()
    one_seed = vmap(functools.partial(reduced, collectives.simulated(3), name))
    batch = tree.stack([stacked(3, seed) for seed in range(3)])  # as many seeds as ranks: the axes must not be mixed up
    expected = [one_seed(*stacked(3, seed)) for seed in range(3)]
    compiled = torch.compile(vmap(one_seed), fullgraph=True, dynamic=False, backend="aot_eager")
    for results in (vmap(one_seed)(*batch), compiled(*batch)):
        assert tree.bits_equal(list(results), expected)
    assert tree.bits_equal(expected[1][0], expected[1][2])
    assert not torch.equal(expected[0], expected[1])


def test_simulated_ranks_share_no_memory():
    results = vmap(collectives.simulated(3).sum)(torch.ones(3, 2))
    assert results.is_contiguous()
    assert results.tolist() == [[3.0, 3.0]] * 3


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda total: total(torch.ones(3)), "no vmap over ranks maps"),
        (lambda total: vmap(lambda x: x + total(torch.ones(2)))(torch.ones(3)), "no vmap over ranks maps"),
        (lambda total: vmap(total)(torch.ones(2)), "inside a vmap of 2"),
    ],
)
def test_simulated_ranks_need_a_vmap_of_exactly_their_number(call, text):
    with pytest.raises(RuntimeError, match=text):
        call(collectives.simulated(3).sum)


def test_no_rank_is_an_error():
    with pytest.raises(ValueError, match=r"simulated\(0\)"):
        collectives.simulated(0)


def test_a_packed_vector_of_another_length_is_an_error():
    layout = wire.layout({"w": torch.zeros(3)})
    with pytest.raises(ValueError, match=r"shape \(3,\), not \[3 \+ 1\]"):
        vmap(lambda x: collectives.simulated(2).reduce(x, layout))(torch.zeros(2, 3))
