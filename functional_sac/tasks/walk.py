"""Walking of the G1 on a floor by a velocity command, with the rewards of UniLab's FlashSAC.

Gains and armatures of the robot are not random here.
"""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import torch
from torch import Tensor

from functional_sac.tasks import locomotion
from functional_sac.tasks import locomotion_terms as terms
from functional_sac.tasks.locomotion import Design
from functional_sac.tasks.task import Outcome, RobotTask, Term
from functional_sl.sim.contract import RobotModel

DESIGN = Design(
    name="g1_walk_flat",
    base="imu_in_pelvis",
    gyro="imu_in_torso",
    feet=("left_foot", "right_foot"),
    offsets=(0.0, 0.5),
    frequency=1.5,
    dead_zone=0.2,
    max_tilt=math.radians(65.0),
    min_height=0.3,
    action_scale=1.0,
)

# Weight of a joint's distance from the default pose, by what its name holds; 50 for waist and arms.
POSE_WEIGHTS = {"hip_pitch": 0.01, "knee": 0.01, "hip_roll": 2.0, "hip_yaw": 5.0, "ankle": 5.0}

SCALE_RANGE = (1 / 16, 1 / 8)  # of the penalties
SCALE_RATE = 0.001
SHORT, LONG = 150.0, 750.0  # mean episode lengths, steps
WINDOW = 1000 / 4096  # episodes of the mean, an environment


class Curriculum(NamedTuple):
    """How much penalties count: the more, the longer episodes are."""

    scale: Tensor  # () float32
    mean_length: Tensor  # () float32, running mean over finished episodes


def reward_table(model: RobotModel) -> tuple[Term, ...]:
    """Returns the terms of the reward."""
    partial, source = functools.partial, "UniLab, g1_walk_flat"
    weights = [next((w for part, w in POSE_WEIGHTS.items() if part in name), 50.0) for name in model.joint_names]
    pose = torch.tensor(weights, device=model.default_qpos.device)
    return (
        Term("track_lin_vel", partial(terms.track_lin_vel, sigma=0.25), 2.0, source),
        Term("track_yaw_rate", partial(terms.track_yaw_rate, sigma=0.25), 1.5, source),
        Term("roll_pitch_rate", terms.roll_pitch_rate, -1.0, source),
        Term("tilt", terms.tilt, -10.0, source),
        Term("action_rate", terms.action_rate, -5.0, source),
        Term("pose", partial(terms.pose, weights=pose), -0.5, source),
        Term("foot_tilt", terms.foot_tilt, -25.0, source),
        Term("foot_swing", partial(terms.foot_swing, height=0.09, sigma=0.005), 5.0, source),
        Term("alive", terms.alive, 10.0, source),
    )


def make(model: RobotModel) -> RobotTask:
    """Returns the task for the G1 of a simulator."""
    parts = locomotion.observation_table(
        len(model.joint_names), 2, joint_vel_noise=0.1, turn=2 * math.pi, scales=(0.25, 0.05, 2.0)
    )
    table, device = reward_table(model), model.default_qpos.device
    task = locomotion.make(model, DESIGN, table, parts)
    penalty = torch.tensor([term.weight < 0 for term in table], device=device)

    def shared() -> Curriculum:
        return Curriculum(torch.tensor(SCALE_RANGE[0], device=device), torch.zeros((), device=device))

    def weights(shared: Curriculum) -> Tensor:
        return torch.where(penalty, shared.scale, 1.0)

    return task._replace(
        shared=shared,
        weights=weights,
        learn=lambda shared, own, outcome: learn(shared, outcome),
        measured=(*terms.ERRORS, "penalty_scale"),
        measures=lambda own, shared, scene: (*terms.errors(scene).values(), shared.scale),
    )


def learn(shared: Curriculum, outcome: Outcome) -> Curriculum:
    """Moves the curriculum on: a step in which episodes end changes the scale by a thousandth at most."""
    done, num_envs = outcome.done, outcome.done.shape[0]
    count = done.sum()
    batch_mean = (outcome.length * done).sum() / count.clamp(min=1)
    weight = (count / max(1, int(WINDOW * num_envs))).clamp(max=1.0)
    mean = shared.mean_length + weight * (batch_mean - shared.mean_length)
    change = (mean > LONG).float() - (mean < SHORT).float()
    scale = shared.scale * (1.0 + SCALE_RATE * change * (count > 0))
    return Curriculum(scale.clamp(*SCALE_RANGE), mean)
