"""Networks that are only read: two critics' lower value with its derivative in the actions, and an actor's trunk.

Batch norm goes by running statistics, so that it is an affine map and what a row comes to depends on that row alone.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from functional_sac import networks
from functional_sac.fused import critic_heads, frozen_blocks, inputs
from functional_sac.fused.alignment import BLOCK_LEAVES, INPUT_WEIGHT
from functional_sac.fused.float32_products import traced_product
from functional_sac.fused.inputs import Batch
from functional_sac.networks import BatchNorm, Critic, Stats, Trunk
from functional_sac.padding import ALIGNMENT


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
      leaves: of both, `alignment.aligned` in the type of the products.
      x: [B, I], observations and, in the last columns, actions.
      actions: A.
      minimum: the lowest atom.
      maximum: the highest atom.
    """
    *leaves, scale, w = leaves
    own, *rest = _norms(critic.trunk, stats)
    y = inputs.normalised(x, None, 0, *own, leaves[INPUT_WEIGHT].dtype)
    h, tape = _forward(y, leaves, rest)
    value, dh = critic_heads.lower_value(h, scale, w, critic.b, minimum, maximum)
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
    slope = frozen_blocks.slope(own[0].scale[..., observed:], own[1].var[..., observed:])
    return value, (dx * slope).sum(0)


def activations(trunk: Trunk, stats: Stats, leaves: list[Tensor], batch: Batch) -> Tensor:
    """Returns what N stacked trunks make of an actor's next observations, before the RMS norm: [N, B, H]."""
    own, *rest = _norms(trunk, stats)
    return _forward(batch.next_actor_input(*own, leaves[INPUT_WEIGHT].dtype), leaves, rest)[0]


def _forward(y: Tensor, leaves: list[Tensor], norms: list[tuple[BatchNorm, Stats]]) -> tuple[Tensor, list[_Block]]:
    """Returns the activations [N, B, H] of a normalised input, and of every block what its backward pass reads."""
    w, *blocks = leaves[INPUT_WEIGHT:]
    h, tape = traced_product(y, w.mT), []
    matrices = blocks[::BLOCK_LEAVES], blocks[BLOCK_LEAVES // 2 :: BLOCK_LEAVES]
    for w1, w2, first, second in zip(*matrices, norms[::2], norms[1::2], strict=True):
        y = frozen_blocks.inner(h, w1, *first)
        h, passed = frozen_blocks.outer(y, w2, *second, h)
        slopes = [(norm.scale, running.var) for norm, running in (first, second)]
        tape.append(_Block(w1, w2, y, passed, *slopes))
    return h, tape


def _norms(trunk: Trunk, stats: Stats) -> list[tuple[BatchNorm, Stats]]:
    """Returns every batch norm with its statistics, in the order of the layers."""
    norms = [trunk.norm, *(norm for block in trunk.blocks for norm in (block.norm1, block.norm2))]
    widths = networks.norm_widths(trunk)
    running = zip(*(part.split(widths, -1) for part in stats), strict=True)
    return [(norm, Stats(*parts)) for norm, parts in zip(norms, running, strict=True)]
