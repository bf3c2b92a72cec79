"""The functional transformer against the same network as an `nn.Module`, and the properties it promises."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from functional_sl import keys, tree
from functional_sl.models import transformer
from functional_sl.models.transformer import Architecture

SMALL = Architecture(inputs=3, outputs=2, width=8, layers=2, heads=2, context=6, head=5)


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width, bias=False), nn.LayerNorm(width, bias=False)
        self.attention = nn.MultiheadAttention(width, heads, bias=False, batch_first=True)
        self.expand, self.contract = nn.Linear(width, 4 * width, bias=False), nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1], dtype=x.dtype)
        y = self.norm1(x)
        x = x + self.attention(y, y, y, attn_mask=mask, need_weights=False)[0]
        return x + self.contract(nn.functional.gelu(self.expand(self.norm2(x))))


class Twin(nn.Module):
    """The same network from torch's own modules."""

    def __init__(self, a: Architecture) -> None:
        super().__init__()
        self.embed, self.positions = nn.Linear(a.inputs, a.width), nn.Embedding(a.context, a.width)
        self.blocks = nn.ModuleList(Block(a.width, a.heads) for _ in range(a.layers))
        self.norm, self.mix = nn.LayerNorm(a.width, bias=False), nn.Linear(a.width, a.width, bias=False)
        self.head = nn.Sequential(nn.Linear(a.width, a.head), nn.ReLU(), nn.Linear(a.head, a.outputs))

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x) + self.positions(torch.arange(x.shape[1]))
        for block in self.blocks:
            x = block(x)
        return self.head(self.mix(self.norm(x)))


def pairs(twin: Twin, params: dict) -> list[tuple[nn.Parameter, Tensor]]:
    linear = [(twin.embed, params["embed"]), (twin.head[0], params["hidden"]), (twin.head[2], params["out"])]
    found = [(getattr(module, name), leaf[name]) for module, leaf in linear for name in ("weight", "bias")]
    found += [(twin.positions.weight, params["positions"]), (twin.norm.weight, params["norm"])]
    found += [(twin.mix.weight, params["mix"])]
    for block, leaf in zip(twin.blocks, params["blocks"], strict=True):
        found += [(block.norm1.weight, leaf["norm1"]), (block.norm2.weight, leaf["norm2"])]
        found += [(block.attention.in_proj_weight, leaf["qkv"]), (block.attention.out_proj.weight, leaf["merge"])]
        found += [(block.expand.weight, leaf["expand"]), (block.contract.weight, leaf["contract"])]
    return found


def make(a: Architecture = SMALL, scale: float = 1.0) -> tuple[dict, Tensor]:
    params = tree.map(lambda x: (x * scale).double(), transformer.init(keys.key(0), a))
    return params, keys.normal(keys.key(1), (4, 5, a.inputs)).double()


def test_outputs_and_gradients_are_those_of_the_module() -> None:
    """In float64, where sums in another order differ by some 1e-16 of their terms; scaled up so that all matters."""
    params, x = make(scale=10.0)
    twin = Twin(SMALL).double()
    for parameter, leaf in pairs(twin, params):
        parameter.data.copy_(leaf)
    assert sum(p.numel() for p in twin.parameters()) == tree.size(params)
    expected = twin(x)
    torch.testing.assert_close(transformer.apply(params, x, SMALL.heads), expected, rtol=1e-10, atol=1e-10)

    expected.square().sum().backward()
    gradients = torch.func.grad(lambda p: transformer.apply(p, x, SMALL.heads).square().sum())(params)
    for parameter, gradient in pairs(twin, gradients):
        assert parameter.grad.abs().max() > 0
        torch.testing.assert_close(gradient, parameter.grad, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(
    ("architecture", "size"),
    [
        (Architecture(6, 4, 192, 6, 12, 32), 2_713_668),
        (Architecture(215, 29, 384, 6, 12, 32), 10_891_037),
    ],
)
def test_paper_sizes(architecture: Architecture, size: int) -> None:
    """12 E^2 a block, E a norm, C E positions; the published counts are 2.71 M and 10.89 M."""
    e, f, s, c = architecture.width, architecture.inputs, architecture.outputs, architecture.context
    outside = (f * e + e) + c * e + e + e * e + (64 * e + 64) + (64 * s + s)
    assert size == 6 * (12 * e * e + 2 * e) + outside
    assert tree.size(transformer.init(keys.key(0), architecture)) == size


def test_initial_spread() -> None:
    """Standard deviation 0.02, and 0.02 / sqrt(2 * 8) = 0.005 at the end of the residual branches."""
    params = transformer.init(keys.key(0), Architecture(6, 4, 64, 8, 4, 32))
    for name, std in (("qkv", 0.02), ("expand", 0.02), ("merge", 0.005), ("contract", 0.005)):
        drawn = torch.stack([block[name] for block in params["blocks"]])
        assert math.isclose(drawn.std(), std, rel_tol=0.02), name
    assert not params["out"]["bias"].any()
    assert bool((params["norm"] == 1).all())


def test_a_token_sees_no_later_one() -> None:
    params, x = make(scale=10.0)
    whole = transformer.apply(params, x, SMALL.heads)
    changed = torch.cat([x[:, :3], x[:, 3:] + 1], 1)
    assert torch.equal(transformer.apply(params, changed, SMALL.heads)[:, :3], whole[:, :3])
    assert not torch.equal(transformer.apply(params, changed, SMALL.heads)[:, 3:], whole[:, 3:])
    torch.testing.assert_close(transformer.apply(params, x[:, :2], SMALL.heads), whole[:, :2], rtol=1e-12, atol=1e-12)


def test_one_example_vmap_and_a_compiled_graph_agree() -> None:
    params, x = make()

    def one(sequence: Tensor) -> Tensor:
        return transformer.apply(params, sequence, SMALL.heads)

    batched = one(x)
    for other in (torch.vmap(one)(x), torch.stack([one(sequence) for sequence in x])):
        torch.testing.assert_close(other, batched, rtol=1e-12, atol=1e-12)

    def gradient(p: dict, x: Tensor) -> dict:
        return torch.func.grad(lambda p: transformer.apply(p, x, SMALL.heads).square().sum())(p)

    compiled = torch.compile(gradient, fullgraph=True, backend="aot_eager")(params, x)
    for a, b in zip(tree.leaves(compiled), tree.leaves(gradient(params, x)), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-15)


def test_wrong_sizes_are_named() -> None:
    with pytest.raises(ValueError, match="width=8 must be a multiple of heads=3"):
        transformer.init(keys.key(0), SMALL._replace(heads=3))
    params, _ = make()
    with pytest.raises(ValueError, match="7 tokens exceeds the context of 6"):
        transformer.apply(params, torch.zeros(7, 3, dtype=torch.float64), SMALL.heads)
