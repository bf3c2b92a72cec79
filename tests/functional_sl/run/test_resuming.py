"""Among the runs of several trainers the latest is that of one's own."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from functional_sl.run import resuming, runlog, snapshot
from functional_sl.run.cli import UsageError


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Path]:
    """Two runs under `runs/`, the second the newer one, and their snapshots."""
    monkeypatch.chdir(tmp_path)
    found = {}
    for age, name in enumerate(("task", "recipe")):
        with runlog.create({name: "x"}, (name,), run_dir=f"runs/{name}") as log:
            values = {"state": {"w": torch.zeros(2)}}
            snapshot.save(log.run_dir / "snapshots", 3, values, run_id=log.run_id, config={name: "x"})
        os.utime(f"runs/{name}/run.json", (100 + age, 100 + age))
        found[name] = Path(f"runs/{name}/snapshots/step_000000000003")
    return found


def test_latest_is_of_a_run_that_has_the_setting(runs: dict[str, Path]) -> None:
    for name, path in runs.items():
        for look in (resuming.find, resuming.folder):
            assert look("latest", having=name).samefile(path)
    assert resuming.find("latest").samefile(runs["recipe"])
    for name, other in (("task", "recipe"), ("recipe", "task")):
        for look in (resuming.find, resuming.folder):
            assert look(str(runs[name]), having=name) == runs[name]
            with pytest.raises(UsageError, match=f"another trainer's run, which has no setting '{other}'"):
                look(str(runs[name]), having=other)
    with pytest.raises(UsageError, match="no run with a game and a valid snapshot under"):
        resuming.find("latest", having="game")
