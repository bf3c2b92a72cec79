"""Work side by side gives the numbers of work in a row, launched and as branches of a graph."""

from __future__ import annotations

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
