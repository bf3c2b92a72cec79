"""A run has a folder of its own, and its metrics are one rising series of strict JSON whatever broke in between."""

from __future__ import annotations

import json
import os
import re
import resource
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch

from functional_sl.run import identity, runlog
from functional_sl.run.runlog import RunError

CONFIG = {"lr": 0.1, "steps": 200, "optim": {"b1": 0.9, "b2": 0.99}}
BARE = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}


def create(tmp_path, **more):
    return runlog.create(CONFIG, ["pendulum", "seed0"], **{"run_dir": tmp_path / "run"} | more)


def reopen(tmp_path, step, config=CONFIG, **more):
    return runlog.reopen(tmp_path / "run", config, step, **more)


def shared_bytes(records):
    return [json.dumps({name: value for name, value in record.items() if name != "host"}) for record in records]


def test_a_new_run_has_a_name_an_id_and_its_config(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["x", "--a=1"])
    with runlog.create(CONFIG, ["ALE/Pong v5", "", "ü", "seed0"], base_dir=tmp_path / "runs") as log:
        assert log.run_dir.parent == tmp_path / "runs"
        assert re.fullmatch(r"ALE_Pong_v5-_-seed0-\d{8}-\d{6}-[0-9a-f]{4}", log.run_id)
        assert log.run_dir.name == log.run_id
    info = runlog.describe(log.run_dir)
    assert (info["run_id"], info["config"]) == (log.run_id, CONFIG)
    assert info["config_digest"] == identity.digest(dict(reversed(CONFIG.items())))
    (attempt,) = info["attempts"]
    assert (attempt["attempt"], attempt["resume_step"], attempt["command"]) == (0, None, ["x", "--a=1"])
    assert attempt["versions"].keys() >= {"python", "torch", "numpy", "optree", "safetensors"}


MAKER = (
    "import sys\nfrom functional_sl.run import runlog\n"
    "with runlog.create({'a': '\\xfc'}, ['x'], base_dir=sys.argv[1]) as log:\n"
    "    log.write(1, {'who': log.run_id, 'text': '\\xfc'})\n"
)


def test_eight_processes_get_eight_folders_in_any_locale(tmp_path):
    base = tmp_path / "runs of ü"
    command = [sys.executable, "-c", MAKER, base]
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda _: subprocess.run(command, env=os.environ | BARE, check=True), range(8)))
    folders = list(base.iterdir())
    assert len(folders) == 8
    for folder in folders:
        (record,) = runlog.effective(folder)
        assert (record["who"], record["text"]) == (folder.name, "ü")
        assert runlog.describe(folder)["config"] == {"a": "ü"}


def test_two_runs_whose_names_collide_get_two_folders(tmp_path, monkeypatch):
    tokens = iter(["aaaa", "aaaa", "aaaa", "bbbb"])
    monkeypatch.setattr(runlog, "_new_id", lambda name: f"{name}-{next(tokens)}")
    logs = [runlog.create({}, ["x"], base_dir=tmp_path) for _ in range(2)]
    assert [log.run_dir.name for log in logs] == ["x-aaaa", "x-bbbb"]


def test_an_occupied_folder_is_refused_and_left_as_it_is(tmp_path):
    (tmp_path / "run").mkdir()
    log = create(tmp_path)
    log.write(1, {"a": 1})
    for live in (True, False):
        with pytest.raises(RunError, match="a live process holds" if live else "holds a run already; .*--resume"):
            create(tmp_path)
        if live:
            with pytest.raises(RunError, match="a live process holds"):
                reopen(tmp_path, 1)
            log.close()
    assert len(runlog.describe(tmp_path / "run")["attempts"]) == 1
    assert [record["a"] for record in runlog.read(tmp_path / "run")] == [1]


@pytest.mark.parametrize("place", [{"run_dir": "file"}, {"run_dir": "file/run"}, {"base_dir": "file"}])
def test_a_folder_that_cannot_be_made_is_named(tmp_path, monkeypatch, place):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").touch()
    with pytest.raises(RunError, match=r"file.*: cannot write .*; choose a folder that can be written"):
        runlog.create({}, ["x"], **place)


@pytest.mark.parametrize("config", [{"a": {"b": float("inf")}}, {"a": {"b": torch.ones(1)}}])
def test_a_config_that_json_cannot_hold_is_refused_by_field(tmp_path, config):
    with pytest.raises(ValueError, match=r"config\.a\.b: .*no JSON value"):
        runlog.create(config, ["x"], base_dir=tmp_path / "runs")
    assert os.listdir(tmp_path) == []


def test_lines_are_strict_json_and_name_what_is_not_finite(tmp_path):
    values = {
        "loss": torch.tensor(float("nan")),
        "mean": None,
        "norms": {"actor": np.float32("inf"), "critic": torch.tensor(0.5, dtype=torch.bfloat16)},
        "ids": torch.tensor([1, 2]),
        "pair": (1.5, -float("inf")),
        "flag": np.bool_(True),
        "count": np.int64(3),
        "phase": "evaluation",
    }
    with create(tmp_path) as log:
        log.write(np.int64(10), values, {"rate": float("inf")})
    (line,) = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    record = identity.parse(line)
    host = record.pop("host")
    assert record == {
        "step": 10,
        "loss": None,
        "mean": None,
        "norms": {"actor": None, "critic": 0.5},
        "ids": [1, 2],
        "pair": [1.5, None],
        "flag": True,
        "count": 3,
        "phase": "evaluation",
        "nonfinite": {"loss": "nan", "norms/actor": "inf", "pair/1": "-inf"},
    }
    assert host.keys() == {"time", "elapsed_s", "attempt", "rate", "nonfinite"}
    assert (host["rate"], host["nonfinite"], host["attempt"]) == (None, {"rate": "inf"}, 0)


BAD_LINES = [
    ((5, {"a": 1}), ValueError, "step 5 come after step 5"),
    ((4, {"a": 1}), ValueError, "step 4 come after step 5"),
    ((6, {"host": 1}), ValueError, "host are reserved"),
    ((6, {"a": 1}, {"time": 1}), ValueError, "time are reserved"),
    ((6, {"a": {"b": b"x"}}), TypeError, "'a/b' is a bytes"),
    ((6, {"a": 1j}), TypeError, "'a' is a complex"),
    ((6.5, {"a": 1}), TypeError, "float"),
]


@pytest.mark.parametrize(("arguments", "error", "message"), BAD_LINES)
def test_a_bad_line_is_refused_and_nothing_is_written(tmp_path, arguments, error, message):
    with create(tmp_path) as log:
        log.write(5, {"a": 1})
        with pytest.raises(error, match=message):
            log.write(*arguments)
        log.write(6, {"a": 2})
    assert [record["a"] for record in runlog.read(tmp_path / "run")] == [1, 2]


def train(log, steps):
    for step in steps:
        log.write(step, {"loss": torch.tensor(1.0 / step)}, {"rate": 7.0 + log.attempt})


def test_a_resumed_series_equals_the_straight_one_byte_for_byte(tmp_path):
    with create(tmp_path, run_dir=tmp_path / "straight") as log:
        train(log, range(1, 201))
    with create(tmp_path) as log:
        train(log, range(1, 151))
    with reopen(tmp_path, 100) as log:
        assert log.attempt == 1
        with pytest.raises(ValueError, match="step 100 come after step 100"):
            train(log, [100])
        train(log, range(101, 181))
    with reopen(tmp_path, 120) as log:
        train(log, range(121, 201))
    found = runlog.effective(tmp_path / "run")
    assert [record["step"] for record in found] == list(range(1, 201))
    assert [record["host"]["attempt"] for record in found] == [0] * 100 + [1] * 20 + [2] * 80
    assert shared_bytes(found) == shared_bytes(runlog.effective(tmp_path / "straight"))
    # 150 lines of the first attempt, 80 of the second and 80 of the third: nothing was deleted.
    assert len(runlog.read(tmp_path / "run")) == 150 + 80 + 80


def test_an_earlier_point_supersedes_all_attempts_and_none_means_anew(tmp_path):
    for resume, steps in ((None, (1, 2, 3, 4)), (3, (4, 5)), (1, (2, 6)), (None, (1,))):
        with reopen(tmp_path, resume) if (tmp_path / "run").exists() else create(tmp_path) as log:
            train(log, steps)
            series = [(record["step"], record["host"]["attempt"]) for record in runlog.effective(tmp_path / "run")]
        # Worked by hand: attempt 2 resumes at 1, which ends attempts 0 and 1 there.
        assert (
            series
            == {
                0: [(1, 0), (2, 0), (3, 0), (4, 0)],
                1: [(1, 0), (2, 0), (3, 0), (4, 1), (5, 1)],
                2: [(1, 0), (2, 2), (6, 2)],
                3: [(1, 3)],
            }[log.attempt]
        )


def test_elapsed_time_goes_on_where_the_lines_ended(tmp_path, monkeypatch):
    clock = iter([100.0, 130.0, 5000.0, 5010.0])
    monkeypatch.setattr(runlog.time, "monotonic", lambda: next(clock))
    with create(tmp_path) as log:
        train(log, [1])
    with reopen(tmp_path, 1) as log:
        train(log, [2])
    # 130 - 100, then 30 + (5010 - 5000): neither the pause nor another clock's origin counts.
    assert [record["host"]["elapsed_s"] for record in runlog.effective(tmp_path / "run")] == [30.0, 40.0]


@pytest.mark.parametrize(
    "torn", [b'{"step": 3, "lo', b'{"step": 3, "host": {"attempt": 0}}', b"\0\0\0\n", b"NaN\n", b"7\n\n"]
)
def test_torn_lines_are_moved_and_later_ones_stay_whole(tmp_path, caplog, torn):
    with create(tmp_path) as log:
        train(log, [1, 2])
    path = tmp_path / "run" / "metrics.jsonl"
    with path.open("ab") as file:
        file.write(torn)
    assert [record["step"] for record in runlog.read(tmp_path / "run")] == [1, 2]
    with reopen(tmp_path, 2) as log:
        train(log, [3])
    assert "moved" in caplog.text
    assert [identity.parse(line)["step"] for line in path.read_bytes().splitlines()] == [1, 2, 3]
    assert (tmp_path / "run" / "metrics.torn").read_bytes().rstrip(b"\n") == torn.rstrip(b"\n")


def test_a_full_disk_is_one_error_and_leaves_whole_lines(tmp_path):
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    with create(tmp_path) as log:
        log.write(1, {"text": "x" * 600_000})
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, hard))
        try:
            with pytest.raises(RunError, match=r"metrics\.jsonl: cannot write \d+ bytes .*free space there"):
                log.write(2, {"text": "y" * 600_000})
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        log.write(2, {"text": "z"})
    assert [record["text"][0] for record in runlog.read(tmp_path / "run")] == ["x", "z"]


def test_a_changed_config_is_refused_by_field_or_taken_over_by_name(tmp_path):
    create(tmp_path).close()
    new = {"lr": 0.2, "steps": 300, "optim": {"b1": 0.9, "b2": 0.999}, "extra": None}
    with pytest.raises(RunError, match=r"\(extra: absent -> null; lr: 0\.1 -> 0\.2; optim\.b2: 0\.99 -> 0\.999\)"):
        reopen(tmp_path, 1, new, may_change={"steps"})
    assert len(runlog.describe(tmp_path / "run")["attempts"]) == 1
    reopen(tmp_path, 1, new, may_change={"steps", "lr", "optim", "extra"}).close()
    info = runlog.describe(tmp_path / "run")
    assert info["config"] == new
    assert info["attempts"][1]["changes"]["steps"] == ["200", "300"]
    reopen(tmp_path, 1, new).close()
    assert runlog.describe(tmp_path / "run")["attempts"][2]["changes"] == {}


def test_a_run_resumes_wherever_it_has_been_moved(tmp_path, monkeypatch):
    create(tmp_path).close()
    os.rename(tmp_path / "run", tmp_path / "ein Lauf ü")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "link").symlink_to("ein Lauf ü")
    for path in ("ein Lauf ü/", "~/ein Lauf ü", "link"):
        with runlog.reopen(path, CONFIG, None) as log:
            monkeypatch.chdir("/")
            log.write(1, {"a": 1})
        monkeypatch.chdir(tmp_path)
    assert log.attempt == 3
    assert [record["host"]["attempt"] for record in runlog.read("link")] == [1, 2, 3]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "holds no run"),
        ("{", "cannot be read"),
        ('{"format": 9}', "format 9, expected 1"),
        ('{"format": 1}', "edited"),
    ],
)
def test_a_folder_without_a_readable_run_is_refused(tmp_path, text, message):
    (tmp_path / "run").mkdir()
    if text is not None:
        (tmp_path / "run" / "run.json").write_text(text)
    with pytest.raises(RunError, match=message):
        reopen(tmp_path, 1)
    with pytest.raises(RunError, match="no such folder"):
        runlog.reopen(tmp_path / "absent", CONFIG, 1)


@pytest.mark.parametrize("host", ["3", "{}", '{"attempt": "0", "elapsed_s": 1}', '{"attempt": 0, "elapsed_s": null}'])
def test_a_line_that_no_run_wrote_is_moved_like_a_torn_one(tmp_path, host):
    with runlog.create({}, ("a",), run_dir=tmp_path) as log:
        log.write(1, {"loss": 0.5})
    with open(tmp_path / "metrics.jsonl", "a") as file:
        file.write(f'{{"step": 2, "host": {host}}}\n')
    with runlog.reopen(tmp_path, {}, 1):
        assert [record["step"] for record in runlog.effective(tmp_path)] == [1]
    assert host in (tmp_path / "metrics.torn").read_text()


def test_records_of_an_attempt_that_the_run_does_not_know_are_refused(tmp_path):
    with runlog.create({}, ("a",), run_dir=tmp_path) as log:
        log.write(1, {"loss": 0.5})
    with open(tmp_path / "metrics.jsonl", "a") as file:
        file.write('{"step": 2, "host": {"attempt": 1, "elapsed_s": 1.0}}\n')
    with pytest.raises(RunError, match=r"metrics.jsonl: holds records of attempt 1, which run.json does not know"):
        runlog.reopen(tmp_path, {}, 1)
