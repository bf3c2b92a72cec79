"""The gate: one 0-d bool decides whether a whole update happens, on every rank alike.

Nothing here branches on the host: a closed gate selects the old tree, so the same code runs eagerly, compiled
and inside a CUDA graph.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class GateState(NamedTuple):
    """Counts of one optimizer's closed gates.

    Attributes:
      skipped: () int64, all skipped updates.
      consecutive: () int64, skipped updates since the last accepted one.
    """

    skipped: Tensor
    consecutive: Tensor


def init(device: torch.device | str | None = None) -> GateState:
    """Returns counters at zero."""
    return GateState(*(torch.zeros((), dtype=torch.int64, device=device) for _ in range(2)))


def is_open(sentinels: Tensor) -> Tensor:
    """Tells from a reduced group's sentinels, () or [Q], whether its update may happen, as a 0-d bool.

    It may when no rank raised one. Every rank holds the same bytes after the reduction, hence the same answer. The
    reduced gradient is then finite too, see `wire.limit`.
    """
    return (sentinels == 0).all()


def update(state: GateState, ok: Tensor) -> GateState:
    """Counts one decision."""
    closed = (~ok).to(torch.int64)
    return GateState(skipped=state.skipped + closed, consecutive=(state.consecutive + 1) * closed)
