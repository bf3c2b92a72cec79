"""Which snapshot is the latest and which the best, and which are removed."""

from __future__ import annotations

import os
import shutil

import pytest
import torch

from functional_sl.run import snapshot


def save(root, step, score=None, run_id="run-a", **more):
    more = {"keep": 100} | more
    return snapshot.save(root, step, {"state": [torch.tensor(step)]}, run_id=run_id, config={}, score=score, **more)


def steps(root):
    return sorted(int(path.name[5:]) for path in root.glob("step_*"))


def test_latest_is_the_highest_step_by_number_and_validity(tmp_path, caplog):
    assert snapshot.latest(tmp_path) is None
    nearest = save(tmp_path, 10000)
    save(tmp_path, 9900)
    for name in ("step_99999", "step_000000099999", "step_000000050000"):
        (tmp_path / name).mkdir()
    (tmp_path / "step_000000050000" / "state-0123456789abcdef.safetensors").touch()
    # The name says 20000, the manifest 9900.
    shutil.copytree(tmp_path / "step_000000009900", tmp_path / "step_000000020000")
    (tmp_path / "step_7").write_text("a file")
    (tmp_path / "notes").mkdir()
    assert snapshot.latest(tmp_path) == nearest
    for name in ("step_99999", "step_000000099999", "step_000000050000", "step_000000020000", "step_7"):
        assert (
            f"{name}/manifest.json: not there" in caplog.text
            or f"{name}: holds the snapshot of step 9900" in caplog.text
        )


def test_snapshots_of_another_run_are_foreign_where_the_run_is_told(tmp_path):
    mine, other = save(tmp_path, 1), save(tmp_path, 2, run_id="run-b", score=1.0)
    assert snapshot.latest(tmp_path) == other
    assert snapshot.latest(tmp_path, "run-a") == mine
    assert snapshot.best(tmp_path, "run-a") is None
    assert snapshot.restore(tmp_path, {"state": [torch.tensor(0)]}, run_id="run-a")[1]["step"] == 1
    save(tmp_path, 3, keep=1)
    assert steps(tmp_path) == [2, 3]


def test_best_is_the_highest_finite_score_and_the_earlier_of_equal_ones(tmp_path):
    assert snapshot.best(tmp_path) is None
    # 1, 5, 3, then resumed: 4, 2, NaN, 5, inf, none.
    for step, score in enumerate([1.0, 5.0, 3.0, 4.0, 2.0, float("nan"), 5.0, float("inf"), None], start=1):
        save(tmp_path, step, score)
    assert snapshot.best(tmp_path).name == "step_000000000002"
    (part,) = snapshot.best(tmp_path).glob("*.safetensors")
    os.truncate(part, 3)
    assert snapshot.best(tmp_path).name == "step_000000000007"


def test_pruning_keeps_the_newest_the_best_and_the_protected(tmp_path):
    for step, score in enumerate([5.0, 1.0, 2.0, 3.0, None, float("nan")], start=9997):
        save(tmp_path, step, score)
    snapshot.prune(tmp_path, keep=2, protect=[9999])
    assert steps(tmp_path) == [9997, 9999, 10001, 10002]
    snapshot.prune(tmp_path, keep=1)
    assert steps(tmp_path) == [9997, 10002]
    with pytest.raises(ValueError, match="keep=0"):
        snapshot.prune(tmp_path, keep=0)


def test_saving_below_the_newest_keeps_what_was_just_saved(tmp_path):
    for step in (10, 20, 30):
        save(tmp_path, step)
    save(tmp_path, 15, keep=2)
    assert steps(tmp_path) == [15, 20, 30]


def test_leftovers_go_and_what_others_wrote_stays(tmp_path):
    save(tmp_path, 5)
    snapshot.write_part(tmp_path, 4, "state", [torch.ones(1)])
    snapshot.write_part(tmp_path, 6, "state", [torch.ones(1)])
    foreign = tmp_path / "step_000000000003" / "notes.txt"
    foreign.parent.mkdir()
    foreign.touch()
    damaged = save(tmp_path, 2)
    (damaged / "manifest.json").write_text('{"format": 2}')
    before = sorted(path.name for path in damaged.iterdir())
    snapshot.prune(tmp_path, keep=1)
    # 6 is newer than the newest snapshot: another rank may be writing it. 2 may be of a later version.
    assert steps(tmp_path) == [2, 3, 5, 6]
    assert foreign.exists()
    assert sorted(path.name for path in damaged.iterdir()) == before


def test_a_step_saved_again_holds_only_its_new_files(tmp_path):
    save(tmp_path, 5)
    path = snapshot.save(tmp_path, 5, {"other": [torch.zeros(3)]}, run_id="run-a", config={})
    assert sorted(file.name.partition("-")[0] for file in path.iterdir()) == ["manifest.json", "other"]
    assert snapshot.restore(path, {"other": [torch.ones(3)]})[0]["other"][0].tolist() == [0, 0, 0]


def test_resuming_sets_the_abandoned_later_snapshots_aside_and_loses_none(tmp_path):
    for step in (10, 20, 30):
        save(tmp_path, step)
    moved = snapshot.set_aside(tmp_path, 10)
    assert snapshot.latest(tmp_path).name == "step_000000000010"
    assert steps(tmp_path) == [10]
    assert [snapshot.read_manifest(path)["step"] for path in moved] == [20, 30]
    save(tmp_path, 20)
    assert snapshot.set_aside(tmp_path, 10) == [tmp_path / "superseded" / "step_000000000020.1"]


@pytest.mark.parametrize("step", [-1, 1.5])
def test_a_step_is_a_count(tmp_path, step):
    with pytest.raises((ValueError, TypeError)):
        save(tmp_path, step)
