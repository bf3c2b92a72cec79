"""A snapshot of either layout becomes a bundle that predicts what the trainer's parameters predict."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import tiny_recipes
import tiny_training
import torch
from ranks import run_ranks

from functional_sl import bundle, export
from functional_sl.run import snapshot
from functional_sl.run.cli import UsageError


def one_rank(folder: str) -> None:
    tiny_training.run(folder)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("export") / "run"
    tiny_training.run(folder)
    return folder


def check(run: Path, out: Path) -> None:
    """The stored network of the last snapshot, written once more by hand."""
    state = tiny_training.state(run)
    x = torch.linspace(-2, 2, 51).reshape(17, 3)
    expected = torch.tanh(x @ state["params/w1"] + state["params/b1"]) @ state["params/w2"]
    loaded = bundle.load(out)
    assert torch.equal(loaded.predict({"x": x})["y"], expected)
    trained = loaded.bundle.about["trained"]
    assert (trained["run_id"], trained["updates"]) == (tiny_training.manifest(run)["run_id"], 12)


def test_one_process(run, tmp_path, capsys):
    export.main([str(run), str(tmp_path / "model"), "--formats=safetensors"])
    assert list(json.loads(capsys.readouterr().out)["files"]) == [str(tmp_path / "model.safetensors")]
    check(run, tmp_path / "model.safetensors")


def test_torchrun(tmp_path):
    run_ranks(1, one_rank, str(tmp_path / "run"))
    assert tiny_training.manifest(tmp_path / "run")["extra"]["layout"] == 2
    export.export(tiny_training.snapshot(tmp_path / "run"), tmp_path / "model")
    check(tmp_path / "run", tmp_path / "model.safetensors")
    with tiny_training.prepared():
        assert tiny_training.resume(tmp_path / "run", updates=14)["updates"] == 14
    assert tiny_training.manifest(tmp_path / "run")["extra"]["layout"] == 1


def test_what_cannot_be_exported_is_named(run, tmp_path, monkeypatch, capsys):
    snapshot.save(tmp_path / "other", 3, {"state": {"w": torch.zeros(2)}}, run_id="r", config={})
    with pytest.raises(UsageError, match="of another trainer's run, which has no setting 'recipe'"):
        export.export(tmp_path / "other" / "step_000000000003", tmp_path / "model")
    line = tiny_recipes.line

    def silent(config: tiny_recipes.Line):
        return line(config)._replace(bundle=None)

    silent.__annotations__["config"], silent.__module__ = tiny_recipes.Line, "tiny_recipes"
    monkeypatch.setattr(tiny_recipes, "line", silent)
    with pytest.raises(SystemExit, match="2"):
        export.main([str(run), str(tmp_path / "model")])
    assert "the recipe makes no bundle" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="2"):
        export.main([str(run)])
    assert not list(tmp_path.glob("model*"))
