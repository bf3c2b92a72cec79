"""Bytes reach rank 0 whole, and values that differ between ranks are named."""

from __future__ import annotations

import os

import pytest
from ranks import run_ranks

from functional_sl.parallel.buffers import gather_bytes
from functional_sl.parallel.errors import RankError
from functional_sl.parallel.likeness import check_alike
from functional_sl.parallel.world import world


def one_rank() -> tuple[list[tuple[bytes, ...]], str]:
    rank = int(os.environ["RANK"])
    with world("cpu", 20.0) as here:
        found = [gather_bytes(here, data) for data in (bytes(range(rank, 100)), b"x" * rank, b"")]
        check_alike(here, {"a": 1, "b": [2]}, "unlike")
        with pytest.raises(RankError) as error:
            check_alike(here, {"a": 1, "b": rank // 2}, "unlike")
    return found, str(error.value)


def test_three_ranks() -> None:
    results = run_ranks(3, one_rank)
    lengths = [tuple(bytes(range(rank, 100)) for rank in range(3)), (b"", b"x", b"xx"), (b"",) * 3]
    assert [found for found, _ in results] == [lengths, [()] * 3, [()] * 3]
    assert {error for _, error in results} == {"unlike: b (rank 0: 0, rank 1: 0, rank 2: 1)"}


def test_one_process_keeps_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    with world("cpu") as here:
        assert gather_bytes(here, b"abc") == (b"abc",)
