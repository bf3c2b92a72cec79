"""How the learner's cycle scales: with batch, width and number of updates, and with learners side by side.

    python -m experiments.bench_scaling --device=cuda --points=batch,seeds --csv=scaling.csv --plot=scaling.png
    python -m experiments.bench_scaling --plot=scaling.png --csv=scaling.csv --points=   # draw what was measured

A point changes one number of the g1 cycle (batch 2048, critic width 256 and actor width half of it, 6 updates), such
as `batch=512`; `seeds=16` is 16 learners of the small size (batch 128, widths 64 and 32) mapped over in one cycle, and
`processes=16` as many processes with one such learner each, which share the device as the driver lets them. On
CUDA every point is compiled for its own shapes (`dynamic=False`), about a minute with a cold cache, and captured as
one graph; `--compile=false` captures the same functions launched kernel by kernel, ready in seconds, slower to run.
"""

from __future__ import annotations

import csv
import dataclasses
import itertools
import multiprocessing
import statistics
import time
from pathlib import Path
from typing import Any

import torch

from experiments import bench_learner, learner_sides, timing
from experiments.learner_agreement import transitions
from functional_sl.run import cli, figures
from functional_sl.run.figures import Series

FAMILIES = {
    "batch": (512, 1024, 2048, 4096, 8192, 16384),
    "width": (128, 256, 512, 1024),
    "updates": (1, 2, 4, 6, 8, 16),
    "seeds": (1, 4, 16, 64),
    "processes": (1, 4, 16),
}
# Families of several learners of the small size, and what legends add.
LEARNERS = {"seeds": ", as one graph", "processes": ", a process each"}
PATIENCE_S = 600.0  # until all processes are ready
COLUMNS = ("family", "value", "compute_dtype", "ms_per_cycle", "updates_per_s", "ready_s", "compiled", "device")


@dataclasses.dataclass(frozen=True)
class Settings:
    """The flags."""

    points: str = cli.option(",".join(FAMILIES), "Families or points of them, such as batch,width=512; empty for none.")
    compute_dtype: str = cli.option("bfloat16,float32", "Matrix products, comma-separated: bfloat16, float32, tf32.")
    device: str = cli.option("cpu", "Where the learner runs.", choices=("cpu", "cuda"))
    size: str = cli.option("g1", "The cycle whose numbers are changed.", choices=tuple(bench_learner.SIZES))
    compile: bool | None = cli.option(None, "Compile every point; by default on CUDA only.")
    cycles: int = cli.option(30, "Timed cycles of a point.")
    threads: int = cli.option(0, "CPU threads of torch; 0 keeps torch's own choice.")
    csv: str = cli.option("scaling.csv", "File to which every point is appended once it is measured.")
    plot: str | None = cli.option(None, "PNG file of all points in the csv file.")

    @property
    def chosen(self) -> list[tuple[str, int]]:
        """The points, as family and value."""
        found = []
        for part in filter(None, self.points.split(",")):
            family, _, value = part.partition("=")
            if family not in FAMILIES or (value and not value.isdecimal()):
                raise cli.UsageError(f"points={part}: name {', '.join(FAMILIES)}, or a point such as batch=512")
            found += [(family, int(value))] if value else [(family, value) for value in FAMILIES[family]]
        return found


def case(settings: Settings, family: str, value: int, precision: str) -> learner_sides.Case:
    """Returns the case of a point."""
    small = family in LEARNERS
    config, spec = bench_learner.setting("small" if small else settings.size)
    config = dataclasses.replace(config, updates_per_step=2 if small else 6)
    changes: dict[str, dict[str, Any]] = {
        "batch": {"batch_size": value},
        "width": {"critic_width": value, "actor_width": value // 2},
        "updates": {"updates_per_step": value},
        "seeds": {},
        "processes": {},
    }
    config = dataclasses.replace(config, **changes[family])
    compile_ = settings.device == "cuda" if settings.compile is None else settings.compile
    data = transitions(spec, bench_learner.ROWS, settings.device)
    seeds = value if family == "seeds" else 1
    return learner_sides.Case(config, spec, data, precision, compile_, seeds)


def measure(settings: Settings, family: str, value: int, precision: str) -> dict[str, Any]:
    """Builds the cycle of a point and returns its row of the table."""
    point = case(settings, family, value, precision)
    if family == "processes":
        return row_of(settings, point, family, value, *together(settings, value, precision))
    begin = time.perf_counter()
    side = learner_sides.build("ours", point)
    ready = time.perf_counter() - begin
    with learner_sides.products(precision):
        side.cycle()
        if side.events:
            times = timing.by_events(side.cycle, settings.cycles)
        else:
            times = timing.by_clock(side.cycle, side.wait, settings.cycles)
    return row_of(settings, point, family, value, statistics.median(times), ready)


def row_of(
    settings: Settings, point: learner_sides.Case, family: str, value: int, ms: float, ready: float
) -> dict[str, Any]:
    """Returns the row of a point whose cycle of all learners takes `ms` milliseconds."""
    learners = value if family in LEARNERS else 1
    updates = learners * point.config.updates_per_step / ms * 1e3
    device = torch.cuda.get_device_name() if settings.device == "cuda" else "cpu"
    row = (family, value, point.precision, round(ms, 4), round(updates, 1), round(ready, 1), point.compile, device)
    return dict(zip(COLUMNS, row, strict=True))


def together(settings: Settings, number: int, precision: str) -> tuple[float, float]:
    """Returns the mean milliseconds of a cycle in `number` processes at once, and the seconds until all were ready."""
    context = multiprocessing.get_context("spawn")
    start, results = context.Barrier(number + 1), context.Queue()
    arguments = (settings, precision, start, results)
    workers = [context.Process(target=alone, args=arguments, daemon=True) for _ in range(number)]
    begin = time.perf_counter()
    for worker in workers:
        worker.start()
    try:
        start.wait(PATIENCE_S)
        ready = time.perf_counter() - begin
        times = [results.get(timeout=PATIENCE_S) for _ in workers]
    finally:
        for worker in workers:
            worker.join(10.0) if start.n_waiting == 0 else worker.terminate()
    # Rates add up: the cycle of all is the harmonic mean.
    return statistics.harmonic_mean(times), ready


def alone(settings: Settings, precision: str, start: Any, results: Any) -> None:
    """Times one learner between the others, in a process of its own."""
    torch.set_num_threads(1)
    side = learner_sides.build("ours", case(settings, "processes", 1, precision))
    with learner_sides.products(precision):
        side.cycle()
        side.wait()
        start.wait(PATIENCE_S)
        results.put(statistics.fmean(timing.by_clock(side.cycle, side.wait, settings.cycles)))


def append(path: Path, row: dict[str, Any]) -> None:
    """Adds a row to a csv file, with a header if it is new."""
    new = not path.exists()
    with path.open("a", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS)
        if new:
            writer.writeheader()
        writer.writerow(row)


def draw(rows: list[dict[str, str]], path: str) -> None:
    """Draws a panel for each family: milliseconds a cycle, or updates a second of all learners together."""
    panels: dict[str, list[Series]] = {}
    for family, precision in itertools.product(FAMILIES, learner_sides.PRECISIONS):
        together = family in LEARNERS
        field = "updates_per_s" if together else "ms_per_cycle"
        # A point that was measured again counts as it was last.
        points = {
            int(row["value"]): float(row[field])
            for row in rows
            if (row["family"], row["compute_dtype"]) == (family, precision)
        }
        if points:
            title = "updates/s over learners side by side" if together else f"ms a cycle over {family}"
            label = f"{precision}{LEARNERS.get(family, '')}"
            panels.setdefault(title, []).append(Series(label, *zip(*sorted(points.items()), strict=True)))
    figures.panels(path, panels, xlabel="", logarithmic=True)


def main() -> None:
    """Measures the points one after another, appends and prints each, and draws them all."""
    with cli.exit_on_usage_error("bench_scaling"):
        settings = cli.parse(Settings, program="bench_scaling", description=__doc__).config
        points = settings.chosen
        for precision in settings.compute_dtype.split(","):
            if precision not in learner_sides.PRECISIONS:
                raise cli.UsageError(f"compute_dtype={precision}: choose among {', '.join(learner_sides.PRECISIONS)}")
        if settings.device == "cuda" and not torch.cuda.is_available():
            raise cli.UsageError("device=cuda: torch sees no CUDA device")
    if settings.threads:
        torch.set_num_threads(settings.threads)
    print(f"{'family':>8} {'value':>6} {'products':>8} {'ms/cycle':>9} {'updates/s':>10} ready")
    for family, value in points:
        for precision in settings.compute_dtype.split(","):
            try:
                row = measure(settings, family, value, precision)
            except Exception as error:
                # The next point may fit where this one did not.
                print(f"{family:>8} {value:>6} {precision:>8} failed, {type(error).__name__}: {error}", flush=True)
                continue
            finally:
                torch.cuda.empty_cache()
            append(Path(settings.csv), row)
            print(
                f"{family:>8} {value:>6} {precision:>8} {row['ms_per_cycle']:9.3f} {row['updates_per_s']:10.1f} "
                f"{row['ready_s']} s",
                flush=True,
            )
    if settings.plot:
        with Path(settings.csv).open(newline="") as file:
            draw(list(csv.DictReader(file)), settings.plot)


if __name__ == "__main__":
    main()
