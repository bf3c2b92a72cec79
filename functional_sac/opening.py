"""Opening a run, new or resumed, and saving it.

A snapshot has the parts `learner` (a `SACState` without its key, which rank 0 writes for all), and for every rank i
`run.rank<i>` (keys, environments, noise, reward scale, counters) and, with `--snapshot_replay`, `replay.rank<i>`.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from pathlib import Path

import torch

from functional_sac import compiling, environment, plan, replicas, restoring
from functional_sac.config import TrainConfig
from functional_sac.cycle import Learner, make_learner
from functional_sac.envs.env import Env
from functional_sac.envs.host import HostEnv
from functional_sac.iteration import Iteration, TrainState, make_iteration
from functional_sac.replicas import Replicas, States
from functional_sac.request import MAY_CHANGE, Request, request, seeds, stored
from functional_sac.restoring import Start
from functional_sl import keys, tree, wire
from functional_sl.parallel import watchdog
from functional_sl.parallel.errors import RankError
from functional_sl.parallel.likeness import check_alike
from functional_sl.parallel.watchdog import Watchdog
from functional_sl.parallel.world import broadcast, gather, guard, world
from functional_sl.run import board, cli, folders, identity, loading, resuming, runlog, snapshot
from functional_sl.run.command import as_usage_error
from functional_sl.run.manifest import Part

# A rank may wait in a collective while another does what takes longer than an iteration; the watchdog ends a hang.
_COLLECTIVE_TIMEOUTS = 2 * watchdog.BUSY_FACTOR
_OWN_FILES = ("learning_curve.png", "policy.gif", "tensorboard")


@dataclasses.dataclass(frozen=True)
class Run:
    """An open run: static parts, where it starts, and where it is written down."""

    config: TrainConfig
    ranks: Replicas
    watchdog: Watchdog
    env: Env | HostEnv
    eval_env: Env | HostEnv  # where policies are evaluated and filmed; `env` itself, or another of the same task
    learner: Learner
    # (state, random=, phase= or None) -> (state, numbers of environments that took no step), one iteration
    iterate: compiling.Runner
    states: States  # where every rank of this process begins
    start: Start
    run_dir: Path
    log: runlog.RunLog | None  # of the process that writes
    board: board.Board

    @property
    def device(self) -> torch.device:
        """Where this process computes."""
        return self.ranks.world.device


@contextlib.contextmanager
def open_run(config: TrainConfig, given: frozenset[str] = frozenset()) -> Iterator[Run]:
    """Joins the ranks, opens the run that the config asks for, and closes its files at the end.

    Everything that can be refused is refused before a file is written, on every rank alike.

    Args:
      config: the run; with `resume`, the fields of `given` override those of the run that goes on.
      given: names of the fields that were set on purpose.

    Raises:
      cli.UsageError: for settings that cannot be met, and a run or snapshot that is not there or does not fit.
    """
    with contextlib.ExitStack() as stack:
        with as_usage_error(ValueError, runlog.RunError, snapshot.SnapshotError, RankError):
            asked = request(config, given)
            limit = asked.config.timeout_s
            here = stack.enter_context(world(asked.config.device, _COLLECTIVE_TIMEOUTS * limit))
            dog = stack.enter_context(Watchdog(here, limit))
            ranks = stack.enter_context(replicas.joined(asked.config, here))
            with dog.busy("opening the run"):
                run = _open(asked, ranks, dog)
            if run.log is not None:
                stack.enter_context(run.log)
            stack.enter_context(contextlib.closing(run.board))
            for env in {id(env): env for env in (run.env, run.eval_env)}.values():
                stack.callback(env.close)
            # Graphs that hold collectives go before their process group.
            stack.callback(run.iterate.close)
        yield run


def _open(asked: Request, ranks: Replicas, dog: Watchdog) -> Run:
    here, source = ranks.world, asked.source
    with guard(here, "opening the run"):
        loading.check_installed("matplotlib", *(["tensorboard"] if asked.config.tensorboard else []))
        config = _settle(asked.config, ranks)
        torch.set_num_threads(config.threads)
        _make_deterministic(config.deterministic)
        env, eval_env = _environments(config, ranks)
        _check_idling(env, config, ranks)
        reserved = config.num_envs if config.overlap else 0
        learner = make_learner(
            config, env.spec, ranks.collectives, compiling.wrapper(config), compiling.fuses(config, ranks), reserved
        )
        iteration = make_iteration(config, env, learner, ranks.collectives)
        with _within_memory(config):
            fresh = _init(iteration, config, ranks)
        states, start = restoring.restore(fresh, config, ranks, source)
        if source is not None and isinstance(env, HostEnv):
            states, start = restoring.begin_anew(states, start, fresh, env, iteration, config)
        states = tuple(_own(state) for state in states)
    check_alike(here, _settings(config, env, states, start), "the ranks were started unlike")
    replicas.check_equal(ranks, states, "at the start")
    with guard(here, "opening the run's folder"):
        log = _open_log(config, source, start) if ranks.writes else None
    place = broadcast(here, None if log is None else {"run_dir": str(log.run_dir), "run_id": log.run_id})
    run_dir = Path(place["run_dir"])
    with guard(here, "opening the rank's log"):
        if log is None:
            folders.enter(run_dir, place["run_id"], here.rank)
    written = log is not None and config.tensorboard
    events = board.Board(run_dir / "tensorboard" if written else None, start.snapshot_step)
    return Run(
        config, ranks, dog, env, eval_env, learner, compiling.runner(iteration, config, ranks, env), states, start,
        run_dir, log, events,
    )  # fmt: skip


def save(run: Run, states: States, env_steps: int, score: float | None) -> None:
    """Writes a snapshot and removes the older ones that the config does not keep; every rank calls it.

    Every rank writes its own parts first, and rank 0 commits the manifest last.

    Args:
      run: the open run.
      states: what is saved, of every rank of this process.
      env_steps: its step.
      score: mean return of an evaluation of this very state, or None.

    Raises:
      SnapshotError: if it cannot be written.
      RankError: on every rank, if it cannot be written on one of several or the ranks are not equal.
    """
    here, where = run.ranks.world, f"the snapshot of step {env_steps}"
    root = run.run_dir / "snapshots"
    replicas.check_equal(run.ranks, states, f"at {where}")
    try:
        written: list[Part] = []
        with guard(here, where):
            if run.log is not None:
                run.log.sync()
            with_replay, writes = run.config.snapshot_replay, run.ranks.writes
            own = replicas.parts(states, run.ranks.here, with_replay, with_learner=writes)
            written.extend(snapshot.write_part(root, env_steps, name, values) for name, values in own.items())
        found = [Part(*part) for process in gather(here, written) for part in process]
        with guard(here, where):
            if run.log is not None:
                about = {"run_id": run.log.run_id, "config": stored(run.config), "score": score}
                snapshot.commit(root, env_steps, found, **about)
    except BaseException:
        if run.log is not None:
            with contextlib.suppress(OSError, snapshot.SnapshotError):
                snapshot.sweep(snapshot.folder_of(root, env_steps))
        raise
    with guard(here, where):
        if run.log is not None:
            kept = {env_steps, run.start.snapshot_step} - {None}
            snapshot.prune(root, run.config.keep_snapshots, kept, run_id=run.log.run_id)


def _settle(config: TrainConfig, ranks: Replicas) -> TrainConfig:
    if plan.total_updates(config, ranks.size) < 1:
        raise cli.UsageError(
            f"env_steps={config.env_steps}: the run ends before learning starts on {ranks.size} ranks; ask for more"
        )
    config = plan.settle(config, ranks.size)
    config = dataclasses.replace(config, device=ranks.world.device.type, compile=compiling.compiles(config, ranks))
    # More threads only wait for each other at small sizes, and sums depend on their number.
    few = config.batch_size * config.critic_width * config.num_seeds < 2**16
    return dataclasses.replace(config, threads=config.threads or (1 if few else torch.get_num_threads()))


def _settings(config: TrainConfig, env: Env, states: States, start: Start) -> dict[str, str]:
    """Returns what must be the same on every rank before gradients and states may meet."""
    wire_dtype = config.dp_gradient_wire_dtype
    params = {name: getattr(states[0].sac, name).params for name in ("actor", "critic", "temperature")}
    about = {"the task's sizes": env.spec, "the resumed snapshot": start.snapshot_step}
    for name, values in params.items():
        about[f"the layout of the {name}'s gradients"] = wire.digest(wire.layout(values, wire_dtype))[:16]
    return {name: str(value) for name, value in (stored(config) | identity.versions() | about).items()}


def _environments(config: TrainConfig, ranks: Replicas) -> tuple[Env | HostEnv, Env | HostEnv]:
    """Returns the environment in which the run learns, and the one in which it is evaluated."""
    device = ranks.world.device
    env = environment.make(config, device, compiling.wrapper(config))
    if len(ranks.here) > 1 and isinstance(env, Env):
        env = environment.one_at_a_time(env)
    other = ranks.writes and environment.samples(config)
    return env, environment.for_evaluation(config, device) if other else env


def _make_deterministic(deterministic: bool) -> None:
    torch.use_deterministic_algorithms(deterministic)
    # Filling fresh memory would hide nothing here: every buffer is written before it is read.
    torch.utils.deterministic.fill_uninitialized_memory = False


def _init(iteration: Iteration, config: TrainConfig, ranks: Replicas) -> States:
    device = ranks.world.device
    if config.num_seeds > 1:
        return (tree.stack([iteration.init(keys.key(seed, device)) for seed in seeds(config)]),)
    return tuple(iteration.init(keys.key(config.seed, device), rank) for rank in ranks.here)


@contextlib.contextmanager
def _within_memory(config: TrainConfig) -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        if not isinstance(error, torch.OutOfMemoryError) and "can't allocate memory" not in str(error):
            raise
        sizes = ("replay_capacity", "num_envs", "num_seeds", "n_step")
        shown = ", ".join(f"{name}={getattr(config, name)}" for name in sizes)
        raise cli.UsageError(f"{shown}: do not fit in memory ({error}); choose smaller ones") from error


def _own(state: TrainState) -> TrainState:
    """Returns the state in buffers that share nothing; the replay's rows, which may be large, have theirs already."""
    return tree.clone(state._replace(replay=()))._replace(replay=state.replay)


def _check_idling(env: Env | HostEnv, config: TrainConfig, ranks: Replicas) -> None:
    if isinstance(env, HostEnv) and env.idles and max(ranks.size, config.num_seeds) > 1:
        raise cli.UsageError(
            f"--task={config.task}: a vector environment in mode NextStep takes steps of its own number in every rank "
            "and seed; give it autoreset_mode SAME_STEP or DISABLED, or train one rank and one seed"
        )


def _open_log(config: TrainConfig, source: Path | None, start: Start) -> runlog.RunLog:
    content = stored(config)
    if source is not None:
        log = runlog.reopen(resuming.home(source), content, start.snapshot_step, may_change=MAY_CHANGE)
        snapshot.set_aside(log.run_dir, start.snapshot_step, log.run_id)
        return log
    where = {"run_dir": config.run_dir} if config.run_dir else {"base_dir": resuming.RUNS}
    if config.run_dir:
        folders.check_vacant(Path(config.run_dir).expanduser(), _OWN_FILES)
    return runlog.create(content, (config.task, f"seed{config.seed}"), **where)
