"""`functional-sl PATH`: shows what a run, a snapshot, a bundle or a data file holds, without changing anything."""

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
DESCRIPTION = (
    "Shows what a run or snapshot folder holds (settings, attempts, snapshots, scores, leaves), a bundle (features, "
    "conventions, versions), or a data file (spread, dead channels, coverage, share of valid frames)."
)


@dataclasses.dataclass(frozen=True)
class Settings:
    """The flags."""

    path: str | None = cli.option(None, "Folder of a run or of a snapshot, or a bundle or data file.")
    leaves: bool = cli.option(False, "Name every leaf of a snapshot with its type and shape.")
    picture: str | None = cli.option(None, "PNG file for a histogram of every channel of a data file.")


def lines(path: Path, leaves: bool = False) -> Iterator[str]:
    """Yields the report of a folder or file, line by line.

    Args:
      path: of a run, a snapshot, a bundle or a data file.
      leaves: name every leaf of a snapshot.

    Raises:
      RunError, SnapshotError, ValueError: if it is none of them, or damaged.
    """
    if path.is_file():
        yield from _file(path)
        return
    if (path / manifest.NAME).exists():
        yield from _snapshot(path, manifest.read(path), leaves)
        return
    info = runlog.describe(path)
    yield f"run {info['run_id']}: {len(info['attempts'])} attempts, {len(runlog.effective(path))} records"
    yield from (f"  {name}: {value}" for name, value in info["config"].items())
    best = retention.best(path, info["run_id"])
    for folder in sorted((path / "snapshots").glob("step_*")):
        try:
            yield from _snapshot(folder, manifest.read(folder), False, " (best)" if folder == best else "")
        except SnapshotError as error:  # one that is being written, or that a killed process left
            yield f"{folder.name}: {error}"


def _file(path: Path) -> Iterator[str]:
    from functional_sl import bundle, inspection

    yield from bundle.describe(path) if _is_bundle(path, bundle.FORMAT) else inspection.lines(path)


def _is_bundle(path: Path, mark: str) -> bool:
    """Tells whether a safetensors file has the mark of a bundle in its header."""
    if path.suffix != ".safetensors":
        return False
    with path.open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
        return f'"{mark}"'.encode() in file.read(min(size, 1 << 26))


def _snapshot(folder: Path, found: dict[str, Any], leaves: bool, mark: str = "") -> Iterator[str]:
    size = sum(part["bytes"] for part in found["parts"].values())
    yield f"{folder.name}{mark}: score {found['score']}, {size / 2**20:.1f} MiB in {', '.join(found['parts'])}"
    if leaves:
        for name, part in found["parts"].items():
            yield from (f"  {name}/{leaf}: {dtype}{shape}" for leaf, (dtype, shape) in part["leaves"].items())


def _draw(path: Path, picture: str) -> None:
    from functional_sl import inspection

    inspection.draw(path, picture)


def main(argv: Sequence[str] | None = None) -> None:
    """Prints the report; exits with 2 for what is none of the things that it knows."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if arguments and not arguments[0].startswith("-"):
        arguments[0] = f"--path={arguments[0]}"
    with cli.exit_on_usage_error(PROGRAM):
        settings = cli.parse(Settings, arguments, program=PROGRAM, description=DESCRIPTION).config
        if settings.path is None:
            raise cli.UsageError("no folder given; call it with a run, a snapshot, a bundle or a data file")
        path = Path(settings.path).expanduser()
        try:
            report = list(lines(path, settings.leaves))
            if settings.picture is not None:
                _draw(path, settings.picture)
        except (RunError, SnapshotError, ValueError, OSError) as error:
            raise cli.UsageError(str(error)) from error
    cli.emit(sys.stdout, "\n".join([*report, ""]))


if __name__ == "__main__":
    main()
