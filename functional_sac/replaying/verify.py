"""Whether a run comes back bit by bit, and if not, where it first differs."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from functional_sac import replicas
from functional_sac.replaying import repeat, trace
from functional_sac.replaying.repeat import Leg, Moment
from functional_sac.replaying.trace import Trace
from functional_sac.replicas import States
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
    reference = _reference(home, trace.read(home))
    comparison = _Comparison(reference, begin)
    end = reference.end if end is None else end
    if not begin < end <= reference.end:
        raise cli.UsageError(f"--begin={begin} --end={end}: {home} can be compared up to step {reference.end}")
    for moment in _moments(home, begin, end, changes or {}):
        comparison.take(moment)
        if comparison.done:
            break
    return comparison.report(_moved(reference, begin, changes or {}, moment.states))


def record(run_dir: str | os.PathLike[str], every: int = 1) -> Report:
    """Repeats a run from its start and keeps its trace in its folder, if all of its snapshots come back.

    Args:
      run_dir: the run.
      every: iterations from one record to the next.

    Returns:
      What `verify` returns without a trace; where something differs, nothing has been written.

    Raises:
      UsageError: as `verify`.
      RunError, SnapshotError: as `verify`, and if the trace cannot be written.
    """
    if every < 1:
        raise cli.UsageError(f"--every={every}: expected 1 or more iterations")
    home = Path(run_dir).expanduser()
    reference = _reference(home, None)
    comparison, rows = _Comparison(reference, 0), []
    for number, moment in enumerate(_moments(home, 0, reference.end, {})):
        comparison.take(moment)
        if comparison.first is not None:
            return comparison.report(_moved(reference, 0, {}, moment.states))
        if number % every == 0 or moment.env_steps in reference.kept:
            whole = moment.env_steps in reference.kept
            names, words = trace.digests(moment.states, None if whole else every)
            rows.append((moment.env_steps, moment.updates, words))
    about = {
        "run_id": runlog.describe(home)["run_id"],
        "every": every,
        "whole": [*reference.kept],
        "settings": {str(leg.begin): leg.settings for leg in reference.legs},
        "environment": trace.environment(moment.states[0].key.device),
    }
    env_steps, updates, words = (torch.tensor(column) for column in zip(*rows, strict=True))
    trace.write(home, Trace(about, names, env_steps, updates, words))
    return comparison.report(_moved(reference, 0, {}, moment.states))


def _moments(home: Path, begin: int, end: int, changes: Mapping[str, Any]) -> Iterator[Moment]:
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS reads it when CUDA starts
    with torch.no_grad(), contextlib.closing(repeat.moments(home, begin, end, changes)) as repeated:
        yield from repeated


@dataclasses.dataclass(frozen=True)
class _Reference:
    """What is known of a run."""

    home: Path
    legs: list[Leg]
    kept: dict[int, manifest.Manifest]  # its snapshots
    trace: Trace | None
    rows: dict[int, int]  # the trace's rows that count, by step
    end: int

    def recorded(self, moment: Moment) -> list[str] | None:
        """Returns the names whose digests differ from the trace's, or None where nothing was recorded."""
        if self.trace is None or (row := self.rows.get(moment.env_steps)) is None:
            return None
        whole = moment.env_steps in self.trace.about["whole"]
        now = dict(zip(*trace.digests(moment.states, None if whole else self.trace.about["every"]), strict=True))
        before = dict(zip(self.trace.names, self.trace.digests[row].tolist(), strict=True))
        return [name for name in now | before if now.get(name) != before.get(name)]

    def stored(self, moment: Moment) -> dict[str, tuple[bool, float]] | None:
        """Returns every leaf that differs from a snapshot's, or None where none was kept.

        With each: whether its values are real numbers, and their largest difference.
        """
        if (content := self.kept.get(moment.env_steps)) is None:
            return None
        like = replicas.parts(moment.states, range(len(moment.states)), "replay.rank0" in content["parts"])
        folder = manifest.folder_of(self.home / "snapshots", moment.env_steps)
        before, now = trace.leaves(snapshot.restore(folder, like)[0]), trace.leaves(like)
        other = [name for name in now if not tree.bits_equal(before[name], now[name])]
        return {name: (now[name].is_floating_point(), _gap(before[name], now[name])) for name in other}


def _reference(home: Path, found: Trace | None) -> _Reference:
    legs, kept = repeat.legs(home), repeat.snapshots(home)
    # What the run has done anew since a later resume from an earlier step was never recorded.
    settings = found.about["settings"] if found else {}
    limit = min((leg.begin for leg in legs if str(leg.begin) not in settings), default=None)
    steps = found.env_steps.tolist() if found else []
    rows = {step: row for row, step in enumerate(steps) if limit is None or step <= limit}
    end = max((*kept, *rows), default=0)
    if end == 0:
        raise cli.UsageError(f"{home}: holds neither a snapshot nor a trace, so there is nothing to compare with")
    return _Reference(home, legs, kept, found, rows, end)


class _Comparison:
    """The comparisons of one repetition, in order."""

    def __init__(self, reference: _Reference, begin: int) -> None:
        self._reference, self._begin, self._end = reference, begin, begin
        # A resume takes over the learner; without a replay in the snapshot, or with live environments, the rest of
        # the state begins anew and is not what was recorded at that step.
        self._resumed = begin > 0 and begin in {leg.begin for leg in reference.legs}
        self._updates: int | None = None  # at the last comparison that agreed
        self._snapshots = self._iterations = 0
        self.first: Difference | None = None
        self._gap: Gap | None = None

    @property
    def done(self) -> bool:
        """Whether there is nothing more to find out."""
        return self.first is not None and (self._gap is not None or self._end >= max(self._reference.kept, default=0))

    def take(self, moment: Moment) -> None:
        """Compares a state with what is known of it; after the first difference with snapshots alone."""
        recorded = self._reference.recorded(moment) if self.first is None else None
        if recorded and moment.env_steps == self._begin and self._resumed:
            recorded = [name for name in recorded if name.startswith("learner/")]
        if recorded is not None:
            self._iterations += 1
            self._enter(moment, recorded, "trace")
        # The state from which the repetition began is the snapshot's own.
        stored = self._reference.stored(moment) if moment.env_steps > self._begin else None
        if stored is not None:
            self._snapshots += 1
            if self.first is None:
                self._enter(moment, [*stored], "snapshot")
            if stored:
                # The gap of two keys or counters says little beside one of real numbers.
                leaf = max(stored, key=stored.__getitem__)
                self._gap = Gap(moment.env_steps, leaf, stored[leaf][1])
        if recorded is not None or stored is not None:
            self._end = moment.env_steps
        if self._updates is None or self._end == moment.env_steps:
            self._updates = moment.updates

    def _enter(self, moment: Moment, names: list[str], seen_in: str) -> None:
        if names:
            since = moment.updates if self._updates is None else self._updates
            self.first = Difference(moment.env_steps, since + 1, moment.updates, names[0], len(names), seen_in)

    def report(self, environment: dict[str, tuple[str, str]]) -> Report:
        """Returns what was found."""
        counts = self._snapshots, self._iterations
        return Report(self._begin, self._end, *counts, environment, self.first, self._gap)


def _gap(before: Tensor, now: Tensor) -> float:
    gap = (before.double() - now.double()).abs()
    return float(torch.where(gap.isnan(), math.inf, gap).amax())


def _moved(reference: _Reference, begin: int, changes: Mapping[str, Any], states: States) -> dict[str, tuple[str, str]]:
    """Returns what is not as it was when the run was recorded or, without a trace, made."""
    leg = next(leg for leg in reference.legs if leg.end > begin)
    then: dict[str, Any] = {name: leg.settings[name] for name in changes}
    now: dict[str, Any] = dict(changes)
    if len(states) != leg.settings["simulated_ranks"]:
        then["ranks"], now["ranks"] = f"{len(states)} processes", f"{len(states)} threads of one"
    if reference.trace is None:
        return identity.differences(then | leg.versions, now | identity.versions())
    about = reference.trace.about
    then |= about["environment"] | {"settings": about["settings"]}
    settings = {str(leg.begin): leg.settings for leg in reference.legs if str(leg.begin) in about["settings"]}
    return identity.differences(then, now | trace.environment(states[0].key.device) | {"settings": settings})
