"""On a GPU: captured updates of recipes with a model of their own have the bits of launched ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tiny_training
import torch
from equal import assert_bits_equal

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")

# Recipe -> its settings, in a size of seconds; the rigid bodies are those that need no simulator.
RECIPES: dict[str, dict[str, Any]] = {
    "functional_sl.recipes.bc_visual:build": {
        "episodes": 3, "evaluation_episodes": 2, "held_out": 0.3, "chunk": 3, "execute": 1, "hidden": (16,),
        "picture": 14, "crop": 12, "widths": (8,), "strides": (1,), "keypoints": 4,
        "world": "functional_sac.envs.reacher:reacher", "expert": "functional_sac.envs.experts:reacher",
        "camera": "functional_sl.sources.pixels:reacher",
    },
    "experiments.module_rigidformer:build": {
        "scenes": 3, "validation_scenes": 2, "objects": (1, 3), "points": (24, 26), "frames": 16, "steps": (1, 2),
        "clip": 4, "channels": 6, "width": 10, "layers": 1, "heads": 2, "head_size": 12, "frequencies": 2,
        "registers": 2, "anchor": 8, "depths": (0, 1), "horizons": (4,),
    },
    "functional_sl.recipes.rwm:build": {
        "worlds": 4, "steps": 30, "episode_steps": 10, "history": 3, "forecast": 3, "hidden": 6, "head": 5,
        "members": 2, "horizons": (1, 4), "held_out": 0.3,
    },
}  # fmt: skip
TRAINER = {
    "updates": 2, "batch_size": 5, "optimizer": "adamw", "learning_rate": 1e-3, "lr_schedule": "constant",
    "lr_warmup_updates": 0, "clip_norm": 1.0, "log_every": 1, "validate_every": 2, "device": "cuda",
    "compile": "false",
}  # fmt: skip


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", RECIPES)
def test_captured_updates_equal_launched_ones(name: str, dtype: str, tmp_path: Path) -> None:
    """Every update of a capture is a replay; kernels are deterministic, which is the trainer's default."""
    if "rwm" in name:
        pytest.importorskip("mujoco")
    for folder, graph in (("captured", True), ("launched", False)):
        changes = {**TRAINER, **RECIPES[name], "compute_dtype": dtype, "cuda_graph": graph}
        assert tiny_training.run(tmp_path / folder, name, **changes)["updates"] == 2
    captured, launched = tmp_path / "captured", tmp_path / "launched"
    assert_bits_equal(tiny_training.state(captured), tiny_training.state(launched))
    assert tiny_training.records(captured) == tiny_training.records(launched)
    assert all(record["skipped"] == 0 for record in tiny_training.records(captured) if "skipped" in record)
