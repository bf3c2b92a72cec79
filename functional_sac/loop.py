"""The host's side of a training run: what is due when, what is read off the device, what is written down."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from functional_sac import environment, evaluation, opening, plan, reporting, request
from functional_sac.config import TrainConfig
from functional_sac.envs.env import averages
from functional_sac.envs.host import RenderError
from functional_sac.evaluation import Regions
from functional_sac.iteration import Episodes, TrainState, stacked
from functional_sac.opening import Run
from functional_sac.reporting import Mark
from functional_sl import keys, tree
from functional_sl.parallel.world import broadcast, gather, guard, stop_requested
from functional_sl.run import runlog, signals
from functional_sl.run.progress import Progress
from functional_sl.run.runlog import RunError

BLOCKED_UPDATES = 100


def train(config: TrainConfig, given: frozenset[str] = frozenset()) -> dict[str, Any]:
    """Trains as configured and returns the summary; see `functional_sac.train.run`."""
    with torch.no_grad(), signals.Stop() as stop, opening.open_run(config, given) as run:
        with contextlib.closing(_Loop(run)) as loop, _progress(run) as progress:
            for note in (f"run folder: {run.run_dir}", *run.start.notes):
                progress.write(note)
            if loop.done:
                loop.draw_again(progress)
            while not loop.done:
                loop.advance(stop, progress)
            if loop.stopped:
                progress.write(f"{loop.stopped}: stopped after a snapshot; go on with --resume={run.run_dir}")
        # Every rank waits here for the last pictures of rank 0, under the watchdog.
        return broadcast(run.ranks.world, loop.summary() if run.log is not None else None)


@contextlib.contextmanager
def _progress(run: Run) -> Iterator[Progress]:
    with contextlib.ExitStack() as stack:
        stream = None if run.ranks.writes else stack.enter_context(open(os.devnull, "w"))
        yield stack.enter_context(Progress(run.config.env_steps, "steps", stream, initial=run.start.clock.env_steps))


class _Loop:
    """The run's clock. All effects are here; the state moves through pure functions.

    Attributes:
      stopped: the signal that ended the run early, or the empty text.
    """

    def __init__(self, run: Run) -> None:
        self._run, self._config = run, run.config
        self._states, self._ranks = run.states, run.ranks
        self._begun: set[tuple[bool, int | None]] = set()  # kinds of iteration that have run, hence are compiled
        self._clock = run.start.clock
        self._evaluation: dict[str, Any] = {}
        self._begin = self._mark = self._now()
        self._blocked = 0  # updates that the critics' gate has skipped in a row, by the last record
        self._refused, self._said_refused = 0, 0  # steps of all ranks whose numbers were not finite, by the last record
        self._overflowed, self._said_overflowed = set(), set()  # capacities of the simulator that were exceeded
        self._finished, self.stopped = self._clock.env_steps >= run.config.env_steps, ""
        self._regions = Regions.suited(run.eval_env, run.device, run.config.compile == "true")

    def close(self) -> None:
        """Frees what evaluations have captured."""
        self._regions.close()

    @property
    def done(self) -> bool:
        """Whether the last step has been taken and written down."""
        return self._finished or bool(self.stopped)

    def advance(self, stop: signals.Stop, progress: Progress) -> None:
        """Takes one vector step, learns, and writes down what is due."""
        config = self._config
        random, phase = plan.iteration(config, self._clock, self._run.learner.phases)
        idle, before = self._iterate(random, phase), self._clock
        self._clock = plan.tick(config, before, learned=phase is not None, idle=idle, ranks=self._ranks.size)
        env_steps = self._clock.env_steps
        self._finished = env_steps >= config.env_steps
        self.stopped = "" if self._finished else self._stop(stop)
        self._write_down(plan.due(config, before.env_steps, env_steps, self._finished), progress)
        self._warn(progress)
        self._run.watchdog.completed(env_steps // (config.num_envs * self._ranks.size))
        shown = {"return": self._evaluation.get("eval_return_mean")}
        if self._clock.updates and self._mark.env_steps == env_steps:
            shown["loss"] = float(self._states[0].metrics["critic_loss"].mean())
        progress.update(env_steps, **shown)

    def draw_again(self, progress: Progress) -> None:
        """Draws the pictures of a run that is at its end, which the end of the attempt before may have cost."""
        with self._edge("pictures") as writes:
            if writes:
                for record in runlog.effective(self._run.run_dir)[-1:]:
                    self._evaluation = {name: value for name, value in record.items() if name.startswith("eval_")}
                self._draw(plan.Due(log=False, evaluate=True, snapshot=False), progress)

    def _warn(self, progress: Progress) -> None:
        """Says, once a record, that nothing is being learned, or that steps were refused.

        Raises:
          RunError: if every step was, though learning has begun.
        """
        steps = self._clock.env_steps * self._config.num_seeds
        if self._clock.updates and self._refused >= steps:
            raise RunError(
                f"all {steps} environment steps had a NaN or infinite observation or reward, or one beyond 2**48, so "
                f"there is nothing to learn from: look at what task={self._config.task} returns"
            )
        if self._refused > self._said_refused:
            progress.write(
                f"{self._refused} environment steps so far had a NaN or infinite observation or reward, or one beyond "
                "2**48: they are not stored, and their environments began new episodes (refused_steps in the records)"
            )
            self._said_refused = self._refused
        if self._blocked >= BLOCKED_UPDATES:
            progress.write(
                f"the last {self._blocked} updates of the critics were skipped, since a loss or a gradient was not "
                "finite: look at the environment's rewards and observations, and at skipped_* in the records"
            )
            self._blocked = 0
        for name in sorted(self._overflowed - self._said_overflowed):
            progress.write(
                f"worlds had more {name} than the simulator has room for, which it dropped: give a higher "
                f"--sim_{name} (over_{name} in the records is the share of such steps)"
            )
        self._said_overflowed |= self._overflowed

    def _iterate(self, random: bool, phase: int | None) -> int:
        """Moves all states on and returns the number of environments that took no step in it."""
        iterate, kind = self._run.iterate, (random, phase)
        with contextlib.nullcontext() if kind in self._begun else self._run.watchdog.busy("first iteration"):
            found = self._ranks.each(lambda state: iterate(state, random=random, phase=phase), self._states)
        self._begun.add(kind)
        self._states = tuple(state for state, _ in found)
        return sum(sum(idle) for _, idle in found)

    def _stop(self, stop: signals.Stop) -> str:
        """Returns the name of the signal that any rank has had, or the empty text."""
        world = self._ranks.world
        if not stop_requested(world, stop.requested):
            return ""
        return next(name for name in gather(world, stop.name) if name)

    def summary(self) -> dict[str, Any]:
        """Returns the run's last line, in the process that writes."""
        rates = reporting.rates(self._begin, self._now(), self._config.num_seeds)
        return {
            "run_dir": str(self._run.run_dir),
            "task": self._config.task,
            "env_steps": self._clock.env_steps,
            "updates": self._clock.updates,
            "eval_return_mean": self._evaluation.get("eval_return_mean"),
            "eval_return_std": self._evaluation.get("eval_return_std"),
            "seconds": round(self._run.log.elapsed_s, 1),
            **rates,
            **({"stopped": self.stopped} if self.stopped else {}),
        }

    def _write_down(self, due: plan.Due, progress: Progress) -> None:
        if due.evaluate:
            with self._edge("evaluation") as writes:
                self._evaluation = self._evaluate() if writes else {}
        if due.log:
            self._log(self._evaluation if due.evaluate else {})
        # A stop adds nothing but a snapshot, so that the resumed run writes the same records as an unbroken one.
        if due.snapshot or self.stopped:
            score = self._evaluation.get("eval_return_mean") if due.evaluate else None
            with self._run.watchdog.busy("snapshot"):
                opening.save(self._run, self._states, self._clock.env_steps, score)
        if due.evaluate or self._finished:
            with self._edge("pictures") as writes:
                if writes:
                    self._draw(due, progress)

    @contextlib.contextmanager
    def _edge(self, activity: str) -> Iterator[bool]:
        """Lets one process do what a run has once, while the others wait; its error becomes one of all ranks."""
        with self._run.watchdog.busy(activity), guard(self._ranks.world, activity):
            yield self._ranks.writes

    def _draw(self, due: plan.Due, progress: Progress) -> None:
        if due.evaluate:
            reporting.draw_curve(self._run.run_dir, self._run.env.spec)
        if not self._finished:
            return
        env, shown = self._run.eval_env, (self._policies()[0], self._evaluation_keys()[0], self._dtype())
        if env.render is not None:
            try:
                most = None if env.sketched is None else reporting.HOST_PICTURES
                reporting.film(self._run.run_dir / "policy.gif", env, *shown, most, self._regions)
            except RenderError as error:
                progress.write(f"no film of the policy: {error}")
            if env.sketched is not None and env.sketched():
                progress.write(f"policy.gif shows a sketch of the robot: {env.sketched()}")
        if environment.samples(self._config):
            reporting.draw_tracking(self._run.run_dir / "tracking_error.png", env, *shown, self._regions)

    def _log(self, evaluation: dict[str, Any]) -> None:
        learned, totals, self._refused = self._gather()
        measured = self._measure()
        load = self._run.iterate.load
        self._states = tuple(
            load(s._replace(episodes=tree.zeros_like(s.episodes), recorded=stacked(self._sums(s))))
            for s in self._states
        )
        self._blocked = learned.get("skipped_critic_in_a_row", 0)
        taken = {"refused_steps": self._refused, **reporting.episodes(totals)}
        record = {"updates": self._clock.updates, **learned, **taken, **measured, **evaluation}
        self._overflowed |= {name for name in ("contacts", "constraints") if measured.get(f"over_{name}", 0.0) > 0.0}
        now = self._now()
        rates = reporting.rates(self._mark, now, self._config.num_seeds)
        self._mark = now
        with self._edge("records") as writes:
            if writes:
                self._run.log.write(self._clock.env_steps, record, rates)
                self._run.board.write(self._clock.env_steps, record | rates)

    def _gather(self) -> tuple[dict[str, Any], Episodes, int]:
        """Returns what all ranks have learned, and their totals of episodes and of refused steps."""
        fixed = (self._run.learner.rate, self._config.return_bound)
        learned = [reporting.learning(state, *fixed) if self._clock.updates else {} for state in self._states]
        totals = [[x.sum().item() for x in (*state.episodes, state.refused)] for state in self._states]
        found = self._ranks.gather([*zip(learned, totals, strict=True)])
        *columns, refused = zip(*(numbers for _, numbers in found), strict=True)
        dtypes = (torch.int64, torch.float64, torch.int64)
        summed = Episodes(*(torch.tensor(x, dtype=dtype) for x, dtype in zip(columns, dtypes, strict=True)))
        return reporting.over_ranks([values for values, _ in found]), summed, sum(refused)

    def _sums(self, state: TrainState) -> dict[str, Tensor]:
        """Returns what the environments of a rank have summed up so far, by name."""
        metrics = self._run.env.metrics
        if metrics is None:
            return {}
        return torch.func.vmap(metrics)(state.env) if self._config.num_seeds > 1 else metrics(state.env)

    def _measure(self) -> dict[str, float]:
        """Returns means of what the environments of all ranks have measured since the last record."""
        names = sorted(self._sums(self._states[0]))
        if not names:
            return {}
        pairs = [(*stacked(self._sums(state)), *state.recorded) for state in self._states]
        read = [[x.reshape(-1, len(names)).sum(0).tolist() for x in pair] for pair in pairs]
        columns = zip(*self._ranks.gather(read), strict=True)
        now, before = (dict(zip(names, map(sum, zip(*ranks, strict=True)), strict=True)) for ranks in columns)
        return averages(now, before)

    def _evaluate(self) -> dict[str, Any]:
        pairs = zip(self._policies(), self._evaluation_keys(), strict=True)
        episodes = self._config.eval_episodes
        return reporting.evaluated(
            [
                evaluation.evaluate(self._run.eval_env, *policy, key, episodes, self._dtype(), self._regions)
                for policy, key in pairs
            ]
        )

    def _policies(self) -> list[tuple[Any, Any]]:
        actor = self._states[0].sac.actor
        pair = (actor.params, actor.stats)
        return [tree.index(pair, i) for i in range(self._config.num_seeds)] if self._config.num_seeds > 1 else [pair]

    def _evaluation_keys(self) -> list[Tensor]:
        seeds = request.seeds(self._config)
        return [keys.fold_in(keys.key(seed, self._run.device), evaluation.STREAM) for seed in seeds]

    def _dtype(self) -> torch.dtype:
        return getattr(torch, self._config.compute_dtype)

    def _now(self) -> Mark:
        return Mark(time.monotonic(), self._clock.env_steps, self._clock.updates)
