"""The identity of a run and its append-only metrics.

    runs/pendulum-seed0-20261129-143005-4f3a/
      run.json        run id, name, config and its digest, one entry an attempt (start, host, command, versions)
      metrics.jsonl   one strict JSON object a line: {"step": 100, "loss": 0.5, "host": {...}}
      metrics.torn    broken lines that a killed process left, moved here when the run is resumed

What differs between a straight run and a resumed one (times, rates, the attempt's number) stands under the one key
`host`; the rest of the effective lines is equal byte for byte. A NaN or an infinity is null, and `nonfinite` names
it: {"loss": null, "nonfinite": {"loss": "nan"}}.
"""

from __future__ import annotations

import contextlib
import datetime
import fcntl
import json
import logging
import math
import operator
import os
import re
import secrets
import socket
import sys
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from functional_sl.run import files, identity, metrics
from functional_sl.run.metrics import Record

_FORMAT = 1
_RUN, _METRICS, _TORN, _LOCK = "run.json", "metrics.jsonl", "metrics.torn", ".lock"
_log = logging.getLogger(__name__)


class RunError(RuntimeError):
    """A run's folder cannot be made, resumed, read or written; names the place and the remedy."""


class RunLog:
    """An open run; made by `create` or `reopen`, held by one process at a time.

    Attributes:
      run_dir: the absolute path of the run's folder.
      run_id: the name of the run, which stays when the folder is moved.
      attempt: 0 for the first start, one more for each resume.
    """

    def __init__(self, run_dir: Path, run_id: str, attempt: int, lock: int, last_step: int, elapsed_s: float) -> None:
        self.run_dir, self.run_id, self.attempt = run_dir, run_id, attempt
        self._lock, self._last_step = lock, last_step
        self._started = time.monotonic() - elapsed_s
        with _writing(run_dir / _METRICS, 0):
            self._file = os.open(run_dir / _METRICS, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)

    @property
    def elapsed_s(self) -> float:
        """Seconds spent in this attempt and, up to their last lines, in the earlier ones."""
        return time.monotonic() - self._started

    def write(self, step: int, values: Mapping[str, Any], host: Mapping[str, Any] | None = None) -> None:
        """Appends one line, whole or not at all.

        Args:
          step: higher than that of the line before, and than the step from which the run was resumed.
          values: numbers, texts, bools, None, 0-d tensors and NumPy scalars, also nested in dicts, lists and arrays.
          host: values that may differ in a resumed run, such as rates.

        Raises:
          ValueError: for a step that is not higher or a reserved name.
          TypeError: names the value that is none of the above.
          RunError: if the line cannot be written.
        """
        if (step := operator.index(step)) <= self._last_step:
            raise ValueError(f"metrics of step {step} come after step {self._last_step}; write one line a step, rising")
        own = {"time": round(time.time(), 3), "elapsed_s": round(self.elapsed_s, 3), "attempt": self.attempt}
        for given, taken in ((values, {"step", "nonfinite", "host"}), (host or {}, {*own, "nonfinite"})):
            if clash := sorted(taken & given.keys()):
                raise ValueError(f"metrics of step {step}: the names {', '.join(clash)} are reserved; rename them")
        record = {"step": step, **metrics.plain(values), "host": own | metrics.plain(host or {})}
        self._append(json.dumps(record, allow_nan=False).encode() + b"\n")
        self._last_step = step

    def _append(self, line: bytes) -> None:
        path, size = self.run_dir / _METRICS, os.fstat(self._file).st_size
        with _writing(path, len(line)):
            rest = memoryview(line)
            try:
                while rest:
                    rest = rest[os.write(self._file, rest) :]
            except BaseException:
                # A full disk takes the first half of a line; the next line must not continue it.
                os.ftruncate(self._file, size)
                raise

    def sync(self) -> None:
        """Makes the lines durable; called before a snapshot is committed, so that none before it can be lost."""
        with _writing(self.run_dir / _METRICS, 0):
            os.fsync(self._file)

    def close(self) -> None:
        """Makes the lines durable and gives the run free."""
        try:
            self.sync()
        finally:
            os.close(self._file)
            os.close(self._lock)

    def __enter__(self) -> RunLog:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def create(
    config: Mapping[str, Any],
    name_parts: Sequence[str],
    *,
    base_dir: str | os.PathLike[str] | None = None,
    run_dir: str | os.PathLike[str] | None = None,
) -> RunLog:
    """Makes a new run's folder; no other process can get the same one.

    Args:
      config: JSON values.
      name_parts: such as ("pendulum", "seed0"); the time (UTC) and four hexadecimal digits are added.
      base_dir: the folder in which the run's folder is made; or else
      run_dir: the run's folder itself, which holds no run yet.

    Raises:
      RunError: if `run_dir` is occupied, or the folder cannot be made or written.
      ValueError: names the field of `config` that JSON cannot hold.
    """
    if (base_dir is None) == (run_dir is None):
        raise ValueError("give one of base_dir and run_dir")
    digest = identity.digest(config := dict(config))
    name = "-".join(filter(None, (re.sub(r"[^A-Za-z0-9._+=-]+", "_", part) for part in name_parts)))
    folder, run_id = _make(_absolute(run_dir), name) if base_dir is None else _make_in(_absolute(base_dir), name)
    with _locked(folder) as lock:
        if any((folder / entry).exists() for entry in (_RUN, _METRICS, "snapshots")):
            raise RunError(f"{folder}: holds a run already; continue it with --resume or choose another folder")
        info = {"format": _FORMAT, "run_id": run_id, "name": name, "config": config, "config_digest": digest}
        _write_info(folder, info | {"attempts": [_attempt(0, None, {})]})
        return RunLog(folder, run_id, 0, lock, last_step=-1, elapsed_s=0.0)


def reopen(
    run_dir: str | os.PathLike[str],
    config: Mapping[str, Any],
    resume_step: int | None,
    *,
    may_change: Collection[str] = (),
) -> RunLog:
    """Opens a run to continue it from a snapshot, as its next attempt.

    Broken lines of the metrics are moved to `metrics.torn`. Lines after `resume_step` stay in the file but no longer
    count (see `effective`).

    Args:
      run_dir: the run's folder, wherever it lies now.
      config: JSON values; the fields that differ become the run's, and the attempt's entry lists them.
      resume_step: the step of the snapshot; None to start over.
      may_change: fields that may differ, dotted where nested (`optim.lr`, or `optim` for all below).

    Raises:
      RunError: if there is no run, a live process holds it, other fields differ, or it cannot be written.
    """
    folder = _absolute(run_dir)
    digest = identity.digest(config := dict(config))
    with _locked(folder) as lock:
        info = describe(folder)
        changes = identity.differences(info["config"], config)
        refused = [n for n in changes if not any(n == allowed or n.startswith(f"{allowed}.") for allowed in may_change)]
        if refused:
            shown = "; ".join("{}: {} -> {}".format(name, *changes[name]) for name in refused)
            raise RunError(f"{folder}: the run has another configuration ({shown}); set it back or start a new run")
        records, attempt = _repair(folder), len(info["attempts"])
        if ahead := [record["host"]["attempt"] for record in records if record["host"]["attempt"] >= attempt]:
            raise RunError(
                f"{folder / _METRICS}: holds records of attempt {ahead[0]}, which {_RUN} does not know; restore {_RUN} "
                "from a copy"
            )
        info["attempts"].append(_attempt(attempt, resume_step, changes))
        _write_info(folder, info | {"config": config, "config_digest": digest})
        elapsed_s = max((record["host"]["elapsed_s"] for record in records), default=0.0)
        return RunLog(folder, info["run_id"], attempt, lock, -1 if resume_step is None else resume_step, elapsed_s)


def describe(run_dir: str | os.PathLike[str]) -> dict[str, Any]:
    """Returns the contents of `run.json`: `run_id`, `name`, `config`, `config_digest` and `attempts`.

    Raises:
      RunError: if it is not there, damaged, or of another format version.
    """
    path = _absolute(run_dir) / _RUN
    try:
        info = identity.parse(path.read_bytes())
    except (FileNotFoundError, NotADirectoryError):
        raise RunError(f"{path}: not there, so this folder holds no run; give another folder") from None
    except (OSError, ValueError) as error:
        raise RunError(f"{path}: cannot be read ({error}); restore it from a copy") from error
    found = info.get("format") if isinstance(info, dict) else None
    if found != _FORMAT:
        raise RunError(f"{path}: format {found!r}, expected {_FORMAT}; read it with the version that wrote it")
    if identity.digest(info.get("config")) != info.get("config_digest"):
        raise RunError(f"{path}: the config does not fit its digest, so it was edited; restore it from a copy")
    return info


def read(run_dir: str | os.PathLike[str]) -> list[Record]:
    """Returns all whole lines of the metrics, of all attempts, in the order of writing. Others are logged."""
    path = _absolute(run_dir) / _METRICS
    records, _, broken = metrics.split(path)
    if broken:
        _log.warning("%s: left out %d broken lines; resuming the run moves them to %s", path, len(broken), _TORN)
    return records


def effective(run_dir: str | os.PathLike[str]) -> list[Record]:
    """Returns the one series of the run: one line a step, steps rising.

    An attempt that resumed at step s supersedes the lines after s of all earlier attempts.

    Raises:
      RunError: as `describe`.
    """
    records = read(run_dir)
    limits, limit = [], math.inf
    for attempt in reversed(describe(run_dir)["attempts"]):
        limits.append(limit)
        limit = min(limit, -1 if attempt["resume_step"] is None else attempt["resume_step"])
    limits.reverse()
    return [record for record in records if record["step"] <= limits[record["host"]["attempt"]]]


def _absolute(path: str | os.PathLike[str]) -> Path:
    return Path(path).expanduser().absolute()


def _make(folder: Path, name: str) -> tuple[Path, str]:
    with _writing(folder, 0):
        folder.mkdir(parents=True, exist_ok=True)
    return folder, _new_id(name)


def _make_in(base: Path, name: str) -> tuple[Path, str]:
    with _writing(base, 0):
        base.mkdir(parents=True, exist_ok=True)
        while True:
            run_id = _new_id(name)
            with contextlib.suppress(FileExistsError):
                os.mkdir(base / run_id)
                return base / run_id, run_id


def _new_id(name: str) -> str:
    now = datetime.datetime.now(datetime.UTC).strftime("%Y%m%d-%H%M%S")
    return "-".join(filter(None, (name, now, secrets.token_hex(2))))


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[int]:
    """Holds the run; the lock outlives the block unless that fails, and ends with the process."""
    if not folder.is_dir():
        raise RunError(f"{folder}: no such folder; give the folder of a run")
    with _writing(folder / _LOCK, 0):
        lock = os.open(folder / _LOCK, os.O_RDWR | os.O_CREAT, 0o666)
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise RunError(
                f"{folder}: a live process holds this run; wait for it, end it or choose another folder"
            ) from None
        except OSError as error:
            _log.warning("%s: this file system has no locks (%s); start no second process here", folder, error)
        yield lock
    except BaseException:
        os.close(lock)
        raise


@contextlib.contextmanager
def _writing(path: Path, needed: int) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise RunError(files.explain(error, path, needed)) from error


def _write_info(folder: Path, info: Mapping[str, Any]) -> None:
    data = json.dumps(info, indent=1, allow_nan=False).encode() + b"\n"
    with _writing(folder / _RUN, len(data)):
        files.write_whole(folder / _RUN, data)
        files.sync_folder(folder.parent)


def _attempt(number: int, resume_step: int | None, changes: Mapping[str, Sequence[str]]) -> dict[str, Any]:
    return {
        "attempt": number,
        "resume_step": None if resume_step is None else operator.index(resume_step),
        "start": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "command": list(sys.argv),
        "changes": dict(changes),
        "versions": identity.versions(),
    }


def _repair(folder: Path) -> list[Record]:
    path = folder / _METRICS
    with _writing(path, path.stat().st_size if path.exists() else 0):
        records, moved = metrics.repair(path, folder / _TORN)
    if moved:
        _log.warning("%s: moved %d broken lines to %s", path, moved, _TORN)
    return records
