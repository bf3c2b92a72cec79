"""`functional-sl PATH`: shows what a run or a snapshot holds, without changing anything."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from functional_sl.run import cli, manifest, retention, runlog
from functional_sl.run.manifest import SnapshotError
from functional_sl.run.runlog import RunError

PROGRAM = "functional-sl"
DESCRIPTION = "Shows what a run folder or a snapshot folder holds: settings, attempts, snapshots, scores, leaves."


@dataclasses.dataclass(frozen=True)
class Settings:
    """The flags."""

    path: str | None = cli.option(None, "Folder of a run or of a snapshot.")
    leaves: bool = cli.option(False, "Name every leaf of a snapshot with its type and shape.")


def lines(path: Path, leaves: bool = False) -> Iterator[str]:
    """Yields the report of a run's or a snapshot's folder, line by line.

    Args:
      path: the folder.
      leaves: name every leaf of a snapshot.

    Raises:
      RunError, SnapshotError: if it is neither, or damaged.
    """
    if (path / manifest.NAME).exists():
        yield from _snapshot(path, manifest.read(path), leaves)
        return
    info = runlog.describe(path)
    yield f"run {info['run_id']}: {len(info['attempts'])} attempts, {len(runlog.effective(path))} records"
    yield from (f"  {name}: {value}" for name, value in info["config"].items())
    best = retention.best(path, info["run_id"])
    for folder in sorted((path / "snapshots").glob("step_*")):
        found = manifest.read(folder)
        yield from _snapshot(folder, found, False, " (best)" if folder == best else "")


def _snapshot(folder: Path, found: dict[str, Any], leaves: bool, mark: str = "") -> Iterator[str]:
    size = sum(part["bytes"] for part in found["parts"].values())
    yield f"{folder.name}{mark}: score {found['score']}, {size / 2**20:.1f} MiB in {', '.join(found['parts'])}"
    if leaves:
        for name, part in found["parts"].items():
            yield from (f"  {name}/{leaf}: {dtype}{shape}" for leaf, (dtype, shape) in part["leaves"].items())


def main(argv: Sequence[str] | None = None) -> None:
    """Prints the report; exits with 2 for a folder that is neither a run nor a snapshot."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if arguments and not arguments[0].startswith("-"):
        arguments[0] = f"--path={arguments[0]}"
    with cli.exit_on_usage_error(PROGRAM):
        settings = cli.parse(Settings, arguments, program=PROGRAM, description=DESCRIPTION).config
        if settings.path is None:
            raise cli.UsageError("no folder given; call it with the folder of a run or of a snapshot")
        try:
            report = list(lines(Path(settings.path).expanduser(), settings.leaves))
        except (RunError, SnapshotError) as error:
            raise cli.UsageError(str(error)) from error
    print("\n".join(report))


if __name__ == "__main__":
    main()
