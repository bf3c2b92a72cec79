"""What follows the trunk of stacked critics, forward and backward: RMS norm, head and loss.

The gradients are those of `losses`, written out; products run in the type of the activations.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from functional_sac.fused import categorical, rms_norm
from functional_sac.networks import RMS_EPS, Critic


class Backup(NamedTuple):
    """What the target critics' distributions are backed up by."""

    reward: Tensor  # [B], scaled
    terminated: Tensor  # [B] bool
    entropy_term: Tensor  # [B]
    minimum: float  # of the atoms
    maximum: float
    discount: float


def loss_gradient(
    h: Tensor, scale: Tensor, w: Tensor, critic: Critic, target: Critic, backup: Backup
) -> tuple[Tensor, list[Tensor]]:
    """Differentiates `losses.cross_entropy` towards `losses.backup` in the critics.

    Args:
      h: [4, 2B, H], both critics' activations, then both target critics', of observations, then next observations.
      scale: [4, H] of the RMS norms.
      w: [4, M, H] of the heads, padded, in the type of h.
      critic: stacked [2, ...].
      target: likewise.
      backup: of the transitions.

    Returns:
      (gradient of the critics' activations of observations [2, B, H], those of next ones being zero; what is left for
      `trunk.backward` to do and `finished` to name).
    """
    rows = h.shape[1] // 2
    # Critics see the observations, and the target critics, two networks on, the next ones, `rows` further down.
    h = h.as_strided((2, 2, rows, h.shape[2]), (2 * h.stride(0) + rows * h.stride(1), *h.stride()))
    normal = rms_norm.forward(h, scale.unflatten(0, (2, 2)), h.dtype, RMS_EPS)
    logits = torch.bmm(normal.flatten(0, 1), w.mT)
    found, dlogits, db = categorical.loss(logits, critic.b, target.b, *backup)
    dh, post_scale = rms_norm.backward(torch.bmm(dlogits, w[:2]), h[0], critic.trunk.post_scale, RMS_EPS)
    return dh, [dlogits, normal[0], post_scale, db, found]


def finished(behind: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
    """Returns the loss (), and the gradients of RMS norm's scale [2, H], of weights [2, bins, H] and bias [2, bins]."""
    w, post_scale, b, loss = behind
    return loss, [post_scale, w[:, : b.shape[1]], b]


def lower_value(
    h: Tensor, scale: Tensor, w: Tensor, bias: Tensor, minimum: float, maximum: float
) -> tuple[Tensor, Tensor]:
    """Returns the lower one of two critics' mean returns [B], and its derivative in their activations.

    Args:
      h: [2, B, H].
      scale: [2, H] of the RMS norms.
      w: [2, M, H] of the heads, padded, in the type of h.
      bias: [2, bins] of the heads.
      minimum: the lowest atom.
      maximum: the highest atom.

    Returns:
      (values [B], derivatives [2, B, H]).
    """
    normal = rms_norm.forward(h, scale, h.dtype, RMS_EPS)
    value, dlogits = categorical.lower_value(torch.bmm(normal, w.mT), bias, minimum, maximum)
    return value, rms_norm.backward(torch.bmm(dlogits, w), h, scale, RMS_EPS)[0]
