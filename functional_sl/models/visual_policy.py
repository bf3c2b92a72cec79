"""A policy that sees: an encoder makes points of a short history of pictures, and a chunk head plans from them.

    pictures [B, H, C, S, S] -> crop -> [B, H C, s, s] -> vision.keypoints -> [B, 2 K] --+
    proprioception [B, H, P] -> normaliser -> [B, H P] ----------------------------------+--> chunk_policy -> [B, F, A]

The encoder gets the pictures of a history as channels of one, so that its first convolution sees motion: points found
in each picture apart differ by too little for a small network to read speeds from them.

`predict` is what an exported policy runs; it needs nothing but this folder.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from functional_sl import keys
from functional_sl.models import chunk_policy, mlp, naming, normalizer, vision
from functional_sl.models.chunk_policy import Scales
from functional_sl.models.normalizer import Normalizer
from functional_sl.models.vision import Encoder


class Seen(NamedTuple):
    """What a robot with a camera knows."""

    image: Tensor  # [..., C, S, S] uint8
    proprioception: Tensor  # [..., P] float32, in the units of the data; P may be 0


class Parameters(NamedTuple):
    """What is learnt."""

    encoder: vision.Parameters
    head: mlp.MLP


@dataclasses.dataclass(frozen=True)
class Architecture:
    """The static facts of a policy."""

    encoder: Encoder
    crop: int  # side of what the encoder sees of a picture
    head: chunk_policy.Architecture  # of history 1: it observes 2 K coordinates and the H P numbers of proprioception


def init(key: Tensor, architecture: Architecture) -> Parameters:
    """Returns fresh parameters."""
    encoder, head = keys.split(key).unbind(0)
    return Parameters(vision.init(encoder, architecture.encoder), chunk_policy.init(head, architecture.head))


def output(
    params: Parameters,
    architecture: Architecture,
    image: Tensor,
    proprioception: Tensor,
    dropout: float = 0.0,
    key: Tensor | None = None,
) -> Tensor:
    """Returns the head's numbers [B, F, ...]; with a key units of the head are dropped.

    Args:
      params: of `init`.
      architecture: the sizes.
      image: uint8 [B, H, C, s, s], cropped.
      proprioception: [B, H, P], normalised.
      dropout: as in `mlp.apply`.
      key: as in `mlp.apply`.
    """
    points = vision.keypoints(params.encoder, architecture.encoder, image.flatten(1, 2))
    seen = torch.cat((points.flatten(1), proprioception.flatten(1)), -1)[:, None]
    return chunk_policy.output(params.head, architecture.head, seen, dropout, key)


def act(params: Parameters, scales: Scales, architecture: Architecture, seen: Seen) -> Tensor:
    """Returns the actions [B, F, A] for what was seen [B, H, ...], both in the units of the data."""
    image = vision.centre_crop(seen.image, architecture.crop)
    head = output(params, architecture, image, normalizer.normalize(scales.observation, seen.proprioception))
    return chunk_policy.answer(scales, architecture.head, head)


def arguments(architecture: Architecture) -> dict[str, Any]:
    """Returns what `predict` takes beside tensors and inputs, as JSON."""
    encoder, head = architecture.encoder._asdict(), dataclasses.asdict(architecture.head)
    plain = {name: list(x) if isinstance(x, tuple) else x for name, x in encoder.items()}
    return {"encoder": plain, "crop": architecture.crop, "head": {**head, "hidden": list(head["hidden"])}}


def predict(
    tensors: Mapping[str, Tensor],
    inputs: Mapping[str, Tensor],
    *,
    encoder: Mapping[str, Any],
    crop: int,
    head: Mapping[str, Any],
) -> dict[str, Tensor]:
    """Returns {"action": [B, F, A]} for {"image": uint8 [B, H, C, S, S], "proprioception": [B, H, P]}, as `act`.

    Args:
      tensors: by the names of {"params": Parameters, "scales": Scales}.
      inputs: S is at least the crop, of which the middle is seen; the proprioception is absent where P is 0.
      encoder, crop, head: of `arguments`.
    """
    sizes = {name: tuple(x) if isinstance(x, list) else x for name, x in encoder.items()}
    architecture = Architecture(
        Encoder(**sizes), crop, chunk_policy.Architecture(**{**head, "hidden": tuple(head["hidden"])})
    )
    rebuilt = naming.nested(tensors)
    layers = tuple(mlp.Linear(**layer) for layer in rebuilt["params"]["head"])
    scales = Scales(*(Normalizer(**rebuilt["scales"][end]) for end in Scales._fields))
    image = inputs["image"]
    absent = torch.zeros((*image.shape[:2], 0), device=image.device)
    seen = Seen(image, inputs.get("proprioception", absent))
    return {"action": act(Parameters(rebuilt["params"]["encoder"], layers), scales, architecture, seen)}
