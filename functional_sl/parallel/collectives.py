"""Reductions over the ranks: of one packed gradient group, and of small statistics.

One rank, a process group, ranks simulated as a `torch.func.vmap` axis, and ranks that are threads (`lockstep`) all
reduce by the same rules: cast to the wire dtype, sum, restore the group's dtype, then divide.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, library

from functional_sl import tree
from functional_sl.parallel import peers
from functional_sl.parallel.world import World
from functional_sl.tree import Tree
from functional_sl.wire import Begin, Layout, Reduce, Reduced

TRANSPORTS = ("nccl", "peer")
STATISTICS_DTYPES = (torch.float32, torch.float64, torch.int64)
_UNMAPPED = (
    "a reduction over {0} simulated ranks met a tensor that no vmap over ranks maps: "
    "call it inside torch.func.vmap over {0} ranks, on a value that depends on the rank"
)


class Collectives(NamedTuple):
    """What a step needs of the other ranks: their number, reductions and a gathering."""

    size: int
    begin: Begin | None  # any vector's sum, on its way; None where nothing travels
    reduce: Reduce  # a packed gradient group: mean of the gradients, sum of the sentinels
    sum: Callable[[Tensor], Tensor]  # a float32, float64 or int64 tensor of any shape, in its own dtype
    gather: Callable[[Tensor], Tensor]  # a tensor [...] of every rank, by rank: [size, ...]


def single() -> Collectives:
    """Returns the collectives of one rank alone, which touch no process group."""
    return over_sums(1, lambda x: x, lambda x: x.unsqueeze(0))._replace(begin=None, reduce=identity)


def over_sums(
    size: int,
    total: Callable[[Tensor], Tensor],
    gather: Callable[[Tensor], Tensor],
    wait: Callable[[Tensor], Tensor] = lambda x: x,
    begin: Begin | None = None,
) -> Collectives:
    """Builds collectives from one sum and one gathering over `size` ranks, each of a tensor in its own dtype.

    Args:
      size: the number of ranks.
      total: sums a tensor.
      gather: stacks tensors by rank.
      wait: makes what `total` returned readable, if that is on its way still.
      begin: the sum of a gradient group, if it travels another way.
    """

    def begin_total(x: Tensor) -> Callable[[], Tensor]:
        summed = total(x)
        return lambda: wait(summed)

    begin = begin or begin_total

    def reduce(flat: Tensor, layout: Layout) -> Reduced:
        if flat.shape != (layout.size + 1,):
            raise ValueError(f"the packed vector has shape {tuple(flat.shape)}, not [{layout.size} + 1]")
        found = begin(flat.to(layout.travels_as))().to(layout.dtype)
        return Reduced(found[:-1] / size, found[-1])

    return Collectives(size, begin, reduce, _statistics_sum(lambda x: wait(total(x))), gather)


def process_group(group: dist.ProcessGroup, begin: Begin | None = None) -> Collectives:
    """Returns the collectives over `group`; all ranks of the group call them in the same order.

    They are functional: `torch.compile(fullgraph=True)` traces them and a CUDA graph captures them. `begin` is how
    gradients travel, if not as everything else.
    """

    def total(x: Tensor) -> Tensor:
        return torch.ops._c10d_functional.all_reduce(x, "sum", name)

    def gather(x: Tensor) -> Tensor:
        stacked = torch.ops._c10d_functional.all_gather_into_tensor(x.contiguous().unsqueeze(0), size, name)
        return torch.ops._c10d_functional.wait_tensor(stacked)

    name, size = group.group_name, group.size()
    return over_sums(size, total, gather, torch.ops._c10d_functional.wait_tensor, begin)


def simulated(size: int) -> Collectives:
    """Returns the collectives of `size` ranks in one process, which are the axis of a `torch.func.vmap`.

    The vmap directly around the call must be the one over ranks, and what is reduced must depend on something
    that it maps; further vmaps (over seeds) go around it. Slices are added left to right by rank, and every
    partial sum is rounded to the wire dtype: two Gloo ranks give the same bits, more ranks add in Gloo's order.

    Raises:
      ValueError: if `size` is not positive.
      RuntimeError: from a reduction outside a vmap of exactly `size`; one rank needs none.
    """
    if size < 1:
        raise ValueError(f"simulated({size}): the number of ranks must be at least 1")

    return over_sums(size, lambda x: simulated_sum(x, size), lambda x: simulated_gather(x, size))


def over(world: World, transport: str = "nccl") -> Collectives:
    """Returns the collectives over the data group of `world`, or `single()` where it has none.

    Args:
      world: of which all ranks call it.
      transport: what gradients travel by: `nccl`, whatever the group has, or `peer`, see `peers`.

    Raises:
      ValueError: for another transport.
      RankError, ValueError: as `peers.join` does.
    """
    if transport not in TRANSPORTS:
        raise ValueError(f"dp_transport={transport!r}: choose among {', '.join(TRANSPORTS)}")
    begin = peers.join(world) if transport == "peer" else None
    return single() if world.data_group is None else process_group(world.data_group, begin)


def identity(flat: Tensor, layout: Layout) -> Reduced:
    """Reduces over one rank: a `Reduce` that only rounds a BF16 group, as its trip over the wire would.

    So one rank gives the same bits with and without a process group.
    """
    if layout.travels_as != layout.dtype:
        flat = ordered_sum(flat.to(layout.travels_as)[None]).to(layout.dtype)
    return Reduced(flat[:-1], flat[-1])


def sum_over_ranks(collectives: Collectives, values: Tree) -> Tree:
    """Sums a tree of small statistics over the ranks, exactly in each leaf's dtype, in one reduction a dtype.

    Args:
      collectives: over the ranks.
      values: a tree of float32, float64 and int64 tensors.

    Returns:
      The sums, a tree like `values`.
    """
    leaves, structure = tree.flatten(values)
    sums = list(leaves)
    for dtype in dict.fromkeys(leaf.dtype for leaf in leaves):
        places = [i for i, leaf in enumerate(leaves) if leaf.dtype == dtype]
        flat = collectives.sum(torch.cat([leaves[i].reshape(-1) for i in places]))
        parts = flat.split([leaves[i].numel() for i in places])
        for i, part in zip(places, parts, strict=True):
            sums[i] = part.view(leaves[i].shape)
    return tree.unflatten(structure, sums)


def mean_over_ranks(collectives: Collectives, values: Tree) -> Tree:
    """Averages a tree of small floating-point statistics over the ranks: `sum_over_ranks`, then one division."""
    return tree.map(lambda x: x / collectives.size, sum_over_ranks(collectives, values))


def _statistics_sum(total: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    def checked(x: Tensor) -> Tensor:
        if x.dtype not in STATISTICS_DTYPES:
            raise TypeError(f"statistics are summed as float32, float64 or int64, not {x.dtype}: convert them first")
        return total(x)

    return checked


# Opaque to Inductor, which would keep partial sums in FP32 and drop a cast to BF16 and back.
@library.custom_op("functional_sl::ordered_sum", mutates_args=())
def ordered_sum(x: Tensor) -> Tensor:
    """Sums `[n, ...]` over the leading axis from first to last, rounding every partial sum to the dtype of `x`."""
    total = x[0].clone()
    for part in x[1:]:
        total += part
    return total


@ordered_sum.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x[0])


@ordered_sum.register_vmap
def _(info, in_dims, x):
    return ordered_sum(x.movedim(in_dims[0], 1)), 0


@library.custom_op("functional_sl::simulated_sum", mutates_args=())
def simulated_sum(x: Tensor, size: int) -> Tensor:
    """Sums `x` over the ranks that the innermost `torch.func.vmap` maps; every rank gets the same bytes."""
    if size == 1:
        return x.clone()
    raise RuntimeError(_UNMAPPED.format(size))


@simulated_sum.register_fake
def _(x: Tensor, size: int) -> Tensor:
    return torch.empty_like(x)


@simulated_sum.register_vmap
def _(info, in_dims, x, size):
    _check_mapped(info.batch_size, size)
    total = ordered_sum(x.movedim(in_dims[0], 0))
    return total.expand(size, *total.shape).clone(), 0


@library.custom_op("functional_sl::simulated_gather", mutates_args=())
def simulated_gather(x: Tensor, size: int) -> Tensor:
    """Returns `x` of every rank that the innermost `torch.func.vmap` maps, `[size, ...]`, on each of them."""
    if size == 1:
        return x.unsqueeze(0).clone()
    raise RuntimeError(_UNMAPPED.format(size))


@simulated_gather.register_fake
def _(x: Tensor, size: int) -> Tensor:
    return x.new_empty((size, *x.shape))


@simulated_gather.register_vmap
def _(info, in_dims, x, size):
    _check_mapped(info.batch_size, size)
    every = x.movedim(in_dims[0], 0)
    return every.expand(size, *every.shape).clone(), 0


def _check_mapped(mapped: int, size: int) -> None:
    if mapped != size:
        raise RuntimeError(
            f"a reduction over {size} simulated ranks is inside a vmap of {mapped}: "
            f"the vmap directly around it must map the {size} ranks"
        )
