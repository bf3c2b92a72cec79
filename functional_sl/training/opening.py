"""Opening a supervised run, new or resumed."""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch

from functional_sl import capture, keys, tree, wire
from functional_sl.parallel import collectives, watchdog
from functional_sl.parallel.errors import RankError
from functional_sl.parallel.likeness import check_alike
from functional_sl.parallel.watchdog import Watchdog
from functional_sl.parallel.world import World, broadcast, gather, guard, world
from functional_sl.recipe import Recipe
from functional_sl.run import board, cli, files, folders, identity, loading, resuming, runlog, snapshot
from functional_sl.run.command import as_usage_error
from functional_sl.training import admission, generators, recovery, reporting, update
from functional_sl.training.config import MAY_CHANGE, TrainConfig
from functional_sl.training.recovery import Identity
from functional_sl.training.request import Request, stored
from functional_sl.training.update import TrainState

# A rank may wait in a collective while another does what takes longer than an update; the watchdog ends a hang.
_COLLECTIVE_TIMEOUTS = 2 * watchdog.BUSY_FACTOR
_OWN_FILES = ("loss.png", "schema.json", "tensorboard", "pictures", "ranks")


class Start(NamedTuple):
    """Where a run begins."""

    updates: int
    source: Path | None  # the snapshot from which it was resumed
    notes: tuple[str, ...]  # for the user


@dataclasses.dataclass(frozen=True)
class Run:
    """An open run: static parts, where it starts, and where it is written down."""

    config: TrainConfig
    kept: dict[str, Any]  # all settings, as run.json and snapshots keep them
    world: World
    watchdog: Watchdog
    recipe: Recipe  # its data on the device
    fitting: Identity
    advance: capture.Captured | capture.Eager  # state -> (state, {}), one update
    state: TrainState
    start: Start
    run_dir: Path
    run_id: str
    log: runlog.RunLog | None  # of rank 0
    board: board.Board

    @property
    def writes(self) -> bool:
        """Whether this process writes what a run has once."""
        return self.world.rank == 0


@contextlib.contextmanager
def open_run(asked: Request) -> Iterator[Run]:
    """Joins the ranks, opens the run, and closes its files at the end.

    Everything that can be refused is refused before a file is written, on every rank alike.

    Raises:
      cli.UsageError: for settings that cannot be met, and a run or snapshot that does not fit.
    """
    config = asked.config
    with contextlib.ExitStack() as stack:
        with as_usage_error(ValueError, runlog.RunError, snapshot.SnapshotError, RankError):
            _check_device(config.device)
            here = stack.enter_context(world(config.device, _COLLECTIVE_TIMEOUTS * config.timeout_s))
            dog = stack.enter_context(Watchdog(here, config.timeout_s))
            stack.enter_context(generators.preserved(here.device))
            with dog.busy("opening the run"):
                run = _open(asked, here, dog)
            if run.log is not None:
                stack.enter_context(run.log)
            stack.enter_context(contextlib.closing(run.board))
            # Graphs that hold collectives go before their process group.
            stack.callback(run.advance.close)
        yield run


def _open(asked: Request, here: World, dog: Watchdog) -> Run:
    with guard(here, "building the recipe"):
        loading.check_installed("matplotlib", *(["tensorboard"] if asked.config.tensorboard else []))
        config = _settle(asked.config, here)
        torch.use_deterministic_algorithms(config.deterministic)
        # Every buffer is written before it is read.
        torch.utils.deterministic.fill_uninitialized_memory = False
        recipe, digest = _build(asked, config, here)
    fitting = _identity(recipe, gather(here, digest), here)
    across = collectives.over(here, config.dp_transport)
    with guard(here, "opening the run"):
        training = update.make_training(recipe, config, across, here.device)
        state = _init(recipe, training, config, here)
        state, start = _restore(asked, state, config, here, fitting)
        kept = stored(config, asked.task)
    check_alike(here, _settings(kept, state, start, fitting), "the ranks were started unlike")
    with guard(here, "opening the run's folder"):
        log = _open_log(asked, config, kept, recipe, start) if here.rank == 0 else None
        if log is not None:
            _write_schema(log.run_dir, recipe)
    place = broadcast(here, None if log is None else [str(log.run_dir), log.run_id])
    run_dir, run_id = Path(place[0]), place[1]
    with guard(here, "opening the rank's log"):
        if log is None:
            folders.enter(run_dir, run_id, here.rank)
    written = log is not None and config.tensorboard
    events = board.Board(run_dir / "tensorboard" if written else None, start.updates if start.source else None)
    advance = _advance(training.update, recipe, config, here)
    return Run(config, kept, here, dog, recipe, fitting, advance, state, start, run_dir, run_id, log, events)


def _build(asked: Request, config: TrainConfig, here: World) -> tuple[Recipe, str]:
    """Returns the recipe with its data on the device, and the digest of the data."""
    generators.seed(_stream(config, update.HOST, here.rank))
    try:
        recipe = asked.builder.build(asked.task)
    except (OSError, StopIteration) as error:
        raise ValueError(f"--recipe={config.recipe}: {type(error).__name__}: {error}") from error
    admission.check_built(recipe, str(config.recipe))
    if not recipe.captured and config.compile == "true":
        raise cli.UsageError(f"--compile=true: recipe {recipe.name} draws on the host and cannot be compiled")
    digest = tree.digest((recipe.data, recipe.validation))
    # The data's making leaves no trace in what the run draws.
    generators.seed(_stream(config, update.HOST, here.rank))
    return recipe._replace(
        data=tree.to(recipe.data, here.device), validation=tree.to(recipe.validation, here.device)
    ), digest


def _init(recipe: Recipe, training: update.Training, config: TrainConfig, here: World) -> TrainState:
    made = recipe.init(keys.fold_in(keys.key(config.seed), update.INIT))
    params, buffers = tree.to(admission.check_made(recipe, made), here.device)
    key = _stream(config, update.ADMISSION, here.rank).to(here.device)
    with torch.no_grad(), generators.preserved(here.device):
        names = admission.check(recipe, params, buffers, config.batch_size, key)
    return training.init(params, buffers, names, here.rank)


def _stream(config: TrainConfig, purpose: int, rank: int) -> torch.Tensor:
    return keys.fold_in(keys.fold_in(keys.key(config.seed), purpose), rank)


def _restore(
    asked: Request, state: TrainState, config: TrainConfig, here: World, fitting: Identity
) -> tuple[TrainState, Start]:
    source = asked.source
    if source is None:
        return _initialized(state, config), Start(0, None, ())
    content = recovery.check(source, resuming.home(source), fitting, here.rank)
    state, host = recovery.restore(source, state, here.rank, here.device)
    generators.write(host, here.device)
    notes = [f"resumed from {source} after {content['step']} updates"]
    moved = [name for name in ("device", "threads", "compile") if getattr(config, name) != content["config"][name]]
    if moved:
        notes.append(f"other {' and '.join(moved)} than before: the bits may differ from an unbroken run's from here")
    if content["step"] == config.updates:
        notes.append("the run is at its end: its pictures are drawn anew; a greater --updates goes on")
    if config.updates != content["config"]["updates"]:
        ended = config.updates > config.lr_decay_updates and config.lr_schedule != "constant" and config.lr_end == 0
        still = ", behind which the rate is 0 and nothing moves" if ended else ""
        notes.append(
            f"updates is {config.updates} now; the schedule keeps lr_decay_updates={config.lr_decay_updates}{still}"
        )
    return state, Start(content["step"], source, tuple(notes))


def _initialized(state: TrainState, config: TrainConfig) -> TrainState:
    """Returns a fresh state, with the parameters and buffers of `init_from` where it is given."""
    if config.init_from is None:
        return state
    source = resuming.folder(config.init_from, having="recipe")
    params, buffers = recovery.model(source, state.step.params, state.step.stats)
    return state._replace(step=state.step._replace(params=params, stats=buffers))


def _settle(config: TrainConfig, here: World) -> TrainConfig:
    """Returns the settings with everything decided that a resume must not decide anew."""
    kind = here.device.type
    if config.backend not in ("auto", {"cpu": "gloo", "cuda": "nccl"}[kind]):
        raise cli.UsageError(f"--backend={config.backend}: the run is on {kind}; nccl moves CUDA tensors, gloo a CPU's")
    torch.set_num_threads(config.threads or torch.get_num_threads())
    return dataclasses.replace(
        config,
        device=kind,
        compile=config.compile if config.compile != "auto" else ("true" if kind == "cuda" else "false"),
        threads=torch.get_num_threads(),
        lr_decay_updates=config.lr_decay_updates or config.updates,
    )


def _identity(recipe: Recipe, digests: list[str], here: World) -> Identity:
    schema = identity.digest(dict(recipe.schema), "schema")
    return Identity(1 if here.data_group is None else 2, here.size, schema, tuple(digests))


def _settings(kept: dict[str, Any], state: TrainState, start: Start, fitting: Identity) -> dict[str, str]:
    """Returns what must be the same on every rank before gradients and states may meet."""
    shared = state._replace(step=state.step._replace(stats=()), own=())
    about = {
        "the recipe's schema": fitting.schema[:16],
        "the resumed update": start.updates,
        "the parameters and optimizer": tree.digest(shared)[:16],
        "the layout of the gradients": wire.digest(wire.layout(state.step.params))[:16],
        "the layout of the buffers": [(leaf.dtype, tuple(leaf.shape)) for leaf in tree.leaves(state.step.stats)],
        "the metrics": sorted(state.own.sums),
    }
    if start.source is None:
        about["the first buffers"] = tree.digest(state.step.stats)[:16]
    return {name: str(value) for name, value in (kept | identity.versions() | about).items()}


def _open_log(asked: Request, config: TrainConfig, kept: dict[str, Any], recipe: Recipe, start: Start) -> runlog.RunLog:
    if start.source is not None:
        run_dir = resuming.home(start.source)
        log = runlog.reopen(run_dir, kept, start.updates, may_change=MAY_CHANGE | asked.builder.places)
        snapshot.set_aside(log.run_dir, start.updates, log.run_id)
        return log
    if config.run_dir:
        folders.check_vacant(Path(config.run_dir).expanduser(), _OWN_FILES)
    where = {"run_dir": config.run_dir} if config.run_dir else {"base_dir": resuming.RUNS}
    return runlog.create(kept, (recipe.name, f"seed{config.seed}"), **where)


def _write_schema(run_dir: Path, recipe: Recipe) -> None:
    """Writes what the recipe says of its data, such as features, padding and shares, for people to read."""
    text = json.dumps(dict(recipe.schema), indent=1, allow_nan=False)
    with reporting.writing(run_dir / "schema.json"):
        files.write_whole(run_dir / "schema.json", text.encode() + b"\n")


def _advance(step: Callable, recipe: Recipe, config: TrainConfig, here: World) -> capture.Captured | capture.Eager:
    """Returns one update over one state, compiled and captured as the settings ask."""

    def one(state: TrainState) -> tuple[TrainState, dict]:
        return step(state, recipe.data)

    if not recipe.captured:
        return capture.Eager(one)
    chosen = capture.compiled(one) if config.compile == "true" else one
    graph = here.device.type == "cuda" and config.cuda_graph and config.compute_dtype != "float16"
    return capture.Captured(chosen) if graph else capture.Eager(chosen)


def _check_device(name: str) -> None:
    if name == "cuda" and not torch.cuda.is_available():
        raise cli.UsageError("--device=cuda: torch sees no CUDA device; use --device=cpu or a CUDA build of torch")
