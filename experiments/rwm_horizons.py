"""Forecasts of the Go2 over hundreds of steps: trained on their own predictions, trained teacher-forced, and held.

    python -m experiments.rwm_horizons --out=horizons
    python -m experiments.rwm_horizons --out=horizons --autoregressive=runs/a --teacher_forced=runs/b

Trains both models with the same settings and the same number of updates, or loads the last snapshots of two runs with
the same data (the best ones were chosen by the episodes of this very trial). All held-out episodes are forecast from
many of their frames. Writes `horizons.json`, the figures of `rwm_forecasts` and 95 % bounds of a paired bootstrap over
episodes: the nRMSE of the twin, and of the training mean, minus that of the autoregressive model; `nrmse.png` and
`l1.png`, the errors up to every step; and `forecast.gif`, the joints and the attitude of a held-out robot, the true
ones pale.
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
from functional_sl import export, keys, train
from functional_sl.models import normalizer
from functional_sl.models import rwm as models
from functional_sl.recipes import rwm, rwm_forecasts, rwm_windows
from functional_sl.recipes.rwm_forecasts import Judged, Run
from functional_sl.run import cli, figures, manifest, resuming, video
from functional_sl.sim import make, rotation
from functional_sl.sim.robots import go2
from functional_sl.training import request

RECIPE = "functional_sl.recipes.rwm:build"
EVERY = 4  # steps of 20 ms from one picture to the next
RESAMPLES = 2000
MEAN = "training mean"


@dataclasses.dataclass(frozen=True)
class Settings:
    """The flags."""

    out: str = cli.option("horizons", "Folder of what is written.")
    autoregressive: str | None = cli.option(None, "Run to load; none: train one.")
    teacher_forced: str | None = cli.option(None, "Run to load; none: train one with forecast=1.")
    size: str = cli.option("small", "Of the runs to train.")
    updates: int = cli.option(0, "Of the runs to train; 0: the size's own.")
    seed: int = cli.option(0, "Of the runs to train.")
    path: str | None = cli.option(None, "Folder of roll-outs to share; none: in the output folder.")
    device: str = cli.option("auto", "Where to train.", choices=("auto", "cpu", "cuda"))
    every: int = cli.option(40, "Frames of a held-out episode from one forecast to the next.")
    block: int = cli.option(8, "Steps after which a forecast reads its own last frames anew; 368: it never does.")
    episode: int = cli.option(0, "Held-out episode of the film, among those that last for the longest horizon.")
    film: bool = cli.option(True, "Write the film.")


class Forecasts(NamedTuple):
    """What a model makes of the held-out episodes."""

    task: rwm.Task
    judged: Judged
    run: Run  # of the forecasts whose episodes last for the longest horizon


def trained(settings: Settings, name: str, **changes: Any) -> Path:
    """Trains one of the two models and returns its folder."""
    folder = Path(settings.out) / name
    if settings.updates:
        changes["updates"] = settings.updates
    path = settings.path or str(Path(settings.out) / "data")
    changes |= {"run_dir": str(folder), "path": path, "device": settings.device, "seed": settings.seed}
    config, task = train.settings(RECIPE, settings.size, **changes)
    train.run(config, task)
    return folder


def forecasts(run: Path, every: int, block: int) -> Forecasts:
    """Returns what the last snapshot of a run makes of its held-out episodes."""
    source = resuming.folder(run)
    config = request.resolve(manifest.read(source)["config"], frozenset()).task
    config = dataclasses.replace(config, evaluation_every=every, block=block)
    task, _, _, frames = rwm.prepare(config)
    packed = export.bundle_of(source)
    params, scales = models.unnamed(packed.tensors)
    judged = rwm.judge(task, frames, params, scales)
    horizon = max(config.horizons)
    whole = frames.anchor[judged.valid.all(1)]
    state, action, *_ = rwm_windows.window(frames, whole, config.history, horizon)
    return Forecasts(task, judged, rwm_forecasts.run(params, scales, config.history, config.block, state, action))


def compare(found: dict[str, Forecasts]) -> dict[str, Any]:
    """Returns the intervals of the second model's and the training mean's nRMSE minus the first's, by horizon.

    Raises:
      ValueError: if the two models were judged by other frames.
    """
    (_, one), (label, other) = found.items()
    if not torch.equal(one.run.true, other.run.true) or not torch.equal(one.judged.valid, other.judged.valid):
        raise ValueError(
            "the runs held out other episodes: give both the same --path, --data_seed, --held_out, --history"
        )
    first, valid, episode = one.judged.errors[rwm_forecasts.MODEL], one.judged.valid, one.judged.episode
    weight = rwm_windows.bootstrap(keys.key(0), int(episode.max()) + 1, RESAMPLES)
    sides = {label: other.judged.errors[rwm_forecasts.MODEL], MEAN: one.judged.errors[rwm_forecasts.MEAN]}
    table = {}
    for name, side in sides.items():
        bounds = rwm_forecasts.intervals(first.squared, side.squared, valid, episode, weight)
        table[name] = {h: [round(float(x[h - 1]), 4) for x in bounds] for h in one.task.config.horizons}
    return table


def draw(folder: Path, found: dict[str, Forecasts]) -> None:
    """Draws both errors over all steps up to each horizon, beside the floors."""
    first = next(iter(found.values()))
    errors = {label: x.judged.errors[rwm_forecasts.MODEL] for label, x in found.items()}
    errors |= {"hold last": first.judged.errors[rwm_forecasts.HOLD], MEAN: first.judged.errors[rwm_forecasts.MEAN]}
    valid = first.judged.valid
    time = first.task.schema.step_dt * torch.arange(1, valid.shape[1] + 1)
    for name, title in (("nrmse", "nRMSE"), ("l1", "relative L1")):
        series = []
        for label, own in errors.items():
            value = own.squared if name == "nrmse" else own.relative
            upto = rwm_forecasts.up_to(value, valid)
            series.append(figures.Series(label, time, (upto.sqrt() if name == "nrmse" else upto).clamp(max=4)))
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
        true, predicted = places(model.task, model.run.true), places(model.task, model.run.mean)
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
    found = {label: forecasts(Path(run), settings.every, settings.block) for label, run in runs.items()}
    horizons = found["autoregressive"].task.config.horizons
    table: dict[str, Any] = {label: rwm_forecasts.figures(x.judged, horizons) for label, x in found.items()}
    table["minus autoregressive"] = compare(found)
    out.mkdir(parents=True, exist_ok=True)
    (out / "horizons.json").write_text(json.dumps(table, indent=2) + "\n")
    draw(out, found)
    if settings.film:
        film(out / "forecast.gif", found, settings.episode)
    print(json.dumps(table))


if __name__ == "__main__":
    main()
