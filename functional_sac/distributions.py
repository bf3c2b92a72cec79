"""The tanh-squashed diagonal Gaussian policy (Haarnoja et al. 2018, appendix C)."""

from __future__ import annotations

import math
from typing import NamedTuple

import chex
import torch
import torch.nn.functional as F
from torch import Tensor

_LOG_SQRT_TWO_PI = 0.5 * math.log(2.0 * math.pi)


class Sample(NamedTuple):
    """An action and its density."""

    action: Tensor  # [..., A] in [-1, 1]
    log_prob: Tensor  # [...]


def sample(mean: Tensor, log_std: Tensor, noise: Tensor) -> Sample:
    """Squashes `u = mean + exp(log_std) * noise` and returns its exact log-density.

    `log p(tanh u) = sum_a [log N(u_a) - 2 (ln 2 - u_a - softplus(-2 u_a))]`, equation 21 of arXiv 1801.01290 with
    the numerically stable tanh Jacobian.

    Args:
      mean: [..., A] float32.
      log_std: [..., A] float32.
      noise: [..., A] float32, standard normal.

    Returns:
      The action and its log-probability in nats.
    """
    chex.assert_equal_shape([mean, log_std, noise])
    u = mean + torch.exp(log_std) * noise
    gaussian = -0.5 * noise * noise - log_std - _LOG_SQRT_TWO_PI
    jacobian = 2.0 * (math.log(2.0) - u - F.softplus(-2.0 * u))
    return Sample(torch.tanh(u), (gaussian - jacobian).sum(-1))


def target_entropy(action_dim: int, sigma: float) -> float:
    """Returns the entropy in nats of a Gaussian of standard deviation `sigma` in every action dimension."""
    return 0.5 * action_dim * math.log(2.0 * math.pi * math.e * sigma**2)
