"""RigidFormer running freely: errors beside both baselines, a plot of them, and a film of predicted beside true bodies.

    python -m experiments.rigid_rollouts --bundle=model.safetensors --data=FOLDER --pictures=experiments/pictures

The bundle is that of `functional_sl.export`, the folder the run's `--path`. Every scene starts from two true frames,
and nothing true is seen after. `touched` is the share of objects that by then are a centimetre off their free fall.
"""

from __future__ import annotations

import dataclasses
import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from functional_sl import bundle, tree
from functional_sl.models import naming, rigid_motion
from functional_sl.models.point_encoder import Pose, place
from functional_sl.recipes import rigidformer
from functional_sl.recipes.rigidformer import RigidFormer
from functional_sl.run import cli, figures, video
from functional_sl.sources import rigid_bodies
from functional_sl.sources.rigid_bodies import FRAME_DT, Scenes
from functional_sl.sources.rigid_shapes import KINDS

SPEED = 0.5  # of the film


@dataclasses.dataclass(frozen=True)
class Settings:
    """The flags."""

    bundle: str = cli.option("model.safetensors", "The trained model.")
    data: str = cli.option(".", "Folder of validation.safetensors.")
    pictures: str | None = cli.option(None, "Folder for rigidformer_error.png and rigidformer.gif.")
    scene: int = cli.option(0, "Held-out scene of the film.")
    step: int = cli.option(5, "Step size of the film.")


def trained(settings: Settings) -> tuple[RigidFormer, Scenes, Any]:
    """Returns the settings, the held-out scenes and the parameters of a bundle."""
    held_out, simulator = rigid_bodies.read(Path(settings.data) / "validation.safetensors")
    model = bundle.load(settings.bundle)
    if model.about["conventions"]["simulator"] != simulator:
        raise cli.UsageError(f"{settings.data}: its scenes are of {simulator}, the model's of another")
    sizes = model.bundle.arguments["architecture"]
    own = {name: sizes[name] for name in sizes if name in RigidFormer.__dataclass_fields__}
    config = RigidFormer(
        **{**own, "depths": tuple(own["depths"])}, steps=tuple(model.about["steps"]), frames=held_out.positions.shape[1]
    )
    return config, held_out, naming.nested(model.bundle.tensors)


def table(config: RigidFormer, held_out: Scenes, params: Any) -> list[dict[str, Any]]:
    """Returns one row a step size, and one a baseline."""
    found = rigidformer.evaluate(config, held_out, params, ())
    rows = []
    for name in (*(f"step{step}" for step in config.steps), "hold", "fall"):
        row: dict[str, Any] = {"prediction": name}
        for horizon in config.horizons:
            for unit in ("position_m", "orientation_deg"):
                key = f"{unit}_{horizon}_{name}" if name.startswith("step") else f"{name}_{unit}_{horizon}"
                row[f"{unit}_{horizon}"] = round(found[key], 4)
        rows.append(row)
    poses, true, frames = rigidformer.free_run(config, held_out, params, 1)
    gap, _ = rigid_motion.errors(poses["fall"], true)
    touched = {h: float((gap[:, frames.index(h)][held_out.objects] > 0.01).double().mean()) for h in config.horizons}
    return [*rows, {"touched": {str(h): round(x, 3) for h, x in touched.items()}}]


def curves(config: RigidFormer, held_out: Scenes, params: Any, path: Path) -> None:
    """Draws the position error over the frames, every step size beside standing still."""
    drawn = []
    for step in config.steps:
        poses, true, frames = rigidformer.free_run(config, held_out, params, step)
        for name in ("model", "hold", "fall") if step == 1 else ("model",):
            distance, _ = rigid_motion.errors(poses[name], true)
            rms = [rigid_motion.root_mean_square(distance[:, i], held_out.objects) for i in range(len(frames))]
            label = f"RigidFormer, step {step}" if name == "model" else {"hold": "hold last", "fall": "free fall"}[name]
            kept = [i for i, x in enumerate(rms) if x < 1.0]
            drawn.append(figures.Series(label, [frames[i] for i in kept], [rms[i] for i in kept]))
    text = {"title": "Free running on held-out scenes", "xlabel": "frames of 1/120 s", "ylabel": "position RMSE (m)"}
    figures.learning_curve(path, drawn, **text)


def film(config: RigidFormer, held_out: Scenes, params: Any, scene: int, step: int) -> Iterator[np.ndarray]:
    """Yields frames of the true and the predicted hulls of clouds side by side."""
    from matplotlib.figure import Figure

    one = tree.map(lambda x: x[scene : scene + 1], held_out)
    poses, true, frames = rigidformer.free_run(config, one, params, step)
    bodies = rigidformer.bodies_of(one)
    clouds = {}
    for name, moved in (("true", true), ("predicted", poses["model"])):
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
        config, held_out, params = trained(settings)
    for row in table(config, held_out, params):
        print(json.dumps(row))
    if settings.pictures:
        folder = Path(settings.pictures)
        folder.mkdir(parents=True, exist_ok=True)
        curves(config, held_out, params, folder / "rigidformer_error.png")
        frames = film(config, held_out, params, settings.scene, settings.step)
        video.write(folder / "rigidformer.gif", frames, SPEED / (settings.step * FRAME_DT))


if __name__ == "__main__":
    main()
