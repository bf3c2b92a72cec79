"""What `functional-sl` says of a run and of a snapshot."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from functional_sl import bundle, inspection, report
from functional_sl.bundle import Bundle
from functional_sl.run import runlog, snapshot
from functional_sl.sources import episodes
from functional_sl.sources.episodes import Episodes, Feature, Schema


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


def test_a_snapshot_that_a_kill_left_unfinished_hides_no_other(
    run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (run_dir / "snapshots" / "step_000000000005").mkdir()
    report.main([str(run_dir)])
    *_, whole, broken = capsys.readouterr().out.splitlines()
    assert whole.startswith("step_000000000004: score 1.0")
    assert broken.startswith("step_000000000005: ")
    assert broken.endswith("not there, so this is no finished snapshot; choose another one")


def test_a_snapshot_with_its_leaves(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report.main([str(run_dir / "snapshots" / "step_000000000003"), "--leaves"])
    assert capsys.readouterr().out.splitlines()[1] == "  state/w: float32[2, 3]"


@pytest.mark.parametrize(("arguments", "reason"), [([], "no folder given"), (["/nowhere"], "not there")])
def test_what_is_no_run_is_one_line(arguments: list[str], reason: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        report.main(arguments)
    assert stopped.value.code == 2
    assert reason in capsys.readouterr().err


def scaled(tensors: dict, inputs: dict) -> dict:
    return {"y": inputs["x"] * tensors["w"]}


def test_a_bundle(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bundle, "scaled", scaled, raising=False)
    held = Bundle("functional_sl.bundle:scaled", {}, {"w": torch.ones(3)}, {"unit": "m"}, {"x": torch.ones(2, 3)})
    report.main([str(bundle.save(held, tmp_path / "model.safetensors"))])
    shown = capsys.readouterr().out
    assert shown.startswith("bundle of functional_sl.bundle:scaled")
    assert "about.unit: m" in shown


@pytest.fixture
def recorded(tmp_path: Path) -> Path:
    """Frames 0, 1, ... 9 of two episodes, of which the last does not count; one channel of two is dead."""
    features = (
        Feature("x", (2,), "float32", (("ramp", "m"), ("still", ""))),
        Feature("valid", (), "bool", (("valid", ""),)),
    )
    values = {"x": torch.stack([torch.arange(10.0), torch.full((10,), 7.0)], -1), "valid": torch.arange(10) < 9}
    held = Episodes(
        Schema(features, 0.5, "valid", {"world": "toy"}), values, torch.tensor([4, 6]), torch.ones(2).bool()
    )
    episodes.write(tmp_path / "data.safetensors", held)
    return tmp_path / "data.safetensors"


def test_a_data_file(recorded: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """0 ... 8 have the mean 4 and the variance 60 / 9; nine values fall into nine of the twenty bins."""
    report.main([str(recorded), f"--picture={tmp_path / 'histograms.png'}"])
    shown = capsys.readouterr().out.splitlines()
    assert shown[0].startswith("data: 2 episodes of 4 to 6 frames, 10 in all, step 0.5 s, digest ")
    assert shown[1:] == [
        "  valid: 90.0 % of frames; terminated: 2",
        "  dead channels: x/still",
        "  x/ramp: mean 4, std 2.582, 0 to 8 m; coverage 45 %",
        "  x/still: mean 7, std 0, 7 to 7; coverage 5 % (dead)",
        "  about.world: toy",
    ]
    assert (tmp_path / "histograms.png").read_bytes()[:4] == b"\x89PNG"
    counts = inspection.channels(episodes.read(recorded))[0].counts
    assert (sum(counts), max(counts)) == (9, 1)


def test_a_file_of_something_else_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "x.safetensors").write_bytes(b"nothing of the kind")
    with pytest.raises(SystemExit, match="2"):
        report.main([str(tmp_path / "x.safetensors")])
    assert "is no complete file of episodes" in capsys.readouterr().err
