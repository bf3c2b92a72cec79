"""Draws chosen metrics of runs, one panel each, over environment steps or minutes.

    python -m experiments.draw_run --runs=runs/NAME --metrics=episode/completed,error_body_pos --out=run.png
    python -m experiments.draw_run --runs=runs/A,runs/B --metrics=eval_return_mean --x=minutes --out=both.png

One run draws all its metrics into one picture; several runs share the axes of one metric.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from functional_sl.run import cli, figures, runlog


@dataclasses.dataclass(frozen=True)
class Settings:
    """The flags."""

    runs: str = cli.option("", "Folders of runs, by commas.")
    metrics: str = cli.option("eval_return_mean", "Names in the records, by commas.")
    x: str = cli.option("step", "Horizontal axis; minutes count from the run's start.", choices=("step", "minutes"))
    out: str = cli.option("run.png", "The picture.")


def series(run_dir: Path) -> list[dict[str, Any]]:
    """Returns the records of a run with the minutes since its start.

    Raises:
      RunError: if there is no run.
    """
    return [record | {"minutes": record["host"]["elapsed_s"] / 60} for record in runlog.effective(run_dir)]


def draw(settings: Settings) -> Path:
    """Writes the picture and returns its path.

    Raises:
      UsageError: for no run, several runs with several metrics, or a metric that no record has.
    """
    names, out = settings.metrics.split(","), Path(settings.out)
    runs = [Path(name) for name in settings.runs.split(",") if name]
    if not runs or (len(runs) > 1 and len(names) > 1):
        raise cli.UsageError(
            f"{len(runs)} runs and {len(names)} metrics: give --runs one folder, or several and --metrics one name"
        )
    found = {run: series(run) for run in runs}
    for name in names:
        if not any(record.get(name) is not None for records in found.values() for record in records):
            raise cli.UsageError(f"--metrics={name}: no record has it")
    if len(runs) == 1:
        figures.metrics_grid(out, found[runs[0]], names, x=settings.x)
        return out
    curves = []
    for run, records in found.items():
        kept = [record for record in records if record.get(names[0]) is not None]
        curves.append(figures.Series(run.name, [r[settings.x] for r in kept], [r[names[0]] for r in kept]))
    figures.learning_curve(out, curves, title=names[0], xlabel=settings.x, ylabel=names[0])
    return out


def main(argv: list[str] | None = None) -> None:
    """Draws what the command line asks for."""
    with cli.exit_on_usage_error("draw_run"):
        settings = cli.parse(Settings, argv, program="draw_run", description=__doc__).config
        try:
            print(draw(settings))
        except runlog.RunError as error:
            raise cli.UsageError(str(error)) from error


if __name__ == "__main__":
    main()
