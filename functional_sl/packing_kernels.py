"""The Triton kernels of `packing`: a program takes a piece of one leaf, and in a packed vector a last one the rest.

Which program takes what is static, and so is how a leaf lies in memory: each leaf has a branch of its own, with
nothing to look up.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from functional_sl.kernels import launch, matrices

FLAGS = 1024  # of programs that are read at a time


@triton.jit
def _piece(
    leaf, packed, bad, begin, START: tl.constexpr, SIZE: tl.constexpr, LENGTH: tl.constexpr, ROWS: tl.constexpr,
    MATRIX: tl.constexpr, ROW: tl.constexpr, COLUMN: tl.constexpr, PACK: tl.constexpr, PIECE: tl.constexpr,
):  # fmt: skip
    place = begin + tl.arange(0, PIECE)
    inside = place < SIZE
    if (MATRIX == ROWS * LENGTH) and (ROW == LENGTH) and (COLUMN == 1):
        source = leaf + place
    else:
        row = place // LENGTH
        source = leaf + (row // ROWS) * MATRIX + (row % ROWS) * ROW + (place % LENGTH) * COLUMN
    value = tl.load(source, mask=inside, other=0.0).to(packed.dtype.element_ty)
    if PACK:
        tl.store(packed + START + place, value, mask=inside)
    # A comparison with NaN is false.
    tl.store(bad + tl.program_id(0), tl.max(tl.where(tl.abs(value) < float("inf"), 0, 1), 0))


@triton.jit
def _pack(leaves, packed, bad, PLAN: tl.constexpr, COUNT: tl.constexpr, PACK: tl.constexpr, PIECE: tl.constexpr):
    program = tl.program_id(0)
    for i in tl.static_range(COUNT):
        if (program >= PLAN[i][0]) & (program < PLAN[i][1]):
            _piece(
                leaves[i], packed, bad, (program - PLAN[i][0]) * PIECE, PLAN[i][2], PLAN[i][3], PLAN[i][4], PLAN[i][5],
                PLAN[i][6], PLAN[i][7], PLAN[i][8], PACK, PIECE,
            )  # fmt: skip


@triton.jit
def _sentinel(bad, loss, packed, size, PROGRAMS: tl.constexpr, FLAGS: tl.constexpr):
    found = tl.zeros((FLAGS,), tl.int32)
    for begin in range(0, PROGRAMS, FLAGS):
        place = begin + tl.arange(0, FLAGS)
        found = tl.maximum(found, tl.load(bad + place, mask=place < PROGRAMS, other=0))
    is_bad = tl.where(tl.abs(tl.load(loss)) < float("inf"), tl.max(found, 0), 1)
    tl.store(packed + size, is_bad.to(packed.dtype.element_ty))


def pack(leaves: Sequence[Tensor], loss: Tensor, dtype: torch.dtype, piece: int) -> Tensor:
    """Launches `packing.pack`, a program for so many elements."""
    packed = torch.empty(sum(leaf.numel() for leaf in leaves) + 1, dtype=dtype, device=loss.device)
    bad = _look(leaves, packed, True, piece)
    launch(_sentinel, (1,), bad, loss, packed, packed.numel() - 1, PROGRAMS=bad.numel(), FLAGS=FLAGS)
    return packed


def not_finite(leaves: Sequence[Tensor], dtype: torch.dtype, piece: int) -> Tensor:
    """Launches what tells for every piece whether it is not finite."""
    return _look(leaves, leaves[0].new_empty((), dtype=dtype), False, piece)


def _look(leaves: Sequence[Tensor], packed: Tensor, pack: bool, piece: int) -> Tensor:
    """Has the leaves looked at in the type of `packed`, and packed there or not; returns what was found by piece."""
    given = [matrices(leaf) for leaf in leaves]
    plan, programs, size = [], 0, 0
    for leaf in given:
        last = programs + triton.cdiv(leaf.numel(), piece)
        plan.append((programs, last, size, leaf.numel(), *leaf.shape[:0:-1], *leaf.stride()))
        programs = last
        size += leaf.numel()
    bad = torch.empty(programs, dtype=torch.int32, device=packed.device)
    launch(_pack, (programs,), tuple(given), packed, bad, PLAN=tuple(plan), COUNT=len(plan), PACK=pack, PIECE=piece)
    return bad
