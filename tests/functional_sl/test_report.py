"""What `functional-sl` says of a run and of a snapshot."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from functional_sl import report
from functional_sl.run import runlog, snapshot


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """A run with one record and two snapshots, the first of which is the best."""
    with runlog.create({"gamma": 0.5}, ("toy",), run_dir=tmp_path / "run") as log:
        log.write(3, {"loss": 1.0})
        for step, score in ((3, 2.0), (4, 1.0)):
            parts = {"state": {"w": torch.zeros(2, 3)}}
            about = {"run_id": log.run_id, "config": {"gamma": 0.5}, "score": score}
            snapshot.save(log.run_dir / "snapshots", step, parts, **about)
    return tmp_path / "run"


def test_a_run(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report.main([str(run_dir)])
    shown = capsys.readouterr().out.splitlines()
    assert shown[0].startswith("run toy-")
    assert shown[0].endswith(": 1 attempts, 1 records")
    assert shown[1] == "  gamma: 0.5"
    assert shown[2].startswith("step_000000000003 (best): score 2.0, 0.0 MiB in state")
    assert shown[3].startswith("step_000000000004: score 1.0")


def test_a_snapshot_with_its_leaves(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report.main([str(run_dir / "snapshots" / "step_000000000003"), "--leaves"])
    assert capsys.readouterr().out.splitlines()[1] == "  state/w: float32[2, 3]"


@pytest.mark.parametrize(("arguments", "reason"), [([], "no folder given"), (["/nowhere"], "not there")])
def test_what_is_no_run_is_one_line(arguments: list[str], reason: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        report.main(arguments)
    assert stopped.value.code == 2
    assert reason in capsys.readouterr().err
