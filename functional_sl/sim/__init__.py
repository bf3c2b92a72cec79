"""Batched simulation of robots behind one contract (`contract.Simulator`), and `make`, which chooses the engine."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from functional_sl.sim.contract import Simulator
    from functional_sl.sim.mjwarp_backend import Capacity
    from functional_sl.sim.robots.robot import Robot

SIMULATORS = ("mujoco", "mjwarp")


def make(
    robot: Robot,
    sim: str = "mujoco",
    device: torch.device | str = "cpu",
    threads: int | None = None,
    capacity: Capacity | None = None,
) -> Simulator:
    """Returns the simulator of a robot.

    Args:
      robot: from `functional_sl.sim.robots`.
      sim: `mujoco` for MuJoCo's C engine on a CPU, `mjwarp` for MuJoCo Warp on a GPU (or, slowly, a CPU).
      device: of all tensors.
      threads: of `mujoco`, see `mujoco_backend.make`.
      capacity: of `mjwarp`, see `mjwarp_backend.make`.

    Raises:
      ValueError: for an unknown simulator, or a device that it does not run on.
      ModuleNotFoundError: if its extra is not installed; says what to install.
    """
    if sim not in SIMULATORS:
        raise ValueError(f"sim={sim!r}: robots run on {' and '.join(SIMULATORS)}")
    if sim == "mjwarp":
        from functional_sl.sim import mjwarp_backend

        return mjwarp_backend.make(robot, device, capacity)
    if str(device) != "cpu":
        raise ValueError(f"sim='mujoco' runs on the CPU, not on {device}; use --sim=mjwarp there, or --device=cpu")
    from functional_sl.sim import mujoco_backend

    return mujoco_backend.make(robot, threads)
