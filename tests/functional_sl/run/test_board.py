"""TensorBoard's own reader sees one value a step, whatever attempts there were."""

from __future__ import annotations

import math
import resource
import socket
import threading

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from functional_sl.run import board as board_module
from functional_sl.run.board import Board
from functional_sl.run.runlog import RunError


def scalars(folder) -> dict[str, list[tuple[int, float]]]:
    reader = EventAccumulator(str(folder))
    reader.Reload()
    return {tag: [(e.step, e.value) for e in reader.Scalars(tag)] for tag in reader.Tags()["scalars"]}


def write(folder, steps, factor=1.0, resume_step=None) -> None:
    board = Board(folder, resume_step)
    for step in steps:
        board.write(step, {"loss": factor * step})
    board.close()


def test_finite_numbers_are_written_and_nothing_else(tmp_path):
    board = Board(tmp_path / "of ü")
    odd = {"nan": math.nan, "inf": -math.inf, "none": None, "text": "x", "flag": True, "list": [1.0]}
    board.write(2**31 + 5, {"loss": 0.5, "count": 3, **odd})
    board.close()
    assert scalars(tmp_path / "of ü") == {"loss": [(2**31 + 5, 0.5)], "count": [(2**31 + 5, 3.0)]}


def test_a_record_can_be_read_while_the_run_goes_on(tmp_path):
    board, threads = Board(tmp_path), threading.active_count()
    board.write(1, {"loss": 0.5})
    assert scalars(tmp_path) == {"loss": [(1, 0.5)]}
    assert threading.active_count() == threads
    board.close()


def test_a_resume_hides_what_came_after_its_step(tmp_path):
    write(tmp_path, range(1, 8))
    write(tmp_path, range(5, 10), factor=10.0, resume_step=4)
    write(tmp_path, range(9, 11), factor=100.0, resume_step=8)
    values = [*(1.0 * s for s in range(1, 5)), *(10.0 * s for s in range(5, 9)), 900.0, 1000.0]
    assert scalars(tmp_path)["loss"] == list(enumerate(values, start=1))


def test_a_resume_at_step_0_hides_all(tmp_path):
    write(tmp_path, range(1, 4))
    write(tmp_path, [1], factor=10.0, resume_step=0)
    assert scalars(tmp_path)["loss"] == [(1, 10.0)]


def test_attempts_sort_by_their_order_not_by_clocks_or_hosts(tmp_path, monkeypatch):
    write(tmp_path, range(1, 8))
    monkeypatch.setattr(board_module.time, "time", lambda: 1000.0)
    monkeypatch.setattr(socket, "gethostname", lambda: "a")
    write(tmp_path, [5], factor=10.0, resume_step=4)
    assert scalars(tmp_path)["loss"] == [*((s, float(s)) for s in range(1, 5)), (5, 50.0)]


def test_a_torn_record_of_a_killed_attempt_is_passed_over(tmp_path):
    write(tmp_path, range(1, 4))
    (file,) = tmp_path.iterdir()
    file.write_bytes(file.read_bytes()[:-5])
    write(tmp_path, [3, 4], factor=10.0, resume_step=2)
    assert scalars(tmp_path)["loss"] == [(1, 1.0), (2, 2.0), (3, 30.0), (4, 40.0)]


@pytest.mark.parametrize("folder", [None, "events"])
def test_without_a_write_there_is_no_file(tmp_path, folder):
    board = Board(folder and tmp_path / folder)
    if folder is None:
        board.write(1, {"loss": 1.0})
    board.close()
    board.close()
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_is_one_error_that_names_the_place(tmp_path):
    board = Board(tmp_path / "events")
    board.write(1, {"loss": 1.0})
    size = sum(path.stat().st_size for path in (tmp_path / "events").iterdir())
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size + 10, hard))
    try:
        with pytest.raises(RunError, match=r"events: cannot write .*; free space there or lift the limit"):
            board.write(2, {"loss": 2.0})
        board.close()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    # Half of the second record is there, and does no harm.
    assert scalars(tmp_path / "events") == {"loss": [(1, 1.0)]}


def test_a_folder_that_cannot_be_made_is_named(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(RunError, match=r"file/events: cannot write .*choose a folder that can be written"):
        Board(tmp_path / "file" / "events").write(1, {"loss": 1.0})
