"""FlashSAC as published on MuJoCo: official settings, the first part of the run of a million steps, several seeds.

Every task is one process whose seeds are learned side by side, on CUDA as branches of one graph, with an environment
each on the host, stepped one after the other; several such processes share a GPU. Where the environments take longer
than the learners, as Humanoid's do, `--seeds_per_process` spreads a task over processes. Curves are drawn on the
published ones.

    python -m experiments.reproduce_mujoco --out=runs/mujoco --device=cuda --workers=5
    python -m experiments.reproduce_mujoco --wire --out=runs/wire --device=cuda
    python -m experiments.reproduce_mujoco --draw=runs/mujoco

With `--wire` the same seeds are learned on two simulated ranks each, once with gradients that travel in FP32 and once
in BF16. Ranks are an axis of `torch.func.vmap` there, so that they are captured as one learner is. There is one
update an environment step, as without ranks, on 512 transitions of each rank.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import itertools
import multiprocessing
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from experiments import curves
from functional_sac.config import TrainConfig
from functional_sl.run import checks, cli
from functional_sl.run.command import as_usage_error

if TYPE_CHECKING:
    from experiments.trial import Job

TASKS = ("HalfCheetah-v4", "Hopper-v4", "Walker2d-v4", "Ant-v4", "Humanoid-v4")
OFFICIAL = Path(__file__).with_name("official_curves.csv")
# What the published runs say beside the defaults of the dataclass; the rate decays over all of their million updates.
PUBLISHED = {"num_envs": 1, "batch_size": 512, "learning_starts": 10_000, "lr_decay_updates": 1_000_000}
WIRES = ("float32", "bfloat16")


@dataclasses.dataclass(frozen=True)
class Settings:
    """The flags."""

    tasks: str = cli.option("", "Gymnasium ids, by commas; the five published ones, with --wire HalfCheetah-v4.")
    seeds: int = cli.option(0, "Seeds of each task; 0 for five, with --wire three.")
    env_steps: int = cli.option(0, "Environment steps of each seed; 0 for 100,000, with --wire 50,000.")
    seeds_per_process: int = cli.option(0, "Seeds learned side by side in one process; 0 for all of a task.")
    workers: int = cli.option(0, "Training processes at once; 0 for as many as there are runs.")
    evaluators: int = cli.option(2, "Processes that play a training process's policies.")
    out: str = cli.option("runs/reproduce_mujoco", "Folder of the returns, the table and the pictures.")
    budget_s: float = cli.option(0.0, "Time after which runs end with what they have; 0 for no end.", unit="s")
    eval_every: int = cli.option(10_000, "Environment steps between two evaluations.")
    eval_episodes: int = cli.option(10, "Episodes of an evaluation, of each seed.")
    products: str = cli.option(
        "tf32",
        "Matrix products on a GPU: TF32, which the published runs allow, FP32, BF16.",
        choices=("float32", "tf32", "bfloat16"),
    )
    device: str = cli.option("cpu", "Where learners run.", choices=("cpu", "cuda"))
    compile: bool = cli.option(True, "Compile the learners, and capture them on CUDA.")
    wire: bool = cli.option(False, "Compare gradients that travel in FP32 and in BF16.")
    draw: str | None = cli.option(None, "Train nothing: draw the returns in this folder.")
    official: str = cli.option(str(OFFICIAL), "Published curves: a CSV file of task, env_step, mean and std.")

    def __post_init__(self) -> None:
        """Raises ValueError for a negative number."""
        for name in ("seeds", "seeds_per_process", "env_steps", "workers", "evaluators"):
            checks.require(self, getattr(self, name) >= 0, (name,), "must not be negative")


def jobs(settings: Settings) -> list[Job]:
    """Returns the runs that the flags ask for.

    Raises:
      ValueError: for a setting that cannot be meant.
    """
    from experiments.trial import Job  # torch takes seconds, which `--help` need not wait for

    tasks = [name for name in settings.tasks.split(",") if name] or list(TASKS[:1] if settings.wire else TASKS)
    ranks = 2 if settings.wire else 1
    # A CPU has no TF32.
    products = "float32" if (settings.products, settings.device) == ("tf32", "cpu") else settings.products
    steps = settings.env_steps or (50_000 if settings.wire else 100_000)
    deadline = time.time() + settings.budget_s if settings.budget_s else float("inf")
    seeds = settings.seeds or (3 if settings.wire else 5)
    share = settings.seeds_per_process or seeds
    found = []
    for task, wire, first in itertools.product(tasks, WIRES if settings.wire else WIRES[:1], range(0, seeds, share)):
        sizes = PUBLISHED | {"learning_starts": PUBLISHED["learning_starts"] // ranks}
        config = TrainConfig(
            task=task, sim="gym", seed=first, num_seeds=min(share, seeds - first), env_steps=steps,
            updates_per_step=ranks, replay_capacity=max(steps, 10_000) // ranks, device=settings.device,
            compute_dtype="bfloat16" if products == "bfloat16" else "float32",
            dp_gradient_wire_dtype=wire, compile="true" if settings.compile else "false",
            eval_every=settings.eval_every, eval_episodes=settings.eval_episodes, **sizes,
        )  # fmt: skip
        variant = f"{wire} wire" if settings.wire else products
        part = f"-{first}" if share < seeds else ""
        path = Path(settings.out) / f"{task}-{variant.split()[0]}{part}.csv"
        found.append(Job(config, path, variant, ranks, products == "tf32", settings.evaluators, deadline))
    return found


def report(folder: Path, official: Path) -> str:
    """Draws the returns in a folder on the published curves, and returns the table, which it writes too."""
    points, published = curves.read(sorted(folder.glob("*.csv"))), curves.official(official)
    if not points:
        raise cli.UsageError(f"{folder} holds no evaluation; give the --out of such a run")
    curves.draw(folder, points, published)
    table = curves.table(points, published)
    (folder / "table.md").write_text(table + "\n")
    return table


def run(settings: Settings) -> str:
    """Trains what the flags ask for, draws it, and returns the table."""
    from experiments import trial

    return train_all(trial.train, jobs(settings), Path(settings.out), settings.workers, Path(settings.official))


def train_all(train: Callable[[Any], str], asked: Sequence[Any], folder: Path, workers: int, official: Path) -> str:
    """Trains every job in a process of its own, draws the returns that the folder holds then, and returns the table.

    Args:
      train: writes the evaluations of a job to its `path` and returns a line about it.
      asked: the jobs.
      folder: of the paths.
      workers: processes at once; 0 for as many as there are jobs.
      official: published curves.

    Raises:
      cli.UsageError: if the folder cannot be made, or holds one of the paths already.
    """
    with as_usage_error(OSError):
        folder.mkdir(parents=True, exist_ok=True)
    taken = [str(job.path) for job in asked if job.path.exists()]
    if taken:
        raise cli.UsageError(f"--out={folder} holds {', '.join(taken)} already; choose another folder")
    spawn = multiprocessing.get_context("spawn")  # CUDA does not survive a fork
    with concurrent.futures.ProcessPoolExecutor(min(workers or len(asked), len(asked)), mp_context=spawn) as pool:
        failures = []
        for future in concurrent.futures.as_completed([pool.submit(train, job) for job in asked]):
            error = future.exception()
            print(f"failed: {error!r}" if error else future.result(), flush=True)
            failures += [error] if error else []
    if failures and not any(folder.glob("*.csv")):
        raise failures[0]
    table = report(folder, official)
    if failures:
        raise failures[0]
    return table


def main() -> None:
    """Trains or draws, and prints the table."""
    with cli.exit_on_usage_error("reproduce_mujoco"):
        settings = cli.parse(Settings, program="reproduce_mujoco", description=__doc__).config
        if settings.draw == "":
            raise cli.UsageError("--draw= names no folder; give one, or leave the flag out to train")
        with as_usage_error(OSError, ValueError):
            curves.official(Path(settings.official))
            if settings.draw:
                print(report(Path(settings.draw), Path(settings.official)))
                return
            jobs(settings)
        print(run(settings))


if __name__ == "__main__":
    main()
