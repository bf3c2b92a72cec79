"""How many environment steps a second a robot task takes: physics, observations, rewards, ends and starts of episodes.

    python -m experiments.bench_env --task=g1_motion_tracking --num_envs=1024 --threads=2
    python -m experiments.bench_env --task=g1_motion_tracking --sim=mjwarp --device=cuda --compile --num_envs=2048

Actions are random and change at every step; neither a policy nor a learner is part of it. On a GPU the whole step is
one CUDA graph.
"""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

from experiments.results import append, machine
from functional_sac import envs, tasks
from functional_sac.envs.env import Env, averages
from functional_sac.tasks.settings import PRESETS, Settings
from functional_sl import capture, keys, sim, tree
from functional_sl.run import cli


@dataclasses.dataclass(frozen=True)
class Options:
    """The flags."""

    task: str = cli.option("g1_motion_tracking", "Task.", choices=tuple(tasks.TASKS))
    sim: str = cli.option("mujoco", "Engine.", choices=sim.SIMULATORS)
    device: str = cli.option("cpu", "Of mjwarp.", choices=("cpu", "cuda"))
    preset: str = cli.option("unilab", "Of motion tracking.", choices=PRESETS)
    motion: str | None = cli.option(None, "Of motion tracking; all generated clips if left out.")
    geometry: str = cli.option("cheap", "Shapes for contact.", choices=("cheap", "full"))
    compile: bool = cli.option(False, "Compile the pure parts of the step.")
    num_envs: int = cli.option(1024, "Environments.")
    threads: int = cli.option(2, "Threads of mujoco.")
    torch_threads: int = cli.option(1, "Threads of torch.")
    contacts: int | None = cli.option(None, "Contacts a world that mjwarp has room for.")
    constraints: int | None = cli.option(None, "Rows of constraints a world that mjwarp has room for.")
    spread: float = cli.option(0.1, "Actions are uniform within this.")
    steps: int = cli.option(50, "Steps in a timed turn.")
    repeats: int = cli.option(5, "Timed turns.")
    json: str | None = cli.option(None, "File to which the results are appended as one line.")


def build(options: Options) -> Env:
    """Returns the environment."""
    settings = Settings(
        options.preset, options.motion, geometry=options.geometry, contacts=options.contacts,
        constraints=options.constraints, threads=options.threads,
    )  # fmt: skip
    wrap = capture.compiled if options.compile else lambda region: region
    return envs.make(options.task, options.sim, settings, options.device, wrap)


def stepper(options: Options, env: Env) -> Callable[[tree.Tree], tuple[tree.Tree, dict]]:
    """Returns `(key, state) -> the next`."""

    def step(carry: tree.Tree) -> tuple[tree.Tree, dict]:
        key, state = carry
        key, drawn = keys.split(key, 2)
        action = keys.uniform(drawn, (options.num_envs, env.spec.action_dim), -options.spread, options.spread)
        return (key.clone(), env.step(state, action)[0]), {}

    return step


def measure(options: Options) -> dict[str, Any]:
    """Times turns of `steps` steps."""
    torch.set_num_threads(options.torch_threads)
    env, device = build(options), torch.device(options.device)
    carry = (keys.key(0, device), tree.clone(env.init(keys.key(1, device), options.num_envs)[0]))
    step = stepper(options, env)
    run = capture.Captured(step) if device.type == "cuda" else capture.Eager(step)
    begin = time.perf_counter()
    with torch.no_grad():
        carry, _ = run(carry)
        first_s = time.perf_counter() - begin
        rates = []
        for _ in range(options.repeats):
            carry, rate = _turn(options, run, carry)
            rates.append(rate)
    sums = {name: float(x) for name, x in env.metrics(carry[1]).items()}
    run.close()
    env.close()
    return {
        **machine(), **dataclasses.asdict(options), "first_step_s": round(first_s, 2), "metrics": averages(sums, {}),
        "env_steps_per_s": {"median": round(statistics.median(rates)), "best": round(max(rates))},
    }  # fmt: skip


def _turn(options: Options, run: capture.Captured | capture.Eager, carry: tree.Tree) -> tuple[tree.Tree, float]:
    begin = time.perf_counter()
    for _ in range(options.steps):
        carry, _ = run(carry)
    if options.device == "cuda":
        torch.cuda.synchronize()
    return carry, options.steps * options.num_envs / (time.perf_counter() - begin)


def main() -> None:
    """Measures and prints."""
    with cli.exit_on_usage_error("bench_env"):
        options = cli.parse(Options, program="bench_env", description=__doc__).config
        found = measure(options)
    rate = found["env_steps_per_s"]
    print(
        f"{options.task} on {options.sim}, {options.num_envs} environments: {rate['median']:,} steps/s "
        f"(best {rate['best']:,}); first step {found['first_step_s']} s"
    )
    append(options.json, found)


if __name__ == "__main__":
    main()
