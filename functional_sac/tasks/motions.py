"""The reference motions of a tracking task: frames as rows, where episodes begin in them, and how far off."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from functional_sac.tasks import sampling
from functional_sac.tasks.sampling import Sampling
from functional_sac.tasks.task import Outcome, Start
from functional_sac.tasks.tracking_terms import ANCHOR, BODIES, ROOT, Reference
from functional_sl.motions import library as libraries
from functional_sl.sim import rotation
from functional_sl.sim.contract import RobotModel

# Half widths of the uniform noise at the start of an episode.
POSE_NOISE = (0.05, 0.05, 0.01, 0.1, 0.1, 0.2)  # x, y, z in m; roll, pitch, yaw in rad
VELOCITY_NOISE = (0.5, 0.5, 0.2, 0.52, 0.52, 0.78)  # m/s; rad/s
JOINT_NOISE = 0.1  # rad


class Own(NamedTuple):
    """Where an episode is in its motion."""

    frame: Tensor  # [N] int64, shown by the last observation
    first: Tensor  # [N] int64, where the episode began
    last: Tensor  # [N] int64, of the clip


class Motions:
    """The frames of all clips as rows, and where episodes begin in them."""

    def __init__(self, model: RobotModel, library: libraries.MotionLibrary, fps: float, mode: str) -> None:
        """Takes what `tracking.make` takes."""
        self._model, self._fps, self._mode = model, fps, mode
        bodies = torch.tensor(model.bodies(*BODIES), device=library.qpos.device)
        parts = Reference(
            library.joint_pos, library.joint_vel,
            *(x.index_select(1, bodies) for x in
              (library.body_pos, library.body_quat, library.body_lin_vel, library.body_ang_vel)),
        )  # fmt: skip
        self._shapes = [part.shape[1:] for part in parts]
        self._rows = torch.cat([part.flatten(1) for part in parts], dim=1)
        anchor = (parts.body_pos[:, ANCHOR], parts.body_quat[:, ANCHOR])
        self._commands = torch.cat((parts.joint_pos, parts.joint_vel, *anchor), dim=1)
        root = (parts.body_lin_vel[:, ROOT], parts.body_ang_vel[:, ROOT])
        self._starts = torch.cat((library.qpos, *root, library.joint_vel), dim=1)
        lengths = library.clip_end - library.clip_start
        self._last = (library.clip_end - 1).repeat_interleave(lengths)
        self._first_of_clip = library.clip_start
        device = library.qpos.device
        self._noise = torch.tensor(
            (*POSE_NOISE, *VELOCITY_NOISE, *[JOINT_NOISE] * len(model.joint_names)), device=device
        )

    @property
    def frames(self) -> int:
        """The number of frames of all clips."""
        return self._rows.shape[0]

    @property
    def draws(self) -> int:
        """Random numbers that a start takes."""
        return 2 + self._noise.shape[0]

    def statistics(self) -> Sampling:
        """Returns the statistics of the sampling before any failure."""
        return sampling.init(self.frames, self._fps, self._rows.device)

    def reference(self, frame: Tensor) -> Reference:
        """Returns frames [N] of the motions."""
        columns = self._rows[frame].split([shape.numel() for shape in self._shapes], dim=1)
        return Reference(*(x.unflatten(1, shape) for x, shape in zip(columns, self._shapes, strict=True)))

    def command(self, frame: Tensor) -> tuple[Tensor, ...]:
        """Returns joint positions and velocities, and the anchor's position and orientation."""
        joints = len(self._model.joint_names)
        return self._commands[frame].split([joints, joints, 3, 4], dim=1)

    def learn(self, shared: Sampling, own: Own, outcome: Outcome) -> Sampling:
        """Counts failures, where the sampling is adaptive."""
        if self._mode != "adaptive":
            return Sampling(shared.failures.clone())
        return sampling.update(shared, own.frame, outcome.terminated, self.frames)

    def start(self, shared: Sampling, uniform: Tensor) -> Start:
        """Returns episodes about frames of the motions; `uniform` is [N, draws]."""
        frame = self._frame(shared, uniform[:, :2])
        noise = self._noise * (2.0 * uniform[:, 2:] - 1.0)
        pose, velocity, joints = noise.split([6, 6, noise.shape[1] - 12], dim=1)
        reference = self._starts[frame]
        pos, quat, angles, linear, angular, speeds = reference.split([3, 4, joints.shape[1], 3, 3, joints.shape[1]], 1)
        quat = rotation.multiply(rotation.from_euler(*pose[:, 3:].unbind(1)), quat)
        lower, upper = self._model.joint_range.unbind(1)
        spin = rotation.rotate_inverse(quat, angular + velocity[:, 3:])
        return Start(
            Own(frame=frame, first=frame.clone(), last=self._last[frame]),
            qpos=torch.cat((pos + pose[:, :3], quat, torch.clamp(angles + joints, lower, upper)), dim=1),
            qvel=torch.cat((linear + velocity[:, :3], spin, speeds), dim=1),
        )

    def _frame(self, shared: Sampling, uniform: Tensor) -> Tensor:
        if self._mode == "start":
            return self._first_of_clip[(uniform[:, 0] * self._first_of_clip.shape[0]).long()]
        return sampling.draw(sampling.probabilities(shared), uniform, self.frames)
