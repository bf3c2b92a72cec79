"""The host's side of a supervised run: what is due when, what is read off the device, what is written down."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch

from functional_sl import tree, wire
from functional_sl.parallel.world import broadcast, gather, guard, stop_requested
from functional_sl.run import runlog, signals
from functional_sl.run.progress import Progress
from functional_sl.training import admission, generators, opening, optimizer, recovery, reporting, validation
from functional_sl.training.config import TrainConfig
from functional_sl.training.errors import ContractError, UpdateError
from functional_sl.training.opening import Run
from functional_sl.training.recovery import Boundary
from functional_sl.training.reporting import Mark
from functional_sl.training.request import Request
from functional_sl.tree import Tree

_STOP_EVERY = 16  # updates between two questions to all ranks whether a signal came


class Due(NamedTuple):
    """What is due after an update."""

    record: bool
    validation: bool
    snapshot: bool


class Validated(NamedTuple):
    """What `on_validation` gets, on rank 0: `save()` writes a snapshot of this moment without the other ranks."""

    updates: int
    figures: Mapping[str, float]
    score: float
    params: Tree
    buffers: Tree  # of rank 0
    save: Callable[[], Path]


def due(config: TrainConfig, updates: int, stopped: bool) -> Due:
    """Returns what is due after so many updates; a validation has a record and a snapshot of its own.

    A stop adds nothing but a snapshot, so that the resumed run writes the same records as an unbroken one.
    """
    end = updates >= config.updates

    def falls(every: int) -> bool:
        return end or (every > 0 and updates % every == 0)

    validates = falls(config.validate_every)
    return Due(validates or falls(config.log_every), validates, validates or stopped or falls(config.snapshot_every))


def train(asked: Request, on_validation: Callable[[Validated], None] | None = None) -> dict[str, Any]:
    """Trains as asked and returns the summary; see `functional_sl.train.run`."""
    with torch.no_grad(), signals.Stop() as stop, opening.open_run(asked) as run:
        loop = _Loop(run, on_validation)
        with _progress(run) as progress:
            for note in (f"run folder: {run.run_dir}", *run.start.notes):
                progress.write(note)
            while not loop.done:
                loop.advance(stop, progress)
            if loop.stopped:
                progress.write(f"{loop.stopped}: stopped after a snapshot; go on with --resume={run.run_dir}")
        with loop.edge("pictures") as writes:
            if writes:
                loop.draw()
        return broadcast(run.world, loop.summary() if run.log is not None else None)


@contextlib.contextmanager
def _progress(run: Run) -> Iterator[Progress]:
    with contextlib.ExitStack() as stack:
        stream = None if run.writes else stack.enter_context(open(os.devnull, "w"))
        yield stack.enter_context(Progress(run.config.updates, "updates", stream, initial=run.start.updates))


class _Loop:
    """The run's clock. All effects are here; the state moves through one pure function.

    Attributes:
      stopped: the signal that ended the run early, or the empty text.
    """

    def __init__(self, run: Run, on_validation: Callable[[Validated], None] | None) -> None:
        self._run, self._config, self._on_validation = run, run.config, on_validation
        self._state, self._updates = run.state, run.start.updates
        self._rate = optimizer.learning_rate(run.config)
        self._skipped = int(run.state.step.gate.skipped)
        self._record: dict[str, Any] = {}
        self._figures: dict[str, float] = {}
        self._begin = self._mark = self._now()
        self.stopped = ""
        if self.done and run.log is not None:
            self._recall()

    @property
    def done(self) -> bool:
        """Whether the last update has been taken and written down."""
        return self._updates >= self._config.updates or bool(self.stopped)

    def advance(self, stop: signals.Stop, progress: Progress) -> None:
        """Takes one update, and writes down what is due."""
        first = self._updates == self._run.start.updates
        with self._run.watchdog.busy("first update") if first else contextlib.nullcontext():
            self._state, _ = self._update()
        self._updates += 1
        if self._updates < self._config.updates:
            self.stopped = self._stop(stop)
        todo = due(self._config, self._updates, bool(self.stopped))
        if any(todo) or self._run.world.device.type == "cpu":
            self._check()
        if any(todo):
            self._write_down(todo)
        self._run.watchdog.completed(self._updates)
        progress.update(self._updates, loss=self._record.get("train_loss"), validation=self._figures.get("loss"))

    def _update(self) -> tuple[Any, dict[str, Any]]:
        try:
            return self._run.advance(self._state)
        except StopIteration as error:
            raise ContractError(
                f"recipe {self._run.recipe.name}: its data ended in update {self._updates + 1}; draw with replacement, "
                "or begin anew where they end"
            ) from error

    def summary(self) -> dict[str, Any]:
        """Returns the run's last line, on rank 0."""
        return {
            "run_id": self._run.run_id,
            "run_dir": str(self._run.run_dir),
            "updates": self._updates,
            "train_loss": self._record.get("train_loss"),
            "validation": self._figures,
            "seconds": round(self._run.log.elapsed_s, 1),
            "samples_per_s": reporting.rates(self._begin, self._now())["samples_per_s"],
            **({"stopped": self.stopped} if self.stopped else {}),
        }

    @contextlib.contextmanager
    def edge(self, activity: str) -> Iterator[bool]:
        """Lets rank 0 do what a run has once, while the others wait; its error becomes one of all ranks."""
        with self._run.watchdog.busy(activity), guard(self._run.world, activity):
            yield self._run.writes

    def draw(self) -> None:
        """Writes the pictures of a finished or stopped run, on rank 0."""
        reporting.draw_loss(self._run.run_dir, self._run.recipe.name)
        if self._run.recipe.draw and not self.stopped:
            folder = self._run.run_dir / "pictures"
            with reporting.writing(folder), generators.preserved(self._run.world.device):
                folder.mkdir(exist_ok=True)
                self._run.recipe.draw(self._state.step.params, self._state.step.stats, str(folder))

    def _recall(self) -> None:
        """Takes the last record for that of this attempt, which begins at the run's end."""
        for record in runlog.effective(self._run.run_dir)[-1:]:
            self._record, prefix = record, "validation_"
            self._figures = {k.removeprefix(prefix): v for k, v in record.items() if k.startswith(prefix)}

    def _stop(self, stop: signals.Stop) -> str:
        """Returns the name of the signal that any rank has had, or the empty text."""
        world = self._run.world
        if world.size > 1 and self._updates % _STOP_EVERY:
            return ""
        if not stop_requested(world, stop.requested):
            return ""
        return next(name for name in gather(world, stop.name) if name)

    def _check(self) -> None:
        """Raises on all ranks alike for an update without a valid item, or with a number that is not finite."""
        state, where = self._state, f"update {self._updates}"
        empty, skipped = int(state.empty_at), int(state.step.gate.skipped)
        if empty >= 0:
            raise UpdateError(f"update {empty}: no rank has drawn a valid item; look at the data and the masks")
        if skipped == self._skipped:
            return
        self._skipped = skipped
        found = int(state.own.nonfinite_at)
        with guard(self._run.world, where):
            if found >= 0:
                limit = f"{wire.limit(torch.float32):.1e}"
                raise UpdateError(f"the loss was not finite, or a gradient was not below {limit}, in update {found}")

    def _write_down(self, todo: Due) -> None:
        record, rates = self._measure() if todo.record else ({}, {})
        boundary = None
        if todo.snapshot:
            with self._run.watchdog.busy("snapshot"):
                boundary = recovery.commit(self._run.world, self._state, self._updates)
        figures, score = {}, None
        if todo.validation:
            with self.edge("validation") as writes:
                figures, score = self._validate() if writes else ({}, None)
        if todo.record:
            with self.edge("records") as writes:
                if writes:
                    self._write_record(record, rates, figures, score)
        if todo.validation and self._on_validation:
            with self.edge("the callback after validation") as writes:
                if writes:
                    self._call_back(boundary, figures, score)
        if todo.snapshot:
            with self.edge(f"the snapshot of update {self._updates}") as writes:
                if writes:
                    self._save(boundary, score)

    def _measure(self) -> tuple[dict[str, Any], dict[str, float]]:
        """Returns the record and the rates since the last one, and begins the next one's sums."""
        found = reporting.means(gather(self._run.world, reporting.totals(self._state)))
        own = self._state.own
        fresh = own._replace(items=torch.zeros_like(own.items), sums=tree.zeros_like(own.sums))
        self._state = self._run.advance.load(self._state._replace(own=fresh))
        now = self._now()
        rates, self._mark = reporting.rates(self._mark, now), now
        return found | reporting.learning(self._state, self._rate, now.samples), rates

    def _validate(self) -> tuple[dict[str, float], float]:
        config, step = self._config, self._state.step
        device = self._run.world.device
        with generators.preserved(device):
            found = validation.figures(
                self._run.recipe, step.params, step.stats, config.batch_size, config.compute_dtype, device
            )
            self._figures = found
            return found, admission.number(self._run.recipe, "score", self._run.recipe.score(found))

    def _write_record(
        self, record: dict[str, Any], rates: dict[str, float], figures: Mapping[str, float], score: float | None
    ) -> None:
        self._record = record
        whole = record | reporting.validated(figures) | ({"score": score} if figures else {})
        self._run.log.write(self._updates, whole, rates)
        self._run.board.write(self._updates, whole | rates)

    def _call_back(self, boundary: Boundary, figures: Mapping[str, float], score: float) -> None:
        def save() -> Path:
            if boundary.updates != self._updates:
                raise RuntimeError(f"the moment after update {boundary.updates} is over; save within the callback")
            return self._save(boundary, score)

        step = self._state.step
        with generators.preserved(self._run.world.device):
            self._on_validation(Validated(self._updates, figures, score, step.params, step.stats, save))

    def _save(self, boundary: Boundary, score: float | None) -> Path:
        run = self._run
        run.log.sync()
        counts = {"updates": boundary.updates, "samples": self._now().samples, "valid": int(boundary.state.valid)}
        return recovery.save(
            run.run_dir,
            boundary,
            run.fitting,
            run_id=run.run_id,
            config=run.kept,
            score=score,
            keep=run.config.keep_snapshots,
            protect=frozenset({run.start.updates} if run.start.source else ()),
            counts=counts,
        )

    def _now(self) -> Mark:
        together = self._config.batch_size * self._config.accumulation * self._run.world.size
        return Mark(time.monotonic(), self._updates, self._updates * together)
