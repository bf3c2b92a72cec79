"""One training process: learners of several seeds, their evaluations in processes of their own, and an end in time."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import multiprocessing
import statistics
import time
from pathlib import Path

import torch

from experiments import curves, fleet
from functional_sac.config import TrainConfig

LAST_EVALUATION_S = 20.0  # what is kept of the time for it, before one has been timed


@dataclasses.dataclass(frozen=True)
class Job:
    """What one process does."""

    config: TrainConfig
    path: Path  # of its evaluations
    variant: str = "float32"  # its name among the runs of a task
    ranks: int = 1  # simulated, of each seed
    tf32: bool = False
    evaluators: int = 1  # processes; with 0 this one plays, while it learns
    deadline: float = float("inf")  # of `time.time`


class Judge:
    """Evaluates the policies of a job beside its training, and writes their returns.

    Attributes:
      reserve: seconds that an evaluation takes.
    """

    def __init__(self, job: Job, pool: concurrent.futures.Executor) -> None:
        """Takes what runs the evaluations."""
        self._job, self._pool = job, pool
        self._pending: list[tuple[int, float, list[concurrent.futures.Future]]] = []
        self._submitted, self._begin = -1, time.time()
        self.reserve = LAST_EVALUATION_S

    def submit(self, learners: fleet.Fleet) -> None:
        """Has the current policies evaluated, once a step, and writes what is done."""
        self.collect(wait=False)
        if learners.env_steps == self._submitted:
            return
        self._submitted, config = learners.env_steps, self._job.config
        found = [
            self._pool.submit(fleet.play, config.task, policy, seed, config.eval_episodes)
            for policy, seed in zip(learners.policies(), learners.seeds, strict=True)
        ]
        self._pending.append((learners.env_steps, time.time() - self._begin, found))

    def collect(self, wait: bool) -> None:
        """Writes the evaluations that are done; all of them if asked to wait."""
        while self._pending and (wait or all(future.done() for future in self._pending[0][2])):
            step, seconds, futures = self._pending.pop(0)
            self._write(step, seconds, [future.result() for future in futures])

    def _write(self, step: int, seconds: float, played: list[fleet.Played]) -> None:
        config, variant = self._job.config, self._job.variant
        points = [
            curves.Point(
                config.task, variant, config.seed + i, step, statistics.fmean(found.returns), len(found.returns)
            )
            for i, found in enumerate(played)
        ]
        curves.append(self._job.path, points)
        rounds = -(-len(played) // max(1, self._job.evaluators))
        self.reserve = 1.5 * rounds * max(found.seconds for found in played)
        means = [point.mean_return for point in points]
        shown = ", ".join(f"{mean:.0f}" for mean in means)
        about = f"{config.task} {variant}: {step} steps after {seconds:.0f} s"
        print(f"{about}: {statistics.fmean(means):.0f} ({shown})", flush=True)


def train(job: Job) -> str:
    """Trains, writes the evaluations as they come, and returns a line about it.

    An evaluation stands at step 0, behind every `eval_every` steps, and at the end, which the deadline may bring.
    """
    torch.set_float32_matmul_precision("high" if job.tf32 else "highest")
    config, begin = job.config, time.time()
    with (
        _pool(job.evaluators) as pool,
        fleet.opened(config, torch.device(config.device), job.ranks) as learners,
    ):
        judge = Judge(job, pool)
        pace = _learn(job, learners, judge)
        judge.submit(learners)
        judge.collect(wait=True)
        return (
            f"{config.task} {job.variant}: {learners.env_steps} steps and {learners.updates} updates of each seed in "
            f"{time.time() - begin:.0f} s, {pace:.2f} ms a step, {learners.skipped()} updates skipped"
        )


def _pool(evaluators: int) -> concurrent.futures.Executor:
    if evaluators == 0:
        return concurrent.futures.ThreadPoolExecutor(1)
    return concurrent.futures.ProcessPoolExecutor(evaluators, mp_context=multiprocessing.get_context("spawn"))


def _learn(job: Job, learners: fleet.Fleet, judge: Judge) -> float:
    """Runs the learners to their end or the deadline; returns the milliseconds of a step with learning, median."""
    paces, every = [], job.config.eval_every
    mark = (time.time(), 0, False)
    judge.submit(learners)
    while learners.env_steps < job.config.env_steps and time.time() + judge.reserve < job.deadline:
        before = learners.env_steps // every
        learners.step()
        if learners.env_steps // every > before:
            now = (time.time(), learners.env_steps, learners.updates > 0)
            paces += [1e3 * (now[0] - mark[0]) / (now[1] - mark[1])] if mark[2] else []
            mark = now
            judge.submit(learners)
    return statistics.median(paces) if paces else float("nan")
