"""Training runs of about a second: small networks, episodes of ten steps, no pictures; and what they left behind."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from functional_sac import envs, replicas, reporting, train
from functional_sac.config import TrainConfig
from functional_sac.envs import pendulum
from functional_sac.envs.env import Env, Task, autoreset
from functional_sac.iteration import TrainState
from functional_sl import tree
from functional_sl.run import runlog

# 30 vector steps; the eighth is the first that learns, so there are 23 updates.
TINY: dict[str, Any] = {
    "actor_width": 8,
    "critic_width": 8,
    "num_blocks": 1,
    "bins": 11,
    "batch_size": 8,
    "updates_per_step": 1,
    "learning_starts": 16,
    "replay_capacity": 100,
    "num_envs": 2,
    "env_steps": 60,
    "eval_episodes": 2,
    "log_every": 10,
    "eval_every": 20,
    "snapshot_every": 20,
    "lr_decay_updates": 40,
    "device": "cpu",
}


def short_pendulum() -> Env:
    """Returns the swing-up with episodes of ten steps."""
    spec = dataclasses.replace(pendulum.pendulum().spec, max_episode_steps=10)
    return autoreset(Task(spec, pendulum.reset, pendulum.step, pendulum.observe, pendulum.render))


@contextlib.contextmanager
def prepared(env: Env | None = None) -> Iterator[None]:
    """Lets runs of this process take `env` (the short pendulum) as every task, and draw nothing."""
    chosen = env or short_pendulum()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(envs, "make", lambda task, sim="auto": chosen)
        for name in ("draw_curve", "film"):
            patch.setattr(reporting, name, lambda *args: None)
        patch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        patch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", True)
        yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture
def tiny() -> Iterator[None]:
    """Has a test run as `prepared` does; a module takes it, and the two below, by their names."""
    with prepared():
        yield


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run with its snapshots at 20, 40 and 60, which tests copy."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    with prepared():
        run(folder)
    return folder


@pytest.fixture
def run_dir(whole: Path, tmp_path: Path) -> Path:
    """A copy of the module's `whole`."""
    return Path(shutil.copytree(whole, tmp_path / "run"))


def config(run_dir: Path | str | None = None, **changes: Any) -> TrainConfig:
    """Returns the config of a new tiny run."""
    return TrainConfig(**{**TINY, "run_dir": run_dir and str(run_dir), **changes})


def run(run_dir: Path | str | None = None, **changes: Any) -> dict[str, Any]:
    """Trains a new tiny run and returns its summary."""
    return train.run(config(run_dir, **changes))


def resume(source: Path | str, **changes: Any) -> dict[str, Any]:
    """Goes on with a run, as the flags `changes` would."""
    return train.run(config(resume=str(source), **changes), frozenset(changes))


def flags(**changes: Any) -> list[str]:
    """Returns the flags of a tiny run."""
    return [f"--{name}={value}" for name, value in {**TINY, **changes}.items()]


def steps(run_dir: Path) -> list[int]:
    """Returns the steps of the run's snapshots."""
    return sorted(int(path.name.removeprefix("step_")) for path in (run_dir / "snapshots").glob("step_*"))


def state(run_dir: Path, step: int | None = None) -> dict[str, torch.Tensor]:
    """Returns every leaf of a snapshot (the last one) by part and name."""
    folder = run_dir / "snapshots" / f"step_{steps(run_dir)[-1] if step is None else step:012d}"
    parts = json.loads((folder / "manifest.json").read_text())["parts"]
    loaded = {name: load_file(folder / part["file"]) for name, part in parts.items()}
    return {f"{name}/{leaf}": value for name, leaves in loaded.items() for leaf, value in leaves.items()}


def records(run_dir: Path) -> list[dict[str, Any]]:
    """Returns the effective records without what may differ in a resumed run."""
    return [{k: v for k, v in record.items() if k != "host"} for record in runlog.effective(run_dir)]


def files(folder: Path) -> dict[str, bytes]:
    """Returns the contents of all files by their path under `folder`."""
    found = {str(path.relative_to(folder)): path for path in sorted(folder.rglob("*"))}
    return {name: path.read_bytes() if path.is_file() else b"" for name, path in found.items()}


def named(state: TrainState) -> dict[str, torch.Tensor]:
    """Returns the leaves of a live state under the names of `state`."""
    parts = replicas.parts((state,), (0,), with_replay=True)
    return {f"{part}/{name}": leaf for part, values in parts.items() for name, leaf in tree.named(values).items()}
