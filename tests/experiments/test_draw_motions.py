"""The script draws a picture, prints its table and refuses what falls over."""

from __future__ import annotations

import sys

import pytest
import torch

pytest.importorskip("mujoco")

from experiments import draw_motions
from functional_sl.motions import clip, load
from functional_sl.sim.robots import g1


def run(monkeypatch: pytest.MonkeyPatch, *flags: str) -> None:
    monkeypatch.setattr(sys, "argv", ["draw_motions", *flags])
    draw_motions.main()


def test_a_picture_and_a_table(tmp_path, monkeypatch, capsys) -> None:
    picture = tmp_path / "motions.png"
    run(monkeypatch, "--motions=squat", "--seconds=2", f"--picture={picture}")
    assert picture.read_bytes().startswith(b"\x89PNG")
    row = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("squat")).split()
    assert row[3] == "0.0%"


def test_a_clip_that_would_fall_fails_the_check(tmp_path, monkeypatch) -> None:
    """All joints at 0, leaning forward by 0.5 rad about the ankles."""
    qpos = torch.zeros(3, 36)
    qpos[:, 2], qpos[:, 3], qpos[:, 5] = 0.75, 0.9689, 0.2474
    load.save(tmp_path / "leaning.npz", clip.make(qpos, 50.0, "leaning", len(g1.JOINTS)))
    with pytest.raises(SystemExit) as caught:
        run(monkeypatch, f"--motions={tmp_path / 'leaning.npz'}", "--check", "--contact_height=0.2")
    assert caught.value.code == 1


def test_listing(monkeypatch, capsys) -> None:
    run(monkeypatch, "--list")
    assert "walk: Walks along an arc" in capsys.readouterr().out
