"""Whether a run comes back bit by bit, and if not, where it first differs."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from functional_sac.replaying import repeat, trace
from functional_sac.replaying.repeat import Leg, Moment
from functional_sac.replaying.trace import Trace
from functional_sl import tree
from functional_sl.run import cli, identity, manifest, runlog, snapshot


class Difference(NamedTuple):
    """The first place at which the repeated run is another one."""

    env_steps: int
    first_update: int  # the updates, from 1, since the comparison before; none were made where first > last
    last_update: int
    leaf: str
    leaves: int  # how many differ there
    seen_in: str  # `trace` or `snapshot`


class Gap(NamedTuple):
    """The largest difference of a value, at the first snapshot that differs."""

    env_steps: int
    leaf: str
    largest: float


class Report(NamedTuple):
    """What a repetition found.

    Attributes:
      begin: environment steps.
      end: environment steps of the last comparison.
      snapshots: how many were compared, leaf by leaf.
      iterations: how many were compared with the trace.
      environment: what is not as it was, by name: (then, now).
      first: the first difference, or None if every bit came back.
      gap: the largest difference, where a snapshot shows it.
    """

    begin: int
    end: int
    snapshots: int
    iterations: int
    environment: dict[str, tuple[str, str]]
    first: Difference | None
    gap: Gap | None


def verify(
    run_dir: str | os.PathLike[str], begin: int = 0, end: int | None = None, changes: Mapping[str, Any] | None = None
) -> Report:
    """Repeats a run and compares it with its snapshots and, where it has one, its trace.

    After the first difference it goes on to the next snapshot alone, which shows how large it is.

    Args:
      run_dir: the run; it is only read.
      begin: the step of a snapshot, or 0 for the run's start.
      end: environment steps; None for the last snapshot or recorded iteration.
      changes: fields of the config (`device`, `threads`, `compile`) that differ from the run's.

    Raises:
      UsageError: for a run or steps that cannot be repeated.
      RunError, SnapshotError: for a folder that cannot be read.
    """
    home = Path(run_dir).expanduser()
    found = trace.read(home)
    return _compare(home, begin, end, changes or {}, found, None)


def record(run_dir: str | os.PathLike[str], every: int = 1) -> Report:
    """Repeats a run from its start and keeps its trace in its folder, if all of its snapshots come back.

    Args:
      run_dir: the run.
      every: iterations from one record to the next.

    Returns:
      What `verify` returns without a trace; with a difference nothing has been written.

    Raises:
      UsageError, RunError, SnapshotError: as `verify`, and if the trace cannot be written.
    """
    home, recorder = Path(run_dir).expanduser(), _Recorder(every)
    report = _compare(home, 0, None, {}, None, recorder)
    if report.first is None:
        trace.write(home, recorder.trace(home))
    return report


def _compare(
    home: Path, begin: int, end: int | None, changes: Mapping[str, Any], found: Trace | None, recorder: _Recorder | None
) -> Report:
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS reads it when CUDA starts
    path, kept = repeat.legs(home), repeat.snapshots(home)
    reference = _Reference(home, path, kept, found)
    end = reference.end if end is None else end
    if begin >= end:
        raise cli.UsageError(f"--begin={begin}, --end={end}: nothing to repeat; the run can be compared to {reference.end}")
    comparison = _Comparison(reference, begin)
    with torch.no_grad(), contextlib.closing(repeat.moments(home, begin, end, changes)) as repeated:
        for number, moment in enumerate(repeated):
            comparison.take(moment)
            if recorder is not None:
                recorder.take(number, moment, moment.env_steps in kept or moment.env_steps >= end)
            if comparison.done:
                break
        environment = reference.moved(begin, changes, moment.states[0].key.device)
    if recorder is not None:
        recorder.whole, recorder.environment = sorted(kept), trace.environment(moment.states[0].key.device)
    return comparison.report(environment)


class _Reference:
    """What is known of the run."""

    def __init__(self, home: Path, path: list[Leg], kept: dict[int, manifest.Manifest], found: Trace | None) -> None:
        self.home, self.path, self.kept, self.trace = home, path, kept, found
        # What the run did since a later resume from an earlier step was never recorded.
        settings = found.about["settings"] if found else {}
        limit = min((leg.begin for leg in path if str(leg.begin) not in settings), default=None)
        steps = found.env_steps.tolist() if found else []
        self.rows = {step: row for row, step in enumerate(steps) if limit is None or step <= limit}
        known = [*kept, *self.rows]
        if not known or max(known) == 0:
            raise cli.UsageError(f"{home}: holds neither a snapshot nor a trace, so there is nothing to compare with")
        self.end = max(known)

    def recorded(self, moment: Moment) -> tuple[int, list[str]] | None:
        """Returns the updates that the trace has for a moment and the names that differ, or None without a record."""
        if self.trace is None or (row := self.rows.get(moment.env_steps)) is None:
            return None
        whole = moment.env_steps in self.trace.about["whole"]
        names, words = trace.digests(moment.states, None if whole else self.trace.about["every"])
        before = dict(zip(self.trace.names, self.trace.digests[row].tolist(), strict=True))
        now = dict(zip(names, words, strict=True))
        other = [name for name in names if now[name] != before.get(name)]
        return row, other + [name for name in before if name not in now]

    def stored(self, moment: Moment) -> tuple[list[str], Gap | None] | None:
        """Returns the names that differ from a snapshot's and the largest gap, or None without a snapshot."""
        if (content := self.kept.get(moment.env_steps)) is None:
            return None
        like = trace.parts(moment.states, "replay.rank0" in content["parts"])
        folder = manifest.folder_of(self.home / "snapshots", moment.env_steps)
        before, now = trace.leaves(snapshot.restore(folder, like)[0]), trace.leaves(like)
        other = [name for name in now if not tree.bits_equal(now[name], before[name])]
        return other, _largest(moment.env_steps, {name: (before[name], now[name]) for name in other})

    def moved(self, begin: int, changes: Mapping[str, Any], device: torch.device) -> dict[str, tuple[str, str]]:
        """Returns what differs from the time when the run was recorded, or else made."""
        used = [leg for leg in self.path if leg.end > begin]
        if self.trace is None:
            then = used[0].versions | {name: str(used[0].settings[name]) for name in changes}
            return identity.differences(then, {**{k: v for k, v in identity.versions().items()}, **_texts(changes)})
        before = {str(leg.begin): leg.settings for leg in self.path if str(leg.begin) in self.trace.about["settings"]}
        found = identity.differences(self.trace.about["settings"], before)
        found |= {name: (json_of(used[0].settings[name]), json_of(value)) for name, value in changes.items()}
        return found | identity.differences(self.trace.about["environment"], trace.environment(device))
