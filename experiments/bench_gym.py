"""What a step of HalfCheetah with one update costs: this loop against stable-baselines3's SAC.

Both run in one process, in turns, on the same task, batch and dense layers: stable-baselines3 gets one hidden layer
for every dense layer of a FlashSAC trunk. FlashSAC's networks do more (batch norms, 101 bins) and its actor less:
it learns in every second update, unless `--actor_update_period=1`. One environment step, one update. The time of the
processor is given beside that of the clock, since other work on the machine tells on it less.

    pip install stable-baselines3 '.[mujoco]'
    python -m experiments.bench_gym --size=small --threads=1
"""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from experiments.results import append, machine
from functional_sac import opening, plan
from functional_sac.config import TrainConfig
from functional_sl.run import cli

WARM_UP = 1000  # random steps before the first update, in a turn that is not counted
UNCOUNTED = 100  # steps with updates in that turn, which compile
EXPANSION = 4  # of an inverted residual block
# batch, actor width, critic width, blocks
SIZES = {"small": (128, 32, 64, 1), "middle": (256, 64, 128, 2), "large": (512, 128, 256, 2)}
LEARNERS = ("eager", "compiled", "stable-baselines3")

Turn = Callable[[int], None]


@dataclasses.dataclass(frozen=True)
class Settings:
    """The flags."""

    task: str = cli.option("HalfCheetah-v5", "Gymnasium id.")
    size: str = cli.option("small", "Networks and batch.", choices=tuple(SIZES))
    actor_update_period: int = cli.option(2, "FlashSAC's actor learns in every n-th update; 1 as the other one does.")
    threads: int = cli.option(1, "CPU threads of torch.")
    repeats: int = cli.option(7, "Timed turns of each learner.")
    steps: int = cli.option(200, "Steps of a turn.")
    json: str | None = cli.option(None, "File to which the results are appended as one line.")


def ours(settings: Settings, compile: bool, run_dir: Path) -> tuple[Any, Turn]:
    """Returns an open run, to be closed, and a function that takes so many of its iterations."""
    batch, actor, critic, blocks = SIZES[settings.size]
    config = TrainConfig(
        task=settings.task, sim="gym", num_envs=1, updates_per_step=1, batch_size=batch, actor_width=actor,
        critic_width=critic, num_blocks=blocks, actor_update_period=settings.actor_update_period, tau=0.005,
        replay_capacity=100_000, learning_starts=WARM_UP, env_steps=1_000_000, device="cpu", threads=settings.threads,
        compile="true" if compile else "false", tensorboard=False, run_dir=str(run_dir),
    )  # fmt: skip
    opened = opening.open_run(config)
    run = opened.__enter__()
    state, clock = run.states[0], run.start.clock

    def turn(steps: int) -> None:
        nonlocal state, clock
        for _ in range(steps):
            random, phase = plan.iteration(run.config, clock, run.learner.phases)
            state, _ = run.iterate(state, random=random, phase=phase)
            clock = plan.tick(run.config, clock, learned=phase is not None)

    return opened, turn


def theirs(settings: Settings) -> Turn:
    """Returns a function that takes so many steps of stable-baselines3's SAC, each with one update."""
    import stable_baselines3

    batch, actor, critic, blocks = SIZES[settings.size]
    layers = {name: [w] + [EXPANSION * w, w] * blocks for name, w in (("pi", actor), ("qf", critic))}
    model = stable_baselines3.SAC(
        "MlpPolicy", settings.task, batch_size=batch, buffer_size=100_000, learning_starts=WARM_UP, train_freq=1,
        gradient_steps=1, policy_kwargs={"net_arch": layers}, device="cpu", seed=0,
    )  # fmt: skip

    def turn(steps: int) -> None:
        model.learn(steps, reset_num_timesteps=False)

    return turn


def measure(settings: Settings, folder: Path) -> dict[str, Any]:
    """Times all learners in turns.

    Returns:
      Machine, settings and, for each learner, medians over the turns: `updates_per_s`, which are environment steps a
      second too, with `lowest` and `highest`; `cpu_ms` of a step; and the `ratio` and `cpu_ratio` of its speed to
      stable-baselines3's, turn by turn.
    """
    opened, turns = [], {}
    with torch.no_grad():
        for name in LEARNERS[:2]:
            run, turns[name] = ours(settings, name == "compiled", folder / name)
            opened.append(run)
    turns[LEARNERS[2]] = theirs(settings)
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in turns}
    for repeat in range(settings.repeats + 1):
        for name, turn in turns.items():
            with torch.set_grad_enabled(name == LEARNERS[2]):
                taken = timed(turn, settings.steps if repeat else WARM_UP + UNCOUNTED)
            times[name] += [taken] if repeat else []
    for run in opened:
        run.__exit__(None, None, None)
    return {**machine(), **dataclasses.asdict(settings), "learners": summed(times)}


def timed(turn: Turn, steps: int) -> tuple[float, float]:
    """Returns the seconds of a step by the clock and of the processor."""
    clock, processor = time.perf_counter(), time.process_time()
    turn(steps)
    return (time.perf_counter() - clock) / steps, (time.process_time() - processor) / steps


def summed(times: dict[str, list[tuple[float, float]]]) -> dict[str, dict[str, float]]:
    """Returns what `measure` says of each learner."""
    base, found = times[LEARNERS[2]], {}
    for name, taken in times.items():
        rates = [1 / clock for clock, _ in taken]
        ratios = [[theirs[i] / mine[i] for mine, theirs in zip(taken, base, strict=True)] for i in range(2)]
        found[name] = {
            "updates_per_s": statistics.median(rates),
            "lowest": min(rates),
            "highest": max(rates),
            "cpu_ms": 1e3 * statistics.median(processor for _, processor in taken),
            "ratio": statistics.median(ratios[0]),
            "cpu_ratio": statistics.median(ratios[1]),
        }
    return found


def main() -> None:
    """Times all and prints a table."""
    import tempfile

    with cli.exit_on_usage_error("bench_gym"):
        settings = cli.parse(Settings, program="bench_gym", description=__doc__).config
    with tempfile.TemporaryDirectory() as folder:
        result = measure(settings, Path(folder))
    print(", ".join(f"{k} {v}" for k, v in result.items() if k not in ("learners", "json")))
    print("| learner | updates/s (lowest to highest) | CPU ms | speed to stable-baselines3, by clock | by CPU |")
    print("|---|---|---|---|---|")
    for name, r in result["learners"].items():
        rate = f"{r['updates_per_s']:.1f} ({r['lowest']:.1f} to {r['highest']:.1f})"
        print(f"| {name} | {rate} | {r['cpu_ms']:.2f} | {r['ratio']:.2f} | {r['cpu_ratio']:.2f} |")
    append(settings.json, result)


if __name__ == "__main__":
    main()
