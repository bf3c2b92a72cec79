"""Returns of evaluations as a file, a table and a picture beside published curves."""

from __future__ import annotations

import csv
import statistics
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from functional_sl.run import figures
from functional_sl.run.figures import Series


class Point(NamedTuple):
    """One evaluation of one seed."""

    task: str
    variant: str
    seed: int
    env_step: int
    mean_return: float
    episodes: int


class Official(NamedTuple):
    """A published evaluation: mean and population deviation over five seeds."""

    env_step: int
    mean: float
    std: float


OFFICIAL_SEEDS = 5
Curves = dict[tuple[str, str], dict[int, list[tuple[int, float]]]]  # (task, variant) -> seed -> (step, return)


def append(path: Path, points: Iterable[Point]) -> None:
    """Adds evaluations to a CSV file, which begins with the names of the columns."""
    fresh = not path.exists()
    with path.open("a", newline="") as file:
        writer = csv.writer(file)
        if fresh:
            writer.writerow(Point._fields)
        writer.writerows(point._replace(mean_return=round(point.mean_return, 3)) for point in points)


def read(paths: Iterable[Path]) -> list[Point]:
    """Returns the evaluations of files that `append` wrote; a repeated one counts once, as the last said.

    Raises:
      ValueError: names the file, and the line that is no evaluation.
    """
    found = {}
    for path in paths:
        with path.open(newline="") as file:
            rows = csv.DictReader(file)
            try:
                for row in rows:
                    numbers = int(row["seed"]), int(row["env_step"]), float(row["mean_return"]), int(row["episodes"])
                    point = Point(row["task"], row["variant"], *numbers)
                    found[point[:4]] = point
            except (KeyError, TypeError, ValueError) as error:
                columns = ", ".join(Point._fields)
                raise ValueError(f"{path} line {rows.line_num}: expected {columns}; move it away or mend it") from error
    return sorted(found.values())


def official(path: Path) -> dict[str, list[Official]]:
    """Returns published curves by task from a CSV file with the columns task, env_step, mean and std.

    Raises:
      ValueError: if a column is missing, or a row holds no numbers.
    """
    found: dict[str, list[Official]] = {}
    with path.open(newline="") as file:
        rows = csv.DictReader(line for line in file if not line.startswith("#"))
        missing = {"task", *Official._fields} - set(rows.fieldnames or ())
        if missing:
            raise ValueError(f"{path} has no column {', '.join(sorted(missing))}")
        for row in rows:
            try:
                value = Official(int(row["env_step"]), float(row["mean"]), float(row["std"]))
            except (TypeError, ValueError) as error:
                raise ValueError(f"{path}: {dict(row)} is no number of steps, mean and std") from error
            found.setdefault(row["task"], []).append(value)
    return found


def curves(points: Sequence[Point]) -> Curves:
    """Groups evaluations by task and variant, and by seed within."""
    found: Curves = {}
    for point in sorted(points):
        seeds = found.setdefault((point.task, point.variant), {})
        seeds.setdefault(point.seed, []).append((point.env_step, point.mean_return))
    return found


def last(seeds: Mapping[int, Sequence[tuple[int, float]]]) -> tuple[int, list[float]]:
    """Returns the newest step that all seeds have been evaluated at, and their returns there.

    Raises:
      ValueError: if there is none.
    """
    common = set.intersection(*({step for step, _ in curve} for curve in seeds.values()))
    if not common:
        raise ValueError(f"the seeds {', '.join(map(str, seeds))} were evaluated at no step in common; go on with them")
    step = max(common)
    return step, [dict(curve)[step] for curve in seeds.values()]


def reach(published: Official) -> tuple[float, float]:
    """Returns between which returns all published seeds lie, whatever they were.

    None of n values lies further than `sqrt(n - 1)` population deviations from their mean (Samuelson 1968).
    """
    spread = (OFFICIAL_SEEDS - 1) ** 0.5 * published.std
    return published.mean - spread, published.mean + spread


def verdict(mean: float, published: Official) -> str:
    """Compares a mean with the published band, mean ± std, and with what its seeds can have reached."""
    if mean > published.mean + published.std:
        return "above the band"
    if mean >= published.mean - published.std:
        return "within the band"
    return "below the band" if mean >= reach(published)[0] else "below every seed"


def table(points: Sequence[Point], published: Mapping[str, Sequence[Official]]) -> str:
    """Returns a Markdown table: the newest evaluation of each task and variant beside the published one there."""
    lines = [
        "| task | variant | steps | ours: mean ± std | our seeds | official: mean ± std | its seeds within | verdict |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for (task, variant), seeds in curves(points).items():
        step, found = last(seeds)
        mean = statistics.fmean(found)
        row = [task, variant, f"{step:,}", f"{mean:.0f} ± {statistics.pstdev(found):.0f} ({len(found)} seeds)"]
        row += [f"{min(found):.0f} to {max(found):.0f}"]
        there = next((x for x in published.get(task, ()) if x.env_step == step), None)
        if there is None:
            row += ["no figure at this step", "", ""]
        else:
            lowest, highest = reach(there)
            row += [f"{there.mean:.0f} ± {there.std:.0f}", f"{lowest:.0f} to {highest:.0f}", verdict(mean, there)]
        lines.append(f"| {' | '.join(row)} |")
    return "\n".join(lines)


def draw(folder: Path, points: Sequence[Point], published: Mapping[str, Sequence[Official]]) -> list[Path]:
    """Draws `TASK.png` for each task, and all of them as `overview.png`: mean and range over seeds, published band.

    The published curve is drawn up to its first point behind ours.

    Returns:
      The files.
    """
    found, paths, every = curves(points), [], {}
    folder.mkdir(parents=True, exist_ok=True)
    for task in dict.fromkeys(task for task, _ in found):
        ours = {variant: seeds for (name, variant), seeds in found.items() if name == task}
        series = [
            figures.band(
                f"here, {variant}: mean and range of {len(seeds)} seeds", [_columns(curve) for curve in seeds.values()]
            )
            for variant, seeds in ours.items()
        ]
        end = max(step for seeds in ours.values() for curve in seeds.values() for step, _ in curve)
        series += [_band(_until(published[task], end))] if task in published else []
        paths.append(folder / f"{task}.png")
        every[task] = series
        figures.learning_curve(
            paths[-1], series, title=f"{task}: return of evaluations", xlabel="environment steps", ylabel="return"
        )
    figures.panels(folder / "overview.png", every, xlabel="environment steps")
    return [*paths, folder / "overview.png"]


def _columns(curve: Sequence[tuple[int, float]]) -> tuple[list[int], list[float]]:
    """Returns the steps and the returns of a curve."""
    steps, returns = zip(*curve, strict=True)
    return list(steps), list(returns)


def _until(published: Sequence[Official], end: int) -> list[Official]:
    before = [x for x in published if x.env_step < end]
    return [*before, *[x for x in published if x.env_step >= end][:1]]


def _band(published: Sequence[Official]) -> Series:
    steps, means, spread = zip(*published, strict=True)
    low = [m - s for m, s in zip(means, spread, strict=True)]
    high = [m + s for m, s in zip(means, spread, strict=True)]
    return Series("FlashSAC as published: mean ± std of 5 seeds", steps, means, low, high)
