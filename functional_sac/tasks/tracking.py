"""Motion tracking of the G1: follow a reference frame by frame, from any place in it.

The task of BeyondMimic (arXiv:2508.08241) in two presets: `unilab`, with the weights, thresholds and the action scale
of UniLab's FlashSAC, and `beyondmimic`. In both, a clip's end is a truncation, and nothing about the robot is random
but where and how it starts.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
from torch import Tensor

from functional_sac.tasks import sampling
from functional_sac.tasks import tracking_terms as terms
from functional_sac.tasks.motions import Motions, Own
from functional_sac.tasks.sampling import Sampling
from functional_sac.tasks.task import Part, RobotTask, Term
from functional_sac.tasks.tracking_terms import ANCHOR, BODIES, Scene, Seen
from functional_sl.motions import library as libraries
from functional_sl.sim import rotation, sensors
from functional_sl.sim.contract import RobotModel, SimState

MAX_EPISODE_STEPS = 500


class Preset(NamedTuple):
    """What differs between the two sources.

    Attributes:
      dynamics: of the robot, see `robots.g1.robot`.
      action_scale: rad; None for a quarter of effort limit over stiffness, joint by joint.
      anchor_weight: of the anchor's position in the reward.
      body_weight: of the bodies' positions.
      height_limit: largest error of the anchor's height and of the ends' heights, m.
      clean_velocity: whether the critic sees the base velocity twice.
    """

    dynamics: str
    action_scale: float | None
    anchor_weight: float
    body_weight: float
    height_limit: float
    clean_velocity: bool
    noise: dict[str, float]


PRESETS = {
    "unilab": Preset(
        "unilab", 2.0, 1.0, 2.0, 0.5, True,
        {"base_lin_vel": 0.1, "base_ang_vel": 0.2, "joint_pos": 0.01, "joint_vel": 1.5},
    ),
    "beyondmimic": Preset(
        "beyondmimic", None, 0.5, 1.0, 0.25, False,
        {
            "anchor_pos": 0.25, "anchor_ori": 0.05, "base_lin_vel": 0.5, "base_ang_vel": 0.2, "joint_pos": 0.01,
            "joint_vel": 0.5,
        },
    ),
}  # fmt: skip
TILT_LIMIT = 0.8
SOFT_LIMITS = 0.9  # of the range of a joint


class View(NamedTuple):
    """What observations are made of."""

    seen: Seen
    joint_pos: Tensor  # [N, J], of the reference
    joint_vel: Tensor  # [N, J]
    anchor_pos: Tensor  # [N, 3]
    anchor_quat: Tensor  # [N, 4]
    last_action: Tensor  # [N, J]
    default_pose: Tensor  # [J]


def reward_table(preset: str, model: RobotModel) -> tuple[Term, ...]:
    """Returns the terms of the reward."""
    chosen, partial, mimic = PRESETS[preset], functools.partial, "BeyondMimic, arXiv:2508.08241, table of rewards"
    lower, upper = model.joint_range.unbind(1)
    if preset == "unilab":
        limits = Term("joint_limits", partial(terms.joint_limits_squared, lower=lower, upper=upper), -2.0, "UniLab")
        contacts = Term("low_bodies", partial(terms.low_bodies, height=0.05), -0.1, "UniLab")
    else:
        middle, half = (upper + lower) / 2, SOFT_LIMITS * (upper - lower) / 2
        soft = partial(terms.joint_limits, lower=middle - half, upper=middle + half)
        limits = Term("joint_limits", soft, -10.0, mimic)
        contacts = Term("touching_bodies", partial(terms.touching_bodies, force=1.0), -0.1, mimic)
    return (
        Term("anchor_position", partial(terms.anchor_position, std=0.3), chosen.anchor_weight, mimic),
        Term("anchor_orientation", partial(terms.anchor_orientation, std=0.4), 0.5, mimic),
        Term("body_position", partial(terms.body_position, std=0.3), chosen.body_weight, mimic),
        Term("body_orientation", partial(terms.body_orientation, std=0.4), 1.0, mimic),
        Term("body_linear_velocity", partial(terms.body_linear_velocity, std=1.0), 1.0, mimic),
        Term("body_angular_velocity", partial(terms.body_angular_velocity, std=3.14), 1.0, mimic),
        Term("action_rate", terms.action_rate, -0.1, mimic),
        limits,
        contacts,
    )


def observation_table(preset: str, joints: int) -> tuple[tuple[Part, ...], tuple[Part, ...]]:
    """Returns the parts of the actor's observation, and what the critic sees beside them."""
    noise = PRESETS[preset].noise
    actor = (
        Part("command", _command, 2 * joints),
        Part("anchor_pos", _anchor_pos, 3),
        Part("anchor_ori", _anchor_ori, 6),
        Part("base_lin_vel", lambda view: view.seen.base_lin_vel, 3),
        Part("base_ang_vel", lambda view: view.seen.base_ang_vel, 3),
        Part("joint_pos", lambda view: view.seen.joint_pos - view.default_pose, joints),
        Part("joint_vel", lambda view: view.seen.joint_vel, joints),
        Part("last_action", lambda view: view.last_action, joints),
    )
    privileged = (Part("body_pos", _body_pos, 3 * len(BODIES)), Part("body_ori", _body_ori, 6 * len(BODIES)))
    if PRESETS[preset].clean_velocity:
        privileged += (Part("clean_base_lin_vel", lambda view: view.seen.base_lin_vel, 3),)
    return tuple(part._replace(noise=noise.get(part.name, 0.0)) for part in actor), privileged


def make(
    model: RobotModel,
    library: libraries.MotionLibrary,
    preset: str = "unilab",
    mode: str = "adaptive",
    fps: float = 50.0,
) -> RobotTask:
    """Returns the task.

    Args:
      model: the G1 of the simulator.
      library: motions at the control rate, on the model's device.
      preset: `unilab` or `beyondmimic`.
      mode: where episodes begin: `adaptive`, `uniform` or `start`.
      fps: frames a second of the library.

    Raises:
      ValueError: if the library's rate is not the control rate, or its bodies and joints are not the model's.
    """
    _check(model, library, fps)
    motions = Motions(model, library, fps, mode)
    look, joints = _Look(model), len(model.joint_names)
    actor, privileged = observation_table(preset, joints)
    limit, scale = PRESETS[preset].height_limit, PRESETS[preset].action_scale

    def terminated(scene: Scene) -> Tensor:
        lost = (scene.anchor_height.abs() > limit) | (scene.anchor_tilt.abs() > TILT_LIMIT)
        return lost | (scene.end_height.abs() > limit).any(dim=1)

    def measures(own: Own, shared: Sampling, scene: Scene) -> tuple[Tensor, ...]:
        return *terms.errors(scene).values(), *sampling.measures(sampling.probabilities(shared)).values()

    def view(own: Own, seen: Seen, last_action: Tensor) -> View:
        return View(seen, *motions.command(own.frame), last_action, model.default_joint_pos)

    return RobotTask(
        name="g1_motion_tracking",
        max_episode_steps=MAX_EPISODE_STEPS,
        default_pose=model.default_joint_pos,
        action_scale=0.25 * model.effort_limit / model.kp if scale is None else torch.full_like(model.kp, scale),
        terms=reward_table(preset, model),
        actor=actor,
        privileged=privileged,
        step_draws=0,
        start_draws=motions.draws,
        shared=motions.statistics,
        look=look,
        scene=lambda own, seen, action, last: terms.compare(motions.reference(own.frame), seen, action, last),
        view=view,
        terminated=terminated,
        expired=lambda own: own.frame >= own.last,
        advance=lambda own, length, uniform: own._replace(frame=torch.minimum(own.frame + 1, own.last)),
        start=motions.start,
        learn=motions.learn,
        possible_length=lambda own: (own.last - own.first + 1).clamp(max=MAX_EPISODE_STEPS),
        measured=(*terms.ERRORS, *sampling.MEASURES),
        measures=measures,
        reference=lambda own: (library.qpos[own.frame], library.body_pos[own.frame]),
    )


def _check(model: RobotModel, library: libraries.MotionLibrary, fps: float) -> None:
    rate = 1.0 / model.control_dt
    if abs(fps - rate) > 1e-3 * rate:
        raise ValueError(f"the motions have {fps:g} frames a second; {model.name} is controlled at {rate:g}")
    found = (library.qpos.shape[1], library.body_pos.shape[1])
    expected = (model.default_qpos.shape[0], len(model.body_names))
    if found != expected:
        raise ValueError(f"the motions have {found} positions and bodies; {model.name} has {expected}")


class _Look:
    """Measures a robot."""

    def __init__(self, model: RobotModel) -> None:
        device = model.default_qpos.device
        allowed = {body for body in BODIES if "ankle" in body or "wrist" in body}
        hard = [body for body in model.contact_bodies if body not in allowed]
        self._model = model
        self._bodies = torch.tensor(model.bodies(*BODIES), device=device)
        self._touched = torch.tensor(model.contacts(*hard), device=device)

    def __call__(self, state: SimState) -> Seen:
        frames = (state.body_pos, state.body_quat, state.body_lin_vel, state.body_ang_vel)
        return Seen(
            state.joint_pos,
            state.joint_vel,
            *(x.index_select(1, self._bodies) for x in frames),
            base_lin_vel=sensors.velocimeter(self._model, state, "imu_in_pelvis"),
            base_ang_vel=sensors.gyro(self._model, state, "imu_in_torso"),
            contact_force=state.contact_force.index_select(1, self._touched),
        )


def _command(view: View) -> Tensor:
    return torch.cat((view.joint_pos, view.joint_vel), dim=1)


def _anchor(view: View) -> tuple[Tensor, Tensor]:
    return view.seen.body_pos[:, ANCHOR], view.seen.body_quat[:, ANCHOR]


def _anchor_pos(view: View) -> Tensor:
    """Returns the reference's anchor in the frame of the robot's."""
    pos, quat = _anchor(view)
    return rotation.rotate_inverse(quat, view.anchor_pos - pos)


def _anchor_ori(view: View) -> Tensor:
    _, quat = _anchor(view)
    return rotation.sixd(rotation.multiply(rotation.conjugate(quat), view.anchor_quat))


def _body_pos(view: View) -> Tensor:
    """Returns the robot's bodies in the frame of its anchor."""
    pos, quat = _anchor(view)
    return rotation.rotate_inverse(quat.unsqueeze(1), view.seen.body_pos - pos.unsqueeze(1)).flatten(1)


def _body_ori(view: View) -> Tensor:
    _, quat = _anchor(view)
    inverse = rotation.conjugate(quat).unsqueeze(1).expand_as(view.seen.body_quat)
    return rotation.sixd(rotation.multiply(inverse, view.seen.body_quat)).flatten(1)
