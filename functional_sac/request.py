"""What a start comes to before the ranks meet: a checked config, and the snapshot from which a run goes on."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch

from functional_sac.config import TrainConfig
from functional_sl.parallel.errors import LostRank
from functional_sl.run import cli, runlog, snapshot
from functional_sl.run.manifest import read as read_manifest

RUNS = "runs"
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
        "threads",
        "timeout_s",
    )
)
_UNSTORED = {"resume": None, "run_dir": None}  # a run may be moved, and every attempt has its own


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
    source = _source(config.resume) if config.resume else None
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


def _source(resume: str) -> Path:
    """Returns the snapshot folder that `--resume` names."""
    if resume == "latest":
        return _latest()
    path = Path(resume).expanduser()
    if path.name == "manifest.json":
        path = path.parent
    if (path / "manifest.json").exists():
        return path
    if not path.is_dir():
        raise cli.UsageError(f"--resume={resume}: no such folder; give the folder of a run or of a snapshot")
    run_dir = path.parent if path.name == "snapshots" else path
    found = snapshot.latest(run_dir, runlog.describe(run_dir)["run_id"])
    if found is None:
        raise cli.UsageError(f"--resume={resume}: holds no valid snapshot; start a new run instead")
    return found


def _latest() -> Path:
    runs = sorted(Path(RUNS).glob("*/run.json"), key=lambda p: p.stat().st_mtime, reverse=True)
    for run in runs:
        # A damaged run is no reason not to find the one before it.
        with contextlib.suppress(runlog.RunError):
            if found := snapshot.latest(run.parent, runlog.describe(run.parent)["run_id"]):
                return found
    raise cli.UsageError(f"--resume=latest: no run with a valid snapshot under {Path(RUNS).absolute()}; give its path")


def _resumed_config(config: TrainConfig, given: frozenset[str], source: Path) -> TrainConfig:
    """Returns the stored config of the run, with the fields that were given now."""
    if config.run_dir is not None:
        raise cli.UsageError(f"--run_dir={config.run_dir}: a resumed run stays in its folder; leave it out")
    done = _steps_done(source)
    old = cli.from_dict(TrainConfig, runlog.describe(run_dir_of(source))["config"])
    changes = {name: getattr(config, name) for name in given if name not in _UNSTORED}
    refused = [name for name in sorted(changes.keys() - MAY_CHANGE) if changes[name] != getattr(old, name)]
    if refused:
        shown = ", ".join(f"{name} {getattr(old, name)} -> {changes[name]}" for name in refused)
        raise cli.UsageError(f"a resumed run keeps its settings ({shown}); start a new run with --init_from={source}")
    with as_usage_error(ValueError):
        new = dataclasses.replace(old, **changes)
    if done >= new.env_steps:
        raise cli.UsageError(f"--env_steps={new.env_steps}: {source} has {done} already; ask for more")
    return new


def _steps_done(source: Path) -> int:
    """Returns the environment steps of a snapshot that its own run can go on from."""
    elsewhere = f"; start a new run with --init_from={source}"
    if source.resolve().parent.name == "superseded":
        raise cli.UsageError(f"--resume={source}: the run has gone on from an earlier snapshot{elsewhere}")
    manifest, run_id = read_manifest(source), runlog.describe(run_dir_of(source))["run_id"]
    if manifest["run_id"] != run_id:
        raise cli.UsageError(f"--resume={source}: is of run {manifest['run_id']}, but lies in run {run_id}{elsewhere}")
    return manifest["step"]


def run_dir_of(source: Path) -> Path:
    """Returns the folder of the run to which a snapshot belongs."""
    return source.resolve().parent.parent


def _check_seeds(config: TrainConfig) -> None:
    if seeds(config).stop > 2**32:
        raise ValueError(f"seed={config.seed}, num_seeds={config.num_seeds}: seeds end at 2**32 - 1; choose lower ones")


def _check_device(name: str) -> None:
    if name == "cuda" and not torch.cuda.is_available():
        raise ValueError("--device=cuda: torch sees no CUDA device; use --device=cpu or install a CUDA build of torch")


@contextlib.contextmanager
def as_usage_error(*kinds: type[Exception]) -> Iterator[None]:
    """Turns errors of these kinds, but not the loss of a rank, into a `UsageError`."""
    try:
        yield
    except (cli.UsageError, LostRank):
        raise
    except kinds as error:
        raise cli.UsageError(str(error)) from error
