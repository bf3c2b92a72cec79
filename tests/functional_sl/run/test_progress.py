from __future__ import annotations

import io
import os
import pty
import subprocess
import sys
import termios

import pytest

from functional_sl.run.progress import Progress, compact


class Clock:
    """A clock that stands still until it is told to go on."""

    now = 100.0

    def __call__(self) -> float:
        return self.now


class Terminal(io.StringIO):
    """Says that it is a terminal and replays what a person would see on it."""

    def isatty(self) -> bool:
        return True

    def screen(self, columns: int) -> list[str]:
        rows = []
        for line in self.getvalue().split("\n"):
            cells = [" "] * columns
            for redraw in line.split("\r"):
                assert len(redraw) < columns, f"{redraw!r} wraps at {columns} columns"
                cells[: len(redraw)] = redraw
            rows.append("".join(cells).rstrip())
        return rows


def make(stream, total=10_000_000, **more) -> tuple[Progress, Clock]:
    clock = Clock()
    return Progress(total, "steps", stream, clock=clock, **more), clock


@pytest.mark.parametrize(
    ("columns", "expected"),
    [
        (20, "10% 1M/10M"),
        (30, "10% 1M/10M  eta 15m00s"),
        (40, "10% 1M/10M  eta 15m00s  return 123.5"),
        (60, "10% 1M/10M  eta 15m00s  10k steps/s  return 123.5"),
        (75, "10% 1M/10M  eta 15m00s  10k steps/s  return 123.5  loss 0.0123"),
        (77, "[#.........]  10% 1M/10M  eta 15m00s  10k steps/s  return 123.5  loss 0.0123"),
    ],
)
def test_least_important_parts_go_first(columns, expected):
    stream = Terminal()
    progress, clock = make(stream, width=columns)
    clock.now += 100  # a million steps in 100 s: 10,000 a second, nine million more take 900 s
    progress.update(1_000_000, **{"return": 123.456, "loss": 0.0123})
    assert stream.screen(columns) == [expected]


def test_terminal_redraws_five_times_a_second_and_leaves_no_remains():
    stream = Terminal()
    progress, clock = make(stream, total=1000, width=40)
    with progress:
        for step in range(1, 1001):
            clock.now += 0.01
            progress.update(step, loss="a long text" if step < 500 else 1)
    # 10 s at 5 a second, and the last state.
    assert 45 <= stream.getvalue().count("\r") <= 52
    assert stream.screen(40) == ["100% 1000/1000  after 0m10s  loss 1", ""]


def test_written_lines_stand_above_the_bar():
    stream = Terminal()
    progress, clock = make(stream, total=10, width=60)
    progress.write("before")
    progress.update(1)
    progress.write("saved: größer ✓")
    clock.now += 1
    progress.update(2)
    progress.close()
    progress.close()
    rows = stream.screen(60)
    assert rows[:2] == ["before", "saved: größer ✓"]
    assert "20% 2/10" in rows[2]
    assert rows[3:] == [""]


def test_pipe_gets_plain_lines_every_ten_seconds_with_first_and_last():
    stream = io.StringIO()
    progress, clock = make(stream, total=None)
    with progress:
        for step in range(1, 36):
            clock.now += 1
            progress.update(step, loss=0.5 if step > 1 else None)
        progress.write("note")
    assert stream.getvalue().splitlines() == [
        "1  after 0m01s  1 steps/s  loss -",
        "11  after 0m11s  1 steps/s  loss 0.5",
        "21  after 0m21s  1 steps/s  loss 0.5",
        "31  after 0m31s  1 steps/s  loss 0.5",
        "note",
        "35  after 0m35s  1 steps/s  loss 0.5",
    ]


def test_rate_of_a_resumed_run_counts_its_own_steps():
    stream = io.StringIO()
    progress, clock = make(stream, total=1000, initial=900)
    clock.now += 10
    progress.update(950, loss=float("nan"))
    assert stream.getvalue() == "95% 950/1000  eta 0m10s  5 steps/s  loss -\n"


def test_slow_start_is_forgotten():
    stream = io.StringIO()
    progress, clock = make(stream, total=10**6)
    clock.now += 5000
    for step in range(1, 101):
        clock.now += 10
        progress.update(10 * step)
    assert stream.getvalue().splitlines()[-1].endswith("1 steps/s")


def test_nothing_to_tell_writes_nothing():
    stream = Terminal()
    with make(stream)[0]:
        pass
    assert stream.getvalue() == ""


def test_ascii_stream_and_odd_values():
    raw = io.BytesIO()
    progress, _ = make(io.TextIOWrapper(raw, encoding="ascii"), total=3)
    progress.update(1, state="lä\nuft", loss=float("inf"))
    progress.write("ü")
    assert raw.getvalue() == b"33% 1/3  eta -  0 steps/s  state l??uft  loss inf\n\\xfc\n"


def test_failing_streams_fall_silent():
    closed = io.StringIO()
    progress, clock = make(closed)
    progress.update(1)
    closed.close()
    clock.now += 20
    progress.update(2)
    progress.write("x")
    progress.close()
    code = "from functional_sl.run.progress import Progress\n"
    code += "with Progress(2, 's') as p: p.update(1); p.write('\\xfc'); p.update(2)"
    environment = {**os.environ, "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    with open("/dev/full", "w") as full:
        assert subprocess.run([sys.executable, "-c", code], stderr=full, env=environment).returncode == 0
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, env=environment)
    assert done.returncode == 0
    assert b"\r" not in done.stderr
    assert b"\x1b" not in done.stderr
    assert len(done.stderr.splitlines()) == 3


def test_width_is_that_of_the_terminal():
    leader, follower = pty.openpty()
    with os.fdopen(follower, "w") as stream:
        termios.tcsetwinsize(follower, (24, 30))
        progress, clock = make(stream)
        clock.now += 100
        progress.update(1_000_000, loss=0.5)
        shown = os.read(leader, 1000).decode()
    os.close(leader)
    assert shown == "\r10% 1M/10M  eta 15m00s"


@pytest.mark.parametrize(
    ("number", "text"),
    [(0, "0"), (950, "950"), (9999, "9999"), (9999.7, "10k"), (12_345, "12.3k"), (999_950, "1M"), (1.25e6, "1.25M")],
)
def test_compact(number, text):
    assert compact(number) == text
    assert compact(-number) == f"{'-' if number else ''}{text}"
