"""A causal transformer for sequences of feature vectors, as a pure pair of init and apply.

The network of Neural Robot Dynamics (arXiv:2508.15755), after GPT-2: pre-norm blocks without biases and without
dropout between a linear embedding and a small regression head.

    x -> Linear + learned position -> [x + attention(norm(x)); x + mlp(norm(x))] x layers -> norm -> Linear -> head
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from functional_sl import keys

Parameters = dict[str, Any]


class Architecture(NamedTuple):
    """The sizes of one network; static, so that a bundle can carry them as JSON."""

    inputs: int
    outputs: int
    width: int  # of a token
    layers: int
    heads: int  # divides the width
    context: int  # longest sequence
    head: int = 64  # hidden units of the regression head


def init(key: Tensor, architecture: Architecture) -> Parameters:
    """Returns fresh parameters: weights N(0, 0.02), biases 0, scales 1.

    The last matrix of every residual branch is divided by sqrt(2 layers) (Radford et al., 2019, section 2.3).

    Args:
      key: [2] int64.
      architecture: the sizes.

    Raises:
      ValueError: if the heads do not divide the width.
    """
    a = architecture
    if a.width % a.heads:
        raise ValueError(f"width={a.width} must be a multiple of heads={a.heads}")
    draws = iter(keys.split(key, 6 + 4 * a.layers))
    residual = 0.02 / math.sqrt(2 * a.layers)

    def weight(outputs: int, inputs: int, std: float = 0.02) -> Tensor:
        return std * keys.normal(next(draws), (outputs, inputs))

    def linear(outputs: int, inputs: int) -> Parameters:
        return {"weight": weight(outputs, inputs), "bias": torch.zeros(outputs, device=key.device)}

    def scale() -> Tensor:
        return torch.ones(a.width, device=key.device)

    return {
        "embed": linear(a.width, a.inputs),
        "positions": weight(a.context, a.width),
        "blocks": [
            {
                "norm1": scale(),
                "qkv": weight(3 * a.width, a.width),
                "merge": weight(a.width, a.width, residual),
                "norm2": scale(),
                "expand": weight(4 * a.width, a.width),
                "contract": weight(a.width, 4 * a.width, residual),
            }
            for _ in range(a.layers)
        ],
        "norm": scale(),
        "mix": weight(a.width, a.width),
        "hidden": linear(a.head, a.width),
        "out": linear(a.outputs, a.head),
    }


def apply(params: Parameters, x: Tensor, heads: int) -> Tensor:
    """Returns one output a token; token t sees tokens 0 .. t alone.

    Args:
      params: of `init`.
      x: [..., T, inputs] with T at most the context.
      heads: attention heads, the one size that the parameters do not show.

    Returns:
      [..., T, outputs].

    Raises:
      ValueError: if the sequence is longer than the context.
    """
    length, context = x.shape[-2], params["positions"].shape[0]
    if length > context:
        raise ValueError(f"a sequence of {length} tokens exceeds the context of {context}")
    x = F.linear(x, **params["embed"]) + params["positions"][:length]
    for block in params["blocks"]:
        x = x + _attention(block, _norm(x, block["norm1"]), heads)
        x = x + F.linear(F.gelu(F.linear(_norm(x, block["norm2"]), block["expand"])), block["contract"])
    x = F.linear(_norm(x, params["norm"]), params["mix"])
    return F.linear(F.relu(F.linear(x, **params["hidden"])), **params["out"])


def _norm(x: Tensor, scale: Tensor) -> Tensor:
    return F.layer_norm(x, scale.shape, scale)


def _attention(block: Parameters, x: Tensor, heads: int) -> Tensor:
    # Plain products: the fused kernels win nothing at ten tokens, and some of their gradients are not deterministic.
    query, key, value = (
        part.unflatten(-1, (heads, -1)).transpose(-3, -2) for part in F.linear(x, block["qkv"]).chunk(3, dim=-1)
    )
    scores = query @ key.transpose(-2, -1) / math.sqrt(query.shape[-1])
    future = torch.ones(scores.shape[-2:], dtype=torch.bool, device=x.device).triu(1)
    weights = torch.softmax(scores.masked_fill(future, -math.inf), dim=-1)
    return F.linear((weights @ value).transpose(-3, -2).flatten(-2), block["merge"])
