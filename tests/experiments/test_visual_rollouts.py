"""The experiment from pixels: what it reports of a tiny task, its films, and its mistakes."""

from __future__ import annotations

import json
import pathlib

import numpy as np
import pytest
import tiny_pixels
import torch
from PIL import Image

from experiments import visual_rollouts


def test_an_exported_policy_is_judged_with_and_without_sight_and_filmed(
    tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    dots = {**tiny_pixels.SETTINGS, "episodes": 4, "batch_size": 4, "tensorboard": False}
    monkeypatch.setitem(visual_rollouts.WORLDS, "dots", dots)
    flags = ["--worlds=dots", "--updates=2", "--device=cpu", f"--root={tmp_path}", f"--films={tmp_path}"]
    visual_rollouts.main(flags)
    (found,) = (json.loads(line) for line in capsys.readouterr().out.splitlines())
    assert (found["world"], found["updates"], found["expert_return"]) == ("dots", 2, 0.0)
    assert found["success"] != found["blind_success"]
    with Image.open(tmp_path / "visual_dots.gif") as film:
        assert film.size == (2 * 3 * 18 + 2, 2 * (3 * 18 + visual_rollouts.STRIP) + 2)


def test_a_strip_shows_the_present_behind_what_is_done() -> None:
    """48 pixels of the camera make 144; 32 + 4 steps of 4 pixels each."""
    done, ahead = torch.tensor([1.0, 0.0]), torch.tensor([0.0, -1.0, -1.0, -1.0])
    strip = visual_rollouts.shown(torch.zeros(3, 48, 48, dtype=torch.uint8), done, ahead)[144:]
    orange, dark = ((strip == np.array(colour)).all(-1) for colour in ((230, 126, 34), (60, 64, 72)))
    assert sorted(set(np.nonzero(dark)[1] // 4)) == [31, 32]
    assert sorted(set(np.nonzero(orange)[1] // 4)) == [33, 34, 35]
    assert np.nonzero(orange)[0].min() == 44


def test_an_unknown_world_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        visual_rollouts.main(["--worlds=pendlum"])
    assert "there is no 'pendlum'; choose from pendulum" in capsys.readouterr().err
