"""Clips of rigid bodies: frames a step apart, drawn by key from scenes of any length."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from functional_sl import keys
from functional_sl.sources.rigid_bodies import Scenes

_TURN = math.radians(5.0)


class Clips(NamedTuple):
    """B clips of T frames with O objects of P points; what is not valid may hold anything."""

    positions: Tensor  # [B, T, O, 3] float32, m
    quaternions: Tensor  # [B, T, O, 4] float32, wxyz
    frames: Tensor  # [B, T] bool, the frames before the end of the scene
    points: Tensor  # [B, O, P, 3] float32, m, in the order of farthest-point sampling
    point_mask: Tensor  # [B, O, P] bool
    objects: Tensor  # [B, O] bool
    properties: Tensor  # [B, O, 3] float32
    step: Tensor  # [B] float32, in frames


def sample(data: Scenes, key: Tensor, batch_size: int, *, steps: tuple[int, ...], length: int) -> Clips:
    """Returns clips of random scenes, step sizes and starts, each with at least one supervised frame.

    A step size is drawn first, then one of the scenes that last longer than two of its steps. Half of the clips are
    turned about the vertical by a multiple of 5 degrees, half have their objects in another order.

    Args:
      data: at least one scene is long enough for every step size, see `check`.
      key: [2].
      batch_size: B.
      steps: step sizes in frames.
      length: T, frames of a clip.
    """
    # One draw for everything: the rounds of the generator are most of what a compiler sees of this function.
    u = keys.uniform(key, (batch_size, 6 + data.objects.shape[1]))
    size = _floor(u[:, 1], torch.full_like(u[:, 1], len(steps)))
    step = torch.stack([torch.where(size == i, frames, 0) for i, frames in enumerate(steps)]).sum(0)
    # The longest scenes first, so that those that are long enough for a step are the first ones.
    longest = data.lengths.argsort(descending=True, stable=True)
    chosen = longest[_floor(u[:, 0], (data.lengths > 2 * step[:, None]).sum(-1))]
    start = _floor(u[:, 2], data.lengths[chosen] - 2 * step)
    batch = at(data, chosen, start, step, length)
    angle = torch.where(u[:, 3] < 0.5, torch.floor(72 * u[:, 4]) * _TURN, 0.0)
    order = torch.where(u[:, 5:6] < 0.5, u[:, 6:].argsort(-1), torch.arange(u.shape[1] - 6, device=key.device))
    return _shuffled(_turned(batch, angle), order)


def check(data: Scenes, steps: tuple[int, ...]) -> None:
    """Refuses data in which no scene lasts for a clip of every step size.

    Raises:
      ValueError: names the step size and the longest scene.
    """
    longest, step = int(data.lengths.max()), max(steps)
    if longest <= 2 * step:
        raise ValueError(
            f"the longest of the training scenes ends after {longest} frames, and a clip of step {step} takes "
            f"{2 * step + 1}: throw more gently, or take smaller steps"
        )


def at(data: Scenes, chosen: Tensor, start: Tensor, step: Tensor, length: int) -> Clips:
    """Returns one clip a row; where a scene ends its last frame is repeated, and does not count."""
    frame = start[:, None] + step[:, None] * torch.arange(length, device=start.device)
    end = data.lengths[chosen][:, None]
    inside = torch.minimum(frame, end - 1)
    return Clips(
        positions=data.positions[chosen[:, None], inside],
        quaternions=data.quaternions[chosen[:, None], inside],
        frames=frame < end,
        points=data.points[chosen],
        point_mask=data.point_mask[chosen],
        objects=data.objects[chosen],
        properties=data.properties[chosen],
        step=step.to(torch.float32),
    )


def _floor(u: Tensor, below: Tensor) -> Tensor:
    """Returns integers in [0, below) from uniform numbers in [0, 1); a product may round up to its bound."""
    return torch.minimum((u * below).to(torch.int64), below.to(torch.int64) - 1)


def _turned(batch: Clips, angle: Tensor) -> Clips:
    """Turns clips by angles [B] about the vertical."""
    w, z = torch.cos(angle / 2)[:, None, None], torch.sin(angle / 2)[:, None, None]
    a, b, c, d = batch.quaternions.unbind(-1)
    quaternions = torch.stack((w * a - z * d, w * b - z * c, w * c + z * b, w * d + z * a), -1)
    cos, sin = torch.cos(angle)[:, None, None], torch.sin(angle)[:, None, None]
    x, y, up = batch.positions.unbind(-1)
    positions = torch.stack((cos * x - sin * y, sin * x + cos * y, up), -1)
    return batch._replace(positions=positions, quaternions=quaternions)


def _shuffled(batch: Clips, order: Tensor) -> Clips:
    """Puts the objects of clips into the order [B, O]."""
    row = torch.arange(order.shape[0], device=order.device)[:, None]
    moving = {name: getattr(batch, name)[row, :, order].transpose(1, 2) for name in ("positions", "quaternions")}
    still = {name: getattr(batch, name)[row, order] for name in ("points", "point_mask", "objects", "properties")}
    return batch._replace(**moving, **still)
