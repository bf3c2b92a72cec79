"""RigidFormer's error in closed loop: every supervised frame of a clip follows from the predicted ones before it.

The error of an anchor is SmoothL1 of its position (times 10) and of its acceleration, both of the anchor as it was
predicted and as the rigid motion has it. Positions are divided by dt^2, so that both are accelerations.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from functional_sl.models import precision, rigidformer
from functional_sl.models.point_encoder import ANCHORS, Bodies, Pose, place
from functional_sl.models.rigidformer import Advance
from functional_sl.sources.rigid_bodies import FRAME_DT, Scenes
from functional_sl.sources.rigid_clips import Clips

POSITION, ACCELERATION = 10.0, 1.0  # weights of the loss


def bodies_of(batch: Clips | Scenes) -> Bodies:
    """Returns what does not change in time."""
    return rigidformer.prepare(batch.points, batch.point_mask, batch.objects, batch.properties)


def observed(batch: Clips) -> list[Pose]:
    """Returns the poses [B, O, ...] of the two first frames."""
    return [
        rigidformer.pose(batch.positions[:, i], batch.quaternions[:, i], batch.objects & batch.frames[:, i, None])
        for i in range(2)
    ]


def count(batch: Clips) -> Tensor:
    """Returns the number of valid pairs of supervised frame and anchor."""
    return _valid(batch).sum()


def errors(batch: Clips, found: list[Advance]) -> tuple[Tensor, dict[str, Tensor]]:
    """Returns the loss and the distance of rigid anchors from the true ones (m), both summed over the valid ones.

    Args:
      batch: clips of T frames.
      found: T - 2 predicted steps.
    """
    with precision.full(batch.positions):
        return _errors(batch, found)


def _errors(batch: Clips, found: list[Advance]) -> tuple[Tensor, dict[str, Tensor]]:
    bodies, dt = bodies_of(batch), batch.step * FRAME_DT
    true = rigidformer.pose(batch.positions, batch.quaternions, batch.objects[:, None] & batch.frames[..., None])
    anchors = place(bodies, true, bodies.anchors[:, None])
    raw, rigid, acceleration = (
        torch.stack([getattr(x, name) for x in found], 1) for name in ("raw", "rigid", "acceleration")
    )
    # The rigid anchors' own accelerations, from the places that they were predicted from.
    path = torch.cat((anchors[:, :2], rigid), 1)
    square = dt.square()[:, None, None, None, None]
    moved = (path[:, 2:] - 2 * path[:, 1:-1] + path[:, :-2]) / square
    wanted = (anchors[:, 2:] - 2 * anchors[:, 1:-1] + anchors[:, :-2]) / square
    gaps = [(x - anchors[:, 2:]) / square for x in (raw, rigid)]
    error = POSITION * sum(_smooth(gap) for gap in gaps)
    error = error + ACCELERATION * (_smooth(acceleration - wanted) + _smooth(moved - wanted))
    valid = _valid(batch)
    distance = torch.where(valid, torch.linalg.vector_norm((rigid - anchors[:, 2:]).detach(), dim=-1), 0.0)
    return torch.where(valid, error, 0.0).sum(), {"distance": distance.sum()}


def _smooth(gap: Tensor) -> Tensor:
    return F.smooth_l1_loss(gap, torch.zeros_like(gap), reduction="none", beta=1.0).sum(-1)


def _valid(batch: Clips) -> Tensor:
    """Tells which anchors are supervised, [B, T - 2, O, A]: of a frame, an object and a point that exist."""
    anchors = batch.objects[..., None] & batch.point_mask[..., :ANCHORS]
    return batch.frames[:, 2:, None, None] & anchors[:, None]
