"""A run's iterations once more, in a folder of their own: what each attempt did, as the run's records tell it.

The run's own folder is only read. Its attempts are repeated as they were made: a start, and then a resume from the
snapshot of each step at which the run was resumed, with the settings that held from there on.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from functional_sac import opening, plan
from functional_sac.config import TrainConfig
from functional_sac.envs.host import HostEnv
from functional_sac.opening import Run
from functional_sac.replicas import States, ranks_of
from functional_sac.request import stored
from functional_sl import tree
from functional_sl.run import cli, files, identity, manifest, runlog


class Leg(NamedTuple):
    """A stretch of a run under one attempt's settings."""

    begin: int  # environment steps
    end: float  # where the next leg begins, or infinity
    settings: dict[str, Any]  # the stored config
    versions: dict[str, str]


class Moment(NamedTuple):
    """The state after an iteration, or at the beginning."""

    env_steps: int
    updates: int
    states: States  # of all ranks; used up by the next iteration


def legs(run_dir: Path) -> list[Leg]:
    """Returns the stretches that make up the run, without what a resume from an earlier snapshot took back.

    Raises:
      RunError: if there is no run.
    """
    info = runlog.describe(run_dir)
    settings, end, found = info["config"], math.inf, []
    for attempt in reversed(info["attempts"]):
        begin = attempt["resume_step"] or 0
        if begin < end:
            found.append(Leg(begin, end, settings, attempt["versions"]))
        end = min(end, begin if attempt["resume_step"] is not None else -1)
        before = {name: pair[0] for name, pair in attempt["changes"].items()}
        settings = {name: value for name, value in settings.items() if before.get(name) != "absent"}
        settings |= {name: identity.parse(text) for name, text in before.items() if text != "absent"}
    return found[::-1]


def snapshots(run_dir: Path) -> dict[int, manifest.Manifest]:
    """Returns the manifests of the run's snapshots by rising step.

    Raises:
      SnapshotError: if one is damaged.
    """
    found = [manifest.read(path.parent) for path in (run_dir / "snapshots").glob("step_*/manifest.json")]
    run_id = runlog.describe(run_dir)["run_id"]
    return {m["step"]: m for m in sorted(found, key=lambda m: m["step"]) if m["run_id"] == run_id}


def moments(run_dir: Path, begin: int, end: int, changes: Mapping[str, Any]) -> Iterator[Moment]:
    """Yields the run's state at `begin` and after every iteration up to `end`.

    Args:
      run_dir: the run; read only.
      begin: 0 for its start, or the step of a snapshot.
      end: environment steps.
      changes: fields of the config (`device`, `threads`, `compile`) that differ from the run's.

    Raises:
      UsageError: for a beginning from which the run cannot be repeated, or settings that cannot be met here.
      RunError, SnapshotError: for a run that cannot be read.
    """
    ahead = [leg for leg in legs(run_dir) if leg.end > begin and leg.begin < end]
    extra = {**_simulated(run_dir), **changes, "tensorboard": False}
    if begin:
        _check_begin(run_dir, begin, ahead)
    with tempfile.TemporaryDirectory(prefix="repeat-") as temporary:
        home = Path(temporary) / "run"
        for number, leg in enumerate(ahead):
            start = max(begin, leg.begin)
            with opening.open_run(_continued(run_dir, home, start, _config(leg, extra))) as run:
                if start > leg.begin and isinstance(run.env, HostEnv):
                    raise cli.UsageError(
                        f"--begin={begin}: this task's environments are in no snapshot; take a step at which the run "
                        "was resumed, or 0"
                    )
                for moment in _iterations(run, min(leg.end, end)):
                    # A later leg begins where the one before it ended.
                    if number == 0 or moment.env_steps > start:
                        yield moment
                if leg.end < end:
                    opening.save(run, moment.states, moment.env_steps, None)


def _iterations(run: Run, end: float) -> Iterator[Moment]:
    """Yields the states of an open run from its start on; the clock is that of training."""
    config, states, clock = run.config, run.states, run.start.clock
    yield Moment(clock.env_steps, clock.updates, states)
    while clock.env_steps < end:
        random, phase = plan.iteration(config, clock, run.learner.phases)
        states, idle = _advance(run, states, random, phase)
        before, clock = clock, plan.tick(config, clock, learned=phase is not None, idle=idle, ranks=run.ranks.size)
        if plan.due(config, before.env_steps, clock.env_steps, clock.env_steps >= config.env_steps).log:
            # A record starts the totals of episodes anew.
            emptied = [state._replace(episodes=tree.zeros_like(state.episodes)) for state in states]
            states = tuple(run.iterate.load(state) for state in emptied)
        yield Moment(clock.env_steps, clock.updates, states)


def _advance(run: Run, states: States, random: bool, phase: int | None) -> tuple[States, int]:
    """Returns the states after one iteration, and the number of environments that took no step in it."""
    found = run.ranks.each(lambda state: run.iterate(state, random=random, phase=phase), states)
    return tuple(state for state, _ in found), sum(sum(idle) for _, idle in found)


def _check_begin(run_dir: Path, begin: int, ahead: list[Leg]) -> None:
    kept = snapshots(run_dir)
    if begin not in kept:
        known = ", ".join(map(str, kept)) or "none"
        raise cli.UsageError(
            f"--begin={begin}: {run_dir} has no snapshot of that step (it has {known}); take one, or 0"
        )
    resumed = bool(ahead) and ahead[0].begin == begin
    if "replay.rank0" not in kept[begin]["parts"] and not resumed:
        raise cli.UsageError(
            f"--begin={begin}: that snapshot holds no replay, with which the run went on; take --begin=0"
        )


def _simulated(run_dir: Path) -> dict[str, Any]:
    """Returns the change by which this process stands for the processes of a run under torchrun."""
    if "RANK" in os.environ:
        raise cli.UsageError("a run is repeated by one process; start it without torchrun")
    ranks = max((ranks_of([*content["parts"]]) for content in snapshots(run_dir).values()), default=1)
    return {"simulated_ranks": ranks} if ranks > 1 else {}


def _config(leg: Leg, extra: Mapping[str, Any]) -> TrainConfig:
    config = cli.from_dict(TrainConfig, leg.settings)
    if extra.get("simulated_ranks", 1) > 1:
        # Nothing travels between threads, which add as peers do.
        config = dataclasses.replace(config, dp_transport="nccl")
    try:
        return dataclasses.replace(config, **extra)
    except ValueError as error:
        raise cli.UsageError(f"this run cannot be repeated in one process here: {error}") from None


def _continued(run_dir: Path, home: Path, start: int, config: TrainConfig) -> TrainConfig:
    """Returns the config that opens the run in `home` at `start`, with these settings from there on."""
    if start == 0:
        return dataclasses.replace(config, run_dir=str(home))
    if not home.exists():
        _link(run_dir, home, start)
    settings = stored(config)
    info = runlog.describe(home) | {"config": settings, "config_digest": identity.digest(settings)}
    files.write_whole(home / "run.json", json.dumps(info).encode())
    return TrainConfig(resume=str(manifest.folder_of(home / "snapshots", start)))


def _link(run_dir: Path, home: Path, step: int) -> None:
    """Makes a run's folder whose one snapshot is links to the files of the original."""
    source, target = (manifest.folder_of(folder / "snapshots", step) for folder in (run_dir.absolute(), home))
    target.mkdir(parents=True)
    for path in source.iterdir():
        (target / path.name).symlink_to(path)
    (home / "run.json").write_bytes((run_dir / "run.json").read_bytes())
