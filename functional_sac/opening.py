"""Opening a run, new or resumed, and saving it.

A snapshot has the parts `learner` (a `SACState`), `run` (environments, noise, reward scale, counters) and, with
`--snapshot_replay`, `replay.rank0`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import shutil
from collections.abc import Callable, Iterator
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
COMPILED_UPDATES = 20_000
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
      cli.UsageError: for settings that cannot be met, and a run or snapshot that is not there or does not fit.
    """
    with _as_usage_error(runlog.RunError, snapshot.SnapshotError):
        run = _open(config, given)
    with run.log, contextlib.closing(run.board):
        yield run


def _open(config: TrainConfig, given: frozenset[str]) -> Run:
    for name in ("run_dir", "resume", "init_from"):
        if getattr(config, name) == "":
            raise cli.UsageError(f"--{name}= names no folder; give one or leave the flag out")
    source = _source(config.resume) if config.resume else None
    if source:
        config = _resumed_config(config, given, source)
    with _as_usage_error(ValueError):
        _check_seeds(config)
        device = _device(config.device)
        env = envs.make(config.task, config.sim)
    config = plan.settle(config)
    config = dataclasses.replace(config, compile=_compiles(config, device))
    _make_deterministic(config.deterministic)
    learner = make_learner(config, env.spec, wrap=_wrap(config))
    iteration = make_iteration(config, env, learner)
    state, start = _restore(_init(iteration, config, device), config, source)
    log = _open_log(config, source, start)
    events = board.Board(log.run_dir / "tensorboard" if config.tensorboard else None, start.snapshot_step)
    return Run(config, device, env, learner, _over_seeds(iteration, config), state, start, log, events)


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
    if resume == "latest":
        return _latest()
    path = Path(resume).expanduser()
    if path.name == "manifest.json":
        path = path.parent
    if (path / "manifest.json").exists():
        return path
    if not path.is_dir():
        raise cli.UsageError(f"--resume={resume}: no such folder; give the folder of a run or of a snapshot")
    run_dir = path.parent if path.name == "snapshots" else path
    found = snapshot.latest(run_dir, runlog.describe(run_dir)["run_id"])
    if found is None:
        raise cli.UsageError(f"--resume={resume}: holds no valid snapshot; start a new run instead")
    return found


def _latest() -> Path:
    runs = sorted(Path(RUNS).glob("*/run.json"), key=lambda p: p.stat().st_mtime, reverse=True)
    for run in runs:
        if found := snapshot.latest(run.parent, runlog.describe(run.parent)["run_id"]):
            return found
    raise cli.UsageError(f"--resume=latest: no run with a valid snapshot under {Path(RUNS).absolute()}; give its path")


def _resumed_config(config: TrainConfig, given: frozenset[str], source: Path) -> TrainConfig:
    """Returns the stored config of the run, with the fields that were given now."""
    if config.run_dir is not None:
        raise cli.UsageError(f"--run_dir={config.run_dir}: a resumed run stays in its folder; leave it out")
    done = _steps_done(source)
    old = cli.from_dict(TrainConfig, runlog.describe(_run_dir(source))["config"])
    changes = {name: getattr(config, name) for name in given if name not in _UNSTORED}
    refused = [name for name in sorted(changes.keys() - MAY_CHANGE) if changes[name] != getattr(old, name)]
    if refused:
        shown = ", ".join(f"{name} {getattr(old, name)} -> {changes[name]}" for name in refused)
        raise cli.UsageError(f"a resumed run keeps its settings ({shown}); start a new run with --init_from={source}")
    with _as_usage_error(ValueError):
        new = dataclasses.replace(old, **changes)
    if done >= new.env_steps:
        raise cli.UsageError(f"--env_steps={new.env_steps}: {source} has {done} already; ask for more")
    return new


def _steps_done(source: Path) -> int:
    """Returns the environment steps of a snapshot that its own run can go on from."""
    elsewhere = f"; start a new run with --init_from={source}"
    if source.resolve().parent.name == "superseded":
        raise cli.UsageError(f"--resume={source}: the run has gone on from an earlier snapshot{elsewhere}")
    manifest, run_id = read_manifest(source), runlog.describe(_run_dir(source))["run_id"]
    if manifest["run_id"] != run_id:
        raise cli.UsageError(f"--resume={source}: is of run {manifest['run_id']}, but lies in run {run_id}{elsewhere}")
    return manifest["step"]


def _run_dir(source: Path) -> Path:
    return source.resolve().parent.parent


def _check_seeds(config: TrainConfig) -> None:
    if seeds(config).stop > 2**32:
        raise ValueError(f"seed={config.seed}, num_seeds={config.num_seeds}: seeds end at 2**32 - 1; choose lower ones")


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


def _compiles(config: TrainConfig, device: torch.device) -> str:
    """Returns what `--compile=auto` comes to, which the run keeps, resumes included."""
    if config.compile != "auto":
        return config.compile
    # On a CPU compiling takes about a minute and then halves an update's time.
    worthwhile = plan.total_updates(config) >= COMPILED_UPDATES and any(map(shutil.which, ("c++", "g++", "clang++")))
    return "true" if device.type == "cuda" or worthwhile else "false"


def _wrap(config: TrainConfig) -> Callable[[capture.Function], capture.Function]:
    """Returns what is done to a region of the cycle: mapped over seeds where there are several, compiled if asked."""

    def wrap(region: capture.Function) -> capture.Function:
        region = capture.mapped(region) if config.num_seeds > 1 else region
        return capture.compiled(region) if config.compile == "true" else region

    return wrap


def _over_seeds(iteration: Iteration, config: TrainConfig) -> Iteration:
    """Maps the environment step over seeds, where there are several; the learner's regions are mapped already."""
    if config.num_seeds == 1:
        return iteration
    steps = [capture.mapped(functools.partial(iteration.step, random=random)) for random in (False, True)]
    return iteration._replace(step=lambda state, random: steps[random](state))


def _restore(state: TrainState, config: TrainConfig, source: Path | None) -> tuple[TrainState, Start]:
    if source is None:
        state = _init_from(state, Path(config.init_from).expanduser()) if config.init_from else state
        return state, Start(0, 0, 0)
    manifest = read_manifest(source)
    has_replay = "replay.rank0" in manifest["parts"]
    like = {"learner": state.sac, "run": _rest(state)} | ({"replay.rank0": state.replay} if has_replay else {})
    parts, _ = snapshot.restore(source, like)
    state = parts["run"]._replace(sac=parts["learner"], replay=parts.get("replay.rank0", state.replay))
    updates, inserted = (int(x.reshape(-1)[0]) for x in (state.sac.updates, state.replay.steps))
    start = Start(manifest["step"], updates, inserted, snapshot_step=manifest["step"])
    notes = [f"resumed from {source} at {start.env_steps} environment steps"]
    if not has_replay:
        notes.append(_refill_note(config, start.env_steps))
    if config.env_steps != manifest["config"]["env_steps"]:
        notes.append(f"env_steps is {config.env_steps} now; lr_decay_updates stays {config.lr_decay_updates}")
    return state, start._replace(notes=tuple(notes))


def _refill_note(config: TrainConfig, done: int) -> str:
    first = done + config.num_envs * plan.next_learning_step(config)
    if first >= config.env_steps + config.num_envs:
        raise cli.UsageError(
            f"--env_steps={config.env_steps}: the snapshot holds no replay, and once it is filled anew, at {first} "
            "environment steps, nothing would be left to learn; ask for more"
        )
    return f"the snapshot holds no replay: it is filled anew, and learning goes on at {first} environment steps"


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
    if config.run_dir:
        _check_vacant(Path(config.run_dir).expanduser())
    return runlog.create(content, (config.task, f"seed{config.seed}"), **where)


def _check_vacant(run_dir: Path) -> None:
    # The log refuses a run's folder; these names would be overwritten or mixed with what is there.
    taken = [name for name in ("learning_curve.png", "policy.gif", "tensorboard") if (run_dir / name).exists()]
    if taken and not (run_dir / "run.json").exists():
        raise cli.UsageError(f"--run_dir={run_dir}: holds {', '.join(taken)} of something else; choose another folder")


@contextlib.contextmanager
def _as_usage_error(*kinds: type[Exception]) -> Iterator[None]:
    try:
        yield
    except cli.UsageError:
        raise
    except kinds as error:
        raise cli.UsageError(str(error)) from error
