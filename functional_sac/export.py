"""`python -m functional_sac.export SNAPSHOT OUT`: the policy of a snapshot, for use without this project."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import sys
from collections.abc import Sequence
from typing import Any

from functional_sl.run import cli
from functional_sl.run.manifest import SnapshotError
from functional_sl.run.runlog import RunError

PROGRAM = "python -m functional_sac.export"
DESCRIPTION = (
    "Writes the policy of a snapshot as OUT.safetensors (weights, statistics, order and scales of observations and "
    "actions, a self-test), OUT.pt2 (a torch.export program) and OUT.onnx, each checked against the trainer. "
    "SNAPSHOT is a snapshot, a run or 'latest'. The last line on stdout is one JSON object."
)


@dataclasses.dataclass(frozen=True)
class Settings:
    """The flags."""

    snapshot: str | None = cli.option(None, "Folder of a snapshot, or of a run (its newest), or 'latest' or 'best'.")
    out: str | None = cli.option(None, "The files' name without its suffix.")
    formats: str = cli.option("safetensors,pt2", "Any of safetensors, pt2 and onnx (the extra `onnx`), by commas.")
    learner: int = cli.option(0, "Which learner, in a run of several seeds.")


def run(settings: Settings) -> dict[str, Any]:
    """Writes the files and returns what they are: snapshot, and by file its largest difference from the trainer.

    Raises:
      cli.UsageError: for what cannot be read, exported or written.
    """
    if settings.snapshot is None or settings.out is None:
        raise cli.UsageError("expected SNAPSHOT and OUT: a snapshot, a run or 'latest', and a name for the files")
    from functional_sac import trained  # torch and chex take seconds, which `--help` need not wait for
    from functional_sl import programs

    try:
        policy = trained.read(settings.snapshot, learner=settings.learner)
        with contextlib.closing(trained.facts(policy)) as env:
            bundle = trained.portable(policy, env)
        files = programs.write(bundle, settings.out, [name.strip() for name in settings.formats.split(",")])
    except (ValueError, OSError, RunError, SnapshotError) as error:
        raise cli.UsageError(str(error)) from error
    return {
        "snapshot": str(policy.folder),
        "task": policy.config.task,
        "files": {str(path): {"difference": x.difference, "bit_equal": x.bit_equal} for path, x in files.items()},
    }


def main(argv: Sequence[str] | None = None) -> None:
    """Exports, and prints a line a file and the summary; exits with 2 for what cannot be exported."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    for i, name in enumerate(("snapshot", "out")):
        if i < len(arguments) and not arguments[i].startswith("-"):
            arguments[i] = f"--{name}={arguments[i]}"
    with cli.exit_on_usage_error(PROGRAM):
        summary = run(cli.parse(Settings, arguments, program=PROGRAM, description=DESCRIPTION).config)
    lines = []
    for path, found in summary["files"].items():
        how = "bit by bit" if found["bit_equal"] else f"to {found['difference']:.1e}"
        lines.append(f"{path}: repeats the trainer's actions {how}\n")
    cli.emit(sys.stdout, "".join([*lines, json.dumps(summary), "\n"]))


if __name__ == "__main__":
    main()
