"""RigidFormer judged on held-out scenes: free running from two true frames, beside two baselines.

Every scene starts at the same frame, the largest step size; what stands behind the end of a scene counts nowhere.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from functional_sl import tree
from functional_sl.models import rigid_motion, rigidformer
from functional_sl.models.point_encoder import Parameters, Pose
from functional_sl.models.rigidformer import Architecture
from functional_sl.recipes.rigid_loss import bodies_of
from functional_sl.run import figures
from functional_sl.sources.rigid_bodies import FRAME_DT, Scenes

BASELINES = {"hold": "hold last", "land": "fall and slide"}
_GREATEST = 1e3  # m, an error of a roll-out


class Course(NamedTuple):
    """What is run, and what is read off."""

    architecture: Architecture
    steps: tuple[int, ...]  # frames of a step
    horizons: tuple[int, ...]  # frames of free running that are judged


class Run(NamedTuple):
    """T predictions of N scenes with O objects."""

    predicted: Pose  # [N, T, O, ...]
    true: Pose  # [N, T, O, ...]
    there: Tensor  # [N, T, O] bool, the objects of scenes that last so long
    frames: list[int]  # [T], after the second observed one


def last_frame(steps: tuple[int, ...], horizons: tuple[int, ...]) -> int:
    """Returns the last frame of a scene that is judged: horizons are rounded up to whole steps, whichever they are."""
    return max(steps) + max(-(-max(horizons) // step) * step for step in steps)


def check(course: Course, scenes: Scenes) -> None:
    """Refuses held-out scenes of which none lasts until the last judged frame.

    Raises:
      ValueError: names the frames that there are and that it takes.
    """
    longest, last = int(scenes.lengths.max()), last_frame(course.steps, course.horizons)
    if longest <= last:
        raise ValueError(
            f"the longest of the held-out scenes ends after {longest} frames, and horizons={course.horizons} at "
            f"steps={course.steps} take {last + 1}: throw more gently, or shorten the horizons"
        )


def free_run(course: Course, scenes: Scenes, params: Parameters, step: int) -> Run:
    """Predicts scenes freely from two true frames, `step` frames apart; nothing true is seen after."""
    scenes = tree.to(scenes, params["norm"].device)
    true, start = _true(scenes), max(course.steps)
    before, now = (Pose(*(x[:, frame] for x in true)) for frame in (start - step, start))
    number = -(-max(course.horizons) // step)
    with torch.no_grad():
        found = rigid_motion.free_run(
            params, course.architecture, bodies_of(scenes), before, now, step, FRAME_DT, number
        )
    return _run(found, true, scenes, start, [step * (i + 1) for i in range(number)])


def baselines(course: Course, scenes: Scenes) -> dict[str, Run]:
    """Returns what stays and what falls and slides, by the names of `BASELINES`, at every frame up to the horizons.

    Both know the last two frames before the start, whatever the step sizes are.
    """
    true, start, number = _true(scenes), max(course.steps), max(course.horizons)
    before, now = (Pose(*(x[:, frame] for x in true)) for frame in (start - 1, start))
    found = {
        "hold": rigid_motion.hold(now, number),
        "land": rigid_motion.land(bodies_of(scenes), before, now, FRAME_DT, number),
    }
    frames = list(range(1, number + 1))
    return {name: _run(poses, true, scenes, start, frames) for name, poses in found.items()}


def evaluate(course: Course, held_out: Scenes, params: Parameters, buffers: tuple) -> Mapping[str, float]:
    """Returns the errors of held-out scenes after each horizon of free running, root mean squares over the objects.

    Keys are such as `position_m_50_step5`, `orientation_deg_50_step5`, `hold_position_m_50` and `land_position_m_50`;
    `gain_50` is the smallest ratio over the step sizes of the better baseline's position error to the model's. A step
    size that does not divide a horizon is judged at its first frame behind it. An error is cut at 1 km.
    """
    found: dict[str, float] = {}
    runs = {("", f"_step{step}"): free_run(course, held_out, params, step) for step in course.steps}
    runs |= {(f"{name}_", ""): run for name, run in baselines(course, held_out).items()}
    for (prefix, suffix), run in runs.items():
        distance, angle = rigid_motion.errors(run.predicted, run.true)
        distance = torch.nan_to_num(distance, nan=_GREATEST).clamp(max=_GREATEST)
        for horizon in course.horizons:
            at = next(i for i, frame in enumerate(run.frames) if frame >= horizon)
            for unit, x in (("position_m", distance), ("orientation_deg", torch.nan_to_num(angle, nan=180.0))):
                rms = rigid_motion.root_mean_square(x[:, at], run.there[:, at])
                found[f"{prefix}{unit}_{horizon}{suffix}"] = rms
    for horizon in course.horizons:
        best = min(found[f"{name}_position_m_{horizon}"] for name in BASELINES)
        worst = max(found[f"position_m_{horizon}_step{step}"] for step in course.steps)
        found[f"gain_{horizon}"] = best / max(worst, 1e-12)
    return found


def curves(course: Course, held_out: Scenes, params: Parameters) -> dict[str, list[figures.Series]]:
    """Returns the errors over the frames, of every step size and of the baselines, as `position` and `orientation`."""
    runs = {f"step {step}": free_run(course, held_out, params, step) for step in course.steps}
    runs |= {BASELINES[name]: run for name, run in baselines(course, held_out).items()}
    found: dict[str, list[figures.Series]] = {"position": [], "orientation": []}
    for label, run in runs.items():
        for kind, x in zip(found, rigid_motion.errors(run.predicted, run.true), strict=True):
            rms = [rigid_motion.root_mean_square(x[:, i], run.there[:, i]) for i in range(len(run.frames))]
            found[kind].append(figures.Series(label, run.frames, rms))
    return found


def draw(course: Course, held_out: Scenes, params: Parameters, buffers: tuple, folder: str) -> None:
    """Draws `curves` as error_position.png and error_orientation.png."""
    found = curves(course, held_out, params)
    for kind, unit in (("position", "m"), ("orientation", "degrees")):
        text = {"title": f"Free running: {kind}", "xlabel": "frames", "ylabel": f"root mean square error ({unit})"}
        figures.learning_curve(Path(folder) / f"error_{kind}.png", found[kind], **text)


def _true(scenes: Scenes) -> Pose:
    return rigidformer.pose(scenes.positions, scenes.quaternions, scenes.objects[:, None])


def _run(found: Pose, true: Pose, scenes: Scenes, start: int, frames: list[int]) -> Run:
    """Joins predictions and truth on the CPU."""
    at = start + torch.tensor(frames)
    lasting = at < scenes.lengths.cpu()[:, None]
    there = scenes.objects.cpu()[:, None] & lasting[..., None]
    predicted, true = (Pose(*(x.cpu() for x in poses)) for poses in (found, true))
    return Run(predicted, Pose(*(x[:, at] for x in true)), there, frames)
