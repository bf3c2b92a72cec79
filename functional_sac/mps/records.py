"""What is known of the services that this user has started: one file each, and whether its process still lives.

A record is `functional-sac/cuda-mps/NAME/daemon.json` in the user's cache folder. A service is alive if the process
that the record names still has the start time that the record holds, so a number that was given to another process
is not taken for it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import json
import os
import re
import shutil
import socket
import time
from collections.abc import Iterator
from pathlib import Path

from functional_sac.mps.gpus import MpsError
from functional_sl.run import files

NAME = r"[a-z0-9][a-z0-9-]{0,63}"
TOPOLOGY = "single_gpu"
_FILE, _STALE = "daemon.json", ".stale"


@dataclasses.dataclass(frozen=True)
class Record:
    """A service that was started here."""

    name: str
    uid: int
    host: str
    topology_mode: str
    gpu_uuids: tuple[str, ...]
    pipe_directory: str
    log_directory: str
    pid: int  # of the control program
    process_start_ticks: int  # clock ticks from the host's start to that of the process
    created_at: str  # ISO 8601, UTC

    @property
    def gpu(self) -> str:
        """The UUID of its GPU."""
        return self.gpu_uuids[0]

    @property
    def state(self) -> str:
        """`live`, `stale`, or `foreign`: of another user or host, so that nobody can tell here."""
        if (self.uid, self.host) != (os.getuid(), socket.gethostname()):
            return "foreign"
        return "live" if start_ticks(self.pid) == self.process_start_ticks else "stale"


def start_ticks(pid: int) -> int | None:
    """Returns when a process started, in clock ticks from the host's start; None if there is none or it has ended."""
    try:
        # The command's name, in parentheses, may hold spaces and parentheses itself.
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return None if fields[0] in "ZX" else int(fields[19])
    except (OSError, IndexError, ValueError):
        return None


def folder() -> Path:
    """Returns the folder of all records."""
    cache = os.environ.get("XDG_CACHE_HOME", "")
    home = Path(cache) if os.path.isabs(cache) else Path.home() / ".cache"
    return home / "functional-sac" / "cuda-mps"


def check_name(name: str) -> str:
    """Returns a service's name as it is.

    Raises:
      MpsError: if it is none.
    """
    if not re.fullmatch(NAME, name):
        raise MpsError(f"--name={name}: a name has 1 to 64 of a-z, 0-9 and -, and begins with a letter or digit")
    return name


@contextlib.contextmanager
def lock() -> Iterator[None]:
    """Keeps other commands of this user from starting or stopping a service meanwhile."""
    folder().mkdir(parents=True, exist_ok=True, mode=0o700)
    with open(folder() / ".lock", "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def read(name: str) -> Record | None:
    """Returns the record of that name, or None.

    Raises:
      MpsError: if it cannot be read.
    """
    path = folder() / check_name(name) / _FILE
    try:
        content = json.loads(path.read_bytes())
        record = Record(**{**content, "gpu_uuids": tuple(content["gpu_uuids"])})
        kinds = {"str": str, "int": int, "tuple[str, ...]": tuple}
        wrong = [f.name for f in dataclasses.fields(Record) if type(getattr(record, f.name)) is not kinds[f.type]]
        if wrong or len(record.gpu_uuids) != 1 or record.name != name:
            raise ValueError(f"wrong {', '.join(wrong) or 'name or number of GPUs'}")
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise MpsError(f"{path}: is no record ({error}); look whether its service runs, then remove it") from None
    return record


def own(name: str) -> Record | None:
    """Returns the record of that name, or None, as `read`.

    Raises:
      MpsError: also if it is of another user or host.
    """
    record = read(name)
    if record is not None and record.state == "foreign":
        raise MpsError(
            f"service {name!r} is of user {record.uid} on host {record.host}, not of user {os.getuid()} on "
            f"{socket.gethostname()}; use another --name"
        )
    return record


def records() -> tuple[Record, ...]:
    """Returns all records by name; what cannot be read is left out."""
    found = []
    for path in sorted(folder().glob(f"*/{_FILE}")):
        with contextlib.suppress(MpsError):
            found.append(read(path.parent.name))
    return tuple(record for record in found if record is not None)


def live() -> tuple[Record, ...]:
    """Returns the records of the services that run."""
    return tuple(record for record in records() if record.state == "live")


def the_live(name: str | None) -> Record:
    """Returns the record of a service that runs: of that name, or without one the only one.

    Raises:
      MpsError: if there is none, or several without a name.
    """
    if name is None:
        running = live()
        if len(running) != 1:
            names = ", ".join(record.name for record in running)
            raise MpsError(f"{len(running)} services run ({names}); give --name" if names else "no service runs")
        return running[0]
    record = own(name)
    if record is None:
        raise MpsError(f"there is no service {name!r}; status lists them")
    if record.state == "stale":
        raise MpsError(f"service {name!r} has ended (its process {record.pid} is gone); stop removes the record")
    return record


def write(record: Record) -> None:
    """Writes a record down for the first time."""
    path = folder() / check_name(record.name) / _FILE
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    if path.exists():
        raise MpsError(f"{path}: is there already")
    files.write_whole(path, json.dumps(dataclasses.asdict(record), indent=1).encode() + b"\n")


def remove(record: Record) -> None:
    """Removes a record."""
    shutil.rmtree(folder() / record.name)


def set_aside(record: Record) -> None:
    """Moves the record of a service that has ended out of the way."""
    aside = folder() / _STALE / f"{record.name}-{time.time_ns() // 1_000_000}"
    aside.parent.mkdir(exist_ok=True, mode=0o700)
    os.rename(folder() / record.name, aside)
