"""Work side by side gives the numbers of work in a row, launched and as branches of a graph."""

from __future__ import annotations

import contextlib
import functools
import types
from collections.abc import Iterator

import pytest
import torch

from functional_sl import capture, streams

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"))]


def powers(x: torch.Tensor, count: int) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Returns x, and the trace of x^2 to x^count by products of which each has a sum made aside."""
    sums, power = [], x
    with streams.aside(x.device) as aside:
        for _ in range(count - 1):
            power = power @ x
            sums.append(aside(torch.trace, power))
    return x, {"traces": torch.stack(sums)} if sums else {}


def branches(x: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    calls = [lambda n=n: powers(x, n)[1]["traces"] for n in (2, 3, 4)]
    one, (two, three) = streams.side_by_side(calls[0], lambda: streams.all_side_by_side(calls[1:], x.device), x.device)
    return x, {"traces": torch.cat([one, two, three])}


@pytest.mark.parametrize("device", DEVICES)
def test_side_by_side_is_in_a_row(device: str) -> None:
    """A shift of n places has traces 0 but for its n-th power; doubled it is 2^n n there."""
    x = 2 * torch.eye(4, device=device).roll(1, 0)
    expected = [0, 0, 0, 0, 0, 64]
    assert branches(x)[1]["traces"].tolist() == expected
    assert powers(x, 1)[1] == {}
    if device == "cuda":
        captured = capture.Captured(branches)
        for _ in range(3):
            assert captured(x)[1]["traces"].tolist() == expected
        captured.close()


class FakeStream:
    """What the bookkeeping of streams asks of one: a number, and what it waited for."""

    def __init__(self, number: int) -> None:
        self.cuda_stream, self.device, self.waited = number, types.SimpleNamespace(index=0), []

    def wait_stream(self, other: FakeStream) -> None:
        self.waited.append(other.cuda_stream)


class Pool:
    """Stands for `torch.cuda` with `size` streams, handed out in turn."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, size: int) -> None:
        self.streams, self.handed, self.now = [FakeStream(i) for i in range(1, size + 1)], 0, FakeStream(0)
        monkeypatch.setattr(torch.cuda, "Stream", self.hand)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device: self.now)
        monkeypatch.setattr(torch.cuda, "stream", self.on)
        monkeypatch.setattr(streams, "_given", set())
        monkeypatch.setattr(streams, "stream", functools.cache(streams.stream.__wrapped__))

    def hand(self, device: int) -> FakeStream:
        self.handed += 1
        return self.streams[(self.handed - 1) % len(self.streams)]

    @contextlib.contextmanager
    def on(self, stream: FakeStream) -> Iterator[None]:
        before, self.now = self.now, stream
        try:
            yield
        finally:
            self.now = before


def nested(pool: Pool, count: int) -> list[tuple[int, int]]:
    """Returns, for each of `count` branches, its stream and that of a branch within it."""
    cuda = types.SimpleNamespace(type="cuda")

    def branch() -> tuple[int, int]:
        inner, _ = streams.side_by_side(lambda: pool.now.cuda_stream, lambda: None, cuda)
        return pool.now.cuda_stream, inner

    return streams.all_side_by_side([branch] * count, cuda)


def test_every_branch_has_a_stream_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = Pool(monkeypatch, 32)
    found = nested(pool, 3)
    assert [outer for outer, _ in found] == [1, 2, 0]
    assert sorted({*sum(found, ())}) == [0, 1, 2, 3, 4, 5]
    assert nested(pool, 3) == found


def test_what_finds_no_stream_runs_in_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three streams: two for branches, one for the branch within the first; the other two stay where they are."""
    assert nested(Pool(monkeypatch, 3), 3) == [(1, 3), (2, 2), (0, 0)]


def test_an_error_leaves_no_branch_unjoined(monkeypatch: pytest.MonkeyPatch) -> None:
    pool, cuda = Pool(monkeypatch, 32), types.SimpleNamespace(type="cuda")
    with pytest.raises(ZeroDivisionError):
        streams.side_by_side(lambda: 1 / 0, lambda: None, cuda)
    assert pool.now.waited == [1]
    with pytest.raises(ZeroDivisionError), streams.aside(cuda) as aside:
        aside(lambda: 1 / 0)
    assert pool.now.waited == [1, 2]
