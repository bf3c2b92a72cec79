"""The manifest that makes a folder a snapshot, and the checks of the files that it names."""

from __future__ import annotations

import contextlib
import hashlib
import json
import operator
import os
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from functional_sl.run import files, identity

FORMAT = 1
NAME = "manifest.json"
STEP = re.compile(r"step_(\d+)")

Manifest = dict[str, Any]


class SnapshotError(RuntimeError):
    """A snapshot cannot be written or read; names the file or leaf, what was found, what is expected, the remedy."""


class Part(NamedTuple):
    """What the manifest says of one part; plain values, which one rank can send to another."""

    name: str
    file: str
    bytes: int
    sha256: str
    structure: str
    leaves: dict[str, list[Any]]  # name -> [dtype, shape]


def folder_of(root: str | os.PathLike[str], step: int) -> Path:
    """Returns the folder of the snapshot of `step` under `root`."""
    if operator.index(step) < 0:
        raise ValueError(f"snapshot step {step}: expected an integer of 0 or more")
    return Path(root).expanduser() / f"step_{operator.index(step):012d}"


def write(folder: Path, manifest: Manifest) -> None:
    """Writes the manifest with its own digest, durably: from the rename on, the folder is this snapshot.

    Raises:
      SnapshotError: if it cannot be written; the manifest that was there is still there.
    """
    data = json.dumps(manifest | {"digest": identity.digest(manifest, "manifest")}, indent=1).encode() + b"\n"
    with writing(folder, len(data)):
        files.write_whole(folder / NAME, data)
        # The names of a new snapshot folder and of a new root must last too.
        files.sync_folder(folder.parent)
        files.sync_folder(folder.parent.parent)


@contextlib.contextmanager
def writing(folder: Path, needed: int) -> Iterator[None]:
    """Turns an OSError into one SnapshotError, and removes the folder if it is empty."""
    try:
        yield
    except OSError as error:
        with contextlib.suppress(OSError):
            folder.rmdir()
        raise SnapshotError(files.explain(error, folder, needed)) from error


def read(folder: str | os.PathLike[str]) -> Manifest:
    """Returns the manifest of a snapshot folder, checked against its own digest.

    Raises:
      SnapshotError: if it is not there, damaged, or of another format version.
    """
    path = Path(folder).expanduser() / NAME
    try:
        manifest = identity.parse(path.read_bytes())
    except (FileNotFoundError, NotADirectoryError):
        raise SnapshotError(f"{path}: not there, so this is no finished snapshot; choose another one") from None
    except (OSError, ValueError, RecursionError) as error:
        raise SnapshotError(f"{path}: cannot be read ({error}); choose another snapshot") from error
    found = manifest.get("format") if isinstance(manifest, dict) else None
    if found != FORMAT:
        raise SnapshotError(f"{path}: format {found!r}, expected {FORMAT}; read it with the version that wrote it")
    recorded = manifest.pop("digest", None)
    actual = identity.digest(manifest, "manifest")
    if recorded != actual:
        raise SnapshotError(f"{path}: damaged: its digest is {actual}, expected {recorded}; choose another snapshot")
    return manifest


def check_sizes(folder: Path, manifest: Manifest, names: Iterable[str]) -> None:
    """Checks that the files of the named parts are there in their full length.

    Raises:
      SnapshotError: names the file and both lengths.
    """
    for part in (manifest["parts"][name] for name in names):
        path = folder / part["file"]
        if path.name != part["file"] or not path.is_file():
            raise SnapshotError(f"{path}: not there, expected {part['bytes']} bytes; choose another snapshot")
        found = path.stat().st_size
        if found != part["bytes"]:
            raise SnapshotError(f"{path}: {found} bytes, expected {part['bytes']}; choose another snapshot")


def check_digests(folder: Path, manifest: Manifest, names: Iterable[str]) -> None:
    """Reads the files of the named parts through and checks their SHA-256.

    Raises:
      SnapshotError: names the file and both digests.
    """
    for part in (manifest["parts"][name] for name in names):
        path = folder / part["file"]
        try:
            with open(path, "rb") as file:
                found = hashlib.file_digest(file, "sha256").hexdigest()
        except OSError as error:
            raise SnapshotError(f"{path}: cannot be read ({error}); choose another snapshot") from error
        if found != part["sha256"]:
            raise SnapshotError(f"{path}: damaged: SHA-256 {found}, expected {part['sha256']}; choose another snapshot")
