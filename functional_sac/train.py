"""`python -m functional_sac.train`: trains FlashSAC and leaves a run folder with curve, metrics and snapshots."""

from __future__ import annotations

import dataclasses
import os
import sys
from collections.abc import Sequence
from typing import Any

from functional_sac import launch, presets
from functional_sac.config import TrainConfig
from functional_sac.mps import binding, gpus
from functional_sac.mps.gpus import MpsError
from functional_sl.parallel.errors import RankError
from functional_sl.run import cli, command

PROGRAM = "functional-sac"
DESCRIPTION = (
    "Trains FlashSAC. Without flags: pendulum swing-up at a size for two CPU cores. The last line on stdout is one "
    "JSON object that sums the run up. Data parallel: CUDA_VISIBLE_DEVICES=0,1 python -m functional_sac.train ..., one "
    "process a device, or torchrun --nproc-per-node=N -m functional_sac.train ..."
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
    if config.cuda_process_sharing is not None:
        _share(config)
    from functional_sac.loop import train  # torch and chex take seconds, which `--help` need not wait for

    return train(config, given)


def _share(config: TrainConfig) -> None:
    """Ties this process to the service of its GPU, before CUDA starts."""
    if config.device == "cpu":
        raise cli.UsageError("cuda_process_sharing=mps, device=cpu: a CPU has no such service; leave one of them out")
    try:
        binding.confirm(binding.bind())
    except MpsError as error:
        raise cli.UsageError(str(error)) from error


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

    With several entries in CUDA_VISIBLE_DEVICES it starts one rank for each and waits for them. Within a rank, of
    this command or of torchrun, it trains; rank 0 alone prints.

    Exit codes: 0 at the end of the run, 2 for a usage error, 1 if the run's folder can no longer be written or
    another rank is lost, 3 from the watchdog, 130, 143 and 129 after SIGINT, SIGTERM and SIGHUP.
    """
    launch.follow()
    arguments = list(sys.argv[1:] if argv is None else argv)
    with cli.exit_on_usage_error(PROGRAM), command.exit_on_failure(PROGRAM, RankError):
        parsed = cli.parse(
            _Flags,
            arguments,
            program=PROGRAM,
            description=DESCRIPTION,
            presets=presets.PRESETS,
            default_preset=presets.default,
        )
        flags = parsed.config
        config = flags if flags.resume is not None else flags.checked()
        if (ranks := _ranks(config)) > 1:
            sys.exit(launch.run([sys.executable, "-m", "functional_sac.train", *arguments], ranks, PROGRAM))
        summary = run(config, parsed.given)
    command.print_summary(summary)
    if "stopped" in summary:
        sys.exit(command.EXIT_CODES[summary["stopped"]])


def _ranks(config: TrainConfig) -> int:
    """Returns how many ranks this process is to start, once everything is there that they need."""
    try:
        size = len(launch.devices(config.device))
        for name in ("num_seeds", "simulated_ranks"):
            if size > 1 and getattr(config, name) > 1:
                visible = os.environ[gpus.VISIBLE]
                raise cli.UsageError(
                    f"{name}={getattr(config, name)}: takes one process, but CUDA_VISIBLE_DEVICES={visible} asks for "
                    f"{size} ranks; show one device"
                )
        if config.cuda_process_sharing is not None and config.device != "cpu":
            for rank in range(size if size > 1 else 0):
                binding.find(rank, os.environ)
    except MpsError as error:
        raise cli.UsageError(str(error)) from None
    return size


if __name__ == "__main__":
    main()
