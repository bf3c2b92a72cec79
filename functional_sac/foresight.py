"""What an update of the policy begins with, computed beside the critics' update before it."""

from __future__ import annotations

import functools
from collections.abc import Callable

from functional_sac.fused.gradients import Forward
from functional_sac.updates import Foreseen, Metrics, SACState
from functional_sl import streams
from functional_sl.step import StepState

Change = Callable[[SACState], tuple[SACState, Metrics]]
Foresee = Callable[..., tuple[StepState, dict[str, dict]]]  # a region, whose dict holds trees


class Foresight:
    """What a cycle's updates of the policy begin with, beside the critics' update behind the policy's one before.

    Nothing is made for updates that are not fused.
    """

    def __init__(self, foresee: Foresee | None, inputs: list[tuple]) -> None:
        """Takes the region, if there is one, and its inputs of every update of the policy in the cycle."""
        self._foresee, self._coming = foresee, inputs if foresee else []
        self._found: Foreseen | tuple[()] = ()

    def take(self, state: SACState) -> Foreseen | tuple[()]:
        """Returns what the next update of the policy begins with."""
        found = self._next(state) if self._coming and not self._found else self._found
        self._found = ()
        return found

    def beside(self, change: Change, state: SACState) -> tuple[SACState, Metrics]:
        """Changes the critics, with what the next update of the policy begins with beside it."""
        if self._found or not self._coming:
            return change(state)
        begin, go_on = functools.partial(self._next, state), functools.partial(change, state)
        self._found, changed = streams.side_by_side(begin, go_on, state.updates.device)
        return changed

    def _next(self, state: SACState) -> Foreseen:
        actor = state.temperature, state.actor.params, state.actor_copies
        temperature, found = self._foresee(*actor, *self._coming.pop(0))
        return Foreseen(Forward(**found["forward"]), temperature, found["metrics"])
