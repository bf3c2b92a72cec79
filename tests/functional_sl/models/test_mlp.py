"""The perceptron and the mixture head against torch's own modules and distributions."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributions import Categorical, Independent, MixtureSameFamily, Normal

from functional_sl import keys, tree
from functional_sl.models import mixture, mlp

MODULES = {"relu": nn.ReLU, "gelu": nn.GELU, "silu": nn.SiLU, "tanh": nn.Tanh}


@pytest.mark.parametrize("activation", MODULES)
def test_the_perceptron_is_that_of_modules(activation: str) -> None:
    params = mlp.init(keys.key(0), (3, 8, 5, 2))
    layers = [nn.Linear(3, 8), nn.Linear(8, 5), nn.Linear(5, 2)]
    for layer, ours in zip(layers, params, strict=True):
        layer.load_state_dict(ours._asdict())
    act = MODULES[activation]
    network = nn.Sequential(layers[0], act(), layers[1], act(), layers[2])
    x = keys.normal(keys.key(1), (7, 3))
    assert torch.equal(mlp.apply(params, x, activation), network(x))


def test_parameters_lie_within_one_over_the_root_of_the_inputs() -> None:
    for inputs, layer in zip((4, 100), mlp.init(keys.key(2), (4, 100, 50)), strict=True):
        bound = inputs**-0.5
        for leaf in layer:
            assert 0.8 * bound < float(leaf.abs().max()) <= bound


def test_dropout_zeroes_its_share_and_keeps_the_mean() -> None:
    one = mlp.Linear(torch.eye(1000), torch.ones(1000))  # hidden units are relu(0 + 1) = 1
    read = mlp.Linear(torch.eye(1000), torch.zeros(1000))
    x = torch.zeros(4, 1000)
    dropped = mlp.apply((one, read), x, dropout=0.25, key=keys.key(3))
    values = dropped.unique().tolist()
    assert values == [0.0, pytest.approx(4.0 / 3.0)]
    # 4000 draws: the share's standard deviation is 0.007.
    assert float((dropped == 0).float().mean()) == pytest.approx(0.25, abs=0.03)
    assert torch.equal(mlp.apply((one, read), x, dropout=0.25), torch.ones(4, 1000))


def test_the_mixture_is_that_of_torch_distributions() -> None:
    components, dims = 3, 2
    output = keys.normal(keys.key(4), (5, mixture.width(components, dims)), torch.float64)
    found = mixture.from_output(output, components, dims)
    target = keys.normal(keys.key(5), (5, dims), torch.float64)
    normals = Independent(Normal(found.mean, found.std), 1)
    expected = MixtureSameFamily(Categorical(logits=output[:, :components]), normals)
    torch.testing.assert_close(mixture.nll(found, target), -expected.log_prob(target), rtol=1e-12, atol=1e-12)
    heaviest = output[:, :components].argmax(-1)
    assert torch.equal(mixture.mode(found), found.mean[torch.arange(5), heaviest])
    assert float(found.std.min()) >= mixture.MIN_STD


def test_every_parameter_gets_a_gradient() -> None:
    params = mlp.init(keys.key(6), (3, 16, mixture.width(4, 2)))

    def loss(params: mlp.MLP) -> torch.Tensor:
        output = mlp.apply(params, keys.normal(keys.key(7), (32, 3)), "gelu")
        return mixture.nll(mixture.from_output(output, 4, 2), torch.ones(32, 2)).sum()

    for name, gradient in tree.named(torch.func.grad(loss)(params)).items():
        assert bool((gradient != 0).any()), name
