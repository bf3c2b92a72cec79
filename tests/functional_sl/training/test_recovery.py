"""12 updates straight equal 6, an end by force, a resume and 12, byte for byte; and what is refused by name."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_recipes
import tiny_training
import torch
from equal import assert_bits_equal
from ranks import RanksFailed, run_ranks

from functional_sl import keys, tree
from functional_sl.run import runlog
from functional_sl.run.cli import UsageError
from functional_sl.run.snapshot import SnapshotError
from functional_sl.training import recovery, update

NOISY = {"recipe": "tiny_recipes:noisy", "dropout": 0.3, "validate_every": 3, "snapshot_every": 2}
NOISY |= {"optimizer": "adamw", "weight_decay": 0.1, "lr_schedule": "cosine", "lr_warmup_updates": 4}


class Killed(BaseException):
    """Stands for the end of a process."""


def strike(at: int, act: Any) -> Any:
    """Returns `noisy` whose host code acts in the `at`-th draw after the admission's."""
    build, draws = tiny_recipes.noisy, [0]

    def built(config: tiny_recipes.Line) -> Any:
        recipe = build(config)

        def sample(data: Any, key: torch.Tensor, size: int) -> Any:
            draws[0] += 1
            if draws[0] == at + 1:
                act()
            return recipe.sample(data, key, size)

        return recipe._replace(sample=sample)

    return built


def equal_runs(first: Path, second: Path) -> None:
    assert_bits_equal(tiny_training.state(first), tiny_training.state(second))
    assert tiny_training.records(first) == tiny_training.records(second)


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("straight") / "run"
    assert tiny_training.run(folder, **NOISY)["updates"] == 12
    return folder


def end(monkeypatch: pytest.MonkeyPatch, folder: Path, at: int, **changes: Any) -> None:
    """Ends a new run in its `at`-th update."""

    def act() -> None:
        raise Killed

    built = strike(at, act)
    built.__annotations__["config"] = tiny_recipes.Line
    monkeypatch.setattr(tiny_recipes, "noisy", built)
    built.__module__ = "tiny_recipes"
    with pytest.raises(Killed):
        tiny_training.run(folder, **{**NOISY, **changes})
    monkeypatch.undo()


@pytest.mark.parametrize("at", [3, 8, 9])
def test_a_resumed_run_equals_a_straight_one(straight, tmp_path, monkeypatch, at):
    """In update 3 only a snapshot of 2 is there; in 8 that of 6 and a record ahead of it; in 9 a snapshot of 8."""
    end(monkeypatch, tmp_path / "run", at)
    torch.rand(3)
    np.random.rand(3)  # noqa: NPY002
    tiny_training.resume(tmp_path / "run")
    equal_runs(straight, tmp_path / "run")
    names = {name.partition("/")[0] for name in tiny_training.state(straight)}
    assert names == {"params", "optimizer", "buffers", "control"}


def test_a_record_covers_updates_before_and_after_a_break(tmp_path, monkeypatch):
    """That of update 10 is the mean over 7 to 10, with the snapshot of 8 between."""
    changes = {"log_every": 5, "validate_every": 6}
    tiny_training.run(tmp_path / "straight", **{**NOISY, **changes})
    end(monkeypatch, tmp_path / "run", 9, **changes)
    tiny_training.resume(tmp_path / "run")
    equal_runs(tmp_path / "straight", tmp_path / "run")
    assert [record["step"] for record in tiny_training.records(tmp_path / "run")] == [5, 6, 10, 12]


def test_a_run_leaves_the_callers_generators_alone(tmp_path):
    torch.manual_seed(1)
    expected = torch.rand(1)
    torch.manual_seed(1)
    tiny_training.run(tmp_path / "run", **NOISY)
    assert torch.equal(torch.rand(1), expected)


def test_a_callback_may_save_and_die(straight, tmp_path, monkeypatch):
    """What it saved in validation 6 is the boundary: the resumed run draws and writes what the straight one did."""

    def save(validated: Any) -> None:
        torch.rand(5)
        if validated.updates == 6:
            folder = validated.save()
            assert folder.name.endswith("6")
            raise Killed

    with pytest.raises(Killed):
        tiny_training.run(tmp_path / "run", on_validation=save, **NOISY)
    assert tiny_training.steps(tmp_path / "run")[-1] == 6
    tiny_training.resume(tmp_path / "run")
    equal_runs(straight, tmp_path / "run")


def test_saving_callbacks_change_nothing(straight, tmp_path):
    tiny_training.run(tmp_path / "run", on_validation=lambda validated: validated.save(), **NOISY)
    equal_runs(straight, tmp_path / "run")


@pytest.mark.parametrize("call", range(0, 40, 5))
def test_an_end_during_a_save(straight, tmp_path, monkeypatch, call):
    """The run ends at one of the save's file-system calls at update 6; what was committed before goes on."""
    real, count = {name: getattr(os, name) for name in ("write", "fsync", "replace", "open")}, [None]

    def counting(name: str) -> Any:
        def act(*args: Any, **kwargs: Any) -> Any:
            if count[0] is not None:
                count[0] += 1
                if count[0] > call:
                    raise Killed
            return real[name](*args, **kwargs)

        return act

    def save(validated: Any) -> None:
        if validated.updates == 6:
            count[0] = 0
            validated.save()
            raise Killed

    with monkeypatch.context() as patch:
        for name in real:
            patch.setattr(os, name, counting(name))
        with pytest.raises(Killed):
            tiny_training.run(tmp_path / "run", on_validation=save, **NOISY)
    tiny_training.resume(tmp_path / "run")
    equal_runs(straight, tmp_path / "run")


def one_rank(folder: str, kill_at: int | None = None, resume: bool = False) -> Any:
    """Runs this rank, which the kill strikes if it is rank 1."""
    with pytest.MonkeyPatch.context() as patch:
        if kill_at is not None and os.environ["RANK"] == "1":
            built = strike(kill_at, lambda: os.kill(os.getpid(), signal.SIGKILL))
            built.__annotations__["config"], built.__module__ = tiny_recipes.Line, "tiny_recipes"
            patch.setattr(tiny_recipes, "noisy", built)
        if resume:
            return tiny_training.resume(folder)
        return tiny_training.run(folder, **{**NOISY, "timeout_s": 5.0})


def test_two_ranks_resume_after_kill_9(tmp_path):
    straight, broken = tmp_path / "straight", tmp_path / "broken"
    first, second = run_ranks(2, one_rank, str(straight))
    assert first == second
    with pytest.raises(RanksFailed, match="died without a word"):
        run_ranks(2, one_rank, str(broken), 8)
    assert tiny_training.steps(broken)[-1] == 6
    run_ranks(2, one_rank, str(broken), None, True)
    equal_runs(straight, broken)
    state = tiny_training.state(straight)
    assert {name.partition("/")[0] for name in state} == {
        "params", "optimizer", "buffers.rank0", "buffers.rank1", "control.rank0", "control.rank1",
    }  # fmt: skip
    for name in ("buffers.rank{}/mean", "control.rank{}/own/key", "control.rank{}/host/torch_cpu"):
        assert not torch.equal(state[name.format(0)], state[name.format(1)]), name
    # What each attempt knows of the other world is one line, before anything changes.
    before = tiny_training.files(broken)
    with pytest.raises(UsageError, match="is of 2 ranks, but 1 have started; start 2 processes"):
        tiny_training.resume(broken, updates=15)
    assert tiny_training.files(broken) == before


def test_the_size_of_a_rank_grows_with_neither_parameters_nor_data(tmp_path):
    sizes = []
    for hidden, rows in ((4, 40), (400, 4000)):
        recipe = tiny_recipes.line(tiny_recipes.Line(hidden=hidden, rows=rows))
        training = update.make_training(recipe, tiny_training.train.TrainConfig(), _single(), torch.device("cpu"))
        state = training.init(*recipe.init(torch.zeros(2, dtype=torch.int64)), ["absolute"], 0)
        own = recovery._own_parts(state, torch.device("cpu"))
        sizes.append(len(recovery._bytes(own)))
        assert_bits_equal(recovery._trees(recovery._bytes(own), own), own)
    assert sizes[0] == sizes[1] < 16_000


def _single() -> Any:
    from functional_sl.parallel import collectives

    return collectives.single()


def edit(path: Path, change: Any) -> None:
    path.write_text(change(path.read_text()))


def cut(run: Path) -> None:
    edit(run / "metrics.jsonl", lambda text: "".join(text.splitlines(keepends=True)[:3]))


def changed(run: Path) -> None:
    edit(run / "metrics.jsonl", lambda text: text.replace('"step": 6', '"step": 7'))


def edited(run: Path) -> None:
    edit(run / "metrics.jsonl", lambda text: text.replace('"samples": 8,', '"samples": 9,'))


def broken(run: Path) -> None:
    edit(run / "metrics.jsonl", lambda text: text.replace('"step": 2,', '"step"; 2,'))


def foreign(run: Path) -> None:
    info = json.loads((run / "run.json").read_text())
    (run / "run.json").write_text(json.dumps(info | {"run_id": "another"}))


def ahead(run: Path) -> None:
    edit(
        run / "metrics.jsonl", lambda text: text + text.splitlines()[-1].replace('"attempt": 0', '"attempt": 3') + "\n"
    )


def repeated(run: Path) -> None:
    edit(run / "metrics.jsonl", lambda text: text + text.splitlines()[-1] + "\n")


@pytest.mark.parametrize(
    ("harm", "error", "pattern"),
    [
        (cut, UsageError, r"metrics.jsonl: \d+ bytes, but the snapshot was written after \d+"),
        (changed, UsageError, "its first [0-9]+ bytes are not those"),
        (edited, UsageError, "its first [0-9]+ bytes are not those"),
        (broken, UsageError, "line 2: invalid"),
        (foreign, UsageError, "is of run noisy-.* but lies in run another"),
        (ahead, UsageError, "ahead of its run, which knows no attempt 3"),
        (repeated, UsageError, "invalid after the record of update 6"),
    ],
)
def test_what_is_no_history_of_the_snapshot_is_refused(straight, tmp_path, harm, error, pattern):
    run = shutil.copytree(straight, tmp_path / "run")
    for step in (8, 9, 10, 12):
        shutil.rmtree(tiny_training.snapshot(run, step))
    edit(run / "metrics.jsonl", lambda text: "".join(text.splitlines(keepends=True)[:6]))
    harm(run)
    before = tiny_training.files(run)
    with pytest.raises(error, match=pattern):
        tiny_training.resume(tiny_training.snapshot(run, 6))
    assert {**tiny_training.files(run), ".lock": b""} == {**before, ".lock": b""}


def test_a_torn_line_is_moved_and_lines_ahead_are_superseded(straight, tmp_path):
    run = shutil.copytree(straight, tmp_path / "run")
    for step in (10, 12):
        shutil.rmtree(tiny_training.snapshot(run, step))
    lines = (run / "metrics.jsonl").read_text().splitlines(keepends=True)
    (run / "metrics.jsonl").write_text("".join(lines[:11]) + lines[11][:20])
    tiny_training.resume(run)
    equal_runs(straight, run)
    assert (run / "metrics.torn").read_text() == lines[11][:20] + "\n"
    assert [record["host"]["attempt"] for record in runlog.effective(run)] == [0] * 9 + [1] * 3


def test_a_run_that_is_at_its_end_is_drawn_again(straight, tmp_path, capsys):
    """Its process may have been killed after the last snapshot, before pictures and summary."""
    run = Path(shutil.copytree(straight, tmp_path / "run"))
    picture = (run / "loss.png").read_bytes()
    (run / "loss.png").unlink()
    summary = tiny_training.resume(run)
    assert (run / "loss.png").read_bytes() == picture
    last = tiny_training.records(run)[-1]
    assert (summary["updates"], summary["train_loss"]) == (12, last["train_loss"])
    assert summary["validation"]["loss"] == last["validation_loss"]
    assert "the run is at its end: its pictures are drawn anew" in capsys.readouterr().err
    equal_runs(straight, run)
    assert tiny_training.steps(run) == tiny_training.steps(straight)


@pytest.mark.parametrize(
    ("changes", "pattern"),
    [
        ({"hidden": 5}, "hidden 4 -> 5"),
        ({"learning_rate": 0.5}, "learning_rate 0.001 -> 0.5"),
        ({"updates": 9}, "has 12 already"),
        ({"updates": 12}, "has 12 already"),
        ({"updates": 15, "run_dir": "elsewhere"}, "a resumed run stays in its folder"),
        ({"updates": 15, "init_from": "x"}, "give one of them"),
        ({"updatez": 15}, "did you mean updates"),
    ],
)
def test_other_settings_are_refused(straight, changes, pattern):
    before = tiny_training.files(straight)
    with pytest.raises(UsageError, match=pattern):
        tiny_training.resume(straight, **changes)
    assert tiny_training.files(straight) == before


@pytest.mark.parametrize(
    ("change", "pattern"),
    [
        (lambda r: r._replace(schema={"inputs": ["z"]}), "schema is another"),
        (lambda r: r._replace(data=tree.map(lambda x: x[1:], r.data)), "the data differ"),
        (
            lambda r: tiny_recipes.line(tiny_recipes.Line(hidden=5)),
            r"leaf 'w1' is float32\[3, 4\], expected float32\[3, 5\]",
        ),
    ],
)
def test_another_task_is_refused(straight, tmp_path, monkeypatch, change, pattern):
    run, build = shutil.copytree(straight, tmp_path / "run"), tiny_recipes.noisy

    def built(config: tiny_recipes.Line) -> Any:
        return change(build(config))

    built.__module__ = "tiny_recipes"
    built.__annotations__["config"] = tiny_recipes.Line
    monkeypatch.setattr(tiny_recipes, "noisy", built)
    before = tiny_training.files(run)
    with pytest.raises(UsageError, match=pattern):
        tiny_training.resume(run, updates=15)
    assert tiny_training.files(run) == before


def test_a_damaged_snapshot_names_the_last_good_one(straight, tmp_path):
    run = shutil.copytree(straight, tmp_path / "run")
    part = next(tiny_training.snapshot(run).glob("params-*"))
    part.write_bytes(part.read_bytes()[:-1] + b"!")
    with pytest.raises((UsageError, SnapshotError), match=r"damaged.*step_000000000010"):
        tiny_training.resume(tiny_training.snapshot(run), updates=15)
    assert tiny_training.resume(run, updates=12)["updates"] == 12
    equal_runs(straight, run)


def test_best_and_latest(straight, tmp_path):
    """The best is that of the highest score; going on from it sets later ones aside, whose scores count no more."""
    run = shutil.copytree(straight, tmp_path / "run")
    scores = {step: tiny_training.manifest(run, step)["score"] for step in tiny_training.steps(run)}
    assert [step for step, score in scores.items() if score is not None] == [3, 6, 9, 12]
    best = max((s for s in scores if scores[s] is not None), key=lambda s: scores[s])
    summary = tiny_training.resume("best", run_dir=str(run), updates=13)
    notes = json.loads((run / "run.json").read_text())["attempts"]
    assert notes[-1]["resume_step"] == best
    assert summary["updates"] == 13
    with pytest.raises(UsageError, match="holds no run"):
        tiny_training.resume("latest", run_dir=str(tmp_path))


def test_the_snapshot_resumed_from_stays(straight, tmp_path):
    """That of update 2 has no score, so it is neither the newest one that is kept nor the best."""
    run = shutil.copytree(straight, tmp_path / "run")
    tiny_training.resume(tiny_training.snapshot(run, 2), keep_snapshots=1)
    kept = tiny_training.steps(run)
    assert kept[0] == 2
    assert kept[-1] == 12
    assert len(kept) <= 3


def test_a_moved_run_goes_on(straight, tmp_path, monkeypatch):
    run = shutil.copytree(straight, tmp_path / "a run ü")
    shutil.rmtree(tiny_training.snapshot(run, 12))
    monkeypatch.chdir(tmp_path)
    assert tiny_training.resume("a run ü/")["updates"] == 12
    equal_runs(straight, run)
    info = json.loads((run / "run.json").read_text())
    assert info["run_id"] == json.loads((straight / "run.json").read_text())["run_id"]
    assert not re.search(str(straight), (run / "run.json").read_text().split('"attempts"')[0])


def test_init_from_takes_parameters_and_buffers(straight, tmp_path):
    config = {**NOISY, "updates": 1, "validate_every": 1, "learning_rate": 1e-30, "lr_warmup_updates": 0}
    tiny_training.run(tmp_path / "run", init_from=str(straight), **config)
    new, old = tiny_training.state(tmp_path / "run"), tiny_training.state(straight)
    for name in ("w1", "b1", "w2"):
        assert torch.equal(new[f"params/{name}"], old[f"params/{name}"])
    # One update has moved the key of the dropout on.
    assert torch.equal(new["buffers/key"], keys.split(old["buffers/key"])[1])
    assert int(new["optimizer/updates"]) == 1
