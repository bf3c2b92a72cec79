"""What a NeRD network learns from: inputs and targets of every step of a trajectory, and windows of them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from functional_sl import keys, tree
from functional_sl.models import articulation, nerd, normalizer
from functional_sl.models.articulation import Robot
from functional_sl.models.nerd import Convention, Statistics
from functional_sl.sources.nerd_data import Trajectories

EPS = 1e-5  # under the root of a channel's variance
_INACTIVE = 1e-9  # a target with a smaller standard deviation never changes
_CHUNK = 512  # trajectories whose features are computed at once


class Transitions(NamedTuple):
    """Network inputs and targets of every step, a row a trajectory."""

    inputs: Tensor  # [N, T, F] float32
    targets: Tensor  # [N, T, S] float32


def transitions(robot: Robot, convention: Convention, data: Trajectories) -> Transitions:
    """Returns inputs and targets, computed in float64 and rounded once."""
    parts = []
    for i in range(0, len(data.states), _CHUNK):
        states, actuation, normals, offsets = (x[i : i + _CHUNK] for x in data)
        now, after = states[:, :-1], states[:, 1:]
        inputs = nerd.features(convention, now, actuation, *surroundings(robot, now, normals, offsets))
        targets = nerd.relative(convention, nerd.to_frame(convention, now, now), nerd.to_frame(convention, after, now))
        parts.append(Transitions(inputs.to(torch.float32), targets.to(torch.float32)))
    return tree.concatenate(parts)


def surroundings(
    robot: Robot, states: Tensor, normals: Tensor, offsets: Tensor
) -> tuple[articulation.Contacts | None, Tensor | None, Tensor]:
    """Returns contacts, the slots' thickness [C] and the direction of gravity [N, T, 3]; two None without a ground.

    Args:
      robot: whose kinematics give the contacts.
      states: [N, T, S].
      normals: [N, 3] of the ground of every trajectory.
      offsets: [N], likewise.
    """
    down = states.new_tensor((0.0, 0.0, -1.0)).expand(*states.shape[:-1], 3)
    if not robot.ground:
        return None, None, down
    ground = (normals[:, None].expand(*states.shape[:2], 3), offsets[:, None].expand(states.shape[:2]))
    return articulation.ground_contacts(robot, states, *ground), articulation.thickness(robot, states), down


def fit(data: Transitions) -> Statistics:
    """Returns the statistics of the training set: std = sqrt(var + 1e-5), and 1 for a channel that does not vary."""
    return Statistics(
        inputs=normalizer.fit(data.inputs, eps=EPS),
        targets=normalizer.fit(data.targets, floor=_INACTIVE, eps=EPS),
        active=~normalizer.constant(data.targets, floor=_INACTIVE),
    )


def sample(data: Transitions, key: Tensor, batch_size: int, *, history: int) -> Transitions:
    """Returns windows [B, h, ...] drawn uniformly from every slice of `history` steps of every trajectory."""
    trajectories, steps = data.inputs.shape[:2]
    starts = steps - history + 1
    drawn = keys.randint(key, (batch_size,), 0, trajectories * starts)
    return _windows(data, drawn // starts, drawn % starts, history)


def batches(data: Transitions, batch_size: int, *, history: int) -> Iterator[Transitions]:
    """Yields every window once, a trajectory after the other."""
    trajectories, steps = data.inputs.shape[:2]
    starts = steps - history + 1
    for windows in torch.arange(trajectories * starts, device=data.inputs.device).split(batch_size):
        yield _windows(data, windows // starts, windows % starts, history)


def count(batch: Transitions, *, active: int) -> Tensor:
    """Returns the number of supervised (window, position, channel) triples, () int64."""
    windows, positions = batch.targets.shape[:2]
    return torch.full((), windows * positions * active, dtype=torch.int64, device=batch.targets.device)


def _windows(data: Transitions, trajectory: Tensor, start: Tensor, history: int) -> Transitions:
    steps = start[:, None] + torch.arange(history, device=start.device)
    return Transitions(*(x[trajectory[:, None], steps] for x in data))
