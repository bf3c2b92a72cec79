"""Forecasts of the Go2 over hundreds of steps: trained on their own predictions, trained teacher-forced, and held.

    python -m experiments.rwm_horizons --out=horizons
    python -m experiments.rwm_horizons --out=horizons --autoregressive=runs/a --teacher_forced=runs/b

Trains both models with the same settings and the same number of updates, or loads the last snapshots of two runs with
the same data (the best ones were chosen by the episodes of this very trial). Writes `horizons.json`, the errors over
all steps up to each horizon; `nrmse.png` and `l1.png`, the errors up to every step; and `forecast.gif`, the joints and
the attitude of a held-out robot, the true ones pale.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from functional_sac.envs import sketch
from functional_sl import export, train
from functional_sl.models import normalizer
from functional_sl.models import rwm as models
from functional_sl.recipes import rwm
from functional_sl.run import cli, figures, manifest, resuming, video
from functional_sl.sim import make, rotation
from functional_sl.sim.robots import go2
from functional_sl.training import request

RECIPE = "functional_sl.recipes.rwm:build"
EVERY = 4  # steps of 20 ms from one picture to the next


@dataclasses.dataclass(frozen=True)
class Settings:
    """The flags."""

    out: str = cli.option("horizons", "Folder of what is written.")
    autoregressive: str | None = cli.option(None, "Run to load; none: train one.")
    teacher_forced: str | None = cli.option(None, "Run to load; none: train one with forecast=1.")
    size: str = cli.option("small", "Of the runs to train.")
    updates: int = cli.option(0, "Of the runs to train; 0: the size's own.")
    path: str | None = cli.option(None, "Folder of roll-outs to share; none: in the output folder.")
    device: str = cli.option("auto", "Where to train.", choices=("auto", "cpu", "cuda"))
    episode: int = cli.option(0, "Held-out episode of the film.")
    film: bool = cli.option(True, "Write the film.")


class Forecasts(NamedTuple):
    """A model's task and its free-running states of held-out episodes, normalised [E, H, S]."""

    task: rwm.Task
    predicted: Tensor
    held: Tensor
    true: Tensor


def trained(settings: Settings, name: str, **changes: Any) -> Path:
    """Trains one of the two models and returns its folder."""
    folder = Path(settings.out) / name
    if settings.updates:
        changes["updates"] = settings.updates
    path = settings.path or str(Path(settings.out) / "data")
    config, task = train.settings(
        RECIPE, settings.size, run_dir=str(folder), path=path, device=settings.device, **changes
    )
    train.run(config, task)
    return folder


def forecasts(run: Path) -> Forecasts:
    """Returns what the last snapshot of a run makes of its held-out episodes."""
    source = resuming.folder(run)
    config = request.resolve(manifest.read(source)["config"], frozenset()).task
    prepared = rwm.prepare(config)
    packed = export.bundle_of(source)
    params, scales = models.unnamed(packed.tensors, config.layers)
    return Forecasts(prepared.task, *rwm.free_running(prepared.task, prepared.whole, params, scales))


def curves(found: dict[str, Forecasts]) -> dict[str, rwm.Errors]:
    """Returns the errors of every model and of the held state by label."""
    errors = {label: rwm.errors(x.predicted, x.true) for label, x in found.items()}
    first = next(iter(found.values()))
    return errors | {"hold last": rwm.errors(first.held, first.true)}


def draw(folder: Path, errors: dict[str, rwm.Errors], step_dt: float) -> None:
    """Draws both errors over all steps up to each horizon."""
    steps = torch.arange(1, next(iter(errors.values())).squared.shape[1] + 1)
    for name, title in (("nrmse", "nRMSE"), ("l1", "relative L1")):
        series = []
        for label, found in errors.items():
            by_step = (found.squared if name == "nrmse" else found.absolute / found.scale).mean(0)
            upto = by_step.cumsum(0) / steps
            series.append(
                figures.Series(label, steps * step_dt, (upto.sqrt() if name == "nrmse" else upto).clamp(max=4))
            )
        text = {
            "title": f"Forecasts of held-out episodes: {title}",
            "xlabel": "horizon (s)",
            "ylabel": f"{title} (cut at 4)",
        }
        figures.learning_curve(folder / f"{name}.png", series, **text)


def poses(states: Tensor, default: Tensor) -> Tensor:
    """Returns qpos [H, 19] of states [H, 45] in their units: attitude and joints, no heading and no travel."""
    x, y, z = states[:, 6:9].unbind(1)
    turn = rotation.from_euler(torch.atan2(-y, -z), torch.asin(x.clamp(-1, 1)), torch.zeros_like(x))
    return torch.cat([default[:3].expand(len(states), 3), turn, states[:, 9:21]], 1)


def film(path: Path, found: dict[str, Forecasts], episode: int) -> None:
    """Writes the true robot, pale, behind every model's forecast of it, side by side, lowest feet on the floor."""
    robot = go2.robot("full")
    sim = make(robot, "mujoco", threads=1)
    pairs, height = sketch.links(robot, sim.model), float(sim.model.default_qpos[2])

    def places(task: rwm.Task, states: Tensor) -> np.ndarray:
        raw = normalizer.denormalize(task.scales.state, states[episode, ::EVERY])
        qpos = poses(raw, sim.model.default_qpos)
        state = sim.reset(
            sim.init(len(qpos)), torch.ones(len(qpos), dtype=torch.bool), qpos, torch.zeros(len(qpos), 18)
        )
        points = np.stack([sketch.points(sim.model, state, i) for i in range(len(qpos))])
        points[..., 2] += go2.FOOT_RADIUS - points[:, -len(go2.LEGS) :, 2].min(1)[:, None]
        return points

    drawn = []
    for label, model in found.items():
        true, predicted = places(model.task, model.true), places(model.task, model.predicted)
        frames = [sketch.draw(pairs, p, height, ghost=t) for p, t in zip(predicted, true, strict=True)]
        drawn.append([video.annotate(frame, label) for frame in frames])
    sim.close()
    video.write(path, (video.tile(np.stack(row)) for row in zip(*drawn, strict=True)), 50 / EVERY)


def main() -> None:
    """Trains or loads, writes the pictures, and prints the figures as one JSON line."""
    with cli.exit_on_usage_error("rwm_horizons"):
        settings = cli.parse(Settings, program="rwm_horizons", description=__doc__).config
    out = Path(settings.out)
    runs = {
        "autoregressive": settings.autoregressive or trained(settings, "autoregressive"),
        "teacher-forced": settings.teacher_forced or trained(settings, "teacher_forced", forecast=1),
    }
    found = {label: forecasts(Path(run)) for label, run in runs.items()}
    errors, task = curves(found), found["autoregressive"].task
    table = {label: rwm.figures_of(x, task.config.horizons) for label, x in errors.items()}
    out.mkdir(parents=True, exist_ok=True)
    (out / "horizons.json").write_text(json.dumps(table, indent=2) + "\n")
    draw(out, errors, task.schema.step_dt)
    if settings.film:
        film(out / "forecast.gif", found, settings.episode)
    print(json.dumps({label: {k: round(x, 4) for k, x in row.items()} for label, row in table.items()}))


if __name__ == "__main__":
    main()
