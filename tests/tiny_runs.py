"""Training runs of about a second: small networks, episodes of ten steps, no pictures; and what they left behind."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from functional_sac import envs, reporting, train
from functional_sac.config import TrainConfig
from functional_sac.envs import pendulum
from functional_sac.envs.env import Env, Task, autoreset
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
}


def short_pendulum() -> Env:
    """Returns the swing-up with episodes of ten steps."""
    spec = dataclasses.replace(pendulum.pendulum().spec, max_episode_steps=10)
    return autoreset(Task(spec, pendulum.reset, pendulum.step, pendulum.observe, pendulum.render))


def prepare(monkeypatch: pytest.MonkeyPatch, env: Env | None = None) -> None:
    """Lets runs of this process take `env` (the short pendulum) as every task, and draw nothing."""
    chosen = env or short_pendulum()
    monkeypatch.setattr(envs, "make", lambda task, sim="auto": chosen)
    for name in ("draw_curve", "film"):
        monkeypatch.setattr(reporting, name, lambda *args: None)
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    # Registered so that the test's end restores them; a run sets both.
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", True)


def run(run_dir: Path | None = None, **changes: Any) -> dict[str, Any]:
    """Trains a new tiny run and returns its summary."""
    return train.run(TrainConfig(**{**TINY, "run_dir": run_dir and str(run_dir), **changes}))


def resume(source: Path | str, **changes: Any) -> dict[str, Any]:
    """Goes on with a run, as the flags `changes` would."""
    config = TrainConfig(**{**TINY, "resume": str(source), **changes})
    return train.run(config, frozenset(changes))


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
