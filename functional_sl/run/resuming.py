"""Finding the snapshot from which a run goes on, and refusing one that is not its own."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from functional_sl.run import files, manifest, retention, runlog
from functional_sl.run.cli import UsageError
from functional_sl.run.command import as_usage_error

RUNS = "runs"
_PICKS = {"latest": retention.latest, "best": retention.best}


def find(wish: str, run_dir: str | None = None, *, having: str = "") -> Path:
    """Returns the snapshot folder that `--resume` means, after the check that it is its run's own.

    Args:
      wish: `latest` or `best`, or the path of a run, of its snapshots, of a snapshot or of a manifest.
      run_dir: `--run_dir`; latest and best are looked for there, and a path must lie there. Without it they are those
        of the newest run under `runs/` that has any.
      having: a setting by which the runs of one trainer are told from those of another; `latest` and `best` under
        `runs/` are of runs that have it, and a path to a run without it is refused.

    Raises:
      UsageError: names what is missing or does not fit.
      RunError, SnapshotError: for a damaged run or snapshot.
    """
    if wish in _PICKS:
        found = _pick(Path(run_dir).expanduser(), wish) if run_dir else _newest(wish, having)
    else:
        found = _at(Path(wish).expanduser(), f"--resume={wish}", having)
    if run_dir and home(found) != Path(run_dir).expanduser().resolve():
        raise UsageError(f"--run_dir={run_dir}: a resumed run stays in its folder, {home(found)}; leave it out")
    _check_own(found)
    return found


def folder(path: str | os.PathLike[str], *, having: str = "") -> Path:
    """Returns the snapshot folder at a path: itself, that of a manifest, or the latest of a run; or `latest`, `best`.

    `having` is as in `find`.

    Raises:
      UsageError, RunError, SnapshotError: as `find`.
    """
    wish = os.fspath(path)
    return _newest(wish, having) if wish in _PICKS else _at(Path(path).expanduser(), wish, having)


def home(source: Path) -> Path:
    """Returns the folder of the run to which a snapshot belongs."""
    parent = source.resolve().parent
    return parent.parent.parent if parent.name == "superseded" else parent.parent


def _at(path: Path, wish: str, having: str) -> Path:
    found = _folder_at(path, wish)
    if having and having not in manifest.read(found)["config"]:
        raise UsageError(
            f"{wish}: is of another trainer's run, which has no setting {having!r}; give one of this trainer"
        )
    return found


def _folder_at(path: Path, wish: str) -> Path:
    path = path.parent if path.name == manifest.NAME else path
    with as_usage_error(ValueError):
        finished = files.there(path / manifest.NAME)
    if finished or manifest.STEP.fullmatch(path.name):
        manifest.read(path)
        return path
    if not path.is_dir():
        raise UsageError(f"{wish}: no such folder; give the folder of a run or of a snapshot")
    return _pick(path.parent if path.name == "snapshots" else path, "latest")


def _pick(run_dir: Path, wish: str) -> Path:
    found = _PICKS[wish](run_dir, runlog.describe(run_dir)["run_id"])
    if found is None:
        raise UsageError(f"{run_dir}: holds no {_kind(wish)}; start a new run instead")
    return found


def _kind(wish: str) -> str:
    return "scored snapshot" if wish == "best" else "valid snapshot"


def _newest(wish: str, having: str) -> Path:
    runs = sorted(Path(RUNS).glob("*/run.json"), key=lambda path: path.stat().st_mtime, reverse=True)
    for run in runs:
        # A damaged run is no reason not to find the one before it.
        with contextlib.suppress(runlog.RunError, UsageError):
            if not having or having in runlog.describe(run.parent)["config"]:
                return _pick(run.parent, wish)
    what = f"run with a {having} and a {_kind(wish)}" if having else f"run with a {_kind(wish)}"
    raise UsageError(f"--resume={wish}: no {what} under {Path(RUNS).absolute()}; give its path")


def _check_own(source: Path) -> None:
    elsewhere = f"; start a new run with --init_from={source}"
    if source.resolve().parent.name == "superseded":
        raise UsageError(f"--resume={source}: the run has gone on from an earlier snapshot{elsewhere}")
    found, run_id = manifest.read(source)["run_id"], runlog.describe(home(source))["run_id"]
    if found != run_id:
        raise UsageError(f"--resume={source}: is of run {found}, but lies in run {run_id}{elsewhere}")
