"""The simulator on a GPU: MuJoCo Warp, launched on torch's stream and captured with whatever torch captures.

Every call copies a state into the engine's buffers, launches the engine's kernels and copies the new state out. The
number of launches never depends on values: the constraint solver runs all its iterations, in which converged worlds
do nothing. On warp's own CPU device the same kernels run serially; that is for tests.

Contacts take their places in the engine's arrays in the order in which threads find them, so sums over contacts
round differently from run to run: on a GPU two runs agree to rounding, not to the last bit.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from functional_sl.sim import contract
from functional_sl.sim.contract import SimState, Simulator
from functional_sl.sim.robots import robot as robots
from functional_sl.sim.robots.robot import Robot

try:
    import mujoco_warp
    import warp
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        "the mjwarp simulator needs MuJoCo Warp: pip install '.[mjwarp]' in the checkout", name=error.name
    ) from error


class Capacity(NamedTuple):
    """What the engine allocates; a world that needs more drops contacts and says so in `SimState.overflow`.

    Attributes:
      contacts: contacts a world, of a pool that all worlds share.
      constraints: rows of constraints a world: four a contact, one a joint with friction loss or at its limit.
    """

    contacts: int = 64
    constraints: int = 256


def make(robot: Robot, device: torch.device | str = "cuda", capacity: Capacity | None = None) -> Simulator:
    """Returns the simulator of a robot on a GPU, or on warp's CPU device.

    The first step in a process compiles the kernels, for about a minute if warp's cache (`WARP_CACHE_PATH`) has none.
    Before a number of worlds can be captured, `init` and one step with it must have run. All calls on one simulator
    belong on one stream at a time.

    Args:
      robot: what to simulate.
      device: of all tensors.
      capacity: of contacts and constraints.

    Raises:
      ValueError: if the capacity is not positive, or the robot's model does not compile.
    """
    device = _device(device)
    capacity = capacity or Capacity()
    if min(capacity) < 1:
        raise ValueError(f"{capacity}: the engine needs room for at least one contact and one constraint")
    model = robots.facts(robot, device)
    engine = _Engine(robot, device, capacity)

    def placed(qpos: Tensor, qvel: Tensor) -> SimState:
        worlds = engine.worlds(qpos.shape[0])
        with engine.launching():
            worlds.qpos.copy_(qpos)
            worlds.qvel.copy_(qvel)
            frames = engine.frames(worlds)
        return SimState(
            qpos=qpos.clone(),
            qvel=qvel.clone(),
            warmstart=torch.zeros_like(qvel),
            contact_force=qpos.new_zeros(qpos.shape[0], len(model.contact_bodies)),
            overflow=torch.zeros(qpos.shape[0], dtype=torch.int32, device=device),
            **frames,
        )

    def init(num_worlds: int) -> SimState:
        qpos = model.default_qpos.expand(num_worlds, -1).contiguous()
        return placed(qpos, qpos.new_zeros(num_worlds, qpos.shape[1] - 1))

    def step(state: SimState, ctrl: Tensor) -> SimState:
        contract.check_step(model, state, ctrl)
        safe, safe_ctrl, broken = contract.screened(model, state, ctrl)
        worlds = engine.worlds(ctrl.shape[0])
        with engine.launching():
            worlds.load(safe, safe_ctrl)
            engine.advance(worlds)
            new = worlds.read(engine.frames(worlds))
        return contract.poisoned(new, broken)

    def reset(state: SimState, mask: Tensor, qpos: Tensor, qvel: Tensor) -> SimState:
        contract.check_reset(model, state, mask, qpos, qvel)
        rows = mask.unsqueeze(1)
        fresh = placed(torch.where(rows, qpos, state.qpos), torch.where(rows, qvel, state.qvel))
        return SimState(
            *(
                torch.where(mask.reshape(-1, *[1] * (old.ndim - 1)), new, old)
                for old, new in zip(state, fresh, strict=True)
            )
        )

    return Simulator(model, device, init, step, reset, engine.close)


def _device(device: torch.device | str) -> torch.device:
    device = torch.device(device)
    if device.type == "cuda" and device.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return device


class _Worlds:
    """The engine's buffers for one number of worlds, as tensors that share their memory."""

    def __init__(self, data: Any) -> None:
        self.data = data
        names = ("qpos", "qvel", "qacc_warmstart", "ctrl", "sensordata", "overflow", "xpos", "xquat", "cvel")
        for name in (*names, "subtree_com"):
            setattr(self, name, warp.to_torch(getattr(data, name)))

    def load(self, state: SimState, ctrl: Tensor) -> None:
        """Copies a state and targets into the engine."""
        self.qpos.copy_(state.qpos)
        self.qvel.copy_(state.qvel)
        self.qacc_warmstart.copy_(state.warmstart)
        self.ctrl.copy_(ctrl)
        self.overflow.zero_()

    def read(self, frames: dict[str, Tensor]) -> SimState:
        """Copies the state out of the engine."""
        return SimState(
            qpos=self.qpos.clone(),
            qvel=self.qvel.clone(),
            warmstart=self.qacc_warmstart.clone(),
            contact_force=self.sensordata.clone(),
            overflow=self.overflow.clone(),
            **frames,
        )


class _Engine:
    """The model on the device and buffers by number of worlds; the only objects of warp here."""

    def __init__(self, robot: Robot, device: torch.device, capacity: Capacity) -> None:
        warp.config.log_level = warp.LOG_WARNING
        warp.init()
        self._host = robots.compiled(robot)
        self._device, self._capacity = device, capacity
        self._warp_device = warp.device_from_torch(device)
        self._decimation = robot.options.decimation
        self._bodies = torch.tensor([self._host.body(name).id for name in robot.body_names], device=device)
        self._root = int(self._bodies[0])
        self._worlds: dict[int, _Worlds] = {}
        self._streams: dict[int, Any] = {}
        self._graphs: list[Any] = []
        with warp.ScopedDevice(self._warp_device):
            self._model = mujoco_warp.put_model(self._host)
        self._model.opt.graph_conditional = False
        self._model.opt.warn_overflow = False

    def worlds(self, number: int) -> _Worlds:
        """Returns the buffers for a number of worlds, made when it is new."""
        if number not in self._worlds:
            if self._capturing():
                raise ValueError(f"{number} worlds are new to the simulator; call init({number}) before a capture")
            with warp.ScopedDevice(self._warp_device):
                data = mujoco_warp.make_data(
                    self._host, nworld=number, nconmax=self._capacity.contacts, njmax=self._capacity.constraints
                )
            warp.synchronize_device(self._warp_device)
            self._worlds[number] = _Worlds(data)
        return self._worlds[number]

    def advance(self, worlds: _Worlds) -> None:
        """Launches one control step."""
        for _ in range(self._decimation):
            mujoco_warp.step(self._model, worlds.data)

    def frames(self, worlds: _Worlds) -> dict[str, Tensor]:
        """Returns poses and velocities of all bodies at the engine's present position and velocity."""
        mujoco_warp.kinematics(self._model, worlds.data)
        mujoco_warp.com_pos(self._model, worlds.data)
        mujoco_warp.com_vel(self._model, worlds.data)
        pos, spatial = worlds.xpos[:, self._bodies], worlds.cvel[:, self._bodies]
        angular, linear = spatial[..., :3].contiguous(), spatial[..., 3:]
        # The engine's velocities are those of the point of each body at the robot's centre of mass.
        arm = pos - worlds.subtree_com[:, self._root, None]
        velocity = linear + torch.linalg.cross(angular, arm)
        return dict(zip(contract.FRAMES, (pos, worlds.xquat[:, self._bodies], velocity, angular), strict=True))

    @contextlib.contextmanager
    def launching(self) -> Iterator[None]:
        """Puts warp on torch's current stream, and into the graph that torch is capturing there."""
        if self._device.type != "cuda":
            with warp.ScopedDevice(self._warp_device):
                yield
            return
        stream = self._stream()
        with warp.ScopedStream(stream, sync_enter=False):
            if not self._capturing():
                yield
                return
            with _without_garbage_collection():
                # Unless warp knows of the capture, it frees its temporaries outside it.
                warp.capture_begin(stream=stream, force_module_load=False, external=True)
                try:
                    yield
                finally:
                    self._graphs.append(warp.capture_end(stream=stream))

    def close(self) -> None:
        """Drops all buffers and what captures hold."""
        self._worlds.clear()
        self._graphs.clear()

    def _capturing(self) -> bool:
        return self._device.type == "cuda" and torch.cuda.is_current_stream_capturing()

    def _stream(self) -> Any:
        stream = torch.cuda.current_stream(self._device)
        if stream.cuda_stream not in self._streams:
            self._streams[stream.cuda_stream] = warp.stream_from_torch(stream)
        return self._streams[stream.cuda_stream]


@contextlib.contextmanager
def _without_garbage_collection() -> Iterator[None]:
    """Keeps the collector from freeing an older graph in the middle of a capture, which would spoil it."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
