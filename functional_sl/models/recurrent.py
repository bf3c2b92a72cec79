"""Gated recurrent units as a pair of init and apply, with the equations of `torch.nn.GRU`.

    r, z = sigmoid(W x + b + V h + c)      n = tanh(W x + b + r (V h + c))      h' = (1 - z) n + z h

The rows of W, V, b and c are those of r, z and n in this order (Cho et al., arXiv:1406.1078, with the reset gate behind
the product). Inputs of a whole sequence are multiplied at once; only V h waits for the step before.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from functional_sl import keys


class Layer(NamedTuple):
    """One layer of H units over I inputs; names and layout of `torch.nn.GRU`."""

    weight_ih: Tensor  # [3 H, I]
    weight_hh: Tensor  # [3 H, H]
    bias_ih: Tensor  # [3 H]
    bias_hh: Tensor  # [3 H]


GRU = tuple[Layer, ...]


def init(key: Tensor, inputs: int, hidden: int, layers: int) -> GRU:
    """Returns `layers` layers, drawn uniformly from +-1/sqrt(hidden) like `torch.nn.GRU`.

    Args:
      key: [2].
      inputs: I of the first layer.
      hidden: H.
      layers: at least 1.
    """
    bound = 1.0 / math.sqrt(hidden)
    made = []
    for i, own in enumerate(keys.split(key, layers).unbind(0)):
        shapes = ((3 * hidden, hidden if i else inputs), (3 * hidden, hidden), (3 * hidden,), (3 * hidden,))
        drawn = zip(keys.split(own, 4).unbind(0), shapes, strict=True)
        made.append(Layer(*(keys.uniform(k, shape, -bound, bound) for k, shape in drawn)))
    return tuple(made)


def scan(params: GRU, x: Tensor) -> tuple[Tensor, ...]:
    """Returns the last hidden state [..., B, H] of every layer after a sequence [B, T, I] that starts from zeros.

    The leaves may have leading axes [...], of networks side by side.
    """
    last, length = [], x.shape[-2]
    for layer in params:
        gates = linear(x.flatten(-3, -2), layer.weight_ih, layer.bias_ih).unflatten(-2, (-1, length))
        hidden = gates.new_zeros(*gates.shape[:-2], layer.weight_hh.shape[-1])
        outputs = []
        for gate in gates.unbind(-2):
            hidden = _cell(layer, gate, hidden)
            outputs.append(hidden)
        last.append(hidden)
        if layer is not params[-1]:
            x = torch.stack(outputs, -2)
    return tuple(last)


def step(params: GRU, x: Tensor, hidden: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Returns the hidden states [..., B, H] of every layer after one more input [B, I]; the last is the output."""
    found = []
    for layer, old in zip(params, hidden, strict=True):
        x = _cell(layer, linear(x, layer.weight_ih, layer.bias_ih), old)
        found.append(x)
    return tuple(found)


def linear(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Returns x [..., B, I] through affine maps [..., O, I] and [..., O] with the same or no leading axes."""
    return x @ weight.mT + bias.unsqueeze(-2)


def _cell(layer: Layer, gate: Tensor, hidden: Tensor) -> Tensor:
    size = hidden.shape[-1]
    own = linear(hidden, layer.weight_hh, layer.bias_hh)
    # The gradient of a split is one concatenation; that of every slice fills a tensor with zeros.
    (gate, new), (own_gate, own_new) = (x.split((2 * size, size), -1) for x in (gate, own))
    reset, update = torch.sigmoid(gate + own_gate).split(size, -1)
    candidate = torch.tanh(new + reset * own_new)
    return candidate + update * (hidden - candidate)
