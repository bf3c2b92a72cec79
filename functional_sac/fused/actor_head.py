"""What follows the trunk of the policy, forward and backward: RMS norm and both heads in one product."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from functional_sac.fused import rms_norm
from functional_sac.networks import RMS_EPS, Actor
from functional_sac.padding import padded


class Tape(NamedTuple):
    """What `backward` reads."""

    h: Tensor  # [1, B, H]
    normal: Tensor  # [B, H]
    w: Tensor  # [2A, H], padded


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


def backward(actor: Actor, tape: Tape, draw: Tensor) -> tuple[Tensor, list[Tensor]]:
    """Goes backward from the gradient of what `forward` returned, [B, 2A].

    Returns:
      (gradient of the activations [1, B, H]; what is left for `trunk.backward` to do and `finished` to name).
    """
    dy = padded(draw).to(tape.h.dtype)
    flow = torch.mm(dy, tape.w).unsqueeze(0)
    dh, post_scale = rms_norm.backward(flow, tape.h, actor.trunk.post_scale.unsqueeze(0), RMS_EPS)
    return dh, [dy.unsqueeze(0), tape.normal.unsqueeze(0), post_scale, draw.unsqueeze(1)]


def finished(behind: list[Tensor]) -> list[Tensor]:
    """Returns the gradients of RMS norm's scale [1, H] and both heads' weights [1, A, H] and biases [1, A] in turn."""
    w, post_scale, b = behind
    mean_w, std_w = w[:, : b.shape[1]].chunk(2, 1)
    mean_b, std_b = b.chunk(2, 1)
    return [post_scale, mean_w, mean_b, std_w, std_b]
