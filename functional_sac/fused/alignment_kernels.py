"""The Triton kernel of `alignment`: a program copies a piece of one leaf; which one is static."""

from __future__ import annotations

from collections.abc import Sequence

import triton
import triton.language as tl
from torch import Tensor

from functional_sl.kernels import launch

PIECE = 2048  # elements of a program


@triton.jit
def _piece(
    leaf, output, begin, START: tl.constexpr, SIZE: tl.constexpr, LENGTH: tl.constexpr, WIDTH: tl.constexpr,
    PIECE: tl.constexpr,
):  # fmt: skip
    place = begin + tl.arange(0, PIECE)
    inside = place < SIZE
    if LENGTH == WIDTH:
        value = tl.load(leaf + place, mask=inside, other=0.0)
    else:
        column = place % WIDTH
        value = tl.load(leaf + (place // WIDTH) * LENGTH + column, mask=inside & (column < LENGTH), other=0.0)
    tl.store(output + START + place, value.to(output.dtype.element_ty), mask=inside)


@triton.jit
def _align(leaves, outputs, PLAN: tl.constexpr, COUNT: tl.constexpr, OUTPUTS: tl.constexpr, PIECE: tl.constexpr):
    program = tl.program_id(0)
    for i in tl.static_range(COUNT):
        if (program >= PLAN[i][0]) & (program < PLAN[i][1]):
            _piece(
                leaves[i], outputs[i % OUTPUTS], (program - PLAN[i][0]) * PIECE, PLAN[i][2], PLAN[i][3], PLAN[i][4],
                PLAN[i][5], PIECE,
            )  # fmt: skip


def align(leaves: Sequence[Tensor], outputs: Sequence[Tensor]) -> None:
    """Stacks leaf i behind those before it in output i modulo the number of outputs, with zeros behind its rows."""
    plan, first, starts = [], 0, [0] * len(outputs)
    for i, leaf in enumerate(leaves):
        n, length = i % len(outputs), leaf.shape[-1]
        width = outputs[n].shape[-1]
        size = leaf.numel() // length * width
        plan.append((first, first + triton.cdiv(size, PIECE), starts[n], size, length, width))
        first, starts[n] = plan[-1][1], starts[n] + size
    given = tuple(leaf.contiguous() for leaf in leaves)
    launch(
        _align, (first,), given, tuple(outputs), PLAN=tuple(plan), COUNT=len(plan), OUTPUTS=len(outputs), PIECE=PIECE,
    )  # fmt: skip
