"""The lower value of two critics that are only read, and its derivative in the actions, layer by layer.

Batch norm goes by running statistics, so that it is an affine map and a row's value depends on that row alone.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from functional_sac import networks
from functional_sac.fused import critic_heads, frozen_blocks
from functional_sac.fused.alignment import INPUT_WEIGHT
from functional_sac.fused.trunk import LEAVES
from functional_sac.networks import ALIGNMENT, BatchNorm, Critic, Stats, Trunk


class _Block(NamedTuple):
    """What the backward pass of a block reads."""

    w1: Tensor  # [N, F, H]
    w2: Tensor  # [N, H, F]
    y: Tensor  # [N, B, F], behind the first ReLU
    passed: Tensor  # [N, B, H] bool, where the second one let through
    first: tuple[Tensor, Tensor]  # scale and variance [N, F] of the first norm
    second: tuple[Tensor, Tensor]  # likewise [N, H] of the second one


def lower_value(
    critic: Critic, stats: Stats, leaves: list[Tensor], x: Tensor, actions: int, minimum: float, maximum: float
) -> tuple[Tensor, Tensor]:
    """Returns the lower one of the critics' mean returns [B], and its derivative in the actions [B, A].

    Args:
      critic: both critics, stacked [2, ...].
      stats: their running statistics, likewise.
      leaves: their trunks, `alignment.aligned` in the type of the products.
      x: [B, I], observations and, in the last columns, actions.
      actions: A.
      minimum: the lowest atom.
      maximum: the highest atom.
    """
    h, slope, tape = _forward(critic.trunk, stats, leaves, x)
    value, dh = critic_heads.lower_value(h, critic, minimum, maximum)
    d = frozen_blocks.masked(dh, tape[-1].passed, *tape[-1].second)
    for block, before in zip(reversed(tape), [*reversed(tape[:-1]), None], strict=True):
        d = frozen_blocks.inner_backward(d, block.w2, block.y, *block.first)
        if before is None:
            dh = frozen_blocks.added(d, block.w1, dh)
        else:
            dh, d = frozen_blocks.outer_backward(d, block.w1, dh, before.passed, *before.second)
    # Of the inputs only the actions' columns, from a multiple of eight on.
    observed = x.shape[-1] - actions
    begin = observed // ALIGNMENT * ALIGNMENT
    w = leaves[INPUT_WEIGHT][..., begin:]
    dx = torch.bmm(dh, w)[..., observed - begin : x.shape[-1] - begin]
    return value, (dx * slope[..., observed:]).sum(0)


def activations(trunk: Trunk, stats: Stats, leaves: list[Tensor], x: Tensor) -> Tensor:
    """Returns what N stacked trunks make of their common input [B, I], before the RMS norm: [N, B, H]."""
    return _forward(trunk, stats, leaves, x)[0]


def _forward(trunk: Trunk, stats: Stats, leaves: list[Tensor], x: Tensor) -> tuple[Tensor, Tensor, list[_Block]]:
    """Returns activations, the first slope, and of every block what its backward pass reads."""
    own, *rest = _norms(trunk, stats)
    slope, offset = frozen_blocks.affine(*own)
    w, *blocks = leaves[INPUT_WEIGHT:]
    y = networks.padded(torch.addcmul(offset, x, slope)).to(w.dtype)
    h, tape = torch.bmm(y, w.mT), []
    matrices = blocks[::LEAVES], blocks[LEAVES // 2 :: LEAVES]
    for w1, w2, first, second in zip(*matrices, rest[::2], rest[1::2], strict=True):
        y = frozen_blocks.inner(h, w1, *first)
        h, passed = frozen_blocks.outer(y, w2, *second, h)
        slopes = [(norm.scale, running.var) for norm, running in (first, second)]
        tape.append(_Block(w1, w2, y, passed, *slopes))
    return h, slope, tape


def _norms(trunk: Trunk, stats: Stats) -> list[tuple[BatchNorm, Stats]]:
    """Returns every batch norm with its statistics, in the order of the layers."""
    norms = [trunk.norm, *(norm for block in trunk.blocks for norm in (block.norm1, block.norm2))]
    widths = networks.norm_widths(trunk)
    running = zip(*(part.split(widths, -1) for part in stats), strict=True)
    return [(norm, Stats(*parts)) for norm, parts in zip(norms, running, strict=True)]
