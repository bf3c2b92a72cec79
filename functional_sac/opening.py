"""Opening a run, new or resumed, and saving it.

A snapshot has the parts `learner` (a `SACState`), `run` (environments, noise, reward scale, counters) and, with
`--snapshot_replay`, `replay.rank0`.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch

from functional_sac import envs, plan
from functional_sac.config import TrainConfig
from functional_sac.cycle import Learner, SACState, make_learner
from functional_sac.envs.env import Env
from functional_sac.iteration import Iteration, TrainState, make_iteration
from functional_sl import capture, keys, tree
from functional_sl.run import board, cli, runlog, snapshot
from functional_sl.run.manifest import read as read_manifest

RUNS = "runs"
MAY_CHANGE = frozenset(
    ("env_steps", "eval_every", "log_every", "snapshot_every", "keep_snapshots", "snapshot_replay", "tensorboard")
)
_UNSTORED = {"resume": None, "run_dir": None}  # a run may be moved, and every attempt has its own


class Start(NamedTuple):
    """Where a run begins, in host numbers."""

    env_steps: int  # of one seed
    updates: int
    inserted: int  # vector steps in the replay
    notes: tuple[str, ...] = ()  # for the user
    snapshot_step: int | None = None  # the snapshot from which it was resumed


@dataclasses.dataclass(frozen=True)
class Run:
    """An open run: static parts, where it starts, and where it is written down."""

    config: TrainConfig
    device: torch.device
    env: Env
    learner: Learner
    iteration: Iteration
    state: TrainState
    start: Start
    log: runlog.RunLog
    board: board.Board


@contextlib.contextmanager
def open_run(config: TrainConfig, given: frozenset[str] = frozenset()) -> Iterator[Run]:
    """Opens the run that the config asks for, and closes its files at the end.

    Everything that can be refused is refused before a file is written.

    Args:
      config: the run; with `resume`, the fields of `given` override those of the run that goes on.
      given: names of the fields that were set on purpose.

    Raises:
      cli.UsageError: for settings that cannot be met.
      RunError, SnapshotError: for a run or snapshot that is not there or does not fit.
    """
    source = _source(config.resume) if config.resume else None
    if source:
        config = _resumed_config(config, given, source)
    with _as_usage_error():
        device = _device(config.device)
        env = envs.make(config.task, config.sim)
    config = plan.settle(config)
    _make_deterministic(config.deterministic)
    learner = make_learner(config, env.spec)
    iteration = _over_seeds(make_iteration(config, env, learner), config, device)
    state = _init(make_iteration(config, env, learner), config, device)
    state, start = _restore(state, config, source)
    log = _open_log(config, source, start)
    events = board.Board(log.run_dir / "tensorboard" if config.tensorboard else None, start.snapshot_step)
    with log, contextlib.closing(events):
        yield Run(config, device, env, learner, iteration, state, start, log, events)


def save(run: Run, state: TrainState, env_steps: int, score: float | None) -> Path:
    """Writes a snapshot and removes the older ones that the config does not keep.

    Args:
      run: the open run.
      state: what is saved.
      env_steps: its step.
      score: mean return of an evaluation of this very state, or None.
    """
    run.log.sync()
    parts = {"learner": state.sac, "run": _rest(state)}
    if run.config.snapshot_replay:
        parts["replay.rank0"] = state.replay
    return snapshot.save(
        run.log.run_dir / "snapshots",
        env_steps,
        parts,
        run_id=run.log.run_id,
        config=stored(run.config),
        score=score,
        keep=run.config.keep_snapshots,
        protect=() if run.start.snapshot_step is None else (run.start.snapshot_step,),
    )


def stored(config: TrainConfig) -> dict[str, Any]:
    """Returns the config as a run keeps it: without the paths of one attempt."""
    return cli.to_dict(dataclasses.replace(config, **_UNSTORED))


def seeds(config: TrainConfig) -> range:
    """Returns the seeds of the run's learners."""
    return range(config.seed, config.seed + config.num_seeds)


def _rest(state: TrainState) -> TrainState:
    return state._replace(sac=(), replay=())


def _source(resume: str) -> Path:
    """Returns the snapshot folder that `--resume` names."""
    if resume != "latest":
        path = Path(resume).expanduser()
        if path.name == "manifest.json":
            path = path.parent
        if (path / "manifest.json").exists():
            return path
        if not path.is_dir():
            raise cli.UsageError(f"--resume={resume}: no such folder; give the folder of a run or of a snapshot")
        found = snapshot.latest(path)
        if found is None:
            raise cli.UsageError(f"--resume={resume}: holds no valid snapshot; start a new run instead")
        return found
    runs = sorted(Path(RUNS).glob("*/run.json"), key=lambda p: p.stat().st_mtime, reverse=True)
    for run in runs:
        if found := snapshot.latest(run.parent):
            return found
    raise cli.UsageError(f"--resume=latest: no run with a valid snapshot under {Path(RUNS).absolute()}; give its path")


def _resumed_config(config: TrainConfig, given: frozenset[str], source: Path) -> TrainConfig:
    """Returns the stored config of the run, with the fields that were given now."""
    if config.run_dir is not None:
        raise cli.UsageError(f"--run_dir={config.run_dir}: a resumed run stays in its folder; leave it out")
    old = cli.from_dict(TrainConfig, runlog.describe(_run_dir(source))["config"])
    changes = {name: getattr(config, name) for name in given if name not in (*_UNSTORED, "preset", "config")}
    with _as_usage_error():
        new = dataclasses.replace(old, **changes)
    refused = [name for name in cli.differing(old, new) if name not in MAY_CHANGE]
    if refused:
        shown = ", ".join(f"{name} {getattr(old, name)} -> {getattr(new, name)}" for name in refused)
        raise cli.UsageError(f"a resumed run keeps its settings ({shown}); start a new run with --init_from={source}")
    done = read_manifest(source)["step"]
    if done >= new.env_steps:
        raise cli.UsageError(f"--env_steps={new.env_steps}: {source} has {done} already; ask for more")
    return new


def _run_dir(source: Path) -> Path:
    return source.absolute().parent.parent


def _device(name: str) -> torch.device:
    if name == "cuda" and not torch.cuda.is_available():
        raise ValueError("--device=cuda: torch sees no CUDA device; use --device=cpu or install a CUDA build of torch")
    return torch.device("cuda" if name == "cuda" or (name == "auto" and torch.cuda.is_available()) else "cpu")


def _make_deterministic(deterministic: bool) -> None:
    torch.use_deterministic_algorithms(deterministic)
    # Filling fresh memory would hide nothing here: every buffer is written before it is read.
    torch.utils.deterministic.fill_uninitialized_memory = False


def _init(iteration: Iteration, config: TrainConfig, device: torch.device) -> TrainState:
    states = [iteration.init(keys.key(seed, device)) for seed in seeds(config)]
    return tree.stack(states) if config.num_seeds > 1 else states[0]


def _over_seeds(iteration: Iteration, config: TrainConfig, device: torch.device) -> Iteration:
    """Maps the iteration over a leading axis of seeds, where there are several, and compiles where asked to."""

    def learn_in_phase(phase: int) -> capture.Function:
        def learn(state: TrainState) -> tuple[TrainState, dict[str, torch.Tensor]]:
            return iteration.learn(state, phase)

        mapped = _mapped(learn) if config.num_seeds > 1 else learn
        compiles = config.compile == "true" or (config.compile == "auto" and device.type == "cuda")
        return capture.compiled(mapped) if compiles else mapped

    steps = [lambda state, random=random: iteration.step(state, random) for random in (False, True)]
    steps = [_mapped(step) if config.num_seeds > 1 else step for step in steps]
    phases: dict[int, capture.Function] = {}

    def step(state: TrainState, random: bool) -> TrainState:
        return steps[random](state)

    def learn(state: TrainState, phase: int) -> tuple[TrainState, dict[str, torch.Tensor]]:
        if phase not in phases:
            phases[phase] = learn_in_phase(phase)
        return phases[phase](state)

    return Iteration(iteration.init, step, learn)


def _mapped(fn: Any) -> Any:
    # vmap takes flat lists faster than nested NamedTuples.
    def mapped(state: TrainState) -> Any:
        leaves, structure = tree.flatten(state)
        outputs = None

        def flat(leaves: list[torch.Tensor]) -> list[torch.Tensor]:
            nonlocal outputs
            new, outputs = tree.flatten(fn(tree.unflatten(structure, leaves)))
            return new

        found = torch.func.vmap(flat)(leaves)
        return tree.unflatten(outputs, found)

    return mapped


def _restore(state: TrainState, config: TrainConfig, source: Path | None) -> tuple[TrainState, Start]:
    if source is None:
        state = _init_from(state, Path(config.init_from).expanduser()) if config.init_from else state
        return state, Start(0, 0, 0)
    manifest = read_manifest(source)
    like = {"learner": state.sac, "run": _rest(state)}
    has_replay = "replay.rank0" in manifest["parts"]
    if has_replay:
        like["replay.rank0"] = state.replay
    parts, _ = snapshot.restore(source, like)
    buffer = parts.get("replay.rank0", state.replay)
    state = parts["run"]._replace(sac=parts["learner"], replay=buffer)
    step = manifest["step"]
    notes = (f"resumed from {source} at {step} environment steps",)
    if not has_replay:
        notes += ("the snapshot holds no replay: it is filled anew before learning goes on",)
    updates, inserted = (int(x.reshape(-1)[0]) for x in (state.sac.updates, state.replay.steps))
    return state, Start(step, updates, inserted, notes, step)


def _init_from(state: TrainState, path: Path) -> TrainState:
    """Returns a fresh state with the networks, statistics and temperature of a snapshot."""
    old: SACState = snapshot.restore(path, {"learner": state.sac})[0]["learner"]
    names = ("actor", "critic", "temperature")
    taken = {
        n: getattr(state.sac, n)._replace(params=getattr(old, n).params, stats=getattr(old, n).stats) for n in names
    }
    return state._replace(sac=state.sac._replace(target=old.target, **taken))


def _open_log(config: TrainConfig, source: Path | None, start: Start) -> runlog.RunLog:
    content = stored(config)
    if source is not None:
        log = runlog.reopen(_run_dir(source), content, start.snapshot_step, may_change=MAY_CHANGE)
        snapshot.set_aside(log.run_dir, start.snapshot_step, log.run_id)
        return log
    where = {"run_dir": config.run_dir} if config.run_dir else {"base_dir": RUNS}
    return runlog.create(content, (config.task, f"seed{config.seed}"), **where)


@contextlib.contextmanager
def _as_usage_error() -> Iterator[None]:
    try:
        yield
    except cli.UsageError:
        raise
    except ValueError as error:
        raise cli.UsageError(str(error)) from error
