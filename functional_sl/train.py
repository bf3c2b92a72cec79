"""`python -m functional_sl.train`: trains a recipe under torchrun or alone, with exact recovery."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from typing import Any

from functional_sl.parallel.errors import RankError
from functional_sl.run import cli, command
from functional_sl.run.manifest import SnapshotError
from functional_sl.run.runlog import RunError
from functional_sl.training import request
from functional_sl.training.config import TrainConfig
from functional_sl.training.errors import ContractError, UpdateError

PROGRAM = "functional_sl.train"
DESCRIPTION = (
    "Trains the task that --recipe builds; its settings are flags too, which --help lists with --recipe. The last "
    "line on stdout is one JSON object that sums the run up. Several workers: torchrun --nproc-per-node=N -m "
    "functional_sl.train ..."
)


def run(config: TrainConfig, task: Any = None, *, on_validation: Callable[[Any], None] | None = None) -> dict[str, Any]:
    """Trains as configured and returns the summary; a run that was begun goes on with `resume`.

    Args:
      config: the trainer's settings, taken as they are; `settings` applies the recipe's presets to them.
      task: the recipe's settings; those of `config.size` if None.
      on_validation: called on rank 0 after each validation with a `functional_sl.training.loop.Validated`.

    Returns:
      `run_id`, `run_dir`, `updates`, `train_loss`, `validation` (figures by name), `seconds` (over all attempts),
      `samples_per_s` (of this attempt, over all ranks), and `stopped` (the signal's name) if one ended the run early.

    Raises:
      cli.UsageError: for settings that cannot be met, before anything is written.
      RunError, SnapshotError: if the run's folder can no longer be written; what was written is kept.
      UpdateError, ContractError: for an update without valid items or finite numbers, and a recipe that breaks its
        contract on the way.
      RankError: with several ranks, on every one of them, for an error of any.
    """
    if config.resume is not None:
        raise cli.UsageError(f"resume={config.resume}: functional_sl.train.resume goes on with a run; call that")
    values = cli.to_dict(config) | (cli.to_dict(task) if task is not None else {})
    return _train(lambda: request.resolve(values, frozenset()), on_validation)


def resume(
    path: str | os.PathLike[str], *, on_validation: Callable[[Any], None] | None = None, **changes: Any
) -> dict[str, Any]:
    """Goes on with a run and returns the summary; see `run`.

    Args:
      path: a run folder or a snapshot, `latest` or `best`.
      on_validation: as in `run`.
      **changes: settings that change, such as `updates`.
    """
    values = {"resume": os.fspath(path), **changes}
    return _train(lambda: request.resolve(values, frozenset(changes)), on_validation)


def settings(recipe: str, size: str = TrainConfig.size, **changes: Any) -> tuple[TrainConfig, Any]:
    """Returns the trainer's and the recipe's settings for a size, with changes to either, as the flags would give them.

    Raises:
      cli.UsageError: for an unknown name or a wrong value.
    """
    asked = request.resolve({"recipe": recipe, "size": size, **changes}, frozenset())
    return asked.config, asked.task


def _train(ask: Callable[[], request.Request], on_validation: Callable[[Any], None] | None) -> dict[str, Any]:
    # cuBLAS reads it when CUDA starts; without determinism it does no harm.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    with command.as_usage_error(RunError, SnapshotError):
        asked = ask()
    from functional_sl.training.loop import train

    return train(asked, on_validation)


def main(argv: Sequence[str] | None = None) -> None:
    """Reads the flags, trains, and prints the summary.

    Under torchrun this is one of several ranks; rank 0 alone prints.

    Exit codes: 0 at the end of the run, 2 for a usage error, 1 if the run's folder can no longer be written, an
    update is not finite or another rank fails or is lost, 3 from the watchdog, 130, 143 and 129 after SIGINT,
    SIGTERM and SIGHUP.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    with cli.exit_on_usage_error(PROGRAM), command.exit_on_failure(PROGRAM, RankError, ContractError, UpdateError):
        with command.as_usage_error(RunError, SnapshotError):
            line = request.parse(arguments, PROGRAM, DESCRIPTION)
        summary = _train(lambda: request.resolve(*line), None)
    command.print_summary(summary)
    if "stopped" in summary:
        sys.exit(command.EXIT_CODES[summary["stopped"]])


if __name__ == "__main__":
    main()
