"""TensorBoard events of a run, beside its `metrics.jsonl`."""

from __future__ import annotations

import io
import math
import os
import socket
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from functional_sl.run import files, runlog


class Board:
    """Scalars by step; a resumed run hides what an abandoned attempt wrote after the resume's step.

    Every attempt writes a file of its own, and the files' names sort in the order of the attempts. Records are
    written at once by the caller's thread, so that a full disk is an error of the very call that met it.
    """

    def __init__(self, folder: str | os.PathLike[str] | None, resume_step: int | None = None) -> None:
        """Prepares the event file, which the first `write` makes.

        Args:
          folder: where events go; None writes none.
          resume_step: the step from which a run goes on.
        """
        self._folder, self._resume_step = None if folder is None else Path(folder), resume_step
        self._file: int | None = None

    def write(self, step: int, values: Mapping[str, Any]) -> None:
        """Adds every finite number of `values` under its name.

        Raises:
          RunError: if it cannot be written.
        """
        if self._folder is None:
            return
        numbers = {
            name: float(value)
            for name, value in values.items()
            if isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
        }
        scalars = [{"tag": name, "simple_value": value} for name, value in numbers.items()]
        try:
            if self._file is None:
                self._file = self._open(self._folder)
            self._append(step=step, summary={"value": scalars})
        except OSError as error:
            raise runlog.RunError(files.explain(error, self._folder, 0)) from error

    def close(self) -> None:
        """Ends the event file."""
        if self._file is not None:
            os.close(self._file)
        self._folder = self._file = None

    def _open(self, folder: Path) -> int:
        folder.mkdir(parents=True, exist_ok=True)
        number = sum("tfevents" in path.name for path in folder.iterdir())
        name = f"events.out.tfevents.{number:06d}.{socket.gethostname()}.{os.getpid()}"
        self._file = os.open(folder / name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
        self._append(file_version="brain.Event:2")
        if self._resume_step is not None:
            # TensorBoard drops what earlier files hold from the step of a START on.
            self._append(step=self._resume_step + 1, session_log={"status": "START"})
        return self._file

    def _append(self, **event: Any) -> None:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.summary.writer.record_writer import RecordWriter

        record = io.BytesIO()
        RecordWriter(record).write(Event(wall_time=time.time(), **event).SerializeToString())
        rest = memoryview(record.getvalue())
        while rest:
            rest = rest[os.write(self._file, rest) :]
