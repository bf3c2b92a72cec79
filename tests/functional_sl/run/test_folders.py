"""A run begins in a folder of its own, and its other ranks find the same one."""

from __future__ import annotations

from pathlib import Path

import pytest

from functional_sl.run import files, folders, resuming, runlog, snapshot
from functional_sl.run.cli import UsageError
from functional_sl.run.manifest import SnapshotError
from functional_sl.run.runlog import RunError


def test_what_a_run_would_overwrite_is_named(tmp_path: Path) -> None:
    names = ("loss.png", "tensorboard")
    folders.check_vacant(tmp_path / "absent", names)
    (tmp_path / "notes.txt").touch()
    folders.check_vacant(tmp_path, names)
    (tmp_path / "tensorboard").mkdir()
    with pytest.raises(UsageError, match="holds tensorboard of something else"):
        folders.check_vacant(tmp_path, names)
    (tmp_path / "run.json").touch()
    folders.check_vacant(tmp_path, names)


def test_a_rank_that_sees_another_folder_is_told(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="all ranks need one file system"):
        folders.enter(tmp_path, "a run", 1)
    with runlog.create({}, ("mine",), run_dir=tmp_path), pytest.raises(RunError, match=r"holds run mine-.* here"):
        folders.enter(tmp_path, "a run", 1)
    assert not (tmp_path / "ranks").exists()


def test_a_name_that_the_system_refuses_is_one_line(tmp_path: Path) -> None:
    long = tmp_path / ("a" * 300)
    with pytest.raises(ValueError, match=r"aaa.*: File name too long; choose another place"):
        folders.check_vacant(long, ("loss.png",))
    with pytest.raises(UsageError, match=r"aaa.*: File name too long"):
        resuming.folder(long)
    with pytest.raises(SnapshotError, match=r"aaa.*: File name too long"):
        snapshot.restore(long, {})
    assert not files.there(tmp_path / "absent")
