"""Files that are there whole or not at all: temporary file, fsync, rename, directory fsync."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import secrets
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple

TEMPORARY = r"\.\d+-[0-9a-f]{8}\.tmp"


class Staged(NamedTuple):
    """A complete, durable file that still has its temporary name."""

    path: Path
    bytes: int
    sha256: str


def stage(folder: Path, chunks: Iterable[bytes | memoryview]) -> Staged:
    """Writes a temporary file in `folder`, hashing on the way, and fsyncs it.

    Args:
      folder: the folder in which the file will be published.
      chunks: pieces of unsigned bytes, written one after the other.

    Raises:
      OSError: the temporary file is removed first.
    """
    path = folder / f".{os.getpid()}-{secrets.token_hex(4)}.tmp"
    sha, size = hashlib.sha256(), 0
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
    try:
        for chunk in chunks:
            rest = memoryview(chunk)
            sha.update(rest)
            size += len(rest)
            while rest:
                rest = rest[os.write(descriptor, rest) :]
        os.fsync(descriptor)
    except BaseException:
        _unlink(path)
        raise
    finally:
        os.close(descriptor)
    return Staged(path, size, sha.hexdigest())


def publish(temporary: Path, path: Path) -> None:
    """Renames a staged file to `path` in the same folder, replacing what is there, and makes that durable.

    Raises:
      OSError: the temporary file is removed first.
    """
    try:
        os.replace(temporary, path)
    except BaseException:
        _unlink(temporary)
        raise
    sync_folder(path.parent)


def write_whole(path: Path, data: bytes) -> None:
    """Writes `data` to `path`: whatever interrupts it, the file is the old one or the new one."""
    publish(stage(path.parent, [data]).path, path)


def keep(path: Path, write: Callable[[Path], object], needed: int) -> None:
    """Has data that were generated written where the next start finds them.

    Ranks that find none generate the same bytes, and a file appears as a whole, so that all of them may write it.

    Args:
      path: the file; its folder is made.
      write: writes it, whole or not at all.
      needed: its bytes, about, for the error.

    Raises:
      ValueError: if it cannot be written, as `explain`.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write(path)
    except OSError as error:
        raise ValueError(explain(error, path, needed)) from error


def sync_folder(folder: Path) -> None:
    """Makes the names in `folder` durable."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def there(path: str | os.PathLike[str]) -> bool:
    """Tells whether a path that a user gave leads to something.

    Raises:
      ValueError: if the system does not tell, as for a name that is too long or a folder without permission.
    """
    try:
        os.stat(path)
    except (FileNotFoundError, NotADirectoryError):
        return False
    except (OSError, ValueError) as error:
        raise ValueError(f"{os.fspath(path)}: {getattr(error, 'strerror', error)}; choose another place") from None
    return True


def explain(error: OSError, path: Path, needed: int) -> str:
    """Returns one line for a failed write of `needed` bytes under `path`: place, size and free space, cause, remedy."""
    home = next(folder for folder in (path, *path.absolute().parents) if os.path.isdir(folder))
    full = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
    remedy = "free space there or lift the limit" if full else "choose a folder that can be written"
    asked = f"{needed} bytes ({shutil.disk_usage(home).free} bytes are free)" if full else "there"
    return f"{path}: cannot write {asked}: {error.strerror or error}; {remedy}"


def _unlink(path: Path) -> None:
    with contextlib.suppress(OSError):
        os.unlink(path)
