"""Free-running predictions of rigid bodies and their errors, beside two baselines: to stay, and to fall and slide."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from functional_sl.models import kabsch, rigidformer
from functional_sl.models.point_encoder import Bodies, Parameters, Pose
from functional_sl.models.rigidformer import Architecture


def free_run(
    params: Parameters, a: Architecture, bodies: Bodies, before: Pose, now: Pose, step: int, frame_dt: float, count: int
) -> Pose:
    """Returns `count` predicted poses [B, T, O, ...], `step` frames apart, each from those before it."""
    code = torch.full(now.position.shape[:1], float(step), device=now.position.device)
    found = rigidformer.roll_out(params, a, bodies, before, now, code, code * frame_dt, count)
    return Pose(*(torch.stack(x, 1) for x in zip(*(one.pose for one in found), strict=True)))


def hold(now: Pose, count: int) -> Pose:
    """Returns poses [B, T, O, ...] that stay as they are."""
    return Pose(*(x[:, None].expand(-1, count, *x.shape[1:]) for x in now))


def land(
    bodies: Bodies, before: Pose, now: Pose, dt: float, count: int, gravity: float = -9.81, sliding: float = 0.97
) -> Pose:
    """Returns poses [B, T, O, ...] of bodies that fall freely until they reach the ground, and slide there.

    In the air velocity and spin are constant but for gravity: places have the constant second difference gravity dt^2,
    which is exact for the simulated free fall. A body whose lowest point would come below z = 0 in a frame stands on it
    there: it no longer turns, its vertical velocity is 0, and its horizontal one is multiplied by `sliding`.

    Args:
      bodies: the clouds.
      before: one frame before now.
      now: the current frame.
      dt: s, of a frame.
      count: T, frames.
      gravity: m/s^2.
      sliding: horizontal velocity that is left after a frame on the ground.
    """
    spin, moved = now.rotation @ before.rotation.mT, now.position - before.position
    up = torch.arange(3, device=moved.device) == 2
    found = []
    for _ in range(count):
        moved = torch.where(up, moved + gravity * dt * dt, moved)
        place = now.position + moved
        turned = spin @ now.rotation
        # A body whose next rotation reaches the ground stands on what it has now.
        hit = place[..., 2:] < _standing(bodies, turned)
        moved = torch.where(hit, torch.where(up, 0.0, sliding * moved), moved)
        rotation = torch.where(hit[..., None], now.rotation, turned)
        now = Pose(rotation, torch.where(hit & up, _standing(bodies, rotation), place))
        found.append(now)
    return Pose(*(torch.stack(x, 1) for x in zip(*found, strict=True)))


def _standing(bodies: Bodies, rotation: Tensor) -> Tensor:
    """Returns the height of a centre [B, O, 1] at which the body's lowest point is at z = 0."""
    heights = (bodies.points @ rotation.mT)[..., 2]
    return -torch.where(bodies.point_mask, heights, torch.inf).amin(-1, keepdim=True)


def errors(predicted: Pose, true: Pose) -> tuple[Tensor, Tensor]:
    """Returns the distances [...] in m and the angles [...] in degrees between two batches of poses."""
    gap = predicted.rotation.mT @ true.rotation
    cosine = (gap.diagonal(dim1=-2, dim2=-1).sum(-1) - 1) / 2
    # The angle from its sine and cosine: the arccosine alone loses small angles.
    angle = torch.atan2(torch.linalg.vector_norm(kabsch.twist(gap), dim=-1) / 2, cosine)
    return torch.linalg.vector_norm(predicted.position - true.position, dim=-1), angle * (180 / math.pi)


def root_mean_square(x: Tensor, mask: Tensor) -> float:
    """Returns the root of the mean square over the valid entries; of at least one."""
    return math.sqrt(float(torch.where(mask, x.double(), 0.0).square().sum() / mask.sum()))
