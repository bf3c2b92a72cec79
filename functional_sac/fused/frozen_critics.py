"""The lower value of two critics that are only read, and its derivative in the actions, layer by layer.

Batch norm goes by running statistics, so that it is an affine map and a row's value depends on that row alone.
"""

from __future__ import annotations

import torch
from torch import Tensor

from functional_sac import networks
from functional_sac.fused import critic_heads, running_norm
from functional_sac.networks import ALIGNMENT, BatchNorm, Critic, Stats, Trunk


def lower_value(
    critic: Critic, stats: Stats, x: Tensor, actions: int, dtype: torch.dtype, minimum: float, maximum: float
) -> tuple[Tensor, Tensor]:
    """Returns the lower one of the critics' mean returns [B], and its derivative in the actions [B, A].

    Args:
      critic: both critics, stacked [2, ...].
      stats: their running statistics, likewise.
      x: [B, I], observations and, in the last columns, actions.
      actions: A.
      dtype: of the products.
      minimum: the lowest atom.
      maximum: the highest atom.
    """
    h, w, slope, tape = _forward(critic.trunk, stats, x, dtype)
    value, dh = critic_heads.lower_value(h, critic, minimum, maximum)
    for w1, w2, raw, back, first, second in reversed(tape):
        d = torch.bmm(running_norm.backward(dh, back, *second[0], *second[1]), w2)
        dh = torch.baddbmm(dh, running_norm.backward(d, raw, *first[0], *first[1]), w1)
    # Of the inputs only the actions' columns, from a multiple of eight on.
    observed = x.shape[-1] - actions
    begin = observed // ALIGNMENT * ALIGNMENT
    dx = torch.bmm(dh, w[..., begin:])[..., observed - begin : x.shape[-1] - begin]
    return value, (dx * slope[..., observed:]).sum(0)


def activations(trunk: Trunk, stats: Stats, x: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns what N stacked trunks make of their common input [B, I], before the RMS norm: [N, B, H]."""
    return _forward(trunk, stats, x, dtype)[0]


def _forward(trunk: Trunk, stats: Stats, x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, list]:
    """Returns activations, the first matrix and slope, and of every block what its backward pass reads."""
    (norm, running), *rest = _norms(trunk, stats)
    slope, offset = running_norm.affine(norm, running)
    y, w = (networks.padded(t).to(dtype) for t in (torch.addcmul(offset, x, slope), trunk.w))
    h, tape = torch.bmm(y, w.mT), []
    for block, first, second in zip(trunk.blocks, rest[::2], rest[1::2], strict=True):
        w1, w2 = block.w1.to(dtype), block.w2.to(dtype)
        raw = torch.bmm(h, w1.mT)
        back = torch.bmm(running_norm.forward(raw, *first[0], *first[1], None), w2.mT)
        h = running_norm.forward(back, *second[0], *second[1], h)
        tape.append((w1, w2, raw, back, first, second))
    return h, w, slope, tape


def _norms(trunk: Trunk, stats: Stats) -> list[tuple[BatchNorm, Stats]]:
    """Returns every batch norm with its statistics, in the order of the layers."""
    norms = [trunk.norm, *(norm for block in trunk.blocks for norm in (block.norm1, block.norm2))]
    widths = networks.norm_widths(trunk)
    running = zip(*(part.split(widths, -1) for part in stats), strict=True)
    return [(norm, Stats(*parts)) for norm, parts in zip(norms, running, strict=True)]
