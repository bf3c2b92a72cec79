"""On a GPU: the captured update has the bits of the uncaptured one, and a run under NCCL recovers exactly."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tiny_training
import torch
from equal import assert_bits_equal
from ranks import RanksFailed, run_ranks

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
SETTINGS = {"dropout": 0.3, "device": "cuda", "snapshot_every": 2, "validate_every": 3, "compile": "false"}


def equal_runs(first: Path, second: Path) -> None:
    assert_bits_equal(tiny_training.state(first), tiny_training.state(second))
    assert tiny_training.records(first) == tiny_training.records(second)


def one_rank(folder: str, die_at: int | None = None, resume: bool = False, **changes: Any) -> Any:
    """Runs one rank under NCCL, which dies in a validation if asked."""

    def die(validated: Any) -> None:
        if validated.updates == die_at:
            raise SystemExit(9)

    if resume:
        return tiny_training.resume(folder)
    return tiny_training.run(folder, on_validation=die, **{**SETTINGS, **changes})


def one_way(folder: str, changes: dict[str, Any]) -> Any:
    return one_rank(folder, **changes)


@pytest.mark.parametrize("changes", [{}, {"accumulation": 2, "compute_dtype": "bfloat16"}], ids=["float32", "bfloat16"])
def test_captured_equals_uncaptured(tmp_path, changes):
    for name, graph in (("captured", True), ("eager", False)):
        tiny_training.run(tmp_path / name, **{**SETTINGS, **changes}, cuda_graph=graph)
    equal_runs(tmp_path / "captured", tmp_path / "eager")


def test_a_rank_under_nccl_equals_one_process(tmp_path):
    tiny_training.run(tmp_path / "alone", **SETTINGS)
    run_ranks(1, one_way, str(tmp_path / "ranks"), {})
    alone, ranks = (tiny_training.state(tmp_path / name) for name in ("alone", "ranks"))
    assert_bits_equal({name.replace(".rank0", ""): x for name, x in ranks.items()}, alone)


def test_a_compiled_run_under_nccl_recovers_exactly(tmp_path):
    changes = {"compile": "true"}
    run_ranks(1, one_way, str(tmp_path / "straight"), changes)
    with pytest.raises(RanksFailed):
        run_ranks(1, one_way, str(tmp_path / "broken"), {**changes, "die_at": 9})
    assert tiny_training.steps(tmp_path / "broken")[-1] == 8
    run_ranks(1, one_rank, str(tmp_path / "broken"), None, True)
    equal_runs(tmp_path / "straight", tmp_path / "broken")


def test_float16_scales_its_loss(tmp_path):
    summary = tiny_training.run(tmp_path / "run", **{**SETTINGS, "compute_dtype": "float16"})
    assert summary["updates"] == 12
    assert tiny_training.records(tmp_path / "run")[-1]["loss_scale"] > 0
