"""Trotting of the Go2 on a floor by a velocity command, with the rewards of UniLab.

Pushes are the only disturbance: gains, mass and centre of mass of the robot are not random here.
"""

from __future__ import annotations

import functools
import math

import torch
from torch import Tensor

from functional_sac.tasks import locomotion
from functional_sac.tasks import locomotion_terms as terms
from functional_sac.tasks.locomotion import COMMAND_DRAWS, Design
from functional_sac.tasks.task import RobotTask, Term
from functional_sl.sim.contract import RobotModel

STANCE = 0.6  # share of a period that a foot is to be on the ground
DESIGN = Design(
    name="go2_joystick_flat",
    base="imu",
    gyro="imu",
    feet=("FL_foot", "FR_foot", "RL_foot", "RR_foot"),
    offsets=(0.0, 0.5, 0.5, 0.0),
    frequency=2.0,
    dead_zone=0.0,
    max_tilt=math.radians(60.0),
    min_height=-math.inf,
    action_scale=0.4,
)

PUSH_STEPS = 750  # between two pushes
PUSH = (1.0, 1.0, 0.5)  # m/s, half widths of the velocity that a push adds


def reward_table() -> tuple[Term, ...]:
    """Returns the terms of the reward."""
    partial, source = functools.partial, "UniLab, go2_joystick_flat"
    return (
        Term("track_lin_vel", partial(terms.track_lin_vel, sigma=0.5), 1.0, source),
        Term("track_yaw_rate", partial(terms.track_yaw_rate, sigma=0.5), 0.2, source),
        Term("vertical_velocity", terms.vertical_velocity, -5.0, source),
        Term("roll_pitch_rate", terms.roll_pitch_rate, -0.1, source),
        Term("base_height", partial(terms.base_height, height=0.3), -20.0, source),
        Term("action_rate", terms.action_rate, -0.02, source),
        Term("pose", terms.pose_l1, -0.4, source),
        Term("contact_phase", partial(terms.contact_phase, force=0.1, stance=STANCE), 1.5, source),
        Term("swing_height", partial(terms.swing_height, height=0.1, sigma=0.01, stance=STANCE), 4.0, source),
    )


def make(model: RobotModel) -> RobotTask:
    """Returns the task for the Go2 of a simulator."""
    joints = len(model.joint_names)
    parts = locomotion.observation_table(joints, 4, joint_vel_noise=0.1, turn=1.0, scales=(1.0, 1.0, 1.0))
    width = torch.tensor(PUSH, device=model.default_qpos.device)

    def push(length: Tensor, uniform: Tensor) -> tuple[Tensor, Tensor]:
        added = width * (2.0 * uniform[:, COMMAND_DRAWS:] - 1.0)
        return length % PUSH_STEPS == 0, torch.nn.functional.pad(added, (0, 3 + joints))

    task = locomotion.make(model, DESIGN, reward_table(), parts)
    return task._replace(push=push, step_draws=COMMAND_DRAWS + len(PUSH))
