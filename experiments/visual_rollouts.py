"""Behaviour cloning from pixels judged by what the exported policy does, and filmed through its own camera.

    python -m experiments.visual_rollouts --worlds=pendulum --films=experiments/pictures

Success is 0 for random actions and 1 for the expert, which sees the state. `blind_success` is that of the same policy
before an empty scene, with all of its other senses. A film shows four episodes from their start: what the policy sees,
and under it the first action over time, done (dark) and planned (orange).
"""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from functional_sl import bundle, export, keys, train
from functional_sl.models import vision
from functional_sl.recipes import chunks
from functional_sl.recipes.bc_visual import BCVisual
from functional_sl.run import cli, video
from functional_sl.sources import demonstrations, pixels, worlds
from functional_sl.sources.pixels import Camera

RECIPE = "functional_sl.recipes.bc_visual:build"
# Long demonstrations of the arm rest at the target nearly always, and teach to stay; many short ones show many targets.
CHANGES: dict[str, dict[str, Any]] = {"reacher": {"episodes": 500, "longest": 50, "disturbance": 0.5}}
WORLDS: dict[str, dict[str, Any]] = {
    name: {
        "world": f"functional_sac.envs.{module}:{name}",
        "expert": f"functional_sac.envs.experts:{name}",
        "camera": f"functional_sl.sources.pixels:{module}",
        **CHANGES.get(name, {}),
    }
    for name, module in (("pendulum", "pendulum"), ("reacher", "reacher"), ("cartpole_swingup", "cartpole"))
}
EPISODES, STEPS, ENLARGED = 4, 120, 3  # of a film; pixels of the screen for one of the camera
STRIP, PAST = 48, 32  # pixels of the action's strip, and steps that it shows before the present


@dataclasses.dataclass(frozen=True)
class Settings:
    """The flags."""

    worlds: str = cli.option("pendulum", f"Worlds, separated by commas: {', '.join(WORLDS)}.")
    seeds: int = cli.option(1, "Runs of each.")
    updates: int | None = cli.option(None, "Updates of a run; by default those of the small size.")
    device: str = cli.option("auto", "Where the runs are.", choices=("auto", "cpu", "cuda"))
    root: str = cli.option("runs/visual_rollouts", "Folder of the runs.")
    films: str | None = cli.option(None, "Folder of the films of the first seed.")

    def __post_init__(self) -> None:
        unknown = [name for name in self.worlds.split(",") if name not in WORLDS]
        if unknown:
            raise ValueError(f"worlds: there is no {unknown[0]!r}; choose from {', '.join(WORLDS)}")


def planner(model: bundle.Loaded, camera: Camera, picture: int) -> Callable[[Tensor], Tensor]:
    """Returns the exported policy as observations [N, H, O] -> actions [N, F, A]; it sees through the camera."""

    def plan(past: Tensor) -> Tensor:
        seen = pixels.see(camera, past, picture)
        given = {pixels.IMAGE: seen.image, pixels.PROPRIOCEPTION: seen.proprioception}
        return model.predict({name: given[name] for name in model.bundle.inputs})["action"]

    return plan


def judge(model: bundle.Loaded, task: BCVisual) -> dict[str, float]:
    """Returns the success of the exported policy with its camera and before an empty scene."""
    world, expert, camera = worlds.load(task.world), demonstrations.load_expert(task.expert), pixels.load(task.camera)
    cameras = {"": camera, "blind_": camera._replace(scene=lambda _: ())}
    found = {}
    for prefix, eye in cameras.items():
        plan = planner(model, eye, task.picture)
        figures = chunks.success(task, world, expert, plan, torch.device("cpu"))
        found |= {f"{prefix}{name}": figures[name] for name in ("success", "return")}
    return found | {name: figures[name] for name in ("expert_return", "random_return")}


def film(model: bundle.Loaded, task: BCVisual) -> Iterator[np.ndarray]:
    """Yields the frames of some episodes side by side."""
    world, camera, plans = worlds.load(task.world), pixels.load(task.camera), []
    plan = planner(model, camera, task.picture)

    def recorded(past: Tensor) -> Tensor:
        plans.append(plan(past))
        return plans[-1]

    policy = worlds.receding(recorded, task.history, task.execute)
    seen = worlds.rollout(world, policy, keys.key(task.data_seed + 1), EPISODES)
    for step in range(min(STEPS, len(seen.reward))):
        image = vision.centre_crop(pixels.render(camera, seen.observation[step], task.picture), task.crop)
        # The first plan is the memory's shape alone.
        ahead = plans[1 + step // task.execute][:, step % task.execute :, 0]
        done = seen.action[: step + 1, :, 0].T
        tiles = [shown(*one) for one in zip(image, done, ahead, strict=True)]
        yield video.tile(np.stack(tiles))


def shown(image: Tensor, done: Tensor, ahead: Tensor) -> np.ndarray:
    """Returns a picture [3, S, S] above the actions done [T] and planned [F], whose first is the present."""
    large = image.permute(1, 2, 0).numpy().repeat(ENLARGED, 0).repeat(ENLARGED, 1)
    width = large.shape[1]
    strip = np.full((STRIP, width, 3), 235, np.uint8)
    strip[STRIP // 2] = 200
    pace = width // (PAST + len(ahead))
    marks = [(PAST + i, value, (230, 126, 34)) for i, value in enumerate(ahead.tolist())]
    marks += [(PAST + 1 + i - len(done), value, (60, 64, 72)) for i, value in enumerate(done.tolist())]
    for at, value, colour in marks:
        if at >= 0:
            row = round((1.0 - min(max(value, -1.0), 1.0)) / 2.0 * (STRIP - 4))
            strip[row : row + 4, at * pace : (at + 1) * pace] = colour
    return np.concatenate((large, strip))


def clone(name: str, seed: int, settings: Settings) -> dict[str, Any]:
    """Trains and exports one policy and returns its figures."""
    folder = Path(settings.root) / f"{name}_{seed}"
    asked = {**WORLDS[name], "seed": seed, "data_seed": seed, "device": settings.device, "run_dir": str(folder)}
    if settings.updates is not None:
        asked["updates"] = settings.updates
    config, task = train.settings(RECIPE, **asked)
    summary = train.run(config, task)
    export.export(folder, folder / "policy", formats=("safetensors",))
    model = bundle.load(folder / "policy.safetensors")
    if settings.films and seed == 0:
        fps = min(1.0 / worlds.load(task.world).spec.control_dt, video.MAX_GIF_FPS)
        video.write(Path(settings.films) / f"visual_{name}.gif", film(model, task), fps)
    told = {key: summary[key] for key in ("updates", "seconds", "samples_per_s")}
    figures = {key: round(value, 4) for key, value in judge(model, task).items()}
    return {"world": name, "seed": seed, **told, "loss": round(summary["validation"]["loss"], 4), **figures}


def main(argv: list[str] | None = None) -> None:
    """Reads the flags, trains every policy and prints its figures, one JSON line each."""
    with cli.exit_on_usage_error("visual_rollouts"):
        settings = cli.parse(Settings, argv, program="visual_rollouts", description=__doc__.splitlines()[0]).config
    for name in settings.worlds.split(","):
        for seed in range(settings.seeds):
            sys.stdout.write(json.dumps(clone(name, seed, settings)) + "\n")
            sys.stdout.flush()


if __name__ == "__main__":
    main()
