"""What walking tasks share: a velocity command, a gait phase, the start, and how a robot is measured."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from functional_sac.tasks import locomotion_terms as terms
from functional_sac.tasks.locomotion_terms import Scene, Seen, View
from functional_sac.tasks.task import Part, RobotTask, Shared, Start, Term
from functional_sl.sim import rotation, sensors
from functional_sl.sim.contract import RobotModel, SimState

LIN_VEL_X = (-0.6, 1.0)  # m/s
LIN_VEL_Y = (-0.4, 0.4)
YAW_RATE = (-0.8, 0.8)  # rad/s
MAX_EPISODE_STEPS = 1000
RESAMPLE_STEPS = 1000  # between two commands
COMMAND_DRAWS = 3
BASE_DRAWS = 9  # x, y, heading and velocity of the base


class Own(NamedTuple):
    """What an episode asks for."""

    command: Tensor  # [N, 3]: forward and left velocity, yaw rate, in the base's frame
    phase: Tensor  # [N] in [0, 1), of the gait


class Design(NamedTuple):
    """What makes a walking task.

    Attributes:
      name: the task.
      base: site of the IMU that measures the base's velocity.
      gyro: site of the gyro, whose tilt counts too.
      feet: sites of the feet.
      offsets: phase of each foot less the gait's.
      frequency: of the gait, Hz.
      dead_zone: planar speeds below which a command becomes 0, m/s.
      max_tilt: at which an episode ends, rad.
      min_height: of the base, below which an episode ends, m.
      action_scale: rad.
    """

    name: str
    base: str
    gyro: str
    feet: tuple[str, ...]
    offsets: tuple[float, ...]
    frequency: float
    dead_zone: float
    max_tilt: float
    min_height: float
    action_scale: float


def make(
    model: RobotModel, design: Design, table: tuple[Term, ...], parts: tuple[tuple[Part, ...], tuple[Part, ...]]
) -> RobotTask:
    """Returns the task of a design, without anything shared.

    Args:
      model: the robot of the simulator.
      design: numbers and names.
      table: terms of the reward.
      parts: of the observations, from `observation_table`.
    """
    offsets = torch.tensor(design.offsets, device=model.default_qpos.device)
    increment = design.frequency * model.control_dt

    def phases(own: Own) -> Tensor:
        return torch.remainder(own.phase.unsqueeze(1) + offsets, 1.0)

    def advance(own: Own, length: Tensor, uniform: Tensor) -> Own:
        due = (length % RESAMPLE_STEPS == 0).unsqueeze(1)
        drawn = command(uniform[:, :COMMAND_DRAWS], design.dead_zone)
        return Own(torch.where(due, drawn, own.command), torch.remainder(own.phase + increment, 1.0))

    def start(shared: Shared, uniform: Tensor) -> Start:
        base, asked, phase = uniform.split([BASE_DRAWS, COMMAND_DRAWS, 1], dim=1)
        return Start(Own(command(asked, design.dead_zone), phase[:, 0].clone()), *standing(model, base))

    def terminated(scene: Scene) -> Tensor:
        return (scene.seen.gravity[:, 2] > -math.cos(design.max_tilt)) | (scene.seen.base_height < design.min_height)

    def scene(own: Own, seen: Seen, action: Tensor, last_action: Tensor) -> Scene:
        return Scene(seen, own.command, phases(own), action, last_action)

    return RobotTask(
        name=design.name,
        max_episode_steps=MAX_EPISODE_STEPS,
        default_pose=model.default_joint_pos,
        action_scale=torch.full_like(model.default_joint_pos, design.action_scale),
        terms=table,
        actor=parts[0],
        privileged=parts[1],
        step_draws=COMMAND_DRAWS,
        start_draws=BASE_DRAWS + COMMAND_DRAWS + 1,
        shared=lambda: (),
        look=Look(model, design.base, design.gyro, design.feet),
        scene=scene,
        view=lambda own, seen, last_action: View(seen, own.command, phases(own), last_action),
        terminated=terminated,
        expired=lambda own: torch.zeros_like(own.phase, dtype=torch.bool),
        advance=advance,
        start=start,
        learn=lambda shared, own, outcome: shared,
        possible_length=lambda own: torch.full_like(own.phase, MAX_EPISODE_STEPS, dtype=torch.int64),
        measured=terms.ERRORS,
        measures=lambda own, shared, scene: (*terms.errors(scene).values(),),
    )


def command(uniform: Tensor, dead_zone: float = 0.0) -> Tensor:
    """Returns commands [N, 3] of random numbers [N, 3]; a planar velocity within the dead zone becomes 0."""
    drawn = torch.stack(
        [
            low + (high - low) * u
            for (low, high), u in zip((LIN_VEL_X, LIN_VEL_Y, YAW_RATE), uniform.unbind(1), strict=True)
        ],
        dim=1,
    )
    moves = torch.linalg.vector_norm(drawn[:, :2], dim=1, keepdim=True) > dead_zone
    return torch.cat((drawn[:, :2] * moves, drawn[:, 2:]), dim=1)


def standing(model: RobotModel, uniform: Tensor) -> tuple[Tensor, Tensor]:
    """Returns qpos and qvel of the standing pose, displaced by +-0.5 m, at any heading, at +-0.5 m/s and rad/s.

    Args:
      model: the robot.
      uniform: [N, 9] in [0, 1).
    """
    centred = 2.0 * uniform - 1.0
    place = torch.nn.functional.pad(0.5 * centred[:, :2], (0, 1)) + model.default_qpos[:3]
    turned = rotation.multiply(
        rotation.from_yaw(math.pi * centred[:, 2]), model.default_qpos[3:7].expand(len(uniform), 4)
    )
    joints = model.default_joint_pos.expand(len(uniform), -1)
    return torch.cat((place, turned, joints), dim=1), torch.nn.functional.pad(
        0.5 * centred[:, 3:9], (0, joints.shape[1])
    )


class Look:
    """Measures a robot."""

    def __init__(self, model: RobotModel, base: str, gyro: str, feet: tuple[str, ...]) -> None:
        """Takes the names of the sites of the base's IMU, of the gyro and of the feet."""
        device = model.default_qpos.device
        bodies = [model.site(foot).body for foot in feet]
        self._model, self._base, self._gyro = model, base, gyro
        self._feet = torch.tensor(bodies, device=device)
        self._arms = torch.stack([model.site(foot).pos for foot in feet])
        self._touched = torch.tensor(model.contacts(*(model.body_names[i] for i in bodies)), device=device)

    def __call__(self, state: SimState) -> Seen:
        """Returns what was measured in N worlds."""
        model, quat = self._model, state.body_quat.index_select(1, self._feet)
        pos = state.body_pos.index_select(1, self._feet) + rotation.rotate(quat, self._arms)
        return Seen(
            lin_vel=sensors.velocimeter(model, state, self._base),
            ang_vel=sensors.gyro(model, state, self._gyro),
            gravity=sensors.projected_gravity(model, state, self._gyro),
            joint_pos=state.joint_pos - model.default_joint_pos,
            joint_vel=state.joint_vel,
            base_height=state.qpos[:, 2],
            foot_height=pos[..., 2],
            foot_tilt=quat[..., 1:3].square().sum(dim=-1),
            foot_force=state.contact_force.index_select(1, self._touched),
        )


def observation_table(
    joints: int, feet: int, *, joint_vel_noise: float, turn: float, scales: tuple[float, float, float]
) -> tuple[tuple[Part, ...], tuple[Part, ...]]:
    """Returns the parts of the actor's observation, and what the critic sees beside them.

    Args:
      joints: J.
      feet: F.
      joint_vel_noise: half width, rad/s.
      turn: what a whole period of the gait is called, 1 or 2 pi.
      scales: of the angular, the joints' and the linear velocities.
    """
    angular, joint, linear = scales
    actor = (
        Part("ang_vel", lambda view: view.seen.ang_vel, 3, scale=angular),
        Part("gravity", lambda view: view.seen.gravity, 3),
        Part("joint_pos", lambda view: view.seen.joint_pos, joints, noise=0.01),
        Part("joint_vel", lambda view: view.seen.joint_vel, joints, noise=joint_vel_noise, scale=joint),
        Part("last_action", lambda view: view.last_action, joints),
        Part("command", lambda view: view.command, 3),
        Part("phase", lambda view: view.phase, feet, scale=turn),
    )
    return actor, (Part("lin_vel", lambda view: view.seen.lin_vel, 3, scale=linear),)
