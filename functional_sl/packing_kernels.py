"""The Triton kernel of `packing`: a program takes a piece of one leaf.

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


@triton.jit
def _piece(
    leaf, packed, sentinels, lost, begin, START: tl.constexpr, SIZE: tl.constexpr, LENGTH: tl.constexpr,
    ROWS: tl.constexpr, MATRIX: tl.constexpr, ROW: tl.constexpr, COLUMN: tl.constexpr, DTYPE: tl.constexpr,
    LIMIT: tl.constexpr, PIECE: tl.constexpr,
):  # fmt: skip
    place = begin + tl.arange(0, PIECE)
    inside = place < SIZE
    if (MATRIX == ROWS * LENGTH) and (ROW == LENGTH) and (COLUMN == 1):
        source = leaf + place
    else:
        row = place // LENGTH
        source = leaf + (row // ROWS) * MATRIX + (row % ROWS) * ROW + (place % LENGTH) * COLUMN
    value = tl.load(source, mask=inside, other=0.0).to(DTYPE)
    # A comparison with NaN is false.
    raised = tl.max(tl.where(tl.abs(value) < LIMIT, 0, 1), 0)
    if packed is not None:
        tl.store(packed + START + place, value.to(packed.dtype.element_ty), mask=inside)
        raised = tl.maximum(raised, lost).to(tl.float32)
    tl.store(sentinels + tl.program_id(0), raised.to(sentinels.dtype.element_ty))


@triton.jit
def _pack(
    leaves, loss, packed, sentinels, PLAN: tl.constexpr, COUNT: tl.constexpr, DTYPE: tl.constexpr, LIMIT: tl.constexpr,
    PIECE: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    lost = 0
    if loss is not None:
        lost = tl.where(tl.abs(tl.load(loss)) < float("inf"), 0, 1)
    for i in tl.static_range(COUNT):
        if (program >= PLAN[i][0]) & (program < PLAN[i][1]):
            _piece(
                leaves[i], packed, sentinels, lost, (program - PLAN[i][0]) * PIECE, PLAN[i][2], PLAN[i][3], PLAN[i][4],
                PLAN[i][5], PLAN[i][6], PLAN[i][7], PLAN[i][8], DTYPE, LIMIT, PIECE,
            )  # fmt: skip


def pack(
    leaves: Sequence[Tensor],
    loss: Tensor | None,
    packed: Tensor | None,
    sentinels: Tensor,
    dtype: torch.dtype,
    limit: float,
    piece: int,
) -> None:
    """Packs leaves and tells of every piece whether a magnitude in it is not below the limit, or the loss not finite.

    Args:
      leaves: in types that `dtype` holds.
      loss: 0-d, or None, which is finite.
      packed: [P], takes the elements, rounded from `dtype`; None where they are only looked at.
      sentinels: [Q], takes 1 for a piece where something is wrong, else 0.
      dtype: in which elements are looked at.
      limit: see `wire.limit`.
      piece: elements of a piece.
    """
    given = [matrices(leaf) for leaf in leaves if leaf.numel()]
    plan, programs, size = [], 0, 0
    for leaf in given:
        last = programs + triton.cdiv(leaf.numel(), piece)
        plan.append((programs, last, size, leaf.numel(), *leaf.shape[:0:-1], *leaf.stride()))
        programs = last
        size += leaf.numel()
    launch(
        _pack, (programs,), tuple(given), loss, packed, sentinels, PLAN=tuple(plan), COUNT=len(plan),
        DTYPE=getattr(tl, str(dtype).removeprefix("torch.")), LIMIT=limit, PIECE=piece,
    )  # fmt: skip
