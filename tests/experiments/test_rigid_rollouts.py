"""The experiment of rigid bodies: its table, its pictures and its mistakes, on a model that has learnt nothing."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
import torch
from PIL import Image
from tiny_rigid import TINY

from experiments import rigid_rollouts
from functional_sl import bundle, keys
from functional_sl.recipes import rigidformer
from functional_sl.run.cli import UsageError
from functional_sl.sources import rigid_bodies

HORIZONS = (4, 6)


@pytest.fixture
def flags(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Of a model in its folder, the data beside it; a film of few frames."""
    pytest.importorskip("mujoco")
    monkeypatch.setattr(rigid_rollouts, "HORIZONS", HORIZONS)
    task = rigidformer.build(dataclasses.replace(TINY, path=str(tmp_path), scenes=2, validation_scenes=2))
    bundle.save(task.bundle(*task.init(keys.key(0))), tmp_path / "model.safetensors")
    return [f"--bundle={tmp_path / 'model.safetensors'}", f"--data={tmp_path}", "--step=3"]


def test_an_untrained_model_falls_and_is_drawn(
    flags: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rigid_rollouts.main([*flags, f"--pictures={tmp_path / 'pictures'}"])
    *rows, last = (json.loads(line) for line in capsys.readouterr().out.splitlines())
    named = {row.pop("prediction"): row for row in rows}
    assert list(named) == ["step1", "step3", "hold", "land"]
    assert all(list(row) == [f"{x}_{h}" for h in HORIZONS for x in ("position_m", "orientation_deg")]
               for row in named.values())  # fmt: skip
    # Before anything has touched, what falls freely and what lands afterwards are one.
    if last["touched"]["4"] == 0.0:
        assert named["step1"]["position_m_4"] == pytest.approx(named["land"]["position_m_4"], abs=1e-3)
    with Image.open(tmp_path / "pictures" / "rigidformer.gif") as film:
        assert film.n_frames == 2  # 3 and 6 frames after the start
    assert (tmp_path / "pictures" / "rigidformer_error.png").read_bytes().startswith(b"\x89PNG")


def test_a_film_ends_with_its_scene(flags: list[str], tmp_path: Path) -> None:
    path = tmp_path / "validation.safetensors"
    scenes, about = rigid_bodies.read(path)
    rigid_bodies.write(path, scenes._replace(lengths=torch.tensor([24, 7])), about["drawn"])
    settings = rigid_rollouts.Settings(*(flag.split("=")[1] for flag in flags[:2]), None, 1, 3)
    course, held_out, params = rigid_rollouts.trained(settings)
    assert len(list(rigid_rollouts.film(course, held_out, params, 0, 3))) == 2
    assert len(list(rigid_rollouts.film(course, held_out, params, 1, 3))) == 1  # frame 6 of 7, not frame 9


@pytest.mark.parametrize(("changes", "message"), [({"scene": 2}, "one of 2"), ({"step": 2}, r"one of \(1, 3\)")])
def test_a_film_that_cannot_be_made_is_named(flags: list[str], changes: dict[str, int], message: str) -> None:
    bundle_, data = (flag.split("=")[1] for flag in flags[:2])
    with pytest.raises(UsageError, match=message):
        rigid_rollouts.trained(rigid_rollouts.Settings(**{"bundle": bundle_, "data": data, "step": 3, **changes}))


def test_scenes_that_are_too_short_are_refused(flags: list[str], tmp_path: Path) -> None:
    path = tmp_path / "validation.safetensors"
    scenes, about = rigid_bodies.read(path)
    rigid_bodies.write(path, scenes._replace(lengths=torch.tensor([9, 7])), about["drawn"])
    bundle_, data = (flag.split("=")[1] for flag in flags[:2])
    with pytest.raises(UsageError, match=r"the longest of the held-out scenes ends after 9 frames, .* take 10"):
        rigid_rollouts.trained(rigid_rollouts.Settings(bundle_, data, step=3))


def test_data_that_are_not_there_are_one_line(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    with pytest.raises(SystemExit, match="2"):
        rigid_rollouts.main([f"--bundle={tmp_path / 'model.safetensors'}", f"--data={tmp_path / 'data'}"])
    told = capsys.readouterr().err
    assert f"{tmp_path / 'data'}" in told
    assert told.count("\n") == 1
