"""Losses of one example. `torch.func.vmap` adds the batch, and the mean is taken at the call site.

Each returns a 0-d tensor. A wrong rank or shape is an AssertionError: a batch axis that should have been mapped,
or a broadcast of [B, 1] against [B], never passes.
"""

from __future__ import annotations

import math

import chex
import torch
from torch import Tensor


def squared_error(prediction: Tensor, target: Tensor) -> Tensor:
    """Returns the mean of (prediction - target)^2 over the D components.

    Args:
      prediction: [D] floating point.
      target: [D], of the same dtype.
    """
    _check_vectors(prediction, target)
    return torch.square(prediction - target).mean()


def huber(prediction: Tensor, target: Tensor, delta: float = 1.0) -> Tensor:
    """Returns the mean over the D components of Huber's loss: e^2 / 2 up to |e| = delta, then a line of slope delta.

    Args:
      prediction: [D] floating point.
      target: [D], of the same dtype.
      delta: the error where the parabola turns into the line; positive.
    """
    _check_vectors(prediction, target)
    error = torch.abs(prediction - target)
    quadratic = torch.clamp(error, max=delta)
    return (0.5 * torch.square(quadratic) + delta * (error - quadratic)).mean()


def cross_entropy(logits: Tensor, target_probs: Tensor) -> Tensor:
    """Returns -sum_k target_k log softmax(logits)_k, summed over the K classes.

    Args:
      logits: [K] floating point.
      target_probs: [K], not negative, summing to 1.
    """
    _check_vectors(logits, target_probs)
    return -(target_probs * torch.log_softmax(logits, dim=0)).sum()


def softmax_cross_entropy_with_integer_labels(logits: Tensor, label: Tensor) -> Tensor:
    """Returns -log softmax(logits)[label], which reduces over the K classes.

    A label outside 0 ... K-1 gives infinity, which the gate rejects: values are never read on the host.

    Args:
      logits: [K] floating point.
      label: [] integer.
    """
    chex.assert_rank([logits, label], [1, 0])
    classes = torch.arange(logits.shape[0], device=logits.device)
    # A mask instead of indexing: the backward pass then scatters nothing, hence is deterministic.
    chosen = torch.where(classes == label, logits, -math.inf).amax()
    return torch.logsumexp(logits, dim=0) - chosen


def gaussian_nll(mean: Tensor, log_std: Tensor, target: Tensor) -> Tensor:
    """Returns the negative log density of `target` under independent normals, summed over the D components.

    Args:
      mean: [D] floating point.
      log_std: [D], natural logarithm of the standard deviations.
      target: [D].
    """
    _check_vectors(mean, log_std, target)
    z = (target - mean) * torch.exp(-log_std)
    return (0.5 * torch.square(z) + log_std + 0.5 * math.log(2 * math.pi)).sum()


def _check_vectors(*inputs: Tensor) -> None:
    chex.assert_rank(inputs, 1)
    chex.assert_equal_shape(inputs)
