"""The lower value of two critics that are only read, and its derivative in the actions, layer by layer.

Batch norm goes by running statistics, so that it is an affine map and a row's value depends on that row alone.
"""

from __future__ import annotations

import torch
from torch import Tensor

from functional_sac import networks
from functional_sac.fused import critic_heads, running_norm
from functional_sac.fused.alignment import INPUT_WEIGHT
from functional_sac.fused.trunk import LEAVES
from functional_sac.networks import ALIGNMENT, BatchNorm, Critic, Stats, Trunk


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
    for w1, w2, raw, back, first, second in reversed(tape):
        d = torch.bmm(running_norm.backward(dh, back, *second[0], *second[1]), w2)
        dh = torch.baddbmm(dh, running_norm.backward(d, raw, *first[0], *first[1]), w1)
    # Of the inputs only the actions' columns, from a multiple of eight on.
    observed = x.shape[-1] - actions
    begin = observed // ALIGNMENT * ALIGNMENT
    w = leaves[INPUT_WEIGHT][..., begin:]
    dx = torch.bmm(dh, w)[..., observed - begin : x.shape[-1] - begin]
    return value, (dx * slope[..., observed:]).sum(0)


def activations(trunk: Trunk, stats: Stats, leaves: list[Tensor], x: Tensor) -> Tensor:
    """Returns what N stacked trunks make of their common input [B, I], before the RMS norm: [N, B, H]."""
    return _forward(trunk, stats, leaves, x)[0]


def _forward(trunk: Trunk, stats: Stats, leaves: list[Tensor], x: Tensor) -> tuple[Tensor, Tensor, list]:
    """Returns activations, the first slope, and of every block what its backward pass reads."""
    (norm, running), *rest = _norms(trunk, stats)
    slope, offset = running_norm.affine(norm, running)
    w, *blocks = leaves[INPUT_WEIGHT:]
    y = networks.padded(torch.addcmul(offset, x, slope)).to(w.dtype)
    h, tape = torch.bmm(y, w.mT), []
    matrices = blocks[::LEAVES], blocks[LEAVES // 2 :: LEAVES]
    for w1, w2, first, second in zip(*matrices, rest[::2], rest[1::2], strict=True):
        raw = torch.bmm(h, w1.mT)
        back = torch.bmm(running_norm.forward(raw, *first[0], *first[1], None), w2.mT)
        h = running_norm.forward(back, *second[0], *second[1], h)
        tape.append((w1, w2, raw, back, first, second))
    return h, slope, tape


def _norms(trunk: Trunk, stats: Stats) -> list[tuple[BatchNorm, Stats]]:
    """Returns every batch norm with its statistics, in the order of the layers."""
    norms = [trunk.norm, *(norm for block in trunk.blocks for norm in (block.norm1, block.norm2))]
    widths = networks.norm_widths(trunk)
    running = zip(*(part.split(widths, -1) for part in stats), strict=True)
    return [(norm, Stats(*parts)) for norm, parts in zip(norms, running, strict=True)]
