"""Starting and stopping one user-owned `nvidia-cuda-mps-control` for one GPU."""

from __future__ import annotations

import contextlib
import datetime
import os
import shutil
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from functional_sac.mps import gpus, records
from functional_sac.mps.control import CONTROL, LOG, PIPE, WAIT_S, ask
from functional_sac.mps.gpus import Gpu, MpsError
from functional_sac.mps.records import Record

SOCKET_BYTES = 95  # which the path of the control socket may have
_QUIT_S = 10.0
_POLL_S = 0.05
_LOG_LINES = 12


class Place(NamedTuple):
    """Where a service is to run."""

    name: str
    gpu: Gpu
    pipe: Path
    log: Path
    usual: bool  # the pipe's folder is the one without --pipe-dir, which nobody else uses


def place(gpu: Gpu, name: str | None = None, pipe_dir: str | None = None, log_dir: str | None = None) -> Place:
    """Returns where a service runs: by default under the temporary folder, under the GPU's name.

    Raises:
      MpsError: for a name or folders that cannot be used.
    """
    name = records.check_name(gpu.uuid.lower() if name is None else name)
    home = Path(tempfile.gettempdir()) / f"functional-sac-mps-{os.getuid()}" / name
    pipe, log = (
        home / default if given is None else Path(given).expanduser().absolute()
        for given, default in ((pipe_dir, "pipe"), (log_dir, "log"))
    )
    if pipe == log:
        raise MpsError(f"--pipe-dir and --log-dir are both {pipe}; they must differ")
    if (size := len(os.fsencode(pipe / "control"))) > SOCKET_BYTES:
        raise MpsError(
            f"{pipe}/control has {size} bytes, a socket's path at most {SOCKET_BYTES}; "
            f"use --pipe-dir=/tmp/{name[:8]}/pipe"
        )
    return Place(name, gpu, pipe, log, pipe_dir is None)


def start(where: Place, foreground: bool = False) -> tuple[Record, subprocess.Popen | None]:
    """Starts a service and records it.

    Args:
      where: its name, GPU and folders.
      foreground: keeps the control program as a child of this process.

    Returns:
      the record, and the child if it is one.

    Raises:
      MpsError: if it cannot be started, runs already, or does not answer.
    """
    check_host(where.gpu)
    with records.lock():
        old = records.own(where.name)
        if old is not None and old.state == "live":
            raise MpsError(
                f"service {where.name!r} runs already; `env --name={where.name}` tells how to use it, or stop it"
            )
        # Who owns a folder above could put another one in the pipe's place.
        above = where.pipe.parents[1::-1] if where.usual else ()
        for folder in (*above, where.pipe, where.log):
            _own_folder(folder)
        _clear(where)
        if old is not None:
            records.set_aside(old)
        child = _spawn(where, foreground)
        try:
            pid = _wait_for_answer(where, child)
            record = _record(where, pid)
        except MpsError as error:
            raise _failed(where, child, str(error)) from None
        records.write(record)
    return record, child


def check_host(gpu: Gpu) -> None:
    """Checks that this host can run a service for the GPU.

    Raises:
      MpsError: if not.
    """
    if not sys.platform.startswith("linux"):
        raise MpsError(f"CUDA process sharing works on Linux alone, not on {sys.platform}")
    if shutil.which(CONTROL) is None:
        raise MpsError(f"there is no {CONTROL} on the PATH; it comes with the NVIDIA driver")
    if gpu.compute_mode == "Prohibited":
        raise MpsError(f"GPU {gpu.index} is in compute mode Prohibited; no process can use it")


def stop(record: Record) -> None:
    """Ends a service that runs, and removes its record once it has ended.

    Raises:
      MpsError: if it does not take the command, or goes on for its clients; the record stays.
    """
    ask(Path(record.pipe_directory), "quit", _QUIT_S)
    if not _until(lambda: record.state != "live", _QUIT_S):
        raise MpsError(
            f"service {record.name!r} was told to quit, but its process {record.pid} goes on, since clients still use "
            "it; end them and stop it again"
        )
    records.remove(record)


def _own_folder(path: Path) -> None:
    """Makes a folder, and what is above it, for this user alone; refuses what belongs to somebody else."""
    for folder in (*reversed(path.parents), path):
        try:
            folder.mkdir(mode=0o700)
        except FileExistsError:
            pass
        except OSError as error:
            raise MpsError(f"cannot make the folder {folder}: {error.strerror}; choose another") from None
    found = path.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
        raise MpsError(f"{path} is no folder of this user; choose another")


def _clear(where: Place) -> None:
    """Removes what a service that has ended left in its folder, and refuses to touch one that may run."""
    control = where.pipe / "control"
    if os.path.lexists(control):
        if not where.usual or _pid(where.pipe) is None or records.start_ticks(_pid(where.pipe)) is not None:
            raise MpsError(
                f"{control} is there, of a service that is not recorded; stop that one, or use another --pipe-dir"
            )
        for name in ("control", "control_privileged"):
            (where.pipe / name).unlink(missing_ok=True)
    for name in ("control_lock", "log"):
        path = where.pipe / name
        with contextlib.suppress(FileNotFoundError):
            mode = path.lstat().st_mode
            if stat.S_ISFIFO(mode) or (name == "control_lock" and stat.S_ISREG(mode)):
                path.unlink()


def _spawn(where: Place, foreground: bool) -> subprocess.Popen | None:
    variables = {gpus.VISIBLE: where.gpu.uuid, PIPE: str(where.pipe), LOG: str(where.log)}
    # Files, not pipes: the service keeps what it inherits open for as long as it runs.
    with open(where.log / "start.log", "wb") as said:
        child = subprocess.Popen(
            [CONTROL, "-f" if foreground else "-d"],
            env={**os.environ, **variables},
            stdin=subprocess.DEVNULL,
            stdout=said,
            stderr=said,
            start_new_session=True,  # Ctrl-C is for this command, which ends the service in good order
        )
    if foreground:
        return child
    try:
        code = child.wait(_QUIT_S)
    except subprocess.TimeoutExpired:
        child.kill()
        child.wait()
        code = "none in time"
    if code != 0:
        raise _failed(where, None, f"{CONTROL} -d failed (exit code {code})")
    return None


def _wait_for_answer(where: Place, child: subprocess.Popen | None) -> int:
    """Waits until a new service answers, and returns its process."""
    control = where.pipe / "control"

    def there() -> bool:
        with contextlib.suppress(OSError):
            return stat.S_ISSOCK(control.stat().st_mode) or stat.S_ISFIFO(control.stat().st_mode)
        return False

    def answers() -> bool:
        with contextlib.suppress(MpsError):
            ask(where.pipe, "get_server_list")
            return True
        return False

    for condition, what in ((there, f"made no {control}"), (answers, "does not answer")):
        if not _until(condition, WAIT_S):
            raise MpsError(f"the service {what} within {WAIT_S:g} s")
    pid = child.pid if child else _pid(where.pipe)
    if pid is None:
        raise MpsError(f"{where.pipe} names no process of the service, so it could not be told from another later")
    return pid


def _record(where: Place, pid: int) -> Record:
    if (ticks := records.start_ticks(pid)) is None:
        raise MpsError(f"the service's process {pid} is not there, so it could not be told from another later")
    now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    about = (records.TOPOLOGY, (where.gpu.uuid,), str(where.pipe), str(where.log))
    return Record(where.name, os.getuid(), socket.gethostname(), *about, pid, ticks, now)


def _failed(where: Place, child: subprocess.Popen | None, cause: str) -> MpsError:
    """Ends what was started, and returns the error that tells what it said."""
    with contextlib.suppress(MpsError):
        ask(where.pipe, "quit")
    pid = child.pid if child else _pid(where.pipe)
    if pid is not None and _serves(pid, where.pipe):
        os.kill(pid, signal.SIGTERM)
    lines = [line for name in ("start.log", "control.log") for line in _lines(where.log / name)]
    said = f"; its log ends with: {' | '.join(lines[-_LOG_LINES:])}" if lines else ""
    return MpsError(f"{cause}{said}")


def _serves(pid: int, pipe: Path) -> bool:
    """Whether this process was started for this pipe's folder."""
    try:
        return f"\0{PIPE}={pipe}\0".encode() in b"\0" + Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return False


def _lines(path: Path) -> list[str]:
    try:
        return [line for line in path.read_text(errors="replace").splitlines() if line.strip()]
    except OSError:
        return []


def _pid(pipe: Path) -> int | None:
    """Returns the process that the control program has written down."""
    try:
        return int((pipe / f"{CONTROL}.pid").read_text())
    except (OSError, ValueError):
        return None


def _until(condition: Callable[[], bool], seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(_POLL_S)
    return True
