"""The Triton kernel of `peers`: a rank's part in one sum over the GPUs of a host.

A rank's memory that the others write has counters first and then room for two calls. What arrives is added by rank,
from first to last, and every partial sum is rounded: the bits of `collectives.ordered_sum`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from functional_sl.kernels import launch

PROGRAMS = 32  # at most; all of them must run at the same time, with whatever else the GPU computes
COUNTERS = 2 * 2 * PROGRAMS * 32  # bytes: of two meetings in each of two rooms, 32 bytes apart
_WARPS = 16
_ALIGNED = 16  # elements; rows of the room begin at multiples, so that 16 bytes are moved at once


@triton.jit
def _meet(counters, own, arrivals):
    """Waits for the programs of this number on all ranks; what they have written before can be read behind it."""
    # A release covers what the other threads of its program wrote before the barrier.
    tl.debug_barrier()
    tl.atomic_add(counters, 1, sem="release", scope="sys")
    # A difference, as the numbers wrap around.
    while tl.atomic_add(own, 0, sem="acquire", scope="sys") - arrivals < 0:
        pass


@triton.jit
def _read(source, begin, end, BLOCK: tl.constexpr):
    place = begin + tl.arange(0, BLOCK)
    # Under a mask of any length elements would be moved one by one.
    if begin + BLOCK <= end:
        value = tl.load(source + place)
    else:
        value = tl.load(source + place, mask=place < end)
    return value


@triton.jit
def _write(target, begin, end, value, BLOCK: tl.constexpr):
    place = begin + tl.arange(0, BLOCK)
    if begin + BLOCK <= end:
        tl.store(target + place, value)
    else:
        tl.store(target + place, value, mask=place < end)


@triton.jit
def _row(memory, rank, room, number, length, COUNTERS: tl.constexpr, TYPE: tl.constexpr):
    """Returns where a row of a room lies in a rank's memory."""
    base = tl.multiple_of(tl.load(memory + rank).to(tl.pointer_type(TYPE)), 16)
    return base + COUNTERS * 8 // TYPE.primitive_bitwidth + room + number * length


@triton.jit(do_not_specialize=["size"])
def _total(
    x, memory, calls, size, row, RANK: tl.constexpr, RANKS: tl.constexpr, SHOTS: tl.constexpr,
    WIDE: tl.constexpr, COUNTERS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    program, programs = tl.program_id(0), tl.num_programs(0)
    TYPE: tl.constexpr = x.dtype.element_ty
    # Calls take turns in two rooms: whoever writes to one has met the others in the call before, which they began only
    # when they had read this room to its end.
    call = tl.load(calls + program) + 1
    arrivals = ((call + 1) >> 1) * RANKS
    counter = ((call & 1) * 2 * programs + program) * 8
    counters = tl.load(memory + tl.arange(0, RANKS)).to(tl.pointer_type(tl.int32)) + counter
    own = tl.load(memory + RANK).to(tl.pointer_type(tl.int32)) + counter
    room = (call & 1) * SHOTS * RANKS * row
    # In one shot a rank adds all of the vector, in two a part of it, which it hands on.
    for begin in range(program * BLOCK, row, programs * BLOCK):
        for step in tl.static_range(1, RANKS):
            rank = (RANK + step) % RANKS
            first = (SHOTS - 1) * rank * row
            end = tl.minimum(row, size - first)
            value = _read(x + first, begin, end, BLOCK)
            _write(_row(memory, rank, room, RANK, row, COUNTERS, TYPE), begin, end, value, BLOCK)
    _meet(counters, own, arrivals)
    first = (SHOTS - 1) * RANK * row
    end = tl.minimum(row, size - first)
    for begin in range(program * BLOCK, row, programs * BLOCK):
        total = tl.zeros((BLOCK,), TYPE)
        for rank in tl.static_range(RANKS):
            if rank == RANK:
                part = _read(x + first, begin, end, BLOCK)
            else:
                part = _read(_row(memory, RANK, room, rank, row, COUNTERS, TYPE), begin, end, BLOCK)
            # Nothing is added to the first one, which may be a negative zero.
            total = part if rank == 0 else (total.to(WIDE) + part.to(WIDE)).to(TYPE)
        _write(x + first, begin, end, total, BLOCK)
        if SHOTS == 2:
            for step in tl.static_range(1, RANKS):
                rank = (RANK + step) % RANKS
                _write(_row(memory, rank, room, RANKS + RANK, row, COUNTERS, TYPE), begin, end, total, BLOCK)
    if SHOTS == 2:
        _meet(counters + programs * 8, own + programs * 8, arrivals)
        for begin in range(program * BLOCK, row, programs * BLOCK):
            for step in tl.static_range(1, RANKS):
                rank = (RANK + step) % RANKS
                first = (SHOTS - 1) * rank * row
                end = tl.minimum(row, size - first)
                value = _read(_row(memory, RANK, room, RANKS + rank, row, COUNTERS, TYPE), begin, end, BLOCK)
                _write(x + first, begin, end, value, BLOCK)
    tl.store(calls + program, call)


def row(size: int, ranks: int, shots: int) -> int:
    """Returns how many elements of `size` a rank adds; in two shots all ranks together add one vector."""
    part = size if shots == 1 else triton.cdiv(size, ranks)
    return triton.cdiv(part, _ALIGNED) * _ALIGNED


def memory_bytes(size: int, itemsize: int, ranks: int, shots: int) -> int:
    """Returns the bytes that a rank holds for the others, zero before the first call."""
    return COUNTERS + 2 * shots * ranks * row(size, ranks, shots) * itemsize


def total(x: Tensor, memory: Tensor, calls: Tensor, rank: int, ranks: int, shots: int) -> None:
    """Puts into every rank's vector the sum of all, once all have launched it.

    Args:
      x: this rank's, contiguous.
      memory: [ranks] int64, where `memory_bytes` of each rank begin, as this one sees them.
      calls: [PROGRAMS] int32, zero before the first call. It and the memory belong to vectors of one size and type,
        whose sums follow each other.
      rank: this one.
      ranks: 2, 4 or 8.
      shots: 1, every rank adds everything, or 2, every rank adds a part and hands it on.
    """
    part, block = row(x.numel(), ranks, shots), _WARPS * 32 * 16 // x.element_size()
    wide = tl.float64 if x.dtype == torch.float64 else tl.float32
    launch(
        _total, (min(PROGRAMS, triton.cdiv(part, block)),), x, memory, calls, x.numel(), part, RANK=rank,
        RANKS=ranks, SHOTS=shots, WIDE=wide, COUNTERS=COUNTERS, BLOCK=block, num_warps=_WARPS,
    )  # fmt: skip
