"""RigidFormer (arXiv:2605.09196): rigid bodies given as points, learned in closed loop over short clips.

A clip has two observed frames and some supervised ones, `step` frames apart; every supervised one follows from the
predicted ones before it. The error of an anchor is SmoothL1 of its position (times 10) and of its acceleration, both of
the anchor as it was predicted and as the rigid motion has it. Positions are divided by dt^2, so that both are
accelerations.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from functional_sl import data as rows
from functional_sl import keys, tree
from functional_sl.bundle import Bundle
from functional_sl.models import rigid_motion, rigidformer
from functional_sl.models.point_encoder import ANCHORS, FEATURES, LENGTH, Bodies, Parameters, Pose, place
from functional_sl.models.rigidformer import Advance, Architecture
from functional_sl.recipe import Recipe
from functional_sl.run import figures, files
from functional_sl.run.cli import option
from functional_sl.sources import rigid_bodies, rigid_clips
from functional_sl.sources.rigid_bodies import FRAME_DT, Ranges, Scenes
from functional_sl.sources.rigid_clips import Clips
from functional_sl.step import Aux

POSITION, ACCELERATION = 10.0, 1.0  # weights of the loss
_STREAMS = {"training": 0, "validation": 10}  # of the seed
_GREATEST = 1e3  # m, an error of a roll-out


@dataclasses.dataclass(frozen=True)
class RigidFormer:
    """Settings of the task; seeds are those of the data alone."""

    path: str | None = option(
        None, "Folder of training.safetensors and validation.safetensors: each is read, or generated and written.",
        group="Data",
    )  # fmt: skip
    scenes: int = option(600, "Scenes of training data.")
    validation_scenes: int = option(40, "Held-out scenes, of which clips and roll-outs are predicted.")
    objects: tuple[int, ...] = option((2, 4), "Fewest and most objects of a scene.")
    points: tuple[int, ...] = option((24, 32), "Fewest and most points of an object.")
    frames: int = option(130, "Frames of a scene, 120 a second.")
    height: float = option(0.3, "Greatest gap below an object at the start.", unit="m")
    throw: float = option(1.0, "Greatest speed at the start, to the middle and downwards.", unit="m/s")
    spin: float = option(2.0, "Greatest spin at the start, about every axis.", unit="rad/s")
    data_seed: int = option(0, "Seed of training data; held-out data have their own.")
    steps: tuple[int, ...] = option((1, 5, 10), "Frames from one frame of a clip to the next; drawn clip by clip.")
    clip: int = option(5, "Frames of a clip, two observed ones among them.")
    channels: int = option(64, "Channels of a point.", group="Network")
    width: int = option(96, "Width of an object's token.")
    layers: int = option(2, "Layers of the decoder.")
    heads: int = option(4, "Attention heads.")
    head_size: int = option(24, "Channels of a head.")
    frequencies: int = option(4, "Wave lengths of the rotary embedding, per axis.")
    registers: int = option(4, "Register tokens.")
    anchor: int = option(64, "Width of an anchor.")
    depths: tuple[int, ...] = option((0, 1, 2), "Decoder states that anchors attend to; 0 is its input.")
    horizons: tuple[int, ...] = option((50, 75, 100), "Frames of free running that are judged.", group="Evaluation")

    def __post_init__(self) -> None:
        """Raises ValueError for the first setting, or pair of settings, that cannot be meant."""
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            numbers = value if isinstance(value, tuple) else (value,)
            least = 0 if field.name in ("depths", "registers") else 1
            if field.name != "data_seed" and any(isinstance(n, int) and n < least for n in numbers):
                raise ValueError(f"{field.name}={value}: must be at least {least}")
        for name in ("objects", "points"):
            value = getattr(self, name)
            if len(value) != 2 or value[0] > value[1]:
                raise ValueError(f"{name}={value}: the fewest and the most")
        if self.clip < 3:
            raise ValueError(f"clip={self.clip}: two observed frames and at least one more")
        longest = max(self.steps)
        if longest + -(-max(self.horizons) // longest) * longest >= self.frames:
            raise ValueError(
                f"horizons={self.horizons}, steps={self.steps}: a scene of frames={self.frames} ends before"
            )
        if self.head_size < 6 * self.frequencies:
            raise ValueError(f"head_size={self.head_size}: must be at least 6 x frequencies={self.frequencies}")
        if not self.depths or max(self.depths) > self.layers:
            raise ValueError(f"depths={self.depths}: decoder states are numbered 0 to layers={self.layers}")


def build(config: RigidFormer) -> Recipe:
    """Generates or reads the data and returns the task."""
    training, simulator = _scenes(config, "training", config.scenes)
    held_out, second = _scenes(config, "validation", config.validation_scenes)
    if simulator != second:
        raise ValueError(f"{config.path}: its files come from {simulator} and {second}; make them with one")
    return assemble(config, training, held_out, simulator)


def assemble(config: RigidFormer, training: Scenes, held_out: Scenes, simulator: str) -> Recipe:
    """Returns the task over scenes that are there."""
    a = architecture(config)
    return Recipe(
        name="rigidformer",
        schema=schema(config, simulator),
        data=training,
        validation=clips(config, held_out),
        init=lambda key: (rigidformer.init(key, a), ()),
        sample=functools.partial(rigid_clips.sample, steps=config.steps, length=config.clip),
        count=count,
        loss=functools.partial(loss, a),
        batches=rows.in_order,
        validate=functools.partial(validate, a),
        evaluate=functools.partial(evaluate, config, held_out),
        score=functools.partial(_score, horizon=min(config.horizons)),
        bundle=functools.partial(bundle, config, simulator, held_out),
        draw=functools.partial(draw, config, held_out),
    )


def architecture(config: RigidFormer) -> Architecture:
    """Returns the sizes of the network."""
    names = [name for name in Architecture._fields if name in RigidFormer.__dataclass_fields__]
    return Architecture(**{name: getattr(config, name) for name in names})


def clips(config: RigidFormer, scenes: Scenes) -> Clips:
    """Returns the clips of every step size that follow each other through every scene, without augmentation."""
    parts = []
    for step in config.steps:
        starts = range(0, config.frames - 2 * step, step * config.clip)
        for start in starts:
            full = torch.full((len(scenes.lengths),), start)
            parts.append(
                rigid_clips.at(scenes, torch.arange(len(full)), full, torch.full_like(full, step), config.clip)
            )
    return tree.map(lambda *xs: torch.cat(xs), *parts)


def count(batch: Clips) -> Tensor:
    """Returns the number of valid pairs of supervised frame and anchor."""
    return _valid(batch).sum()


def loss(a: Architecture, params: Parameters, buffers: tuple, batch: Clips, key: Tensor) -> tuple[Tensor, Aux]:
    """Returns the error summed over the valid anchors of supervised frames."""
    value, metrics = _errors(a, params, batch)
    return value, Aux(buffers, tree.map(lambda x: x.detach(), metrics))


def validate(a: Architecture, params: Parameters, buffers: tuple, batch: Clips) -> dict[str, Tensor]:
    """Returns the summed errors of held-out clips."""
    value, metrics = _errors(a, params, batch)
    return {"loss": value, **metrics}


def bodies_of(batch: Clips | Scenes) -> Bodies:
    """Returns what does not change in time."""
    return rigidformer.prepare(batch.points, batch.point_mask, batch.objects, batch.properties)


def _errors(a: Architecture, params: Parameters, batch: Clips) -> tuple[Tensor, dict[str, Tensor]]:
    bodies, (before, now) = bodies_of(batch), observed(batch)
    number = batch.positions.shape[1] - 2
    return errors(
        batch, rigidformer.roll_out(params, a, bodies, before, now, batch.step, batch.step * FRAME_DT, number)
    )


def observed(batch: Clips) -> list[Pose]:
    """Returns the poses [B, O, ...] of the two first frames."""
    return [
        rigidformer.pose(batch.positions[:, i], batch.quaternions[:, i], batch.objects & batch.frames[:, i, None])
        for i in range(2)
    ]


def errors(batch: Clips, found: list[Advance]) -> tuple[Tensor, dict[str, Tensor]]:
    """Returns the loss and the distance of rigid anchors from the true ones (m), both summed over the valid ones.

    Args:
      batch: clips of T frames.
      found: T - 2 predicted steps.
    """
    bodies, dt = bodies_of(batch), batch.step * FRAME_DT
    true = rigidformer.pose(batch.positions, batch.quaternions, batch.objects[:, None] & batch.frames[..., None])
    anchors = place(bodies, true, bodies.anchors[:, None])
    raw, rigid, acceleration = (
        torch.stack([getattr(x, name) for x in found], 1) for name in ("raw", "rigid", "acceleration")
    )
    # The rigid anchors' own accelerations, from the places that they were predicted from.
    path = torch.cat((anchors[:, :2], rigid), 1)
    square = dt.square()[:, None, None, None, None]
    moved = (path[:, 2:] - 2 * path[:, 1:-1] + path[:, :-2]) / square
    wanted = (anchors[:, 2:] - 2 * anchors[:, 1:-1] + anchors[:, :-2]) / square
    gaps = [(x - anchors[:, 2:]) / square for x in (raw, rigid)]
    error = POSITION * sum(_smooth(gap) for gap in gaps)
    error = error + ACCELERATION * (_smooth(acceleration - wanted) + _smooth(moved - wanted))
    valid = _valid(batch)
    distance = torch.where(valid, torch.linalg.vector_norm((rigid - anchors[:, 2:]).detach(), dim=-1), 0.0)
    return torch.where(valid, error, 0.0).sum(), {"distance": distance.sum()}


def _smooth(gap: Tensor) -> Tensor:
    return F.smooth_l1_loss(gap, torch.zeros_like(gap), reduction="none", beta=1.0).sum(-1)


def _valid(batch: Clips) -> Tensor:
    """Tells which anchors are supervised, [B, T - 2, O, A]: of a frame, an object and a point that exist."""
    anchors = batch.objects[..., None] & batch.point_mask[..., :ANCHORS]
    return batch.frames[:, 2:, None, None] & anchors[:, None]


def free_run(
    config: RigidFormer, scenes: Scenes, params: Parameters, step: int
) -> tuple[dict[str, Pose], Pose, list[int]]:
    """Predicts scenes freely from two true frames, the second of them frame max(steps).

    Returns:
      Poses [N, T, O, ...] of `model`, `hold` (all stays) and `fall` (constant velocity, gravity), the true ones, and
      the frames after the second observed one that they belong to.
    """
    like, start = params["norm"], max(config.steps)
    scenes = tree.to(scenes, like.device)
    true = rigidformer.pose(scenes.positions, scenes.quaternions, scenes.objects[:, None])
    before, now = (Pose(*(x[:, frame] for x in true)) for frame in (start - step, start))
    number = -(-max(config.horizons) // step)
    with torch.no_grad():
        run = (params, architecture(config), bodies_of(scenes), before, now, step, FRAME_DT, number)
        found = {
            "model": rigid_motion.free_run(*run),
            "hold": rigid_motion.hold(now, number),
            "fall": rigid_motion.fall(before, now, step * FRAME_DT, number),
        }
    frames = [step * (i + 1) for i in range(number)]
    expected = Pose(*(x[:, [start + frame for frame in frames]] for x in true))
    return found, expected, frames


def evaluate(config: RigidFormer, held_out: Scenes, params: Parameters, buffers: tuple) -> Mapping[str, float]:
    """Returns the errors of held-out scenes after each horizon of free running, root mean squares over the objects.

    Keys are such as `position_m_50_step5`, `orientation_deg_50_step5`, `hold_position_m_50` and `fall_position_m_50`;
    `gain_50` is the smallest ratio over the step sizes of the better baseline's position error to the model's. A step
    size that does not divide a horizon is judged at its first frame behind it. An error is cut at 1 km.
    """
    mask, found = held_out.objects, {}
    for step in config.steps:
        poses, true, frames = free_run(config, held_out, params, step)
        for name, predicted in poses.items():
            distance, angle = (x.cpu() for x in rigid_motion.errors(predicted, true))
            distance = torch.nan_to_num(distance, nan=_GREATEST).clamp(max=_GREATEST)
            angle = torch.nan_to_num(angle, nan=180.0)
            for horizon in config.horizons:
                at = next(i for i, frame in enumerate(frames) if frame >= horizon)
                text = f"{horizon}_step{step}" if name == "model" else str(horizon)
                own = "" if name == "model" else f"{name}_"
                values = (("position_m", distance), ("orientation_deg", angle))
                for unit, x in values:
                    found.setdefault(f"{own}{unit}_{text}", rigid_motion.root_mean_square(x[:, at], mask))
    for horizon in config.horizons:
        best = min(found[f"{name}_position_m_{horizon}"] for name in ("hold", "fall"))
        worst = max(found[f"position_m_{horizon}_step{step}"] for step in config.steps)
        found[f"gain_{horizon}"] = best / max(worst, 1e-12)
    return found


def schema(config: RigidFormer, simulator: str) -> dict[str, Any]:
    """Returns what makes data compatible with the model, as JSON."""
    features = (
        ("nearest", 3, "v / (|v| + 0.1 m) of the displacement v to another object's nearest point or to the ground"),
        ("contact", 3, "v / (|v| + 0.02 m)"),
        ("increment", 3, "since one step before"),
        ("velocity", 3, "that over the frames of a step, in units of 0.02 m a frame"),
        ("place", 3, "about the centre of mass, world axes"),
        ("offset", 3, "of that from the reference cloud"),
        ("log_mass", 1, "of kg"),
        ("friction", 1, ""),
        ("restitution", 1, ""),
    )
    assert sum(width for _, width, _ in features) == FEATURES
    return {
        "point_features": [{"name": name, "width": width, "about": about} for name, width, about in features],
        "length_unit_m": LENGTH,
        "anchors": ANCHORS,
        "steps": list(config.steps),
        "clip": config.clip,
        "conventions": rigid_bodies.CONVENTIONS | {"simulator": simulator},
    }


def bundle(config: RigidFormer, simulator: str, held_out: Scenes, params: Parameters, buffers: tuple) -> Bundle:
    """Returns the model with all that reading its numbers takes, and two held-out scenes to check itself."""
    step, start = max(config.steps), max(config.steps)
    some = tree.map(lambda x: x[:2], held_out)
    inputs = {name: getattr(some, name) for name in ("points", "point_mask", "objects", "properties")}
    inputs |= {name: getattr(some, name)[:, [start - step, start]] for name in ("positions", "quaternions")}
    a = architecture(config)
    return Bundle(
        predict="functional_sl.models.rigidformer:predict",
        arguments={"architecture": a._asdict() | {"depths": list(a.depths)}, "frame_dt": FRAME_DT},
        tensors=tree.named(params),
        about=schema(config, simulator)
        | {
            "inputs": "points in body axes about the centre of mass; positions and quaternions one step ago and now",
            "outputs": "positions and quaternions one step later, w >= 0; accelerations of the anchors in m/s^2",
            "integration": "q' = a dt^2 + 2 q - q_before, then the rigid motion of the reference anchors nearest to q'",
        },
        inputs={name: x.clone() for name, x in inputs.items()} | {"step": torch.full((2,), float(step))},
    )


def draw(config: RigidFormer, held_out: Scenes, params: Parameters, buffers: tuple, folder: str) -> None:
    """Draws the errors over the frames of free running, every step size beside the baselines."""
    curves: dict[str, list[figures.Series]] = {"position": [], "orientation": []}
    for step in config.steps:
        poses, true, frames = free_run(config, held_out, params, step)
        names = ("model", "hold") if step == config.steps[-1] else ("model",)
        for name in names:
            label = f"step {step}" if name == "model" else "hold last"
            for kind, x in zip(curves, rigid_motion.errors(poses[name], true), strict=True):
                rms = [rigid_motion.root_mean_square(x[:, i].cpu(), held_out.objects) for i in range(len(frames))]
                curves[kind].append(figures.Series(label, frames, rms))
    for kind, unit in (("position", "m"), ("orientation", "degrees")):
        text = {"title": f"Free running: {kind}", "xlabel": "frames", "ylabel": f"root mean square error ({unit})"}
        figures.learning_curve(Path(folder) / f"error_{kind}.png", curves[kind], **text)


def _score(found: Mapping[str, float], *, horizon: int) -> float:
    return found[f"gain_{horizon}"]


def _scenes(config: RigidFormer, name: str, number: int) -> tuple[Scenes, str]:
    """Reads scenes and their simulator from the folder, or generates them and keeps them there."""
    file = Path(config.path or "").expanduser() / f"{name}.safetensors"
    ranges = Ranges(config.objects, config.points, config.frames, config.height, config.throw, config.spin)
    asked = {"seed": config.data_seed, "count": number, **ranges._asdict()}
    if config.path and file.exists():
        return rigid_bodies.read(file, asked)
    made = rigid_bodies.generate(keys.fold_in(keys.key(config.data_seed), _STREAMS[name]), number, ranges)
    if config.path:
        # Ranks that find none generate the same bytes, and a file appears as a whole.
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            rigid_bodies.write(file, made, asked)
        except OSError as error:
            raise ValueError(files.explain(error, file, 8 * tree.size(made))) from error
    return made, rigid_bodies.conventions()["simulator"]


_TRAIN = {"learning_rate": 1e-3, "lr_schedule": "cosine", "clip_norm": 1.0, "optimizer": "adamw", "weight_decay": 0.01}
# The sizes of the network are the paper's; its meshes are not at hand.
_PAPER = {
    "train": _TRAIN
    | {"updates": 300_000, "batch_size": 18, "learning_rate": 1e-4, "lr_end": 1e-6, "lr_warmup_updates": 10_000}
    | {"validate_every": 10_000},
    "recipe": {
        "scenes": 960, "validation_scenes": 120, "objects": (3, 8), "points": (24, 64), "frames": 480, "clip": 8,
        "height": 0.5, "throw": 2.0, "spin": 5.0, "channels": 1024, "width": 768, "layers": 4, "heads": 6,
        "head_size": 128, "frequencies": 16, "registers": 16, "anchor": 256, "depths": (0, 1, 2, 4),
    },
}  # fmt: skip
# One GPU, 3 minutes.
_MEDIUM = {
    "train": _TRAIN
    | {"updates": 4_500, "batch_size": 64, "lr_end": 1e-6, "lr_warmup_updates": 200, "validate_every": 1_500},
    "recipe": {
        "clip": 8, "channels": 128, "width": 192, "layers": 3, "heads": 6, "head_size": 32, "frequencies": 5,
        "registers": 8, "anchor": 128, "depths": (0, 1, 2, 3),
    },
}  # fmt: skip
# Two CPU cores, 4 minutes.
_SMALL = {
    "train": _TRAIN
    | {"updates": 1_500, "batch_size": 16, "learning_rate": 2e-3, "lr_end": 1e-5, "lr_warmup_updates": 100}
    | {"validate_every": 500},
    "recipe": {},
}
SIZES = {"small": _SMALL, "medium": _MEDIUM, "paper": _PAPER}
PLACES = ("path",)
