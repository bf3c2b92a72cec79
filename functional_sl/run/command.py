"""How a training command ends: one line for what failed, one JSON line for what was done, and an exit code."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Iterator, Mapping
from typing import Any

from functional_sl.parallel.errors import LostRank
from functional_sl.run import metrics
from functional_sl.run.cli import UsageError, one_line
from functional_sl.run.manifest import SnapshotError
from functional_sl.run.runlog import RunError

EXIT_CODES = {"SIGINT": 130, "SIGTERM": 143, "SIGHUP": 129}


@contextlib.contextmanager
def exit_on_failure(program: str, *kinds: type[Exception]) -> Iterator[None]:
    """Turns errors that end a run (`RunError`, `SnapshotError`, `kinds`) into one line on stderr and exit code 1."""
    try:
        yield
    except (RunError, SnapshotError, *kinds) as error:
        sys.exit(f"{program}: {one_line(error)}")


@contextlib.contextmanager
def as_usage_error(*kinds: type[Exception]) -> Iterator[None]:
    """Turns errors of these kinds, but not the loss of a rank, into a `UsageError`."""
    try:
        yield
    except (UsageError, LostRank):
        raise
    except kinds as error:
        raise UsageError(str(error)) from error


def print_summary(summary: Mapping[str, Any]) -> None:
    """Prints a run's summary as one strict JSON line, on rank 0 alone; a full disk or closed pipe is no error."""
    if os.environ.get("RANK", "0") != "0":
        return
    # A path's bytes are UTF-8 whatever the locale, and JSON is too.
    run_dir = os.fsencode(summary["run_dir"]).decode("utf-8", "surrogateescape")
    try:
        print(json.dumps(metrics.plain({**summary, "run_dir": run_dir}), allow_nan=False), flush=True)
    except OSError:
        # The interpreter would complain when it flushes again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
