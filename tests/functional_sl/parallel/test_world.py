from __future__ import annotations

import re
import socket
import time

import pytest
import torch
import torch.distributed as dist
from ranks import RanksFailed, run_ranks

from functional_sl import capture
from functional_sl.parallel import collectives
from functional_sl.parallel.world import (
    ENVIRONMENT,
    RankError,
    agree,
    broadcast,
    check_equal,
    gather,
    guard,
    stop_requested,
    world,
)

TIMEOUT_S = 60.0
SECONDS = 20.0  # well below the timeout: what must not wait for it


@pytest.fixture
def alone(monkeypatch):
    for name in ENVIRONMENT:
        monkeypatch.delenv(name, raising=False)


def error_of(function, *args) -> str:
    with pytest.raises(RankError) as caught:
        function(*args)
    return str(caught.value)


def fail_on(here, ranks, where="sampling"):
    with guard(here, where):
        if here.rank in ranks:
            raise ValueError(f"bad batch {here.rank}")


def control_on_a_rank() -> dict[str, object]:
    """Everything over the control group, in one process group."""
    with world("cpu", timeout_s=TIMEOUT_S) as here:
        start = time.monotonic()
        results = {
            "place": (here.rank, here.size, here.local_rank, str(here.device)),
            "gather": gather(here, {"rank": here.rank, "pair": (1, None)}),
            "broadcast": broadcast(here, f"from {here.rank}: é"),
            "stop": [stop_requested(here, False), stop_requested(here, here.rank == 1)],
            "one": error_of(fail_on, here, [1]),
            "two": error_of(fail_on, here, [0, 2]),
            "nested": error_of(nested, here),
            "mismatch": error_of(check_equal, here, "the layout", "abc" if here.rank != 2 else "xyz"),
            "lost step": error_of(agree, here, None, "validation" if here.rank == 2 else "sampling"),
        }
        fail_on(here, [])
        check_equal(here, "the layout", "abc")
        check_equal(here, "nothing", "")
        assert time.monotonic() - start < SECONDS
    assert not dist.is_initialized()
    return results


def nested(here):
    with guard(here, "epoch"):
        fail_on(here, [1], "validation")


def test_three_ranks_agree():
    results = run_ranks(3, control_on_a_rank)
    assert [result.pop("place") for result in results] == [(rank, 3, rank, "cpu") for rank in range(3)]
    for result, at, other in zip(
        results, ["sampling", "sampling", "validation"], ["rank 2", "rank 2", "ranks 0, 1"], strict=True
    ):
        assert result.pop("lost step").endswith(f"is at {at!r}, but not {other}")
    assert results[0] == results[1] == results[2]
    result = results[0]
    assert result["gather"] == [{"rank": rank, "pair": [1, None]} for rank in range(3)]
    assert result["broadcast"] == "from 0: é"
    assert result["stop"] == [False, True]
    assert result["one"] == "sampling failed on 1 of 3 ranks: rank 1: ValueError: bad batch 1"
    assert result["two"].endswith("2 of 3 ranks: rank 0: ValueError: bad batch 0; rank 2: ValueError: bad batch 2")
    assert result["nested"] == "validation failed on 1 of 3 ranks: rank 1: ValueError: bad batch 1"
    assert result["mismatch"] == "the layout differs between ranks: 'abc' on ranks 0, 1, 'xyz' on rank 2"


def leave_early(how: str) -> str:
    text = ""
    start = time.monotonic()
    try:
        with world("cpu", timeout_s=TIMEOUT_S) as here:
            if here.rank == 1:
                raise KeyError("gone")
            if how == "in a reduction":
                collectives.over(here).sum(torch.ones(2))
            if how == "with an error":
                agree(here, OSError("disk full"), "writing")
    except Exception as error:
        text = f"{type(error).__name__}: {error}"
    assert not dist.is_initialized()
    assert time.monotonic() - start < SECONDS
    return text


@pytest.mark.parametrize(
    ("how", "expected"),
    [
        ("in a reduction", "RuntimeError: "),
        ("with an error", "LostRank: rank 0 cannot reach the other ranks at 'writing'.*own error: OSError: disk full"),
        ("at the end", "LostRank: rank 0 cannot reach the other ranks at 'the end'"),
    ],
)
def test_an_exception_on_one_rank_frees_the_others(how, expected):
    stayed, left = run_ranks(2, leave_early, how)
    assert re.match(expected, stayed, re.DOTALL)
    assert left == "KeyError: 'gone'"


def test_one_process_has_no_group(alone):
    with world("cpu") as here:
        assert not dist.is_initialized()
        assert (here.rank, here.size, here.data_group, here.control_group) == (0, 1, None, None)
        assert gather(here, (1, 2)) == [[1, 2]]
        assert broadcast(here, {"a": None}) == {"a": None}
        assert [stop_requested(here, flag) for flag in (False, True)] == [False, True]
        check_equal(here, "x", "y")
        agree(here, None, "anywhere")
        with pytest.raises(ValueError, match="bad batch 0"):
            fail_on(here, [0])


def test_a_forced_group_of_one_reduces(alone):
    for _ in range(2):
        with world("cpu", timeout_s=TIMEOUT_S, force_group=True) as here:
            assert collectives.over(here).sum(torch.tensor([1.5])).item() == 1.5
            assert gather(here, 7) == [7]
        assert not dist.is_initialized()


def test_the_end_frees_graphs_that_may_hold_collectives(alone):
    closed = []

    class Probe(capture.Captured):
        def close(self) -> None:
            closed.append(dist.is_initialized())

    probe = Probe(lambda state: (state, ()))
    with world("cpu", timeout_s=TIMEOUT_S, force_group=True):
        pass
    assert closed == [True]
    del probe
    capture.close_all()
    assert closed == [True]


@pytest.mark.parametrize(
    ("environment", "text"),
    [
        ({"RANK": "0", "WORLD_SIZE": "2"}, "sets RANK, WORLD_SIZE but not LOCAL_RANK, MASTER_ADDR, MASTER_PORT"),
        (dict.fromkeys(ENVIRONMENT, "2"), "RANK=2, WORLD_SIZE=2, LOCAL_RANK=2"),
        ({**dict.fromkeys(ENVIRONMENT, "0"), "WORLD_SIZE": "two"}, "WORLD_SIZE=two"),
    ],
)
def test_a_half_set_environment_is_one_error(alone, monkeypatch, environment, text):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match=text), world("cpu"):
        pass


@pytest.mark.parametrize(("host", "port"), [("127.0.0.1", "taken"), ("127.0.0.1", "many"), ("no.host.invalid", "1")])
def test_ranks_that_cannot_meet_are_told_where(alone, monkeypatch, host, port):
    with socket.socket() as other:
        other.bind(("", 0))
        other.listen()
        port = str(other.getsockname()[1]) if port == "taken" else port
        rank = "1" if host.endswith("invalid") else "0"
        place = {"RANK": rank, "WORLD_SIZE": "2", "LOCAL_RANK": rank, "MASTER_ADDR": host, "MASTER_PORT": port}
        for name, value in place.items():
            monkeypatch.setenv(name, value)
        told = (
            f"rank {rank} of 2 cannot meet the others at MASTER_ADDR={host}, MASTER_PORT={port} .*: choose a free port"
        )
        with pytest.raises(RankError, match=told), world("cpu", timeout_s=1.0):
            pass


@pytest.mark.parametrize("device", ["gpu", "cpu:0", "cuda:x", "cuda:99"])
def test_a_device_that_cannot_be_had_is_named(alone, device):
    with pytest.raises(ValueError, match=f"'{device}'"), world(device):
        pass


def raise_on_rank_1():
    with world("cpu", timeout_s=TIMEOUT_S) as here:
        fail_on(here, [1])


def test_run_ranks_reports_every_traceback():
    with pytest.raises(RanksFailed) as caught:
        run_ranks(2, raise_on_rank_1)
    text = str(caught.value)
    assert text.count("RankError: sampling failed on 1 of 2 ranks: rank 1: ValueError: bad batch 1") == 2
    assert "rank 0: Traceback" in text
    assert "in fail_on" in text
