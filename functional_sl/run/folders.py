"""The folder of a run as several processes see it: taken by one, entered by the other ranks."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from functional_sl.parallel.world import divert_output
from functional_sl.run import cli, files, runlog


def check_vacant(run_dir: Path, names: Iterable[str]) -> None:
    """Checks that a folder in which a run is to begin holds nothing that the run would overwrite or mix with its own.

    A folder that holds a run is left to `runlog.create`, which refuses it.

    Args:
      run_dir: the folder, which need not be there.
      names: of the files and folders that the run makes beside its log.

    Raises:
      ValueError: names what is there, or why the folder cannot be looked at.
    """
    taken = [name for name in names if files.there(run_dir / name)]
    if taken and not (run_dir / "run.json").exists():
        raise cli.UsageError(f"--run_dir={run_dir}: holds {', '.join(taken)} of something else; choose another folder")


def enter(run_dir: Path, run_id: str, rank: int) -> None:
    """Makes a run's folder the home of a rank that does not write the run: its output goes to `ranks/` there.

    Raises:
      RunError: if this rank finds no run there, or another one.
    """
    try:
        found = runlog.describe(run_dir)["run_id"]
    except runlog.RunError as error:
        raise runlog.RunError(f"{error}; all ranks need one file system: give --run_dir on it") from error
    if found != run_id:
        raise runlog.RunError(f"{run_dir}: holds run {found} here, not {run_id}; give --run_dir on one file system")
    divert_output(run_dir / "ranks" / f"rank{rank}.log")
