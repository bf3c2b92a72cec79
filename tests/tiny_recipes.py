"""Small supervised tasks outside the packages, as a third party would write them."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from functional_sl import data, keys, tree
from functional_sl.bundle import Bundle
from functional_sl.recipe import Recipe
from functional_sl.run.cli import option
from functional_sl.step import Aux


class Rows(NamedTuple):
    x: Tensor  # [N, 3]
    y: Tensor  # [N, 2]
    valid: Tensor  # [N, 2] bool


class Net(NamedTuple):
    w1: Tensor  # [3, H]
    b1: Tensor  # [H]
    w2: Tensor  # [H, 2]


class Moving(NamedTuple):
    mean: Tensor  # [3], of the inputs seen
    key: Tensor  # [2], of the next dropout


@dataclasses.dataclass(frozen=True)
class Line:
    rows: int = option(40, "Training rows.")
    held_out: int = option(21, "Validation rows.")
    hidden: int = option(4, "Hidden units.")
    valid_share: float = option(0.5, "Share of valid targets.")
    dropout: float = option(0.0, "Share of hidden units dropped.")
    data_seed: int = option(3, "Seed of the data.")
    dtype: str = option("float32", "Type of everything.", choices=("float32", "float64"))


SIZES: Mapping[str, Mapping[str, Mapping[str, Any]]] = {
    "small": {"train": {"updates": 12, "batch_size": 4, "log_every": 1, "validate_every": 3}, "recipe": {}},
    "wide": {"train": {"updates": 24}, "recipe": {"hidden": 16}},
}


def line(config: Line) -> Recipe:
    """Two noisy outputs of three inputs, of which some are missing."""
    dtype = getattr(torch, config.dtype)

    def rows(stream: int, count: int) -> Rows:
        key = keys.split(keys.fold_in(keys.key(config.data_seed), stream), 3)
        x = keys.normal(key[0], (count, 3), dtype)
        y = torch.stack([x.sum(-1), torch.tanh(x[:, 0])], -1) + 0.1 * keys.normal(key[1], (count, 2), dtype)
        return Rows(x, y, keys.uniform(key[2], (count, 2)) < config.valid_share)

    def init(key: Tensor) -> tuple[Net, Moving]:
        first, second, noise = keys.split(key, 3)
        w1 = keys.normal(first, (3, config.hidden), dtype)
        net = Net(w1, torch.zeros(config.hidden, dtype=dtype), keys.normal(second, (config.hidden, 2), dtype))
        return net, Moving(torch.zeros(3, dtype=dtype), noise)

    def errors(net: Net, x: Tensor, batch: Rows, mask: Tensor | float = 1.0) -> Tensor:
        prediction = torch.tanh(x @ net.w1 + net.b1) * mask @ net.w2
        return torch.where(batch.valid, prediction - batch.y, 0.0)

    def loss(net: Net, moving: Moving, batch: Rows, key: Tensor) -> tuple[Tensor, Aux]:
        own, following = keys.split(moving.key).unbind(0)
        mask = 1.0
        if config.dropout:
            both = keys.fold_in(own, key[1])
            mask = (keys.uniform(both, (batch.x.shape[0], config.hidden)) >= config.dropout).to(dtype)
        error = errors(net, batch.x, batch, mask)
        moved = Moving(torch.lerp(moving.mean, batch.x.mean(0), 0.1), following)
        return torch.square(error).sum(), Aux(moved, {"absolute": error.abs().sum()})

    def validate(net: Net, moving: Moving, batch: Rows) -> dict[str, Tensor]:
        error = errors(net, batch.x, batch)
        return {"loss": torch.square(error).sum(), "absolute": error.abs().sum()}

    def bundle(net: Net, moving: Moving) -> Bundle:
        tensors = tree.named(net)
        about = {"inputs": [{"name": "x", "width": 3}], "outputs": [{"name": "y", "width": 2}]}
        return Bundle("tiny_recipes:predict", {}, tensors, about, {"x": rows(2, 5).x})

    return Recipe(
        name="line",
        schema={"inputs": ["x"], "outputs": ["y"], "dtype": config.dtype},
        data=rows(0, config.rows),
        validation=rows(1, config.held_out),
        init=init,
        sample=data.uniform,
        count=lambda batch: batch.valid.sum(),
        loss=loss,
        batches=data.in_order,
        validate=validate,
        bundle=bundle,
    )


def predict(tensors: Mapping[str, Tensor], inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The network of `line` without its trainer."""
    return {"y": torch.tanh(inputs["x"] @ tensors["w1"] + tensors["b1"]) @ tensors["w2"]}


def noisy(config: Line) -> Recipe:
    """The line with noise of Python's, NumPy's and torch's own generators on its inputs, and evaluations that draw."""
    recipe = line(config)

    def sample(rows: Rows, key: Tensor, size: int) -> Rows:
        batch = recipe.sample(rows, key, size)
        noise = torch.rand(size, 3) + random.gauss(0, 1) + float(np.random.normal())  # noqa: NPY002
        return batch._replace(x=batch.x + 0.01 * noise)

    def evaluate(net: Net, moving: Moving) -> dict[str, float]:
        return {"drawn": float(torch.rand(())) + random.random() + float(np.random.rand())}  # noqa: NPY002

    return recipe._replace(name="noisy", sample=sample, evaluate=evaluate, captured=False)
