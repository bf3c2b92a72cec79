"""Running sums of what the steps of robots came to; the host reads them whenever it writes a record."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from functional_sac.tasks.task import Outcome, RobotTask
from functional_sl.sim import contract
from functional_sl.sim.contract import SimState

COUNTS = ("steps", "episodes", "episode/timeout", "episode/completed", "diverged", "over_contacts", "over_constraints")


class Totals(NamedTuple):
    """Sums over all environments and all steps since `init`; diverged worlds take part in `diverged` alone."""

    counts: Tensor  # [7] float64, of what `COUNTS` names
    sums: Tensor  # [M] float64, of the terms of the reward and of the task's measures


def zeros(task: RobotTask, device: torch.device) -> Totals:
    """Returns totals before the first step."""
    sizes = (len(COUNTS), len(task.terms) + len(task.measured))
    return Totals(*(torch.zeros(size, dtype=torch.float64, device=device) for size in sizes))


def add(
    totals: Totals,
    state: SimState,
    outcome: Outcome,
    completed: Tensor,
    sound: Tensor,
    weighted: Tensor,
    measures: tuple[Tensor, ...],
) -> Totals:
    """Returns the totals with a step added.

    Args:
      totals: before it.
      state: of the worlds after it.
      outcome: how it ended.
      completed: [N] float32, the part of an episode's possible length that is over.
      sound: [N] bool, not diverged.
      weighted: [T, N] float32, terms of the reward.
      measures: [N] or 0-d float32, in the order of the task's.
    """
    ended, over = outcome.done & sound, contract.overflowed(state)
    counted = (
        sound, ended, ended & ~outcome.terminated, completed.masked_fill(~ended, 0.0), ~sound, over["contacts"],
        over["constraints"],
    )  # fmt: skip
    counts = torch.stack([x.sum(dtype=torch.float64) for x in counted])
    columns = torch.stack([measure.expand_as(sound) for measure in measures])
    values = torch.cat((weighted, columns)).masked_fill(~sound, 0.0)
    return Totals(totals.counts + counts, totals.sums + values.sum(dim=1, dtype=torch.float64))


def named(task: RobotTask, totals: Totals) -> dict[str, Tensor]:
    """Returns the totals by name; see `Env.metrics`."""
    names = (*COUNTS, *(f"reward/{term.name}" for term in task.terms), *task.measured)
    return dict(zip(names, (*totals.counts.unbind(), *totals.sums.unbind()), strict=True))
