"""NeRD's transformer and its loss as modules."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from experiments import module_transformer
from experiments.twins import Twin
from functional_sl.models import normalizer
from functional_sl.models.nerd import Statistics
from functional_sl.models.transformer import Architecture, Parameters
from functional_sl.recipes import nerd
from functional_sl.recipes.nerd import NeRD
from functional_sl.recipes.nerd_windows import Transitions

SIZES = {"small": {"width": 64, "layers": 2, "heads": 4}, "paper": {"width": 192, "layers": 6, "heads": 12}}


class NextState(nn.Module):
    """The mean squared error of normalised changes, from raw inputs and targets."""

    def __init__(self, network: module_transformer.Transformer, statistics: Statistics) -> None:
        super().__init__()
        self.network = network
        self.statistics = statistics  # no buffers, which ranks would send each other at every call

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        known = self.statistics
        output = self.network(normalizer.normalize(known.inputs, inputs))
        gap = torch.where(known.active, output - normalizer.normalize(known.targets, targets), 0.0)
        return gap.square().sum() / (known.active.sum() * targets.shape[0] * targets.shape[1])


def module(settings: NeRD, params: Parameters, statistics: Statistics) -> nn.Module:
    """Returns the module with copies of functional parameters."""
    widths = (params["embed"]["weight"].shape[1], params["out"]["weight"].shape[0])
    architecture = Architecture(*widths, settings.width, settings.layers, settings.heads, settings.context)
    return NextState(module_transformer.with_parameters(architecture, params), statistics)


def draw(settings: NeRD, data: Transitions, batch_size: int) -> Transitions:
    """Returns windows that torch's own generator draws."""
    device, (trajectories, steps) = data.inputs.device, data.inputs.shape[:2]
    row = torch.randint(trajectories, (batch_size, 1), device=device)
    start = torch.randint(steps - settings.history + 1, (batch_size, 1), device=device)
    chosen = (row, start + torch.arange(settings.history, device=device))
    return Transitions(*(x[chosen] for x in data))


TWIN = Twin(
    settings=lambda size: NeRD(trajectories=200, validation_trajectories=2, evaluation_trajectories=2, **SIZES[size]),
    build=nerd.build,
    module=module,
    inputs=lambda settings, batch, key: tuple(batch),
    draw=draw,
)
