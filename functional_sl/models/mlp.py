"""The multi-layer perceptron as an init/apply pair."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from functional_sl import keys

ACTIVATIONS = {"relu": F.relu, "gelu": F.gelu, "silu": F.silu, "tanh": torch.tanh}


class Linear(NamedTuple):
    """An affine map of I inputs to O outputs."""

    weight: Tensor  # [O, I]
    bias: Tensor  # [O]


MLP = tuple[Linear, ...]


def init(key: Tensor, sizes: Sequence[int]) -> MLP:
    """Returns len(sizes) - 1 layers, drawn uniformly from +-1/sqrt(inputs) like `torch.nn.Linear`.

    Args:
      key: [2].
      sizes: input, hidden and output widths.
    """
    widths = list(itertools.pairwise(sizes))
    return tuple(_linear(k, *pair) for k, pair in zip(keys.split(key, len(widths)).unbind(0), widths, strict=True))


def apply(params: MLP, x: Tensor, activation: str = "relu", dropout: float = 0.0, key: Tensor | None = None) -> Tensor:
    """Returns the output [..., O] for inputs [..., I].

    Args:
      params: the layers.
      x: inputs.
      activation: between layers, a name in `ACTIVATIONS`.
      dropout: the share of hidden units that is zeroed where there is a key (inverted dropout).
      key: [2]; None where nothing is dropped, as in inference.
    """
    for i, layer in enumerate(params[:-1]):
        x = ACTIVATIONS[activation](F.linear(x, layer.weight, layer.bias))
        if key is not None and dropout > 0.0:
            kept = keys.uniform(keys.fold_in(key, i), tuple(x.shape)) >= dropout
            x = torch.where(kept, x / (1.0 - dropout), 0.0)
    return F.linear(x, params[-1].weight, params[-1].bias)


def _linear(key: Tensor, inputs: int, outputs: int) -> Linear:
    bound = 1.0 / math.sqrt(inputs)
    weight, bias = keys.split(key).unbind(0)
    return Linear(keys.uniform(weight, (outputs, inputs), -bound, bound), keys.uniform(bias, (outputs,), -bound, bound))
