"""A policy that answers H observations with the next F actions: normaliser, MLP, head, normaliser back.

`predict` is what an exported policy runs; it needs nothing but this folder.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from functional_sl.models import mixture, mlp, naming, normalizer
from functional_sl.models.normalizer import Normalizer


@dataclasses.dataclass(frozen=True)
class Architecture:
    """The static facts of a policy."""

    observation: int
    action: int
    history: int
    chunk: int
    hidden: tuple[int, ...]
    activation: str = "relu"
    components: int = 0  # of the mixture at each step; 0 for a plain prediction

    @property
    def sizes(self) -> tuple[int, ...]:
        """The widths of the MLP, input and output included."""
        step = mixture.width(self.components, self.action) if self.components else self.action
        return (self.history * self.observation, *self.hidden, self.chunk * step)


class Scales(NamedTuple):
    """The frozen normalisers of both ends."""

    observation: Normalizer
    action: Normalizer


def init(key: Tensor, architecture: Architecture) -> mlp.MLP:
    """Returns fresh parameters."""
    return mlp.init(key, architecture.sizes)


def output(
    params: mlp.MLP, architecture: Architecture, x: Tensor, dropout: float = 0.0, key: Tensor | None = None
) -> Tensor:
    """Returns the head's numbers [B, F, ...] for normalised observations [B, H, O]; with a key units are dropped."""
    flat = mlp.apply(params, x.flatten(1), architecture.activation, dropout, key)
    return flat.unflatten(1, (architecture.chunk, -1))


def as_mixture(architecture: Architecture, head: Tensor) -> mixture.Mixture:
    """Returns the mixtures over normalised actions, one a step, that the head describes."""
    return mixture.from_output(head, architecture.components, architecture.action)


def answer(scales: Scales, architecture: Architecture, head: Tensor) -> Tensor:
    """Returns the actions [B, F, A] that the head describes: the most likely component's, where it is a mixture."""
    normalised = mixture.mode(as_mixture(architecture, head)) if architecture.components else head
    return normalizer.denormalize(scales.action, normalised)


def act(params: mlp.MLP, scales: Scales, architecture: Architecture, observation: Tensor) -> Tensor:
    """Returns the actions [B, F, A] for observations [B, H, O], both in the units of the data."""
    head = output(params, architecture, normalizer.normalize(scales.observation, observation))
    return answer(scales, architecture, head)


def predict(
    tensors: Mapping[str, Tensor],
    inputs: Mapping[str, Tensor],
    *,
    observation: int,
    action: int,
    history: int,
    chunk: int,
    hidden: list[int],
    activation: str,
    components: int,
) -> dict[str, Tensor]:
    """Returns {"action": [B, F, A]} for {"observation": [B, H, O]}, as `act`.

    Args:
      tensors: `layers/...` of the MLP, and `observation/...` and `action/...` of the normalisers, by name.
      inputs: in the units of the data, float32.
      observation, action, history, chunk, hidden, activation, components: the `Architecture`.

    Raises:
      ValueError: for an input of another name, shape or dtype.
    """
    architecture = Architecture(observation, action, history, chunk, tuple(hidden), activation, components)
    found = {name: (x.dtype, *x.shape[1:]) for name, x in inputs.items()}
    if found != {"observation": (torch.float32, history, observation)}:
        shapes = {name: f"{x.dtype} {tuple(x.shape)}" for name, x in inputs.items()}
        raise ValueError(f"expected an observation float32 [B, {history}, {observation}], got {shapes}")
    rebuilt = naming.nested(tensors)
    layers = tuple(mlp.Linear(**layer) for layer in rebuilt["layers"])
    scales = Scales(*(Normalizer(**rebuilt[end]) for end in Scales._fields))
    return {"action": act(layers, scales, architecture, inputs["observation"])}
