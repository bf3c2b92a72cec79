"""What a supervised run says of itself: records, rates, pictures."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from functional_sl.run import figures, files, runlog
from functional_sl.schedules import Schedule
from functional_sl.training.update import TrainState


class Mark(NamedTuple):
    """A moment of a run, in host numbers."""

    seconds: float
    updates: int
    samples: int  # of all ranks


def totals(state: TrainState) -> list[Any]:
    """Returns this rank's valid items and sums since the last record, as JSON values that lose no bit."""
    return [int(state.own.items), {name: float(value) for name, value in state.own.sums.items()}]


def means(everyone: Sequence[Sequence[Any]]) -> dict[str, float | None]:
    """Returns sums over all ranks divided by their valid items, by name; None where there was none."""
    items = sum(count for count, _ in everyone)
    sums = {name: sum(own[name] for _, own in everyone) for name in everyone[0][1]}
    return {f"train_{name}": total / items if items else None for name, total in sums.items()}


def learning(state: TrainState, rate: Schedule, samples: int) -> dict[str, Any]:
    """Returns counts of the whole run, the learning rate of the last update, and the loss scale where there is one."""
    steps = state.updates - state.step.gate.skipped
    found = {
        "samples": samples,
        "valid": int(state.valid),
        "skipped": int(state.step.gate.skipped),
        "learning_rate": float(rate(torch.clamp(steps - 1, min=0))),
    }
    return found | ({"loss_scale": float(state.scale.scale)} if state.scale else {})


def rates(begin: Mark, end: Mark) -> dict[str, float]:
    """Returns updates and samples a second between two marks, over all ranks."""
    seconds = max(end.seconds - begin.seconds, 1e-9)
    return {
        "updates_per_s": round((end.updates - begin.updates) / seconds, 2),
        "samples_per_s": round((end.samples - begin.samples) / seconds, 1),
    }


def validated(found: Mapping[str, float]) -> dict[str, float]:
    """Returns figures under the names of records."""
    return {f"validation_{name}": value for name, value in found.items()}


def draw_loss(run_dir: Path, name: str) -> None:
    """Draws `loss.png` from the run's effective records.

    Raises:
      RunError: if it cannot be written.
    """
    records = runlog.effective(run_dir)
    series = []
    for label in ("train_loss", "validation_loss"):
        points = [(r["step"], r[label]) for r in records if r.get(label) is not None]
        steps, values = zip(*points, strict=True) if points else ((), ())
        series.append(figures.Series(label.replace("_loss", ""), steps, values))
    with writing(run_dir / "loss.png"):
        figures.learning_curve(run_dir / "loss.png", series, title=name, xlabel="updates", ylabel="loss")


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turns an OSError into one RunError that names the place."""
    try:
        yield
    except OSError as error:
        raise runlog.RunError(files.explain(error, path, 0)) from error
