"""Supervised runs of a second, and what they left behind."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from functional_sl import train
from functional_sl.run import runlog

TINY: dict[str, Any] = {"device": "cpu", "tensorboard": False, "timeout_s": 20.0, "keep_snapshots": 9}


@contextlib.contextmanager
def prepared() -> Iterator[None]:
    """Keeps what a run sets in this process inside."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        patch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", True)
        threads = torch.get_num_threads()
        yield
    torch.use_deterministic_algorithms(False)
    torch.set_num_threads(threads)


def run(run_dir: Path | str, recipe: str = "tiny_recipes:line", on_validation: Any = None, **changes: Any) -> dict:
    """Trains a new tiny run and returns its summary."""
    with prepared():
        config, task = train.settings(recipe, run_dir=str(run_dir), **{**TINY, **changes})
        return train.run(config, task, on_validation=on_validation)


def resume(source: Path | str, on_validation: Any = None, **changes: Any) -> dict:
    """Goes on with a run."""
    with prepared():
        return train.resume(source, on_validation=on_validation, **changes)


def steps(run_dir: Path) -> list[int]:
    """Returns the updates of the run's snapshots."""
    return sorted(int(path.name.removeprefix("step_")) for path in (run_dir / "snapshots").glob("step_*"))


def manifest(run_dir: Path, step: int | None = None) -> dict[str, Any]:
    """Returns the manifest of a snapshot (the last one)."""
    return json.loads((snapshot(run_dir, step) / "manifest.json").read_text())


def snapshot(run_dir: Path, step: int | None = None) -> Path:
    """Returns the folder of a snapshot (the last one)."""
    return run_dir / "snapshots" / f"step_{steps(run_dir)[-1] if step is None else step:012d}"


def state(run_dir: Path, step: int | None = None) -> dict[str, torch.Tensor]:
    """Returns every leaf of a snapshot (the last one) by part and name."""
    parts = manifest(run_dir, step)["parts"]
    loaded = {name: load_file(snapshot(run_dir, step) / part["file"]) for name, part in parts.items()}
    return {f"{name}/{leaf}": value for name, leaves in loaded.items() for leaf, value in leaves.items()}


def records(run_dir: Path) -> list[dict[str, Any]]:
    """Returns the effective records without what may differ in a resumed run."""
    return [{k: v for k, v in record.items() if k != "host"} for record in runlog.effective(run_dir)]


def files(folder: Path) -> dict[str, bytes]:
    """Returns the contents of all files by their path under `folder`."""
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}
