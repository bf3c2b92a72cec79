"""The transformer of `functional_sl.models.transformer` as modules."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from functional_sl.models.transformer import Architecture


class Block(nn.Module):
    """A pre-norm block."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = (nn.LayerNorm(width, bias=False) for _ in range(2))
        self.qkv, self.merge = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.expand, self.contract = nn.Linear(width, 4 * width, bias=False), nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        heads = [p.unflatten(-1, (self.heads, -1)).transpose(-3, -2) for p in self.qkv(self.norm1(x)).chunk(3, -1)]
        attended = F.scaled_dot_product_attention(*heads, is_causal=True)
        x = x + self.merge(attended.transpose(-3, -2).flatten(-2))
        return x + self.contract(F.gelu(self.expand(self.norm2(x))))


class Transformer(nn.Module):
    """The whole network on normalised inputs."""

    def __init__(self, a: Architecture) -> None:
        super().__init__()
        self.embed, self.positions = nn.Linear(a.inputs, a.width), nn.Parameter(torch.zeros(a.context, a.width))
        self.blocks = nn.ModuleList(Block(a.width, a.heads) for _ in range(a.layers))
        self.norm, self.mix = nn.LayerNorm(a.width, bias=False), nn.Linear(a.width, a.width, bias=False)
        self.hidden, self.out = nn.Linear(a.width, a.head), nn.Linear(a.head, a.outputs)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x) + self.positions[: x.shape[-2]]
        for block in self.blocks:
            x = block(x)
        return self.out(F.relu(self.hidden(self.mix(self.norm(x)))))


def with_parameters(a: Architecture, params: dict[str, Any]) -> Transformer:
    """Returns the module with copies of functional parameters, on their device."""
    module = Transformer(a).to(params["norm"].device)
    named = {"positions": params["positions"], "norm.weight": params["norm"], "mix.weight": params["mix"]}
    for layer in ("embed", "hidden", "out"):
        named |= {f"{layer}.{name}": x for name, x in params[layer].items()}
    for i, block in enumerate(params["blocks"]):
        named |= {f"blocks.{i}.{name}.weight": x for name, x in block.items()}
    module.load_state_dict(named)
    return module
