"""Clouds of points as tokens: features of every point, a hierarchical encoder of every object, pooling at anchors.

After RigidFormer (arXiv:2605.09196). Points are in the order of farthest-point sampling, so that the first half,
quarter and eighth of the valid ones are spread over the object and the first `ANCHORS` are its anchors. All maxima and
sums run over valid points alone. The paper's 12 features of a point have their lengths at a second scale too, and the
place about the object's centre, which makes 21.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from functional_sl import keys
from functional_sl.models import precision

Parameters = dict[str, Any]

ANCHORS = 4
FEATURES = 21
LEVELS = 4  # of the encoder; every one keeps half of the points of the one before
LENGTH = 0.1  # m, the unit of lengths inside the network
NEAR = 0.02  # m, of contact
CHUNK = 1024  # points whose distances to all others are in memory at once


class Bodies(NamedTuple):
    """What does not change in time; all of it finite, also where it is not valid."""

    points: Tensor  # [B, O, P, 3] m, body axes about the centre of mass
    point_mask: Tensor  # [B, O, P] bool
    objects: Tensor  # [B, O] bool
    properties: Tensor  # [B, O, 3] mass in kg, friction, restitution

    @property
    def anchors(self) -> Tensor:
        """The first points [B, O, A, 3]."""
        return self.points[..., :ANCHORS, :]

    @property
    def anchor_mask(self) -> Tensor:
        """Which anchors exist [B, O, A]."""
        return self.point_mask[..., :ANCHORS]


class Pose(NamedTuple):
    """Where objects are."""

    rotation: Tensor  # [B, O, 3, 3] body axes to world axes
    position: Tensor  # [B, O, 3] m, of the centre of mass


def linear(key: Tensor, outputs: int, inputs: int, gain: float = 1.0) -> Parameters:
    """Returns a matrix drawn from N(0, gain^2 / inputs) and a bias of zeros."""
    weight = gain / math.sqrt(inputs) * keys.normal(key, (outputs, inputs))
    return {"weight": weight, "bias": torch.zeros(outputs, device=key.device)}


def init(key: Tensor, channels: int, outputs: int) -> Parameters:
    """Returns fresh parameters of `encode` and `pool`.

    Args:
      key: [2].
      channels: of a point.
      outputs: width of an object's token.
    """
    draws = iter(keys.split(key, 2 + 2 * LEVELS))
    return {
        "embed": linear(next(draws), channels, FEATURES),
        "points": [linear(next(draws), channels, channels, 1.4) for _ in range(LEVELS)],
        "wholes": [linear(next(draws), channels, channels) for _ in range(LEVELS - 1)],
        "token": linear(next(draws), outputs, LEVELS * channels),
        "log_reach": torch.full((), math.log(0.5), device=key.device),
    }


def place(bodies: Bodies, pose: Pose, points: Tensor | None = None) -> Tensor:
    """Returns points [B, O, P, 3] of the bodies in world axes; all of them by default."""
    points = bodies.points if points is None else points
    with precision.full(points):
        return points @ pose.rotation.mT + pose.position[..., None, :]


def features(bodies: Bodies, before: Pose, now: Pose, step: Tensor) -> Tensor:
    """Returns what the network knows of every point, lengths in units of `LENGTH`.

    Args:
      bodies: the clouds.
      before: one step before now.
      now: the current frame.
      step: [B], frames of a step.

    Returns:
      [B, O, P, 21]: displacement to the nearest point of another object or of the ground, saturating far from `LENGTH`
      and, once more, from `NEAR`; increment since the step before, and since the frame before in units of `NEAR`; place
      about the object's centre, in world axes; its offset from the reference cloud about its own; logarithm of the
      mass, friction, restitution.
    """
    with precision.full(bodies.points):
        return _features(bodies, before, now, step)


def _features(bodies: Bodies, before: Pose, now: Pose, step: Tensor) -> Tensor:
    world, local = place(bodies, now), bodies.points @ now.rotation.mT
    gap = nearest(bodies, now, world)
    distance = torch.sqrt(gap.square().sum(-1, keepdim=True) + 1e-12)
    moved = world - place(bodies, before)
    mass, rest = bodies.properties[..., :1], bodies.properties[..., 1:]
    parts = (
        gap / (LENGTH + distance),
        gap / (NEAR + distance),
        moved / LENGTH,
        moved / (NEAR * step[:, None, None, None]),
        local / LENGTH,
        (local - bodies.points) / LENGTH,
        torch.cat((torch.log(mass), rest), -1)[..., None, :].expand(world.shape),
    )
    return torch.cat(parts, -1)


def nearest(bodies: Bodies, pose: Pose, world: Tensor) -> Tensor:
    """Returns the displacement from every point to the nearest valid point of another object, or down to z = 0.

    The search is over all pairs, `CHUNK` points at a time: 8 B CHUNK O P bytes, and no gradient. The gradient of the
    displacement passes through the poses of both objects; a selection over objects instead of points makes it dense.

    Args:
      bodies: the clouds.
      pose: where they are.
      world: [B, O, P, 3], their points there.

    Returns:
      [B, O, P, 3] m.
    """
    objects, points = world.shape[-3:-1]
    here = world.flatten(-3, -2)
    flat, valid = here.detach(), (bodies.point_mask & bodies.objects[..., None]).flatten(-2)
    owner = torch.arange(objects, device=world.device).repeat_interleave(points)
    near = flat - _middle(flat, valid)
    parts = zip(near.split(CHUNK, -2), owner.split(CHUNK), strict=True)
    index = torch.cat([_search(*part, near, owner, valid) for part in parts], -1)
    body = bodies.points.flatten(-3, -2).gather(-2, index[..., None].expand(*index.shape, 3))
    of = (torch.arange(objects, device=world.device) == (index // points)[..., None]).to(world.dtype)
    motion = of @ torch.cat((pose.rotation.flatten(-2), pose.position), -1)
    gap = (motion[..., :9].unflatten(-1, (3, 3)) @ body[..., None])[..., 0] + motion[..., 9:] - here
    down = torch.cat((torch.zeros_like(here[..., :2]), -here[..., 2:]), -1)
    alone = (index // points) == owner
    height = flat[..., 2]
    close = ~alone & (height > 0) & (gap.detach().square().sum(-1) < height.square())
    return torch.where(close[..., None], gap, down).unflatten(-2, (objects, points))


def _middle(points: Tensor, valid: Tensor) -> Tensor:
    """Returns where most of the valid points are, [B, 1, 3]: about it squares of places leave digits for distances.

    A mean that counts what is far from the last one little, so that one object that has flown off does not move it.
    """
    weight = valid[..., None].to(points.dtype)
    middle = (weight * points).sum(-2, keepdim=True) / weight.sum(-2, keepdim=True).clamp_min(1.0)
    for _ in range(4):
        share = weight / (1.0 + (points - middle).square().sum(-1, keepdim=True))
        middle = (share * points).sum(-2, keepdim=True) / share.sum(-2, keepdim=True).clamp_min(1e-12)
    return middle


def _search(points: Tensor, owners: Tensor, others: Tensor, owner: Tensor, valid: Tensor) -> Tensor:
    """Returns the index [B, Q] of the nearest valid point of another object; without one, of one of its own."""
    # Squared distance less the square of the point itself, which decides nothing.
    squared = others.square().sum(-1)[..., None, :] - 2 * points @ others.mT
    own = owners[:, None] == owner
    # Finite, and the own object's points the nearer ones of what is excluded, to tell that there is no other.
    squared = squared + torch.where(own, 1e6, torch.where(valid, 0.0, 1e9)[..., None, :])
    return squared.argmin(-1)


def encode(params: Parameters, bodies: Bodies, x: Tensor) -> tuple[Tensor, Tensor]:
    """Returns a token of every object and a vector of every point.

    Args:
      params: of `init`.
      bodies: whose masks count.
      x: [B, O, P, 21] features.

    Returns:
      [B, O, D], zero where there is no object or no point, and [B, O, P, C].
    """
    count, slots = bodies.point_mask.sum(-1, keepdim=True), torch.arange(x.shape[-2], device=x.device)
    h, first, found = F.silu(F.linear(x, **params["embed"])), None, []
    for level in range(LEVELS):
        if level:
            half = h[..., : math.ceil(x.shape[-2] / 2**level), :]
            h = half + F.linear(found[-1], **params["wholes"][level - 1])[..., None, :]
        h = h + F.silu(F.linear(h, **params["points"][level]))
        first = h if first is None else first
        kept = slots[: h.shape[-2]] * 2**level < count
        whole = torch.where(kept[..., None], h, -torch.inf).amax(-2)
        found.append(torch.where(count > 0, whole, 0.0))
    token = F.linear(torch.cat(found, -1), **params["token"])
    return torch.where(bodies.objects[..., None], token, 0.0), first


def pool(params: Parameters, bodies: Bodies, vectors: Tensor) -> Tensor:
    """Returns the mean of an object's point vectors around every anchor, weighted by exp(-distance / learned reach).

    Distances are those of the reference cloud: bodies are rigid.

    Args:
      params: of `init`.
      bodies: the clouds.
      vectors: [B, O, P, C].

    Returns:
      [B, O, A, C].
    """
    gaps = bodies.anchors[..., :, None, :] - bodies.points[..., None, :, :]
    distance = torch.linalg.vector_norm(gaps, dim=-1) / LENGTH
    kept = bodies.point_mask[..., None, :]
    scores = torch.where(kept, -distance / torch.exp(params["log_reach"]), -1e9)
    return torch.softmax(scores, -1) @ torch.where(bodies.point_mask[..., None], vectors, 0.0)
