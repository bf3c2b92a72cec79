"""The published runs once more, by a loop that shares neither learner nor surroundings with the functional one.

The networks are modules, the optimizers those of `torch.optim` (experiments/module_learner.py); exploration, reward
scaling and replay are written anew, on the host where they can be. What both loops have in common is the published
algorithm, so where their returns differ by more than those of seeds do, one of them is wrong. Every seed is a process
of its own; on CUDA its updates are graphs, one with the actor and one without. `--out` may be a folder of
`reproduce_mujoco`, whose returns are then drawn beside these:

    python -m experiments.module_run --task=HalfCheetah-v4 --seeds=5 --device=cuda --out=runs/modules
    python -m experiments.reproduce_mujoco --draw=runs/modules
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import statistics
import time
from pathlib import Path

import torch

from experiments import curves, module_loop, reproduce_mujoco
from functional_sac.config import TrainConfig
from functional_sl.run import cli

VARIANT = "modules"


@dataclasses.dataclass(frozen=True)
class Settings:
    """The flags."""

    task: str = cli.option("HalfCheetah-v4", "Gymnasium id of a task with vectors as observations and actions.")
    seeds: int = cli.option(5, "Seeds, each in a process of its own.")
    env_steps: int = cli.option(100_000, "Environment steps of each seed.")
    workers: int = cli.option(0, "Processes at once; 0 for as many as there are seeds.")
    out: str = cli.option("runs/module_run", "Folder of the returns, the table and the pictures.")
    budget_s: float = cli.option(0.0, "Time after which runs end with what they have; 0 for no end.", unit="s")
    eval_every: int = cli.option(10_000, "Environment steps between two evaluations.")
    eval_episodes: int = cli.option(10, "Episodes of an evaluation.")
    device: str = cli.option("cpu", "Where learners run.", choices=("cpu", "cuda"))

    def __post_init__(self) -> None:
        """Raises ValueError for a number that cannot be meant."""
        least = {"seeds": 1, "env_steps": 1, "workers": 0, "budget_s": 0, "eval_every": 1, "eval_episodes": 1}
        for name, bound in least.items():
            if getattr(self, name) < bound:
                raise ValueError(f"{name}={getattr(self, name)}: must be at least {bound}")


@dataclasses.dataclass(frozen=True)
class Job:
    """What one process does."""

    config: TrainConfig  # of one seed
    path: Path  # of its evaluations
    deadline: float = math.inf  # of `time.time`


def train(job: Job) -> str:
    """Trains one seed and returns a line about it.

    An evaluation stands at step 0, behind every `eval_every` steps, and at the end, which the deadline may bring.
    """
    torch.set_num_threads(1)
    # The published runs allow TF32, which a CPU does not have.
    torch.set_float32_matmul_precision("high" if job.config.device == "cuda" else "highest")
    config, begin = job.config, time.time()
    with contextlib.closing(module_loop.make(config.task)) as env:
        run = module_loop.Run(config, env)
        reserve = _evaluate(job, run, begin)
        while run.env_steps < config.env_steps and time.time() + reserve < job.deadline:
            run.step()
            if run.env_steps % config.eval_every == 0:
                reserve = _evaluate(job, run, begin)
        if run.env_steps % config.eval_every:
            _evaluate(job, run, begin)
    taken = f"{run.env_steps} steps and {run.learner.updates} updates in {time.time() - begin:.0f} s"
    return f"{config.task} {VARIANT}, seed {config.seed}: {taken}"


def _evaluate(job: Job, run: module_loop.Run, begin: float) -> float:
    """Writes the mean return, says it, and returns the seconds that this took."""
    start, config = time.time(), job.config
    mean = statistics.fmean(run.play())
    point = curves.Point(config.task, VARIANT, config.seed, run.env_steps, mean, config.eval_episodes)
    curves.append(job.path, [point])
    temperature = run.learner.log_temperature.exp().item()
    where = f"{config.task} {VARIANT}, seed {config.seed}: {run.env_steps} steps after {start - begin:.0f} s"
    print(f"{where}: {mean:.0f}, temperature {temperature:.4f}", flush=True)
    return time.time() - start


def jobs(settings: Settings) -> list[Job]:
    """Returns a job for every seed: the published algorithm with a replay that holds the whole run."""
    s, deadline = settings, time.time() + settings.budget_s if settings.budget_s else math.inf
    found = []
    for seed in range(s.seeds):
        config = TrainConfig(
            task=s.task, sim="gym", seed=seed, env_steps=s.env_steps, updates_per_step=1, device=s.device,
            replay_capacity=max(s.env_steps, reproduce_mujoco.PUBLISHED["learning_starts"]),
            eval_every=s.eval_every, eval_episodes=s.eval_episodes, **reproduce_mujoco.PUBLISHED,
        )  # fmt: skip
        path = Path(s.out) / f"{s.task.replace('/', '_')}-{VARIANT}-{seed}.csv"
        found.append(Job(config, path, deadline))
    return found


def run(settings: Settings) -> str:
    """Trains all seeds, draws what the folder holds then, and returns the table."""
    if settings.device == "cuda" and not torch.cuda.is_available():
        raise cli.UsageError("--device=cuda: torch sees no CUDA device")
    module_loop.make(settings.task).close()
    official = reproduce_mujoco.OFFICIAL
    return reproduce_mujoco.train_all(train, jobs(settings), Path(settings.out), settings.workers, official)


def main() -> None:
    """Trains and prints the table."""
    with cli.exit_on_usage_error("module_run"):
        print(run(cli.parse(Settings, program="module_run", description=__doc__).config))


if __name__ == "__main__":
    main()
