"""The ranks of a run: which of them this process holds, what all of them share, and how a snapshot names it.

Shared, and equal bit for bit on every rank: parameters, optimizers, batch-norm statistics, counts, and the reward
scale's moments. A rank's own: keys, environments, held noise, running returns, episode totals, replay.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from functional_sac.config import TrainConfig
from functional_sac.iteration import TrainState
from functional_sac.updates import SACState
from functional_sl import tree
from functional_sl.parallel import collectives, likeness
from functional_sl.parallel.collectives import Collectives
from functional_sl.parallel.lockstep import Lockstep
from functional_sl.parallel.world import World, gather

States = tuple[TrainState, ...]  # one a rank of this process


@dataclasses.dataclass(frozen=True)
class Replicas:
    """The ranks of a run."""

    world: World  # the processes
    size: int  # the ranks of all processes
    here: tuple[int, ...]  # the ranks of this process
    collectives: Collectives
    each: Callable[[Callable[[TrainState], TrainState], States], States]  # applies a function to every rank here

    @property
    def writes(self) -> bool:
        """Whether this process writes what a run has once: records, pictures, manifests."""
        return self.world.rank == 0

    def gather(self, values: Sequence[Any]) -> list[Any]:
        """Returns the values (small, JSON-able, one a rank of this process) of all ranks, by rank."""
        return [value for process in gather(self.world, list(values)) for value in process]


@contextlib.contextmanager
def joined(config: TrainConfig, world: World) -> Iterator[Replicas]:
    """Opens the ranks of a run: those of torchrun, or the config's simulated ones.

    Raises:
      ValueError: for simulated ranks or several seeds under torchrun.
      RankError, ValueError: for a transport that these ranks do not have.
    """
    for name in ("simulated_ranks", "num_seeds"):
        if world.data_group is not None and getattr(config, name) > 1:
            raise ValueError(f"{name}={getattr(config, name)}: not under torchrun; start without it, or leave it at 1")
    if config.simulated_ranks == 1:
        across = collectives.over(world, config.dp_transport)
        yield Replicas(world, world.size, (world.rank,), across, lambda fn, states: (fn(states[0]),))
        return
    size = config.simulated_ranks
    with contextlib.closing(Lockstep(size)) as lockstep:
        yield Replicas(world, size, tuple(range(size)), lockstep.collectives, lockstep.map)


def learner_of(state: TrainState) -> SACState:
    """Returns the learner that all ranks share: all of it but its key."""
    return state.sac._replace(key=())


def parts(
    states: States, ranks: Sequence[int], with_replay: bool, *, with_learner: bool = True
) -> dict[str, tree.Tree]:
    """Returns parts of a snapshot by name: what all ranks share, and what each has of its own.

    Args:
      states: of the ranks.
      ranks: their numbers.
      with_replay: whether the replays are among them.
      with_learner: whether what is shared is.
    """
    found = {"learner": learner_of(states[0])} if with_learner else {}
    for rank, state in zip(ranks, states, strict=True):
        found |= _own_parts(state, rank, with_replay)
    return found


def _own_parts(state: TrainState, rank: int, with_replay: bool) -> dict[str, tree.Tree]:
    nothing = SACState(*((),) * len(SACState._fields))
    found = {f"run.rank{rank}": state._replace(sac=nothing._replace(key=state.sac.key), replay=())}
    return found | ({f"replay.rank{rank}": state.replay} if with_replay else {})


def restored(state: TrainState, rank: int, loaded: Mapping[str, tree.Tree]) -> TrainState:
    """Returns the state of `rank` from the parts of a snapshot; without a replay among them, with that of `state`."""
    own = loaded[f"run.rank{rank}"]
    return own._replace(
        sac=loaded["learner"]._replace(key=own.sac.key), replay=loaded.get(f"replay.rank{rank}", state.replay)
    )


def ranks_of(names: Sequence[str]) -> int:
    """Returns the number of ranks that wrote a snapshot with parts of these names."""
    return sum(name.startswith("run.rank") for name in names)


def check_equal(replicas: Replicas, states: States, when: str) -> None:
    """Compares a digest of everything shared over all ranks, part by part.

    Raises:
      RankError: on every rank if one differs, naming the parts and the ranks.
    """
    if replicas.size > 1:
        everyone = replicas.gather([_digests(state) for state in states])
        likeness.compare(everyone, f"the ranks are no longer equal {when}")


def _digests(state: TrainState) -> dict[str, str]:
    moments = state.scale._replace(returns=())
    shared = learner_of(state)._asdict() | {"reward scale": moments}
    return {name: tree.digest(part)[:16] for name, part in shared.items()}
