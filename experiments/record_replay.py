"""Repeats a run and tells whether every bit comes back; if not, the first leaf and update that differ.

    python -m experiments.record_replay --run=runs/NAME --record
    python -m experiments.record_replay --run=runs/NAME
    python -m experiments.record_replay --run=runs/NAME --begin=6400 --end=9600

A run's snapshots are compared value by value. With `--record` the run is repeated once where it was made, and eight
bytes a leaf and iteration stay in its folder as `trace.safetensors`: from then on a difference is found at its very
iteration, here or elsewhere. The last line is one JSON object; exit code 0 if all bits came back, 1 if not.
"""

from __future__ import annotations

import dataclasses
import json

from functional_sac.replaying import verify
from functional_sac.replaying.verify import Report
from functional_sac.request import as_usage_error
from functional_sl.run import cli, metrics, runlog
from functional_sl.run.manifest import SnapshotError
from functional_sl.run.runlog import RunError

PROGRAM = "record_replay"


@dataclasses.dataclass(frozen=True)
class Settings:
    """The flags."""

    run: str = cli.option("", "Folder of the run; it is only read, but for --record.")
    record: bool = cli.option(False, "Keep a trace of the run in its folder, if its snapshots come back.")
    every: int = cli.option(1, "With --record: iterations from one digest of every leaf to the next.")
    begin: int = cli.option(0, "Step of the snapshot to begin from; 0 for the run's start.")
    end: int | None = cli.option(None, "Step to end at; by default the last snapshot or recorded iteration.")
    device: str | None = cli.option(None, "Instead of the run's.", choices=("cpu", "cuda"))
    threads: int | None = cli.option(None, "Instead of the run's.")
    compile: str | None = cli.option(None, "Instead of the run's.", choices=("true", "false"))


def repeat(settings: Settings) -> Report:
    """Records or verifies the run, as the flags ask.

    Raises:
      UsageError: for what cannot be met or found.
    """
    if not settings.run:
        raise cli.UsageError("--run: which run? give its folder, such as --run=runs/NAME")
    asked = {name: getattr(settings, name) for name in ("device", "threads", "compile")}
    changes = {name: value for name, value in asked.items() if value is not None}
    with as_usage_error(RunError, SnapshotError):
        if "task" not in runlog.describe(settings.run)["config"]:
            raise cli.UsageError(f"--run={settings.run}: is no run of functional_sac; supervised runs are not repeated")
        if settings.record:
            if changes or settings.begin or settings.end is not None:
                raise cli.UsageError("--record: repeats the whole run as it was; leave out begin, end and changes")
            return verify.record(settings.run, settings.every)
        return verify.verify(settings.run, settings.begin, settings.end, changes)


def told(report: Report) -> list[str]:
    """Returns the report in sentences."""
    lines = [f"not as it was: {name}: {then} -> {now}" for name, (then, now) in report.environment.items()]
    what = f"{report.snapshots} snapshots and {report.iterations} recorded iterations"
    where = f"from step {report.begin} to {report.end}"
    if (first := report.first) is None:
        return [*lines, f"bit-identical {where}: {what}"]
    made = f"updates {first.first_update} to {first.last_update}" if first.last_update > first.first_update else (
        f"update {first.last_update}" if first.last_update == first.first_update else "no update in between"
    )  # fmt: skip
    others = f" and {first.leaves - 1} more leaves" if first.leaves > 1 else ""
    lines.append(f"differs {where}, after {what}")
    lines.append(f"first at step {first.env_steps} ({made}), by the {first.seen_in}: {first.leaf}{others}")
    if report.gap:
        lines.append(f"by up to {report.gap.largest:.3g} at step {report.gap.env_steps}, in {report.gap.leaf}")
    return lines


def main() -> None:
    """Reads the flags, repeats the run and prints what was found."""
    with cli.exit_on_usage_error(PROGRAM):
        settings = cli.parse(Settings, program=PROGRAM, description=__doc__).config
        report = repeat(settings)
    kept = [f"the trace is kept in {settings.run}"] if settings.record and report.first is None else []
    print("\n".join([*told(report), *kept]))
    plain = {name: value._asdict() if hasattr(value, "_asdict") else value for name, value in report._asdict().items()}
    print(json.dumps(metrics.plain(plain), allow_nan=False))
    raise SystemExit(report.first is not None)


if __name__ == "__main__":
    main()
