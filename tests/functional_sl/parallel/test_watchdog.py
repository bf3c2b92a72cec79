"""Dead, stopped, hanging and failing ranks, as small processes; what a rank concludes, as arithmetic."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch.distributed as dist

from functional_sl.parallel import watchdog

ROOT = Path(__file__).parents[3]
# Ranks without collectives, so that nothing but the watchdog can notice; rank 1 does something in iteration 5.
RANK = """
import os, signal, sys, time, torch
from functional_sl.parallel.watchdog import Watchdog
from functional_sl.parallel.world import World
rank, act = int(os.environ["RANK"]), sys.argv[1]
# On a busy machine a living process may not beat for seconds.
timeout_s = 10.0 if act == "hang" else 2.0
place = World(rank, 2, rank, torch.device("cpu"), None, None, timeout_s)
with Watchdog(place, timeout_s) as dog:
    for iteration in range(1, 60 if act == "finish" else 10**6):
        if rank == 1 and iteration == 5:
            if act == "kill": os.kill(os.getpid(), signal.SIGKILL)
            if act == "stop": print("ready", flush=True); os.kill(os.getpid(), signal.SIGSTOP)
            if act == "raise": raise KeyError("gone")
        if act == "hang" and iteration == 5: time.sleep(10**6)
        if act == "finish" and iteration == 5:
            with dog.busy("evaluation"): time.sleep(3.0)
        dog.completed(iteration)
        time.sleep(0.02)
print("end", flush=True)
"""


def start(rank: int, port: int, act: str) -> subprocess.Popen:
    place = {"RANK": str(rank), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    return subprocess.Popen([sys.executable, "-c", RANK, act], env={**os.environ, **place, "PYTHONPATH": path}, **pipes)


def outcome(act: str, waiting: tuple[int, ...]) -> list[tuple[int, str, str]]:
    """Returns exit code, stdout and stderr of the ranks that end by themselves; kills the others."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    ranks = [start(rank, store.port, act) for rank in (0, 1)]
    try:
        found = [(ranks[rank], *ranks[rank].communicate(timeout=60)) for rank in waiting]
        return [(process.returncode, out, err) for process, out, err in found]
    finally:
        for process in ranks:
            process.kill()
            process.communicate()


GONE = "rank 1 no longer answers; its last completed iteration is "


@pytest.mark.parametrize("act", ["kill", "stop"])
def test_a_rank_that_is_killed_or_stopped_ends_the_others(act):
    ((code, out, err),) = outcome(act, (0,))
    assert (code, out) == (watchdog.EXIT_CODE, "")
    assert err.startswith("watchdog of rank 0 (iteration ")
    assert GONE in err


def test_a_rank_that_raises_is_named_to_those_that_wait():
    first, second = outcome("raise", (0, 1))
    assert (first[0], second[0]) == (watchdog.EXIT_CODE, 1)
    assert "rank 1 failed (KeyError: 'gone'); its last completed iteration is " in first[2]
    assert "KeyError: 'gone'" in second[2]


def test_a_hang_of_living_processes_ends_them():
    for code, _, err in outcome("hang", (0, 1)):
        assert code == watchdog.EXIT_CODE
        assert re.search(r"no rank has completed an iteration for 8(\.0)? s; last completed: rank 0: 4; rank 1: 4", err)


def test_what_takes_longer_than_an_iteration_is_no_hang():
    """3 s of evaluation under a timeout of 2 s."""
    for code, out, err in outcome("finish", (0, 1)):
        assert (code, out, err) == (0, "end\n", "")


def seen(beat: int, iteration: int, busy: str = "", left: str | None = None) -> dict:
    return {"beat": beat, "iteration": iteration, "busy": busy, "left": left}


class Clock:
    def __init__(self, monkeypatch):
        self.now = 0.0
        monkeypatch.setattr(watchdog.time, "monotonic", lambda: self.now)


@pytest.fixture
def watch(monkeypatch):
    clock = Clock(monkeypatch)
    found = watchdog._Watch(2, 10.0)

    def look(seconds: float, *ranks: dict | None) -> str:
        clock.now += seconds
        found.look(list(ranks))
        return found.verdict(0)

    return look


def test_time_counts_while_this_process_runs(watch):
    """A gap of an hour counts as a quarter of the timeout: this process was stopped, the other beats on."""
    assert watch(1, seen(1, 1), seen(1, 1)) == ""
    assert watch(3600, seen(2, 1), seen(1, 1)) == ""
    for k in range(3):
        assert watch(2.5, seen(3 + k, 2 + k), seen(1, 1)) == ""
    assert watch(2.5, seen(9, 9), seen(1, 1)) == f"{GONE}9"


def test_a_rank_that_never_came_is_missed_too(watch):
    verdicts = [watch(2, seen(k, k), None) for k in range(1, 7)]
    assert verdicts == ["", "", "", "", "", f"{GONE}6"]


def test_an_activity_has_ten_times_the_timeout_and_its_end_starts_anew(watch):
    for k in range(39):
        assert watch(2.5, seen(k, 3), seen(k, 3, "evaluation")) == ""
    assert watch(2.5, seen(40, 3), seen(40, 3)) == ""
    assert [bool(watch(2.5, seen(k, 3), seen(k, 3))) for k in range(41, 46)] == [False] * 4 + [True]


def test_a_rank_that_left_in_order_is_not_missed_and_one_with_an_error_is_soon(watch):
    assert watch(1, seen(1, 7), seen(1, 7, left="")) == ""
    assert [watch(2.5, seen(k, 7 + k), seen(1, 7, left="")) for k in range(2, 12)] == [""] * 10
    assert watch(1, seen(20, 20), seen(2, 7, left="ValueError: x")) == ""
    verdicts = [watch(2.5, seen(20 + k, 20 + k), seen(2, 7, left="ValueError: x")) for k in range(2)]
    assert verdicts == ["", "rank 1 failed (ValueError: x); its last completed iteration is 21"]
