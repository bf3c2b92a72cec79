"""The contract of a batched robot simulator: N independent worlds with one robot each, as tensors.

A simulator is four functions over a `SimState`. All are pure towards their caller: a returned state shares no memory
with an argument, with an earlier state or with the engine, so states may be kept, compared and stored. The engine's own
buffers are scratch: a step copies the state in, runs the physics and copies the new state out. On CUDA nothing
reads a value back to the host, so the functions run inside `torch.cuda.graph`. They do not run under
`torch.func.vmap` or inside a `torch.compile` region: call them between such regions.

Quaternions are (w, x, y, z), lengths metres, angles radians, times seconds, forces newtons.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor


class SimState(NamedTuple):
    """The state of N worlds, all leaves contiguous and on the simulator's device.

    `qpos`, `qvel` and `warmstart` determine the future; the rest is computed from them or reports on the last step.
    Body axes [B] follow `RobotModel.body_names`, which leaves out the world body. Body poses and velocities belong to
    exactly this `qpos` and `qvel` (no substep of lag), those of reset worlds too.

    Attributes:
      qpos: base position, base quaternion, then one angle a joint.
      qvel: base linear velocity in the world frame, base angular velocity in the base's own frame, joint velocities.
      warmstart: acceleration from which the constraint solver starts its next step; 0 on a CPU, where it starts anew.
      body_pos: origin of each body frame, in the world frame.
      body_quat: orientation of each body frame; unit quaternions of either sign.
      body_lin_vel: velocity of the origin of the body frame (not of the centre of mass), in the world frame.
      body_ang_vel: angular velocity of the body, in the world frame.
      contact_force: summed magnitude of the normal forces of all contacts of a body, at the last physics substep; 0 in
        worlds that were just reset. Columns follow `RobotModel.contact_bodies`.
      overflow: bitmask of engine capacities that this world exceeded in the last control step (contacts or constraints
        were dropped, so its physics is wrong); 0 where all is well.
    """

    qpos: Tensor  # [N, 7 + J] float32
    qvel: Tensor  # [N, 6 + J] float32
    warmstart: Tensor  # [N, 6 + J] float32
    body_pos: Tensor  # [N, B, 3] float32
    body_quat: Tensor  # [N, B, 4] float32
    body_lin_vel: Tensor  # [N, B, 3] float32
    body_ang_vel: Tensor  # [N, B, 3] float32
    contact_force: Tensor  # [N, C] float32
    overflow: Tensor  # [N] int32

    @property
    def joint_pos(self) -> Tensor:
        """Joint angles [N, J], a view of `qpos`."""
        return self.qpos[:, 7:]

    @property
    def joint_vel(self) -> Tensor:
        """Joint velocities [N, J], a view of `qvel`."""
        return self.qvel[:, 6:]


class Site(NamedTuple):
    """A named frame that is fixed to a body."""

    body: int  # index into `RobotModel.body_names`
    pos: Tensor  # [3] float32, in the body frame
    quat: Tensor  # [4] float32, from the site frame to the body frame


class RobotModel(NamedTuple):
    """What tasks need to know of a robot with a floating base; tensors lie on the simulator's device.

    Actuator i drives joint i, and both follow `joint_names`: torque = kp (ctrl - angle) - kd velocity, within
    +- effort_limit.

    Attributes:
      name: the robot.
      joint_names: the J actuated hinges, in the order of `qpos[7:]`, `qvel[6:]` and `ctrl`.
      body_names: the B bodies, parents before children; the first is the floating base.
      contact_bodies: the C bodies whose contacts are measured, in the order of `SimState.contact_force`.
      sites: frames of sensors and feet by name, see `functional_sl.sim.sensors`.
      joint_range: lower and upper limit of each joint.
      default_qpos: the standing pose.
      kp: actuator stiffness, N m / rad.
      kd: actuator damping, N m s / rad.
      effort_limit: largest torque, N m.
      mass: of the whole robot, kg.
      sim_dt: length of a physics substep.
      decimation: physics substeps a control step.
    """

    name: str
    joint_names: tuple[str, ...]
    body_names: tuple[str, ...]
    contact_bodies: tuple[str, ...]
    sites: Mapping[str, Site]
    joint_range: Tensor  # [J, 2] float32
    default_qpos: Tensor  # [7 + J] float32
    kp: Tensor  # [J] float32
    kd: Tensor  # [J] float32
    effort_limit: Tensor  # [J] float32
    mass: float
    sim_dt: float
    decimation: int

    @property
    def control_dt(self) -> float:
        """Length of a control step."""
        return self.sim_dt * self.decimation

    @property
    def default_joint_pos(self) -> Tensor:
        """Joint angles [J] of the standing pose."""
        return self.default_qpos[7:]

    def bodies(self, *names: str) -> list[int]:
        """Returns the indices of bodies on the axis [B].

        Raises:
          ValueError: for an unknown name, with the nearest one.
        """
        return _indices(self, "body", self.body_names, names)

    def joints(self, *names: str) -> list[int]:
        """Returns the indices of joints on the axis [J]; raises as `bodies` does."""
        return _indices(self, "joint", self.joint_names, names)

    def contacts(self, *names: str) -> list[int]:
        """Returns the indices of bodies on the axis [C] of contact forces; raises as `bodies` does."""
        return _indices(self, "contact body", self.contact_bodies, names)

    def site(self, name: str) -> Site:
        """Returns a site by name; raises as `bodies` does."""
        _indices(self, "site", tuple(self.sites), (name,))
        return self.sites[name]


class Simulator(NamedTuple):
    """A batched simulator of one robot on a floor.

    Attributes:
      model: facts of the robot.
      device: where all tensors live.
      init: `(num_worlds) -> SimState`, all robots at rest in the standing pose.
      step: `(state, ctrl [N, J] float32 target angles) -> SimState`, `decimation` physics substeps. A world
        whose state or target holds NaN, infinity or a number beyond 1e10 becomes NaN and stays it until it is reset;
        the others do not notice.
      reset: `(state, mask [N] bool, qpos [N, 7 + J], qvel [N, 6 + J]) -> SimState`: worlds of the mask are put there,
        with body poses and velocities computed anew; all leaves of the others keep their bits. Also the way to push a
        robot: give the old qpos and another qvel.
      close: frees the engine; afterwards no function may be called and no graph that holds one replayed.
    """

    model: RobotModel
    device: torch.device
    init: Callable[[int], SimState]
    step: Callable[[SimState, Tensor], SimState]
    reset: Callable[[SimState, Tensor, Tensor, Tensor], SimState]
    close: Callable[[], None]


# MuJoCo's own bound (mjMAXVAL) of what is still a number of mechanics.
LARGEST = 1e10
FRAMES = ("body_pos", "body_quat", "body_lin_vel", "body_ang_vel")


def screened(model: RobotModel, state: SimState, ctrl: Tensor) -> tuple[SimState, Tensor, Tensor]:
    """Takes worlds whose state or target is not finite, or beyond `LARGEST`, out of the engine's sight.

    Returns:
      The state and the targets, with the standing pose at rest in the place of such worlds, and which worlds [N] those
      are.
    """
    joined = torch.cat((state.qpos, state.qvel, state.warmstart, ctrl), dim=1)
    broken = ~(joined.abs() < LARGEST).all(dim=1)
    rows = broken.unsqueeze(1)
    safe = state._replace(
        qpos=torch.where(rows, model.default_qpos, state.qpos),
        qvel=state.qvel.masked_fill(rows, 0.0),
        warmstart=state.warmstart.masked_fill(rows, 0.0),
    )
    return safe, torch.where(rows, model.default_joint_pos, ctrl), broken


def poisoned(state: SimState, broken: Tensor) -> SimState:
    """Returns the state with NaN in all measurements of the worlds `broken` [N]."""
    return SimState(
        *(
            leaf.masked_fill(broken.reshape(-1, *[1] * (leaf.ndim - 1)), torch.nan)
            if leaf.is_floating_point()
            else leaf
            for leaf in state
        )
    )


def overflowed(state: SimState) -> dict[str, Tensor]:
    """Counts the worlds that exceeded a capacity in the last control step, by the name of the capacity to raise.

    Returns:
      0-d int64 tensors: `contacts` and `constraints`.
    """
    return {name: ((state.overflow & bits) != 0).sum() for name, bits in _CAPACITIES.items()}


# Bits of MuJoCo Warp: 1 and 2 for rows and entries of constraints, then pairs, contacts and convex pairs.
_CAPACITIES = {"contacts": 4 | 8 | 16, "constraints": 1 | 2}


def check_step(model: RobotModel, state: SimState, ctrl: Tensor) -> None:
    """Checks the arguments of `Simulator.step` by shape and dtype.

    Raises:
      ValueError: naming what was found and what is expected.
    """
    _check(model, "ctrl", ctrl, (state.qpos.shape[0], len(model.joint_names)), torch.float32)


def check_reset(model: RobotModel, state: SimState, mask: Tensor, qpos: Tensor, qvel: Tensor) -> None:
    """Checks the arguments of `Simulator.reset` as `check_step` does."""
    _check(model, "the reset mask", mask, state.qpos.shape[:1], torch.bool)
    _check(model, "the reset's qpos", qpos, state.qpos.shape, torch.float32)
    _check(model, "the reset's qvel", qvel, state.qvel.shape, torch.float32)


def _check(model: RobotModel, what: str, found: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    if found.shape != shape or found.dtype != dtype:
        raise ValueError(
            f"{model.name}: {what} is {found.dtype} {tuple(found.shape)}; these worlds take {dtype} {tuple(shape)}"
        )


def _indices(model: RobotModel, kind: str, known: tuple[str, ...], names: tuple[str, ...]) -> list[int]:
    for name in names:
        if name not in known:
            near = difflib.get_close_matches(name, known, 1, 0.0)
            hint = f"; the nearest name is {near[0]!r}" if near else ""
            raise ValueError(f"{model.name} has no {kind} {name!r}{hint}")
    return [known.index(name) for name in names]
