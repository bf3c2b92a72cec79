"""Mixtures of diagonal normals over D dimensions, the output of a network: K components, 1 + 2 D numbers each."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

# Of the spread of the normalised target. Narrow components settle on single values, and the heaviest is then often
# the wrong one: on the pendulum 0.01 fails where 0.1 does as well as the expert.
MIN_STD = 0.1


class Mixture(NamedTuple):
    """K components over D dimensions, with any leading axes."""

    log_weight: Tensor  # [..., K], normalised
    mean: Tensor  # [..., K, D]
    std: Tensor  # [..., K, D], at least MIN_STD


def width(components: int, dims: int) -> int:
    """Returns how many numbers a network must give."""
    return components * (1 + 2 * dims)


def from_output(output: Tensor, components: int, dims: int) -> Mixture:
    """Returns the mixture that [..., K (1 + 2 D)] numbers describe."""
    logits, mean, raw = output.split((components, components * dims, components * dims), -1)
    shape = (*output.shape[:-1], components, dims)
    return Mixture(torch.log_softmax(logits, -1), mean.reshape(shape), F.softplus(raw.reshape(shape)) + MIN_STD)


def nll(mixture: Mixture, target: Tensor) -> Tensor:
    """Returns the negative log density [...] of targets [..., D]."""
    z = (target.unsqueeze(-2) - mixture.mean) / mixture.std
    log_density = -(0.5 * torch.square(z) + torch.log(mixture.std) + 0.5 * math.log(2.0 * math.pi)).sum(-1)
    return -torch.logsumexp(mixture.log_weight + log_density, -1)


def mode(mixture: Mixture) -> Tensor:
    """Returns the mean [..., D] of the heaviest component, the first among equals."""
    heaviest = mixture.log_weight.argmax(-1, keepdim=True)
    # A mask instead of indexing, whose gradient would be scattered.
    chosen = torch.arange(mixture.mean.shape[-2], device=heaviest.device) == heaviest
    return torch.where(chosen.unsqueeze(-1), mixture.mean, 0.0).sum(-2)
