"""RigidFormer (arXiv:2605.09196): rigid bodies given as points, learned in closed loop over short clips.

A clip has two observed frames and some supervised ones, `step` frames apart; an item is an anchor of a supervised
frame.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from functional_sl import data as rows
from functional_sl import keys, tree
from functional_sl.models import rigidformer
from functional_sl.models.point_encoder import Parameters
from functional_sl.models.rigidformer import Architecture
from functional_sl.recipe import Recipe
from functional_sl.recipes import rigid_bundle, rigid_evaluation, rigid_loss
from functional_sl.recipes.rigid_evaluation import Course
from functional_sl.run import checks, files
from functional_sl.run.cli import option
from functional_sl.sources import rigid_bodies, rigid_clips
from functional_sl.sources.rigid_bodies import FRAME_DT, Ranges, Scenes
from functional_sl.sources.rigid_clips import Clips
from functional_sl.step import Aux

_STREAMS = {"training": 0, "validation": 10}  # of the seed


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
        for name in ("objects", "points", "steps", "depths", "horizons"):
            checks.require(self, getattr(self, name) != (), (name,), "must name at least one")
        checks.integers(self, but=("data_seed", "depths", "registers"))
        checks.integers(self, least=0, but=("data_seed",))
        rigid_bodies.check(ranges(self))
        if self.clip < 3:
            raise ValueError(f"clip={self.clip}: two observed frames and at least one more")
        last = rigid_evaluation.last_frame(self.steps, self.horizons)
        if last >= self.frames:
            raise ValueError(
                f"horizons={self.horizons}, steps={self.steps}: take {last + 1} frames, and a scene of "
                f"frames={self.frames} ends before"
            )
        if self.head_size < 6 * self.frequencies:
            raise ValueError(f"head_size={self.head_size}: must be at least 6 x frequencies={self.frequencies}")
        if max(self.depths) > self.layers:
            raise ValueError(f"depths={self.depths}: decoder states are numbered 0 to layers={self.layers}")


def build(config: RigidFormer) -> Recipe:
    """Generates or reads the data and returns the task."""
    training, simulator = _scenes(config, "training", config.scenes)
    held_out, second = _scenes(config, "validation", config.validation_scenes)
    if simulator != second:
        raise ValueError(f"{config.path}: its files come from {simulator} and {second}; make them with one")
    return assemble(config, training, held_out, simulator)


def assemble(config: RigidFormer, training: Scenes, held_out: Scenes, simulator: str) -> Recipe:
    """Returns the task over scenes that are there.

    Raises:
      ValueError: if no scene is long enough to be learnt from or judged.
    """
    a = architecture(config)
    course = Course(a, config.steps, config.horizons)
    rigid_clips.check(training, config.steps)
    rigid_evaluation.check(course, held_out)
    schema = rigid_bundle.schema(config.steps, config.clip, simulator)
    data = {"training": _told(config, "training", training), "validation": _told(config, "validation", held_out)}
    return Recipe(
        name="rigidformer",
        schema=schema,
        data=training,
        validation=clips(config, held_out),
        init=lambda key: (rigidformer.init(key, a), ()),
        sample=functools.partial(rigid_clips.sample, steps=config.steps, length=config.clip),
        count=rigid_loss.count,
        loss=functools.partial(loss, a),
        batches=rows.in_order,
        validate=functools.partial(validate, a),
        evaluate=functools.partial(rigid_evaluation.evaluate, course, held_out),
        score=functools.partial(_score, horizon=min(config.horizons)),
        bundle=functools.partial(rigid_bundle.bundle, a, schema, data | {"simulator": simulator}, held_out),
        draw=functools.partial(rigid_evaluation.draw, course, held_out),
    )


def architecture(config: RigidFormer) -> Architecture:
    """Returns the sizes of the network."""
    names = [name for name in Architecture._fields if name in RigidFormer.__dataclass_fields__]
    return Architecture(**{name: getattr(config, name) for name in names})


def ranges(config: RigidFormer) -> Ranges:
    """Returns what scenes are drawn from."""
    return Ranges(config.objects, config.points, config.frames, config.height, config.throw, config.spin)


def drawn(config: RigidFormer, name: str, number: int) -> dict[str, Any]:
    """Returns how `number` scenes of the split `name` are drawn, as their file records it."""
    return {"seed": config.data_seed, "stream": name, "count": number, **ranges(config)._asdict()}


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
    return tree.concatenate(parts)


def loss(a: Architecture, params: Parameters, buffers: tuple, batch: Clips, key: Tensor) -> tuple[Tensor, Aux]:
    """Returns the error summed over the valid anchors of supervised frames."""
    value, metrics = _errors(a, params, batch)
    return value, Aux(buffers, tree.map(lambda x: x.detach(), metrics))


def validate(a: Architecture, params: Parameters, buffers: tuple, batch: Clips) -> dict[str, Tensor]:
    """Returns the summed errors of held-out clips."""
    value, metrics = _errors(a, params, batch)
    return {"loss": value, **metrics}


def _errors(a: Architecture, params: Parameters, batch: Clips) -> tuple[Tensor, dict[str, Tensor]]:
    bodies, (before, now) = rigid_loss.bodies_of(batch), rigid_loss.observed(batch)
    number = batch.positions.shape[1] - 2
    found = rigidformer.roll_out(params, a, bodies, before, now, batch.step, batch.step * FRAME_DT, number)
    return rigid_loss.errors(batch, found)


def _score(found: Mapping[str, float], *, horizon: int) -> float:
    return found[f"gain_{horizon}"]


def _told(config: RigidFormer, name: str, scenes: Scenes) -> dict[str, Any]:
    return drawn(config, name, len(scenes.lengths)) | {"digest": tree.digest(scenes)}


def _scenes(config: RigidFormer, name: str, number: int) -> tuple[Scenes, str]:
    """Reads scenes and their simulator from the folder, or generates them and keeps them there."""
    file = Path(config.path or "").expanduser() / f"{name}.safetensors"
    asked = drawn(config, name, number)
    if config.path and file.exists():
        scenes, about = rigid_bodies.read(file, asked)
        return scenes, about["simulator"]
    key = keys.fold_in(keys.key(config.data_seed), _STREAMS[name])
    made = rigid_bodies.generate(key, number, ranges(config))
    if config.path:
        files.keep(file, lambda file: rigid_bodies.write(file, made, asked), 8 * tree.size(made))
    return made, rigid_bodies.conventions()["simulator"]


_TRAIN = {"learning_rate": 1e-3, "lr_schedule": "cosine", "clip_norm": 1.0, "optimizer": "adamw", "weight_decay": 0.01}
# All predicted frames of a clip are one graph, 7,000 operations of `medium`: tracing it and its gradient takes a CPU
# core a minute before the first kernel is made. It is captured as it is.
_GPU = _TRAIN | {"compile": "false"}
# The sizes of the network are the paper's; its meshes are not at hand.
_PAPER = {
    "train": _GPU
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
    "train": _GPU
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
