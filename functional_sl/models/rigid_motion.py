"""Free-running predictions of rigid bodies and their errors, beside two that know nothing of contact."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from functional_sl.models import rigidformer
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


def fall(before: Pose, now: Pose, dt: float, count: int, gravity: float = -9.81) -> Pose:
    """Returns poses [B, T, O, ...] of constant velocity and spin under gravity, as if there were nothing to hit.

    The places have the constant second difference gravity dt^2, which is exact for the simulated free fall.
    """
    drop = now.position.new_tensor((0.0, 0.0, gravity * dt * dt))
    spin, found = now.rotation @ before.rotation.mT, []
    for _ in range(count):
        before, now = now, Pose(spin @ now.rotation, 2 * now.position - before.position + drop)
        found.append(now)
    return Pose(*(torch.stack(x, 1) for x in zip(*found, strict=True)))


def errors(predicted: Pose, true: Pose) -> tuple[Tensor, Tensor]:
    """Returns the distances [...] in m and the angles [...] in degrees between two batches of poses."""
    gap = predicted.rotation.mT @ true.rotation
    cosine = (gap.diagonal(dim1=-2, dim2=-1).sum(-1) - 1) / 2
    axis = (gap[..., 2, 1] - gap[..., 1, 2], gap[..., 0, 2] - gap[..., 2, 0], gap[..., 1, 0] - gap[..., 0, 1])
    # The angle from its sine and cosine: the arccosine alone loses small angles.
    angle = torch.atan2(torch.linalg.vector_norm(torch.stack(axis, -1), dim=-1) / 2, cosine)
    return torch.linalg.vector_norm(predicted.position - true.position, dim=-1), angle * (180 / math.pi)


def root_mean_square(x: Tensor, mask: Tensor) -> float:
    """Returns the root of the mean square over the valid entries; of at least one."""
    return math.sqrt(float(torch.where(mask, x.double(), 0.0).square().sum() / mask.sum()))
