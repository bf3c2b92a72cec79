"""Portable models: one safetensors file that predicts without the code that trained it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from torch import Tensor


class Bundle(NamedTuple):
    """What a third party needs to run a trained model.

    Attributes:
      predict: `package.module:function`, `(tensors, inputs, **arguments) -> outputs`, all flat dicts of tensors; the
        function imports no training code.
      arguments: JSON keyword arguments of `predict`: the architecture, conventions that change numbers.
      tensors: weights and normalisation by name.
      about: JSON: ordered input and output features with width, unit and frame, time step, conventions, provenance.
      inputs: a few inputs, with which a loader checks itself; their outputs are stored beside them.
    """

    predict: str
    arguments: Mapping[str, Any]
    tensors: Mapping[str, Tensor]
    about: Mapping[str, Any]
    inputs: Mapping[str, Tensor]
