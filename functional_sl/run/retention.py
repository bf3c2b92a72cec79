"""Which snapshots of a run count, which of them is the latest or the best, and which are removed."""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import re
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path

from functional_sl.run import files
from functional_sl.run.manifest import (
    NAME,
    STEP,
    Manifest,
    SnapshotError,
    check_digests,
    check_sizes,
    folder_of,
    read,
)

_OWN = re.compile(rf"{files.TEMPORARY}|\w[\w.]*-[0-9a-f]{{16}}\.safetensors", re.ASCII)
_log = logging.getLogger(__name__)

Found = tuple[Path, Manifest]


def latest(root: str | os.PathLike[str], run_id: str | None = None) -> Path | None:
    """Returns the valid snapshot of the highest step, or None.

    All files are read through. What is skipped (unfinished, damaged, foreign) is logged as a warning.

    Args:
      root: a run's folder or its `snapshots` folder.
      run_id: where given, snapshots of other runs are foreign.
    """
    return _report(*find_latest(root, run_id))


def best(root: str | os.PathLike[str], run_id: str | None = None) -> Path | None:
    """Returns the valid snapshot of the highest score (of equal ones the earliest) or None; otherwise as `latest`."""
    found, problems = _scan(root, run_id)
    return _report(_first_intact(_ranked(found), problems), problems)


def find_latest(root: str | os.PathLike[str], run_id: str | None = None) -> tuple[Path | None, list[str]]:
    """Returns what `latest` returns, and one line for each folder that was skipped."""
    found, problems = _scan(root, run_id)
    return _first_intact(reversed(found), problems), problems


def prune(root: str | os.PathLike[str], keep: int, protect: Collection[int] = (), run_id: str | None = None) -> None:
    """Removes all snapshots but the newest `keep`, the best and the protected ones, and leftovers of broken writes.

    A leftover is a step folder without a manifest that is older than the newest snapshot. Damaged and foreign
    snapshots and files of other origin stay. No part may be in writing meanwhile.

    Args:
      root: a run's folder or its `snapshots` folder.
      keep: at least 1.
      protect: steps, such as the one from which the run was resumed.
      run_id: as in `latest`.

    Raises:
      SnapshotError: if a file cannot be removed; what remains is valid or has no manifest.
    """
    if keep < 1:
        raise ValueError(f"keep={keep}: expected at least 1, the newest snapshot")
    found, _ = _scan(root, run_id)
    kept = {manifest["step"] for _, manifest in [*found[-keep:], *_ranked(found)[:1]]} | set(protect)
    for folder, manifest in found:
        if manifest["step"] not in kept:
            _remove(folder)
    newest = found[-1][1]["step"] if found else -1
    for step, folder in _step_folders(root):
        if step < newest and not (folder / NAME).exists():
            _remove(folder)


def set_aside(root: str | os.PathLike[str], step: int, run_id: str | None = None) -> list[Path]:
    """Moves the snapshots later than `step` out of the way, into `superseded` beside them.

    A run calls it when it resumes at `step`: it writes later steps anew, and until then an abandoned snapshot would
    be the latest. Nothing is deleted.

    Args:
      root: a run's folder or its `snapshots` folder.
      step: the step from which the run goes on.
      run_id: as in `latest`.

    Returns:
      Where the moved snapshots lie now.

    Raises:
      SnapshotError: if a folder cannot be moved.
    """
    moved = []
    for folder, manifest in _scan(root, run_id)[0]:
        if manifest["step"] > step:
            home = folder.parent / "superseded"
            free = (home / f"{folder.name}.{n}" for n in itertools.count())
            target = next(path for path in free if not path.exists())
            try:
                home.mkdir(exist_ok=True)
                folder.rename(target)
                files.sync_folder(folder.parent)
            except OSError as error:
                raise SnapshotError(f"{folder}: cannot move it to {target} ({error}); make it writable") from error
            moved.append(target)
    return moved


def sweep(folder: Path) -> None:
    """Removes the part files and temporary files that the folder's manifest does not name, and an empty folder.

    Where the manifest is unreadable, part files stay. Rank 0 calls it after a write that failed on some rank.

    Raises:
      SnapshotError: if a file cannot be removed.
    """
    if not folder.is_dir():
        return
    committed = (folder / NAME).exists()
    with _removing(folder):
        named = _named(folder) if committed else set()
        for path in list(folder.iterdir()):
            if _OWN.fullmatch(path.name) and path.name not in named:
                path.unlink(missing_ok=True)
        if not committed:
            # A foreign file keeps the folder.
            with contextlib.suppress(OSError):
                folder.rmdir()


def _named(folder: Path) -> set[str]:
    try:
        return {part["file"] for part in read(folder)["parts"].values()}
    except SnapshotError:
        return {path.name for path in folder.iterdir() if path.suffix == ".safetensors"}


def _remove(folder: Path) -> None:
    # Without its manifest the folder is no snapshot, whatever stops the rest.
    with _removing(folder):
        (folder / NAME).unlink(missing_ok=True)
        files.sync_folder(folder)
    sweep(folder)


@contextlib.contextmanager
def _removing(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise SnapshotError(f"{folder}: cannot remove old files here ({error}); make the folder writable") from error


def _step_folders(root: str | os.PathLike[str]) -> list[tuple[int, Path]]:
    home = Path(root).expanduser()
    home = home / "snapshots" if (home / "snapshots").is_dir() else home
    paths = list(home.iterdir()) if home.is_dir() else []
    return sorted((int(match[1]), path) for path in paths if (match := STEP.fullmatch(path.name)))


def _scan(root: str | os.PathLike[str], run_id: str | None) -> tuple[list[Found], list[str]]:
    """Returns the snapshots by rising step, their files there in full length, and why others are skipped."""
    found, problems = [], []
    for _, folder in _step_folders(root):
        try:
            manifest = read(folder)
            if folder != folder_of(folder.parent, manifest["step"]):
                raise SnapshotError(f"{folder}: holds the snapshot of step {manifest['step']}; name it after that step")
            if run_id not in (None, manifest["run_id"]):
                raise SnapshotError(f"{folder}: is of run {manifest['run_id']}, expected {run_id}; remove it from here")
            check_sizes(folder, manifest, manifest["parts"])
            found.append((folder, manifest))
        except SnapshotError as error:
            problems.append(str(error))
    return found, problems


def _ranked(found: list[Found]) -> list[Found]:
    scored = [entry for entry in found if entry[1]["score"] is not None]
    return sorted(scored, key=lambda entry: (-entry[1]["score"], entry[1]["step"]))


def _first_intact(found: Iterable[Found], problems: list[str]) -> Path | None:
    for folder, manifest in found:
        try:
            check_digests(folder, manifest, manifest["parts"])
            return folder
        except SnapshotError as error:
            problems.append(str(error))
    return None


def _report(folder: Path | None, problems: list[str]) -> Path | None:
    for problem in problems:
        _log.warning("skipped a snapshot: %s", problem)
    return folder
