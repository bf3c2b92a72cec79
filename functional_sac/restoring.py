"""Where a run begins: fresh, from the networks of another run, or from a snapshot of its own."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

from functional_sac import plan, replicas
from functional_sac.config import TrainConfig
from functional_sac.envs.host import HostEnv
from functional_sac.iteration import Iteration, TrainState
from functional_sac.plan import Clock
from functional_sac.replicas import Replicas, States
from functional_sac.updates import SACState
from functional_sl import capture, tree
from functional_sl.run import cli, snapshot
from functional_sl.run.manifest import read as read_manifest


class Start(NamedTuple):
    """Where a run begins, in host numbers."""

    clock: Clock
    notes: tuple[str, ...] = ()  # for the user
    snapshot_step: int | None = None  # the snapshot from which it was resumed


def restore(states: States, config: TrainConfig, ranks: Replicas, source: Path | None) -> tuple[States, Start]:
    """Returns where a run begins: the fresh states, those with the networks of `init_from`, or a snapshot's.

    Args:
      states: fresh ones, of every rank of this process.
      config: the run.
      ranks: all of them.
      source: the snapshot from which the run goes on, or None.

    Raises:
      cli.UsageError: for a snapshot of another number of ranks, or one after which nothing would be left to learn.
      SnapshotError: if it is damaged or does not fit.
    """
    if source is None:
        taken = Path(config.init_from).expanduser() if config.init_from else None
        return tuple(_init_from(state, taken) if taken else state for state in states), Start(Clock())
    manifest = read_manifest(source)
    _check_ranks(manifest["parts"], ranks.size, source)
    has_replay = "replay.rank0" in manifest["parts"]
    loaded, _ = snapshot.restore(source, replicas.parts(states, ranks.here, has_replay))
    # Every rank gets buffers of its own.
    states = tuple(
        replicas.restored(state, rank, loaded | {"learner": tree.clone(loaded["learner"])})
        for rank, state in zip(ranks.here, states, strict=True)
    )
    done, counts = manifest["step"], (states[0].sac.updates, states[0].replay.steps)
    clock = Clock(done, *(int(x.reshape(-1)[0]) for x in counts))
    notes = [f"resumed from {source} at {done} environment steps"]
    if done >= config.env_steps:
        notes.append("the run is at its end: its pictures are drawn anew; a greater --env_steps goes on")
    elif not has_replay:
        notes.append(_refill_note(config, done, ranks.size))
    moved = [name for name in ("device", "threads", "compile") if getattr(config, name) != manifest["config"][name]]
    if moved:
        notes.append(
            f"other {' and '.join(moved)} than before: from here on the bits may differ from an unbroken run's"
        )
    if config.env_steps != manifest["config"]["env_steps"]:
        notes.append(f"env_steps is {config.env_steps} now; lr_decay_updates stays {config.lr_decay_updates}")
    return states, Start(clock, tuple(notes), done)


def _check_ranks(parts: dict[str, Any], size: int, source: Path) -> None:
    if (saved := replicas.ranks_of([*parts])) != size:
        raise cli.UsageError(
            f"--resume={source}: is of {saved} ranks, but {size} have started; start torchrun with {saved} processes "
            f"in all, show as many devices in CUDA_VISIBLE_DEVICES, or a new run with --init_from={source}"
        )


def _refill_note(config: TrainConfig, done: int, ranks: int) -> str:
    together = config.num_envs * ranks
    first = done + together * plan.next_learning_step(config)
    if first >= config.env_steps + together:
        raise cli.UsageError(
            f"--env_steps={config.env_steps}: the snapshot holds no replay, and once it is filled anew, at {first} "
            "environment steps, nothing would be left to learn; ask for more"
        )
    return f"the snapshot holds no replay: it is filled anew, and learning goes on at {first} environment steps"


def _init_from(state: TrainState, path: Path) -> TrainState:
    """Returns a fresh state with the networks, statistics and temperature of a snapshot."""
    old: SACState = snapshot.restore(path, {"learner": replicas.learner_of(state)})[0]["learner"]
    names = ("actor", "critic", "temperature")
    taken = {
        n: getattr(state.sac, n)._replace(params=getattr(old, n).params, stats=getattr(old, n).stats) for n in names
    }
    return state._replace(sac=state.sac._replace(target=old.target, **taken))


def begin_anew(
    states: States, start: Start, fresh: States, env: HostEnv, iteration: Iteration, config: TrainConfig
) -> tuple[States, Start]:
    """Lets a resumed run go on with new episodes in the environments of the `fresh` states."""
    pairs = [(s, *env.restart(new.env, s.env.key)) for s, new in zip(states, fresh, strict=True)]
    restart = capture.mapped(iteration.restart) if config.num_seeds > 1 else iteration.restart
    note = "the environments live on the host and are in no snapshot: all episodes begin anew"
    return tuple(restart(*pair) for pair in pairs), start._replace(notes=(*start.notes, note))
