"""Images as numbers: a small residual network whose answer is where its features stand, and crops by key.

    uint8 picture -> crop -> [-0.5, 0.5] -> stem -> stages of residual blocks -> K maps -> spatial softmax -> K points

He et al., "Deep residual learning for image recognition", 2016, with group instead of batch normalisation (Wu and He,
2018), so that a picture's answer depends on no other picture, and strides instead of pooling, whose gradient is not
deterministic on a GPU. Spatial softmax: Levine et al., "End-to-end training of deep visuomotor policies", 2016.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from functional_sl import keys

GROUP = 8  # channels that are normalised together

Parameters = dict[str, Any]


class Encoder(NamedTuple):
    """The sizes of one network; static, so that a bundle can carry them as JSON."""

    channels: int  # of all pictures that are seen as one
    kernel: int  # of the stem, which halves the picture; odd
    widths: tuple[int, ...]  # channels of each stage, multiples of GROUP; the stem has those of the first
    strides: tuple[int, ...]  # of each stage
    blocks: int  # of each stage
    keypoints: int


def check(encoder: Encoder, side: int | None = None) -> None:
    """Refuses sizes that make no network.

    Args:
      encoder: the sizes.
      side: S, pixels of a side of what it sees, where that is known.

    Raises:
      ValueError: names the setting, what it is and what it may be.
    """
    if bad := [width for width in encoder.widths if width < 1 or width % GROUP]:
        raise ValueError(f"widths has {bad[0]}; a stage has a multiple of {GROUP} channels")
    if not encoder.widths or len(encoder.strides) != len(encoder.widths):
        raise ValueError(f"{len(encoder.widths)} widths and {len(encoder.strides)} strides; give one of each a stage")
    if min(encoder.strides) < 1 or encoder.blocks < 1:
        raise ValueError(f"strides={encoder.strides}, blocks={encoder.blocks}: must be at least 1")
    if encoder.kernel < 1 or encoder.kernel % 2 == 0:
        raise ValueError(f"kernel is {encoder.kernel}; it must be odd")
    if side is None:
        return
    if encoder.kernel > side:
        raise ValueError(f"kernel is {encoder.kernel}; it must not exceed the {side} pixels of a side that it sees")
    for stride in (2, *encoder.strides):
        side = math.ceil(side / stride)
    if side < 2:
        raise ValueError(f"strides={encoder.strides} leave 1 pixel a side, and nothing stands anywhere in it")


def init(key: Tensor, encoder: Encoder) -> Parameters:
    """Returns fresh parameters: kernels N(0, 2 / inputs of an output), scales 1, shifts 0.

    Args:
      key: [2].
      encoder: the sizes.

    Raises:
      ValueError: as `check`.
    """
    check(encoder)
    draws = iter(keys.split(key, 2 + 3 * encoder.blocks * len(encoder.widths)))

    def convolution(outputs: int, inputs: int, kernel: int) -> Tensor:
        fan = inputs * kernel**2
        return math.sqrt(2.0 / fan) * keys.normal(next(draws), (outputs, inputs, kernel, kernel))

    def norm(width: int) -> Parameters:
        return {"scale": torch.ones(width, device=key.device), "shift": torch.zeros(width, device=key.device)}

    def block(outputs: int, inputs: int, stride: int) -> Parameters:
        made = {
            "first": {"weight": convolution(outputs, inputs, 3), **norm(outputs)},
            "second": {"weight": convolution(outputs, outputs, 3), **norm(outputs)},
        }
        if stride != 1 or outputs != inputs:
            made["shortcut"] = {"weight": convolution(outputs, inputs, 1), **norm(outputs)}
        return made

    width = encoder.widths[0]
    stem = {"weight": convolution(width, encoder.channels, encoder.kernel), **norm(width)}
    blocks = []
    for outputs, stride in _stages(encoder):
        blocks.append(block(outputs, width, stride))
        width = outputs
    return {"stem": stem, "blocks": blocks, "maps": convolution(encoder.keypoints, width, 1)}


def maps(params: Parameters, encoder: Encoder, x: Tensor) -> Tensor:
    """Returns the K maps [N, K, h, w] of pictures [N, C, S, S] in [-0.5, 0.5]."""
    x = F.relu(_unit(params["stem"], x, 2))
    for block, (_, stride) in zip(params["blocks"], _stages(encoder), strict=True):
        y = _unit(block["second"], F.relu(_unit(block["first"], x, stride)), 1)
        x = F.relu(y + (_unit(block["shortcut"], x, stride) if "shortcut" in block else x))
    return F.conv2d(x, params["maps"])


def keypoints(params: Parameters, encoder: Encoder, image: Tensor) -> Tensor:
    """Returns where the K features stand in pictures uint8 [N, C, S, S]: x and y each, [N, K, 2] in [-1, 1]."""
    return spatial_softmax(maps(params, encoder, scaled(image)))


def scaled(image: Tensor) -> Tensor:
    """Returns bytes as float32 in [-0.5, 0.5]."""
    return image.to(torch.float32) / 255.0 - 0.5


def spatial_softmax(x: Tensor) -> Tensor:
    """Returns the mean place [..., K, 2], x to the right and y down in [-1, 1], under the softmax of maps [..., h, w].

    The outermost pixels' centres are at -1 and 1; a side of one pixel is at 0.
    """
    height, width = x.shape[-2:]
    weight = torch.softmax(x.flatten(-2), -1).unflatten(-1, (height, width))
    places = (_ticks(n, x) for n in (width, height))
    return torch.stack([(weight.sum(dim) * at).sum(-1) for dim, at in zip((-2, -1), places, strict=True)], -1)


def random_crop(key: Tensor, image: Tensor, size: int) -> Tensor:
    """Returns a square of each example, drawn uniformly, the same one in all its pictures.

    Args:
      key: [2].
      image: [B, ..., S, S].
      size: s, at most S.

    Returns:
      [B, ..., s, s].
    """
    side = image.shape[-1]
    corner = keys.randint(key, (len(image), 2), 0, side - size + 1)
    span = torch.arange(size, device=image.device)
    rows, columns = (corner[:, axis, None] + span for axis in (0, 1))
    pixels = (rows[:, :, None] * side + columns[:, None, :]).flatten(1)
    flat = image.flatten(-2).flatten(1, -2)
    chosen = flat.gather(-1, pixels[:, None].expand(-1, flat.shape[1], -1))
    return chosen.reshape(*image.shape[:-2], size, size)


def centre_crop(image: Tensor, size: int) -> Tensor:
    """Returns the middle square [..., s, s] of pictures [..., S, S]; of an odd rest the smaller half is cut first."""
    first = (image.shape[-1] - size) // 2
    return image[..., first : first + size, first : first + size]


def _stages(encoder: Encoder) -> list[tuple[int, int]]:
    """Returns width and stride of every block; the first of a stage strides."""
    stages = zip(encoder.widths, encoder.strides, strict=True)
    return [(width, stride if i == 0 else 1) for width, stride in stages for i in range(encoder.blocks)]


def _unit(unit: Parameters, x: Tensor, stride: int) -> Tensor:
    """Returns the convolution, padded so that stride 1 keeps the size, normalised by groups of channels."""
    weight = unit["weight"]
    x = F.conv2d(x, weight, stride=stride, padding=weight.shape[-1] // 2)
    return F.group_norm(x, weight.shape[0] // GROUP, unit["scale"], unit["shift"])


def _ticks(count: int, like: Tensor) -> Tensor:
    return torch.linspace(-1.0, 1.0, count, dtype=like.dtype, device=like.device) if count > 1 else like.new_zeros(1)
