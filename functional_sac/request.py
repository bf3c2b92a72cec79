"""What a start comes to before the ranks meet: a checked config, and the snapshot from which a run goes on."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any, NamedTuple

import torch

from functional_sac.config import TrainConfig
from functional_sl.run import cli, manifest, resuming, runlog
from functional_sl.run.command import as_usage_error

MAY_CHANGE = frozenset(
    (
        "env_steps",
        "eval_every",
        "log_every",
        "snapshot_every",
        "keep_snapshots",
        "snapshot_replay",
        "tensorboard",
        "device",
        "compile",
        "dp_transport",
        "sim_threads",
        "threads",
        "timeout_s",
    )
)
# A run may be moved, and every attempt has its own.
_UNSTORED = {"resume": None, "run_dir": None, "cuda_process_sharing": None}


class Request(NamedTuple):
    """What a start comes to, before the ranks meet."""

    config: TrainConfig
    source: Path | None  # the snapshot from which the run goes on


def request(config: TrainConfig, given: frozenset[str]) -> Request:
    """Checks the config as far as one process can; with `resume`, of the run that goes on with the `given` fields.

    Raises:
      ValueError, RunError, SnapshotError: for what cannot be met or found.
    """
    for name in ("run_dir", "resume", "init_from"):
        if getattr(config, name) == "":
            raise cli.UsageError(f"--{name}= names no folder; give one or leave the flag out")
    source = resuming.find(config.resume, having="task") if config.resume else None
    if source:
        config = _resumed_config(config, given, source)
    _check_seeds(config)
    _check_device(config.device)
    return Request(config, source)


def stored(config: TrainConfig) -> dict[str, Any]:
    """Returns the config as a run keeps it: without the paths of one attempt."""
    return cli.to_dict(dataclasses.replace(config, **_UNSTORED))


def seeds(config: TrainConfig) -> range:
    """Returns the seeds of the run's learners."""
    return range(config.seed, config.seed + config.num_seeds)


def _resumed_config(config: TrainConfig, given: frozenset[str], source: Path) -> TrainConfig:
    """Returns the stored config of the run, with the fields that were given now."""
    if config.run_dir is not None:
        raise cli.UsageError(f"--run_dir={config.run_dir}: a resumed run stays in its folder; leave it out")
    done = manifest.read(source)["step"]
    old = cli.from_dict(TrainConfig, runlog.describe(resuming.home(source))["config"])
    changes = {name: getattr(config, name) for name in given if name not in _UNSTORED}
    refused = [name for name in sorted(changes.keys() - MAY_CHANGE) if changes[name] != getattr(old, name)]
    if refused:
        shown = ", ".join(f"{name} {getattr(old, name)} -> {changes[name]}" for name in refused)
        raise cli.UsageError(f"a resumed run keeps its settings ({shown}); start a new run with --init_from={source}")
    with as_usage_error(ValueError):
        new = dataclasses.replace(old, **changes)
    # A run that is at its end may lack its pictures: without --env_steps they are drawn anew.
    if done >= new.env_steps and (new.env_steps != old.env_steps or "env_steps" in given):
        raise cli.UsageError(f"--env_steps={new.env_steps}: {source} has {done} already; ask for more")
    return new


def _check_seeds(config: TrainConfig) -> None:
    if seeds(config).stop > 2**32:
        raise ValueError(f"seed={config.seed}, num_seeds={config.num_seeds}: seeds end at 2**32 - 1; choose lower ones")


def _check_device(name: str) -> None:
    if name == "cuda" and not torch.cuda.is_available():
        raise ValueError("--device=cuda: torch sees no CUDA device; use --device=cpu or install a CUDA build of torch")
