"""Lines of metrics: strict JSON objects, one a line, and what is done about lines that are not whole."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from functional_sl.run import files, identity

Record = dict[str, Any]


def plain(values: Mapping[str, Any]) -> Record:
    """Returns the values as JSON values; what is not finite is null and stands under `nonfinite` by name.

    Raises:
      TypeError: names the value that JSON cannot hold.
    """
    odd: dict[str, str] = {}
    record = {name: _convert(value, name, odd) for name, value in values.items()}
    return record | ({"nonfinite": odd} if odd else {})


def _convert(value: Any, name: str, odd: dict[str, str]) -> Any:
    """Returns the JSON value of a metric; enters what is not finite into `odd` by name."""
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, float) and not math.isfinite(value):
        odd[name] = str(value)
        return None
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, Mapping):
        return {str(key): _convert(item, f"{name}/{key}", odd) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_convert(item, f"{name}/{i}", odd) for i, item in enumerate(value)]
    raise TypeError(f"metric {name!r} is a {type(value).__name__}, expected a number or text; convert it first")


def split(path: Path) -> tuple[list[Record], list[bytes], list[bytes]]:
    """Returns the records of a metrics file, their lines, and the broken lines (the last one if it has no newline)."""
    *lines, rest = path.read_bytes().split(b"\n") if path.exists() else [b""]
    records, whole, broken = [], [], []
    for line in lines:
        if (record := _parse(line)) is None:
            broken.append(line)
        else:
            records.append(record)
            whole.append(line)
    return records, whole, broken + ([rest] if rest else [])


def _parse(line: bytes) -> Record | None:
    try:
        record = identity.parse(line)
        kinds = {"attempt": int, "elapsed_s": int | float}
        own = isinstance(record["step"], int) and all(isinstance(record["host"][k], v) for k, v in kinds.items())
        return record if own else None
    except (ValueError, TypeError, LookupError):
        return None


def repair(path: Path, torn: Path) -> tuple[list[Record], int]:
    """Appends the broken lines of a metrics file to `torn` and then takes them out; an interruption loses nothing.

    Returns:
      The records, and the number of lines moved.

    Raises:
      OSError: if a file cannot be written.
    """
    records, whole, broken = split(path)
    if broken:
        with open(torn, "ab") as file:
            file.write(b"".join(line + b"\n" for line in broken))
            file.flush()
            os.fsync(file.fileno())
        files.write_whole(path, b"".join(line + b"\n" for line in whole))
    return records, len(broken)
