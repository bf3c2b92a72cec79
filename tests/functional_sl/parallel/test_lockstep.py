from __future__ import annotations

import contextlib
import threading

import pytest
import torch
from torch.func import vmap

from functional_sl import tree, wire
from functional_sl.parallel import collectives
from functional_sl.parallel.lockstep import Lockstep

BIG = torch.randn(3, 1500, generator=torch.Generator().manual_seed(0))
LAYOUT = wire.layout({"w": BIG[0, :-1]}, "bfloat16")


@pytest.fixture
def ranks():
    with contextlib.closing(Lockstep(3)) as lockstep:
        yield lockstep


def test_reductions_equal_those_of_mapped_ranks(ranks):
    """The last of 1500 columns is the sentinel; 100 rounds, so that no rank overtakes another's value."""
    mapped = vmap(lambda x: collectives.simulated(3).reduce(x, LAYOUT))(BIG)
    for _ in range(100):
        found = ranks.map(lambda x: ranks.collectives.reduce(x, LAYOUT), BIG.unbind(0))
        assert tree.bits_equal(tree.stack(found), mapped)
    assert tree.bits_equal(list(ranks.map(ranks.collectives.gather, BIG.unbind(0))), [BIG] * 3)
    assert tree.bits_equal(vmap(collectives.simulated(3).gather)(BIG), torch.stack([BIG] * 3))
    sums = ranks.map(ranks.collectives.sum, torch.tensor([1, 20, 300]).unbind(0))
    assert sums == (321, 321, 321)


def test_an_error_of_one_rank_frees_the_others_and_the_next_call_works(ranks):
    def fail(rank: int) -> torch.Tensor:
        if rank == 1:
            raise KeyError("gone")
        return ranks.collectives.sum(torch.ones(()))

    for _ in range(3):
        with pytest.raises(KeyError, match="gone"):
            ranks.map(fail, (0, 1, 2))
        assert ranks.map(lambda rank: ranks.collectives.sum(torch.tensor(rank)), (0, 1, 2)) == (3, 3, 3)


def test_ranks_keep_the_grad_mode_and_end(ranks):
    for grad in (True, False):
        with torch.set_grad_enabled(grad):
            assert ranks.map(lambda _: torch.is_grad_enabled(), range(3)) == (grad,) * 3
    ranks.close()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("rank")]


def test_no_rank_is_an_error():
    with pytest.raises(ValueError, match=r"Lockstep\(0\)"):
        Lockstep(0)
