"""The simulator on a CPU: MuJoCo's C engine, all worlds of a batch on a pool of threads (`mujoco.rollout`).

The engine computes in float64 and the state is kept in float32. A second model without actuators, contacts and
constraints reads body poses and velocities at exactly the new state: the engine's own sensors lag by one substep.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import mujoco
import numpy as np
import torch
from mujoco import rollout
from torch import Tensor

from functional_sl.sim import contract
from functional_sl.sim.contract import RobotModel, SimState, Simulator
from functional_sl.sim.robots import robot as robots
from functional_sl.sim.robots.robot import Robot

_FRAME_SENSORS = (
    (mujoco.mjtSensor.mjSENS_FRAMEPOS, 3),
    (mujoco.mjtSensor.mjSENS_FRAMEQUAT, 4),
    (mujoco.mjtSensor.mjSENS_FRAMELINVEL, 3),
    (mujoco.mjtSensor.mjSENS_FRAMEANGVEL, 3),
)


def make(robot: Robot, threads: int | None = None) -> Simulator:
    """Returns the simulator of a robot on the CPU.

    Args:
      robot: what to simulate.
      threads: worlds are shared out among so many; as many as torch uses by default.

    Raises:
      ValueError: if `threads` is below 1, or the robot's model does not compile.
    """
    threads = torch.get_num_threads() if threads is None else threads
    if threads < 1:
        raise ValueError(f"threads={threads}: the simulator needs at least one thread")
    engine = _Engine(robot, threads)
    model = robots.facts(robot)

    def init(num_worlds: int) -> SimState:
        qpos = model.default_qpos.expand(num_worlds, -1).clone()
        return _placed(engine, model, qpos, torch.zeros(num_worlds, engine.nv))

    def step(state: SimState, ctrl: Tensor) -> SimState:
        contract.check_step(model, state, ctrl)
        safe, safe_ctrl, broken = contract.screened(model, state, ctrl)
        qpos, qvel, force = engine.advance(safe, safe_ctrl)
        new = _placed(engine, model, qpos, qvel)._replace(contact_force=force)
        return contract.poisoned(new, broken)

    def reset(state: SimState, mask: Tensor, qpos: Tensor, qvel: Tensor) -> SimState:
        contract.check_reset(model, state, mask, qpos, qvel)
        rows = mask.nonzero().squeeze(1)
        fresh = _placed(engine, model, qpos[rows], qvel[rows])
        return SimState(*(old.index_copy(0, rows, new) for old, new in zip(state, fresh, strict=True)))

    return Simulator(model, torch.device("cpu"), init, step, reset, engine.close)


def _placed(engine: _Engine, model: RobotModel, qpos: Tensor, qvel: Tensor) -> SimState:
    """Returns worlds at a position and velocity, before any contact."""
    worlds = qpos.shape[0]
    return SimState(
        qpos=qpos,
        qvel=qvel,
        warmstart=torch.zeros(worlds, engine.nv),
        contact_force=torch.zeros(worlds, len(model.contact_bodies)),
        overflow=torch.zeros(worlds, dtype=torch.int32),
        **dict(zip(contract.FRAMES, engine.frames(qpos, qvel), strict=True)),
    )


class _Engine:
    """Two models and a pool of threads; the only objects of MuJoCo here."""

    def __init__(self, robot: Robot, threads: int) -> None:
        self.model = robots.compiled(robot)
        # A diverged world shall show: MuJoCo would put it back to its first pose without a word.
        self.model.opt.disableflags |= mujoco.mjtDisableBit.mjDSBL_AUTORESET
        self.observer = _observer(robot)
        self.nq, self.nv, self.bodies = self.model.nq, self.model.nv, len(robot.body_names)
        self.decimation = robot.options.decimation
        self.data = [mujoco.MjData(self.model) for _ in range(threads)]
        self.observer_data = [mujoco.MjData(self.observer) for _ in range(threads)]
        self.pool = rollout.Rollout(nthread=threads if threads > 1 else 0)

    def advance(self, state: SimState, ctrl: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Returns position, velocity and touch after one control step."""
        if len(ctrl) == 0:
            return state.qpos, state.qvel, state.contact_force
        start, targets = self._state(state.qpos, state.qvel), ctrl.double().numpy()[:, None]
        with _quiet():
            found, sensed = self.pool.rollout(self.model, self.data, start, targets, nstep=self.decimation)
        last = found[:, -1]
        parts = (last[:, 1 : 1 + self.nq], last[:, 1 + self.nq :], sensed[:, -1])
        return tuple(torch.from_numpy(part).float().contiguous() for part in parts)

    def frames(self, qpos: Tensor, qvel: Tensor) -> tuple[Tensor, ...]:
        """Returns positions, quaternions, linear and angular velocities of all bodies."""
        worlds = qpos.shape[0]
        sizes = [size for _, size in _FRAME_SENSORS]
        if worlds == 0:
            return tuple(torch.zeros(0, self.bodies, size) for size in sizes)
        state = self._state(qpos, qvel)
        with _quiet():
            _, sensed = self.pool.rollout(self.observer, self.observer_data, state, nstep=1)
        columns = torch.from_numpy(sensed[:, 0]).float()
        parts = columns.split([size * self.bodies for size in sizes], dim=1)
        return tuple(
            part.reshape(worlds, self.bodies, size).contiguous() for part, size in zip(parts, sizes, strict=True)
        )

    def close(self) -> None:
        """Ends the threads."""
        self.pool.close()

    def _state(self, qpos: Tensor, qvel: Tensor) -> np.ndarray:
        state = np.zeros((qpos.shape[0], 1 + self.nq + self.nv))
        state[:, 1 : 1 + self.nq] = qpos.numpy()
        state[:, 1 + self.nq :] = qvel.numpy()
        return state


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keeps MuJoCo from writing a line a diverging world to the screen and to a file in the working directory."""
    before = mujoco.get_mju_user_warning()
    mujoco.set_mju_user_warning(lambda _: None)
    try:
        yield
    finally:
        mujoco.set_mju_user_warning(before)


def _observer(robot: Robot) -> mujoco.MjModel:
    """Returns the robot as a pure mechanism whose sensors are the frames of all bodies."""
    spec = robot.spec.copy()
    for element in (*spec.sensors, *spec.actuators, *spec.excludes, *spec.geoms):
        spec.delete(element)
    for kind, _ in _FRAME_SENSORS:
        for body in robot.body_names:
            spec.add_sensor(type=kind, objtype=mujoco.mjtObj.mjOBJ_XBODY, objname=body)
    flags = mujoco.mjtDisableBit
    spec.option.disableflags |= flags.mjDSBL_CONSTRAINT | flags.mjDSBL_CONTACT
    spec.option.integrator = mujoco.mjtIntegrator.mjINT_EULER
    return spec.compile()
