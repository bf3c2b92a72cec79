"""`python -m functional_sac.train`: trains FlashSAC and leaves a run folder with curve, metrics and snapshots."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import sys
from collections.abc import Iterator, Sequence
from typing import Any

from functional_sac import presets
from functional_sac.config import TrainConfig
from functional_sl.parallel.errors import RankError
from functional_sl.run import cli, metrics
from functional_sl.run.manifest import SnapshotError
from functional_sl.run.runlog import RunError

PROGRAM = "functional-sac"
_EXIT_CODES = {"SIGINT": 130, "SIGTERM": 143, "SIGHUP": 129}
DESCRIPTION = (
    "Trains FlashSAC. Without flags: pendulum swing-up at a size for two CPU cores. The last line on stdout is one "
    "JSON object that sums the run up. Data parallel: torchrun --nproc-per-node=N -m functional_sac.train ..."
)


def run(config: TrainConfig, given: frozenset[str] = frozenset()) -> dict[str, Any]:
    """Trains as configured and returns the summary.

    Args:
      config: the run; with `resume`, fields of `given` override those of the run that goes on (see `resume`).
      given: names of the fields that were set on purpose.

    Returns:
      `run_dir, task, env_steps` and `updates` (of one seed, over all attempts), `eval_return_mean, eval_return_std,
      seconds` (over all attempts), `env_steps_per_s, updates_per_s` (of this attempt, over all seeds), and `stopped`
      (the signal's name) if a signal ended the run early.

    Raises:
      cli.UsageError: for settings that cannot be met, before anything is written.
      RunError, SnapshotError: if the run's folder can no longer be written; what was written is kept.
      RankError: with several ranks, on every one of them, for any of these; and for a rank that fails or is lost.
    """
    if config.deterministic:
        # cuBLAS reads it when CUDA starts.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    from functional_sac.loop import train  # torch and chex take seconds, which `--help` need not wait for

    return train(config, given)


def resume(path: str | os.PathLike[str], **changes: Any) -> dict[str, Any]:
    """Goes on with a run and returns the summary; see `run`.

    Args:
      path: a run folder or a snapshot, or `latest`.
      **changes: fields of the config that change, such as `env_steps`.
    """
    return run(_Flags(resume=os.fspath(path), **changes), frozenset(changes))


@dataclasses.dataclass(frozen=True)
class _Flags(TrainConfig):
    """Settings as flags give them; a resume checks those that were given together with those of its run."""

    def __post_init__(self) -> None:
        pass

    def checked(self) -> TrainConfig:
        return cli.from_dict(TrainConfig, cli.to_dict(self))


def main(argv: Sequence[str] | None = None) -> None:
    """Reads the flags, trains, and prints the summary.

    Under torchrun this is one of several ranks; rank 0 alone prints.

    Exit codes: 0 at the end of the run, 2 for a usage error, 1 if the run's folder can no longer be written or
    another rank is lost, 3 from the watchdog, 130, 143 and 129 after SIGINT, SIGTERM and SIGHUP.
    """
    with cli.exit_on_usage_error(PROGRAM), _exit_on_failure():
        parsed = cli.parse(
            _Flags,
            argv,
            program=PROGRAM,
            description=DESCRIPTION,
            presets=presets.PRESETS,
            default_preset=presets.DEFAULT,
        )
        flags = parsed.config
        summary = run(flags if flags.resume is not None else flags.checked(), parsed.given)
    # A path's bytes are UTF-8 whatever the locale, and JSON is too.
    summary["run_dir"] = os.fsencode(summary["run_dir"]).decode("utf-8", "surrogateescape")
    if os.environ.get("RANK", "0") == "0":
        _print(json.dumps(metrics.plain(summary), allow_nan=False))
    if "stopped" in summary:
        sys.exit(_EXIT_CODES[summary["stopped"]])


@contextlib.contextmanager
def _exit_on_failure() -> Iterator[None]:
    """Turns what ends a run from outside into one line on stderr and an exit code."""
    try:
        yield
    except (RunError, SnapshotError, RankError) as error:
        sys.exit(f"{PROGRAM}: {' '.join(str(error).split())}")
    except KeyboardInterrupt:
        with contextlib.suppress(OSError):
            print(f"{PROGRAM}: interrupted", file=sys.stderr)
        sys.exit(130)


def _print(line: str) -> None:
    try:
        print(line, flush=True)
    except OSError:
        # A full disk or closed pipe takes nothing from the run; the interpreter would complain when it flushes again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


if __name__ == "__main__":
    main()
