"""RigidFormer running freely: errors beside both baselines, a plot of them, and a film of predicted beside true bodies.

    python -m experiments.rigid_rollouts --bundle=model.safetensors --data=FOLDER --pictures=experiments/pictures

The bundle is that of `functional_sl.export`, the folder the run's `--path`. Every scene starts from two true frames,
and nothing true is seen after; what stands behind the end of a scene counts nowhere. `touched` is the share of objects
that by then are a centimetre off their free fall.
"""

from __future__ import annotations

import dataclasses
import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from functional_sl import bundle, tree
from functional_sl.models import naming
from functional_sl.models.point_encoder import Pose, place
from functional_sl.models.rigidformer import Architecture
from functional_sl.recipes import rigid_evaluation
from functional_sl.recipes.rigid_evaluation import Course
from functional_sl.recipes.rigid_loss import bodies_of
from functional_sl.run import cli, figures, video
from functional_sl.run.command import as_usage_error
from functional_sl.sources import rigid_bodies
from functional_sl.sources.rigid_bodies import FRAME_DT, Scenes
from functional_sl.sources.rigid_shapes import KINDS

HORIZONS = (50, 75, 100)  # frames
SPEED = 0.5  # of the film


@dataclasses.dataclass(frozen=True)
class Settings:
    """The flags."""

    bundle: str = cli.option("model.safetensors", "The trained model.")
    data: str = cli.option(".", "Folder of validation.safetensors.")
    pictures: str | None = cli.option(None, "Folder for rigidformer_error.png and rigidformer.gif.")
    scene: int = cli.option(0, "Held-out scene of the film.")
    step: int = cli.option(5, "Step size of the film.")


def trained(settings: Settings) -> tuple[Course, Scenes, Any]:
    """Returns what is run, the held-out scenes and the parameters of a bundle.

    Raises:
      UsageError: for scenes of another simulator, or too short ones.
    """
    held_out, about = rigid_bodies.read(Path(settings.data) / "validation.safetensors")
    model = bundle.load(settings.bundle)
    if model.about["conventions"]["simulator"] != about["simulator"]:
        raise cli.UsageError(f"{settings.data}: its scenes are of {about['simulator']}, the model's of another")
    sizes = model.bundle.arguments["architecture"]
    architecture = Architecture(**{**sizes, "depths": tuple(sizes["depths"])})
    course = Course(architecture, tuple(model.about["steps"]), HORIZONS)
    try:
        rigid_evaluation.check(course, held_out)
    except ValueError as error:
        raise cli.UsageError(f"{settings.data}: {error}") from None
    if not 0 <= settings.scene < len(held_out.lengths) or settings.step not in course.steps:
        count = len(held_out.lengths)
        raise cli.UsageError(f"the film's scene is one of {count}, counted from 0, and its step one of {course.steps}")
    return course, held_out, naming.nested(model.bundle.tensors)


def table(course: Course, held_out: Scenes, params: Any) -> list[dict[str, Any]]:
    """Returns one row a step size, one a baseline, and the share of objects that have touched something."""
    found = rigid_evaluation.evaluate(course, held_out, params, ())
    rows = []
    for name in (*(f"step{step}" for step in course.steps), *rigid_evaluation.BASELINES):
        row: dict[str, Any] = {"prediction": name}
        for horizon in course.horizons:
            for unit in ("position_m", "orientation_deg"):
                key = f"{unit}_{horizon}_{name}" if name.startswith("step") else f"{name}_{unit}_{horizon}"
                row[f"{unit}_{horizon}"] = round(found[key], 4)
        rows.append(row)
    return [*rows, {"touched": {str(h): round(touched(course, held_out, h), 3) for h in course.horizons}}]


def touched(course: Course, held_out: Scenes, frames: int) -> float:
    """Returns the share of objects that are a centimetre off their free fall, `frames` after the start."""
    start = max(course.steps)
    before, now, then = (held_out.positions[:, start + i] for i in (-1, 0, frames))
    # What the second difference g dt^2 adds up to.
    drop = torch.tensor((0.0, 0.0, -9.81)) * (FRAME_DT**2 * frames * (frames + 1) / 2)
    gap = torch.linalg.vector_norm(then - (now + frames * (now - before) + drop), dim=-1)
    there = held_out.objects & (start + frames < held_out.lengths)[:, None]
    return float((gap[there] > 0.01).double().mean())


def curves(course: Course, held_out: Scenes, params: Any, path: Path) -> None:
    """Draws the position error over the frames, every step size beside both baselines."""
    drawn = []
    for series in rigid_evaluation.curves(course, held_out, params)["position"]:
        of_model = series.label.startswith("step")
        drawn.append(series._replace(label=f"RigidFormer, {series.label}") if of_model else series)
    text = {"title": "Free running on held-out scenes", "xlabel": "frames of 1/120 s", "ylabel": "position RMSE (m)"}
    figures.learning_curve(path, drawn, **text)


def film(course: Course, held_out: Scenes, params: Any, scene: int, step: int) -> Iterator[np.ndarray]:
    """Yields frames of the true and the predicted hulls of clouds side by side, as long as the scene lasts."""
    from matplotlib.figure import Figure

    one = tree.map(lambda x: x[scene : scene + 1], held_out)
    run = rigid_evaluation.free_run(course, one, params, step)
    bodies, frames = (
        bodies_of(one),
        [frame for frame, there in zip(run.frames, run.there[0], strict=True) if there.any()],
    )
    clouds = {}
    for name, moved in (("true", run.true), ("predicted", run.predicted)):
        clouds[name] = [place(bodies, Pose(*(x[:, i] for x in moved)))[0].numpy() for i in range(len(frames))]
    for i, frame in enumerate(frames):
        figure = Figure(figsize=(7.2, 3.6), dpi=80, facecolor="white")
        for column, (name, cloud) in enumerate(clouds.items()):
            axes = figure.add_axes((0.5 * column, 0, 0.5, 0.92), projection="3d", computed_zorder=False)
            axes.set(xlim=(-0.9, 0.9), ylim=(-0.9, 0.9), zlim=(0, 0.9))
            axes.set_box_aspect((2, 2, 1), zoom=1.4)
            axes.view_init(24, -60)
            axes.set_axis_off()
            axes.plot_surface(*np.meshgrid([-0.9, 0.9], [-0.9, 0.9]), np.zeros((2, 2)), color="0.88", shade=False)
            axes.set_title(f"{name}, {frame * FRAME_DT:.2f} s", fontsize=10)
            for o in held_out.objects[scene].nonzero()[:, 0].tolist():
                points = cloud[i][o][held_out.point_mask[scene, o].numpy()]
                _solid(axes, points, figures.COLORS[o % len(figures.COLORS)], KINDS[int(held_out.kinds[scene, o])])
        encoded = io.BytesIO()
        figure.savefig(encoded, format="raw")
        height, width = int(figure.bbox.height), int(figure.bbox.width)
        yield np.frombuffer(encoded.getvalue(), np.uint8).reshape(height, width, 4)[..., :3].copy()


def _solid(axes: Any, points: np.ndarray, color: str, kind: str) -> None:
    """Draws the convex hull of a cloud."""
    from mpl_toolkits.mplot3d.art3d import Poly3DCollection
    from scipy.spatial import ConvexHull

    triangles = points[ConvexHull(points).simplices]
    edge = color if kind == "sphere" else "0.3"
    # Nearer to the camera, later drawn.
    depth = 10 + points.mean(0) @ (0.46, -0.79, 0.41)
    axes.add_collection3d(
        Poly3DCollection(triangles, facecolors=color, edgecolors=edge, linewidths=0.3, shade=True, zorder=depth)
    )


def main(argv: list[str] | None = None) -> None:
    """Reads the flags, prints the figures as JSON lines and draws."""
    with cli.exit_on_usage_error("rigid_rollouts"):
        settings = cli.parse(Settings, argv, program="rigid_rollouts", description=__doc__.splitlines()[0]).config
        with as_usage_error(OSError, ValueError):
            course, held_out, params = trained(settings)
    for row in table(course, held_out, params):
        print(json.dumps(row))
    if settings.pictures:
        folder = Path(settings.pictures)
        folder.mkdir(parents=True, exist_ok=True)
        curves(course, held_out, params, folder / "rigidformer_error.png")
        frames = film(course, held_out, params, settings.scene, settings.step)
        video.write(folder / "rigidformer.gif", frames, SPEED / (settings.step * FRAME_DT))


if __name__ == "__main__":
    main()
