"""What follows the trunk of the policy, forward and backward: RMS norm and both heads in one product."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from functional_sac import networks
from functional_sac.fused import rms_norm
from functional_sac.networks import RMS_EPS, Actor


class Tape(NamedTuple):
    """What `backward` reads."""

    h: Tensor  # [1, B, H]
    normal: Tensor  # [B, H]
    w: Tensor  # [2A, H], padded


class Head(NamedTuple):
    """The gradients of a policy's activations, and of its parameters behind the trunk's blocks."""

    h: Tensor  # [1, B, H]
    post_scale: Tensor  # [H]
    mean_w: Tensor  # [A, H]
    mean_b: Tensor  # [A]
    std_w: Tensor  # [A, H]
    std_b: Tensor  # [A]


def forward(h: Tensor, scale: Tensor, w: Tensor, actor: Actor, dtype: torch.dtype) -> tuple[Tensor, Tape]:
    """Returns means and raw deviations side by side, and the tape.

    Args:
      h: [1, B, H].
      scale: [1, H] of the RMS norm.
      w: [1, M, H] of both heads, padded, in the type of h.
      actor: with their biases.
      dtype: of what is returned, [B, 2A].
    """
    normal, w = rms_norm.forward(h, scale, h.dtype, RMS_EPS).squeeze(0), w.squeeze(0)
    outputs = 2 * actor.mean_b.shape[0]
    raw = torch.mm(normal, w.mT)[:, :outputs].to(dtype) + torch.cat([actor.mean_b, actor.std_b])
    return raw, Tape(h, normal, w)


def backward(actor: Actor, tape: Tape, draw: Tensor) -> Head:
    """Returns the gradients from that of what `forward` returned, [B, 2A]."""
    db, outputs = draw.sum(0), draw.shape[1]
    draw = networks.padded(draw).to(tape.h.dtype)
    flow = torch.mm(draw, tape.w).unsqueeze(0)
    dh, post_scale = rms_norm.backward(flow, tape.h, actor.trunk.post_scale.unsqueeze(0), RMS_EPS)
    mean_w, std_w = torch.mm(draw.mT, tape.normal)[:outputs].chunk(2)
    mean_b, std_b = db.chunk(2)
    return Head(dh, post_scale.sum(0).squeeze(0), mean_w, mean_b, std_w, std_b)
