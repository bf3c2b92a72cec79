"""The lower value of two critics that are only read, and its derivative in the actions, layer by layer.

Batch norm goes by running statistics, so that it is an affine map and a row's value depends on that row alone.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from functional_sac import critic_heads, networks
from functional_sac.networks import ALIGNMENT, BN_EPS, BatchNorm, Critic, Stats, Trunk


class Affine(NamedTuple):
    """What a batch norm does by its running statistics."""

    slope: Tensor  # [N, 1, F]
    offset: Tensor  # [N, 1, F]


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
    trunk, norms = critic.trunk, _affine(critic.trunk, stats)
    w = networks.padded(trunk.w).to(dtype)
    h, tape = torch.bmm(networks.padded(_apply(norms[0], x)).to(dtype), w.mT), []
    for i, block in enumerate(trunk.blocks):
        one, two = norms[1 + 2 * i : 3 + 2 * i]
        w1, w2 = block.w1.to(dtype), block.w2.to(dtype)
        inner = torch.relu(_apply(one, torch.bmm(h, w1.mT)).to(dtype))
        out = torch.relu(_apply(two, torch.bmm(inner, w2.mT)).to(dtype))
        tape.append((w1, w2, inner, out, one, two))
        h = h + out
    value, dh = critic_heads.lower_value(h, critic, minimum, maximum)
    for w1, w2, inner, out, one, two in reversed(tape):
        d = torch.where(out <= 0, 0.0, dh * two.slope).to(dtype)
        d = torch.where(inner <= 0, 0.0, torch.bmm(d, w2) * one.slope).to(dtype)
        dh = torch.baddbmm(dh, d, w1)
    # Of the inputs only the actions' columns, from a multiple of eight on.
    first = x.shape[-1] - actions
    begin = first // ALIGNMENT * ALIGNMENT
    dx = torch.bmm(dh, w[..., begin:])[..., first - begin : x.shape[-1] - begin]
    return value, (dx * norms[0].slope[..., first:]).sum(0)


def _affine(trunk: Trunk, stats: Stats) -> list[Affine]:
    norms: list[BatchNorm] = [trunk.norm, *(norm for block in trunk.blocks for norm in (block.norm1, block.norm2))]
    widths = networks.norm_widths(trunk)
    running = zip(stats.mean.split(widths, -1), torch.rsqrt(stats.var + BN_EPS).split(widths, -1), strict=True)
    slopes = [(norm, mean, norm.scale * inverse_std) for norm, (mean, inverse_std) in zip(norms, running, strict=True)]
    return [Affine(slope.unsqueeze(1), (norm.bias - mean * slope).unsqueeze(1)) for norm, mean, slope in slopes]


def _apply(affine: Affine, x: Tensor) -> Tensor:
    return torch.addcmul(affine.offset, x.to(affine.slope.dtype), affine.slope)
