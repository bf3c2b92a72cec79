"""How many control steps a second a simulator takes: step, reset of the fallen, body poses and velocities included.

    python -m experiments.bench_sim --robot=g1 --geometry=cheap --sim=mujoco --num_envs=64 --threads=2
    python -m experiments.bench_sim --robot=g1 --geometry=full --sim=mjwarp --device=cuda --num_envs=2048

Targets are random about the standing pose and change at every step. On a GPU the whole step is one CUDA graph.
"""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

from experiments.results import append, machine
from functional_sl import capture, keys, sim, tree
from functional_sl.run import cli
from functional_sl.sim import contract
from functional_sl.sim.contract import SimState, Simulator
from functional_sl.sim.robots import g1, go2

ROBOTS = {"g1": g1.robot, "go2": go2.robot}
FALLEN = 0.6  # of the standing height


@dataclasses.dataclass(frozen=True)
class Settings:
    """The flags."""

    robot: str = cli.option("g1", "Robot.", choices=tuple(ROBOTS))
    geometry: str = cli.option("cheap", "Shapes for contact.", choices=g1.GEOMETRIES)
    sim: str = cli.option("mujoco", "Engine.", choices=sim.SIMULATORS)
    device: str = cli.option("cpu", "Of mjwarp.", choices=("cpu", "cuda"))
    num_envs: int = cli.option(64, "Worlds.")
    threads: int = cli.option(2, "Threads of mujoco.")
    contacts: int = cli.option(64, "Contacts a world that mjwarp has room for.")
    constraints: int = cli.option(256, "Rows of constraints a world that mjwarp has room for.")
    reset: bool = cli.option(True, "Put fallen robots back on their feet.")
    spread: float = cli.option(0.3, "Standard deviation of the targets.", unit="rad")
    steps: int = cli.option(100, "Control steps in a timed turn.")
    repeats: int = cli.option(5, "Timed turns.")
    json: str | None = cli.option(None, "File to which the results are appended as one line.")


def build(settings: Settings) -> Simulator:
    """Returns the simulator."""
    robot = ROBOTS[settings.robot](settings.geometry)
    if settings.sim == "mujoco":
        return sim.make(robot, threads=settings.threads)
    from functional_sl.sim.mjwarp_backend import Capacity

    return sim.make(robot, "mjwarp", settings.device, capacity=Capacity(settings.contacts, settings.constraints))


def control(settings: Settings, simulator: Simulator) -> Callable[[tree.Tree], tuple[tree.Tree, dict]]:
    """Returns `(key, state, overflowed) -> the next`, counting worlds that exceeded the capacities."""
    model = simulator.model
    height = FALLEN * model.default_qpos[2]

    def step(carry: tuple[torch.Tensor, SimState, torch.Tensor]) -> tuple[tree.Tree, dict]:
        key, state, overflowed = carry
        key, drawn = keys.split(key, 2)
        noise = keys.normal(drawn, (settings.num_envs, len(model.joint_names)))
        state = simulator.step(state, model.default_joint_pos + settings.spread * noise)
        overflowed = overflowed + torch.stack([*contract.overflowed(state).values()])
        if settings.reset:
            upright = model.default_qpos.expand_as(state.qpos)
            state = simulator.reset(state, ~(state.qpos[:, 2] > height), upright, torch.zeros_like(state.qvel))
        return (key.clone(), state, overflowed), {}

    return step


def measure(settings: Settings) -> dict[str, Any]:
    """Times turns of `steps` control steps."""
    simulator = build(settings)
    device = simulator.device
    carry = (keys.key(0, device), simulator.init(settings.num_envs), torch.zeros(2, dtype=torch.int64, device=device))
    step = control(settings, simulator)
    begin = time.perf_counter()
    run = capture.Captured(step) if device.type == "cuda" else capture.Eager(step)
    carry, _ = run(carry)
    first_s = time.perf_counter() - begin
    rates = []
    for _ in range(settings.repeats):
        begin = time.perf_counter()
        for _ in range(settings.steps):
            carry, _ = run(carry)
        if device.type == "cuda":
            torch.cuda.synchronize()
        rates.append(settings.steps * settings.num_envs / (time.perf_counter() - begin))
    overflowed = dict(zip(contract.overflowed(carry[1]), carry[2].tolist(), strict=True))
    run.close()
    simulator.close()
    return {
        **machine(), **dataclasses.asdict(settings), "first_step_s": round(first_s, 2), "overflowed": overflowed,
        "control_steps_per_s": {"median": round(statistics.median(rates)), "best": round(max(rates))},
    }  # fmt: skip


def main() -> None:
    """Measures and prints."""
    with cli.exit_on_usage_error("bench_sim"):
        settings = cli.parse(Settings, program="bench_sim", description=__doc__).config
        found = measure(settings)
    rate = found["control_steps_per_s"]
    print(
        f"{settings.robot} {settings.geometry} on {settings.sim}, {settings.num_envs} worlds: "
        f"{rate['median']:,} control steps/s (best {rate['best']:,}); first step {found['first_step_s']} s; "
        f"over capacity: {found['overflowed']}"
    )
    append(settings.json, found)


if __name__ == "__main__":
    main()
