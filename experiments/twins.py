"""What `bench_sl` needs of a recipe's other side: the same model as modules, trained by `torch.optim`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn, optim

from functional_sl.recipe import Recipe
from functional_sl.run import loading
from functional_sl.tree import Tree


class Twin(NamedTuple):
    """One recipe and its modules; all draws without a key come from torch's own generator."""

    settings: Callable[[str], Any]  # size -> the recipe's settings, with little data
    build: Callable[[Any], Recipe]
    module: Callable[[Any, Tree, Tree], nn.Module]  # (settings, parameters, buffers) -> copies; called, the mean loss
    inputs: Callable[[Any, Tree, Tensor | None], tuple[Tensor, ...]]  # (settings, batch, key of the loss) -> arguments
    draw: Callable[[Any, Tree, int], Tree]  # (settings, data, batch size) -> batch
    compile: Callable[[nn.Module], nn.Module] = torch.compile  # of the module, or of that in DistributedDataParallel


# Name of a recipe -> where its twin stands.
TWINS = {
    "nerd": "experiments.module_nerd:TWIN",
    "rwm": "experiments.module_rwm:TWIN",
    "rigidformer": "experiments.module_rigidformer:TWIN",
    "bc_visual": "experiments.module_visual:TWIN",
}


def load(name: str) -> Twin:
    """Returns the twin of a recipe in `TWINS`."""
    return loading.load(TWINS[name])


def make_update(module: nn.Module, learning_rate: float, clip_norm: float) -> Callable[[tuple[Tensor, ...]], Tensor]:
    """Returns the training loop's body: arguments of the module -> loss, after which the parameters have moved.

    Args:
      module: plain, compiled or wrapped in DistributedDataParallel; its call is the mean loss.
      learning_rate: of AdamW without decay, fused on CUDA.
      clip_norm: bound of the gradient norm.
    """
    parameters = list(module.parameters())
    optimizer = optim.AdamW(parameters, learning_rate, weight_decay=0.0, fused=parameters[0].is_cuda)

    def update(inputs: tuple[Tensor, ...]) -> Tensor:
        optimizer.zero_grad()
        value = module(*inputs)
        value.backward()
        nn.utils.clip_grad_norm_(parameters, clip_norm)
        optimizer.step()
        return value.detach()

    return update
