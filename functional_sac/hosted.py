"""One iteration around environments on the host: act, step them, store and learn."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from functional_sac.envs.host import HostEnv
from functional_sac.iteration import TrainState
from functional_sl import capture, tree

Region = capture.Captured | capture.Eager


def stages(
    act: Callable[[bool], Callable[[TrainState], tuple[TrainState, Tensor]]],
    store: Callable[..., TrainState],
    learn: Callable[[TrainState, int], TrainState],
) -> Callable[..., tuple[TrainState, tree.Tree]]:
    """Returns the pure parts of an iteration as one function, so that one capture owns the state of all.

    Without inputs it acts, `(state, random=) -> (state, action)`, or, given a phase, learns, `(state, phase=) ->
    (state, ())`. With what came of an action it stores and, unless `phase` is None, learns: `(state, action,
    environments' state, time step, present, phase=) -> (state, ())`.
    """

    def stage(
        state: TrainState, *arrived: tree.Tree, random: bool = False, phase: int | None = None
    ) -> tuple[TrainState, tree.Tree]:
        if not arrived and phase is None:
            return act(random)(state)
        state = store(state, *arrived) if arrived else state
        return (state if phase is None else learn(state, phase)), ()

    return stage


class Hosted:
    """The counterpart of `capture.Captured` and `capture.Eager` for a run whose environments live on the host."""

    def __init__(self, region: Region, env: HostEnv, overlap: bool = False) -> None:
        """Takes `stages`, captured or eager, and the environments.

        Args:
          region: the stages.
          env: on the host.
          overlap: learn while the host steps, from the replay before the step, instead of after it.
        """
        self._region, self._env, self._overlap = region, env, overlap

    @property
    def captures(self) -> int:
        """The number of graphs captured so far."""
        return self._region.captures

    def __call__(self, state: TrainState, *, random: bool, phase: int | None) -> tuple[TrainState, tuple[int, ...]]:
        """Runs one iteration.

        Returns:
          The state, and the number of environments that took no step but only began an episode.
        """
        state, action = self._region(state, random=random)
        early = self._overlap and phase is not None

        def learn() -> None:
            nonlocal state
            if early:
                state, _ = self._region(state, phase=phase)

        env_state, step, present = self._env.advance(state.env, action, learn)
        state, _ = self._region(state, action, env_state, step, present, phase=None if early else phase)
        return state, (int((~present).sum()) if self._env.idles else 0,)

    def load(self, state: TrainState) -> TrainState:
        """See `capture.Captured.load`."""
        return self._region.load(state)

    def close(self) -> None:
        """Frees the graphs, not the environments."""
        self._region.close()
