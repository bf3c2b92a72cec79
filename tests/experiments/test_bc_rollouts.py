"""The rollout experiment: short runs that reach the expert, and its mistakes."""

from __future__ import annotations

import json
import pathlib

import pytest

from experiments import bc_rollouts


def lines(argv: list[str], capsys: pytest.CaptureFixture[str]) -> list[dict]:
    bc_rollouts.main(argv)
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


@pytest.mark.slow
@pytest.mark.parametrize("world", bc_rollouts.WORLDS)
def test_every_world_is_cloned(world: str, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    run, total = lines([f"--worlds={world}", "--device=cpu", f"--root={tmp_path}"], capsys)
    assert run["success"] == total["worst"] >= 0.95


def test_results_are_appended_and_an_unknown_world_is_refused(
    tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["--device=cpu", "--updates=2", f"--root={tmp_path}", f"--json={tmp_path / 'found.jsonl'}"]
    run, total = lines(flags, capsys)
    assert (run["world"], run["updates"], total["worst"]) == ("pendulum", 2, run["success"])
    assert len((tmp_path / "found.jsonl").read_text().splitlines()) == 2
    with pytest.raises(SystemExit):
        bc_rollouts.main(["--worlds=pendlum"])
    assert "there is no 'pendlum'; choose from pendulum" in capsys.readouterr().err
