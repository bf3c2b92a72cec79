"""Behaviour cloning from pixels: chunks of actions from a short history of pictures, judged by rollouts from pixels.

    demonstrations -> camera -> pictures, proprioception -> windows with masks -> random crop -> encoder -> chunk head
    evaluation: the policy sees its world through the camera alone; success as in behaviour cloning from state

Pictures stay bytes on the device, 3 S^2 a frame, and become numbers in the model. The robot's own senses go round the
encoder; what else the task needs must be seen. `functional_sl.recipes.chunks` says what an item is and what it costs.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, NamedTuple

import torch
from torch import Tensor

from functional_sl import data, keys, tree
from functional_sl.bundle import Bundle
from functional_sl.models import normalizer, vision, visual_policy
from functional_sl.models.chunk_policy import Scales
from functional_sl.models.vision import Encoder
from functional_sl.models.visual_policy import Architecture, Parameters, Seen
from functional_sl.recipe import Recipe
from functional_sl.recipes import chunk_pictures, chunks
from functional_sl.run.cli import option
from functional_sl.sources import demonstrations, episodes, pixels, windows, worlds
from functional_sl.sources.demonstrations import ACTION, Expert
from functional_sl.sources.episodes import Episodes, Schema
from functional_sl.sources.pixels import IMAGE, PROPRIOCEPTION, Camera
from functional_sl.sources.windows import Frames, Windows
from functional_sl.step import Aux

_PLANNED = 256  # windows that are planned at once for the pictures


@dataclasses.dataclass(frozen=True)
class BCVisual(chunks.Settings):
    """Settings of behaviour cloning from pixels."""

    episodes: int = option(128, "Demonstrations to generate.")
    longest: int | None = option(None, "Frames that are recorded of a demonstration; none: all.")
    history: int = option(2, "Pictures that the policy sees.", group="policy")
    evaluation_episodes: int = option(32, "Episodes of each rollout evaluation.")
    observation_noise: float = option(0.0, "Noise on normalised proprioception in training.")
    camera: str | None = option(
        "functional_sl.sources.pixels:pendulum",
        "Camera that looks at the world, as package.module:name; none: stored demonstrations, no rollouts.",
        group="pictures",
    )
    picture: int = option(52, "Side of a picture that the camera takes.", unit="pixels")
    crop: int = option(
        48, "Side of what the policy sees of it: anywhere in training, the middle in use.", unit="pixels"
    )
    widths: tuple[int, ...] = option((16, 32), "Channels of each stage of the encoder, multiples of 8.")
    strides: tuple[int, ...] = option((1, 2), "Stride of each stage.")
    blocks: int = option(1, "Residual blocks of a stage.")
    kernel: int = option(5, "Of the first convolution, which halves the picture.", unit="pixels")
    keypoints: int = option(16, "Points that the encoder makes of a picture.")

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("picture", "crop", "blocks", "keypoints"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be at least 1")
        if self.longest is not None and self.longest < 1:
            raise ValueError(f"longest is {self.longest}; it must be at least 1, or none")
        if self.crop > self.picture:
            raise ValueError(f"crop is {self.crop}; it must not exceed picture={self.picture}")
        vision.check(Encoder(3, self.kernel, self.widths, self.strides, self.blocks, self.keypoints), self.crop)
        if self.camera is None and (self.demonstrations is None or self.world is not None):
            raise ValueError("rollouts and generated demonstrations need a camera; without one name a file, world=none")


PLACES = ("demonstrations",)
SIZES: dict[str, dict[str, dict[str, Any]]] = {
    "small": {
        "train": {
            "updates": 2500,
            "batch_size": 64,
            "optimizer": "adamw",
            "learning_rate": 1e-3,
            "lr_schedule": "cosine",
            "weight_decay": 1e-6,
            "clip_norm": 1.0,
            "validate_every": 1250,
        },
        "recipe": {},
    },
    # Image observations in Mandlekar et al., arXiv:2108.03298: 600 epochs of 500 updates, crops of 76 of 84 pixels,
    # a ResNet-18 of 32 points. Here its norm is a group's, and its first stage strides where the original pools.
    "paper": {
        "train": {"updates": 300_000, "batch_size": 16, "learning_rate": 1e-4, "validate_every": 10_000},
        "recipe": {
            "chunk": 1,
            "execute": 1,
            "hidden": (1024, 1024),
            "activation": "relu",
            "picture": 84,
            "crop": 76,
            "widths": (64, 128, 256, 512),
            "strides": (2, 2, 2, 2),
            "blocks": 2,
            "kernel": 7,
            "keypoints": 32,
        },
    },
}


def build(config: BCVisual) -> Recipe:
    """Returns the recipe: reads or records the demonstrations, splits them and freezes the normalisers."""
    world = worlds.load(config.world) if config.world else None
    expert = demonstrations.load_expert(config.expert) if config.expert else None
    camera = pixels.load(config.camera) if config.camera else None
    stored = episodes.read(config.demonstrations) if config.demonstrations else _record(config)
    parts = episodes.split(stored, config.held_out, chunks.key_of(config, chunks.SPLIT))
    training, validation = (frames(part) for part in parts)
    own = training.observation.proprioception
    task = Task(config, architecture(config, training), chunks.scales(config, own, training))
    if world:
        _check_world(config, world, camera, training, stored.schema)
    return Recipe(
        name="bc_visual",
        schema=chunks.schema(config, stored, training, PROPRIOCEPTION, own),
        data=training,
        validation=validation,
        init=lambda key: (visual_policy.init(key, task.architecture), tree.to(tree.clone(task.scales), key.device)),
        sample=lambda found, key, size: chunks.window(config, found, data.rows(key, len(found.valid), size)),
        count=lambda batch: batch.valid.sum(),
        loss=functools.partial(loss, task),
        batches=functools.partial(chunks.batches, config),
        validate=functools.partial(validate, task),
        evaluate=functools.partial(evaluate, task, world, camera, expert) if world and expert else None,
        score=lambda figures: figures.get("success", -figures["loss"]),
        bundle=lambda params, buffers: _bundle(task, params, buffers, stored.schema, validation),
        draw=lambda params, buffers, folder: _draw(task, params, buffers, folder, stored.schema, validation),
    )


class Task(NamedTuple):
    """What the functions of the recipe close over."""

    config: BCVisual
    architecture: Architecture
    scales: Scales


def frames(recorded: Episodes) -> Frames:
    """Returns the frames of recorded demonstrations, whose observations are `Seen`.

    Raises:
      ValueError: if a feature is absent or of another kind.
    """
    found = windows.frames(recorded, PROPRIOCEPTION, ACTION)
    image = recorded.values.get(IMAGE)
    if image is None or image.dtype != torch.uint8 or image.ndim != 4 or image.shape[-1] != image.shape[-2]:
        told = "absent" if image is None else f"{image.dtype} {tuple(image.shape)}"
        raise ValueError(f"the feature {IMAGE!r} is {told}; expected square pictures, uint8 [T, C, S, S]")
    return found._replace(observation=Seen(image, found.observation))


def loss(task: Task, params: Parameters, buffers: Scales, batch: Windows, key: Tensor) -> tuple[Tensor, Aux]:
    """Returns the error summed over the supervised steps; crop, noise and dropout are drawn from the key [2]."""
    crop, noise, dropout = keys.split(key, 3).unbind(0)
    image = vision.random_crop(crop, batch.observation.image, task.config.crop)
    found = _errors(task, params, buffers, batch, image, noise, dropout)
    return found["loss"], Aux(buffers, {"absolute_error": found["absolute_error"]})


def validate(task: Task, params: Parameters, buffers: Scales, batch: Windows) -> dict[str, Tensor]:
    """Returns the sums of `loss` over centre crops, without noise and dropout."""
    return _errors(task, params, buffers, batch, vision.centre_crop(batch.observation.image, task.config.crop))


def _errors(
    task: Task,
    params: Parameters,
    scales: Scales,
    batch: Windows,
    image: Tensor,
    noise: Tensor | None = None,
    dropout: Tensor | None = None,
) -> dict[str, Tensor]:
    config, architecture = task.config, task.architecture
    own = normalizer.normalize(scales.observation, chunks.observed(batch.observation.proprioception, batch))
    own = chunks.disturbed(config, own, noise)
    output = visual_policy.output(params, architecture, image, own, config.dropout, dropout)
    return chunks.errors(config.loss, architecture.head, scales, output, batch)


def evaluate(
    task: Task, world: Any, camera: Camera, expert: Expert, params: Parameters, buffers: Scales
) -> dict[str, float]:
    """Returns `worlds.success` of the policy, which sees the world through its camera; the expert sees the state."""

    def plan(past: Tensor) -> Tensor:
        return visual_policy.act(params, buffers, task.architecture, pixels.see(camera, past, task.config.picture))

    return chunks.success(task.config, world, expert, plan, buffers.action.mean.device)


def _record(config: BCVisual) -> Episodes:
    seen = chunks.demonstrate(config)
    seen = seen if config.longest is None else episodes.shorten(seen, config.longest)
    return pixels.record(seen, config.camera, config.picture)


def architecture(config: BCVisual, found: Frames) -> Architecture:
    """Returns the static facts of the policy for these frames.

    Raises:
      ValueError: if the pictures have another size than the settings say.
    """
    image, own = found.observation
    if image.shape[-1] != config.picture:
        raise ValueError(f"the pictures have {image.shape[-1]} pixels a side: say picture={image.shape[-1]}")
    channels, width = config.history * image.shape[1], 2 * config.keypoints + config.history * own.shape[1]
    encoder = Encoder(channels, config.kernel, config.widths, config.strides, config.blocks, config.keypoints)
    head = dataclasses.replace(chunks.head(config, width, found.action.shape[1]), history=1)
    return Architecture(encoder, config.crop, head)


def _check_world(config: BCVisual, world: Any, camera: Camera, found: Frames, schema: Schema) -> None:
    pixels.check(camera, config.camera, world.spec.actor_dim)
    told = schema.about.get("camera", config.camera)
    if told != config.camera or found.observation.proprioception.shape[1] != len(camera.proprioception):
        raise ValueError(f"{config.demonstrations}: was recorded by {told}; name that camera, or world=none")
    chunks.check_world(config, world, world.spec.actor_dim, found.action.shape[1], schema.about)


def _bundle(task: Task, params: Parameters, buffers: Scales, schema: Schema, validation: Frames) -> Bundle:
    named = chunks.channels(schema)
    image, own = chunks.window(task.config, validation, torch.linspace(0, len(validation.valid) - 1, 8).long())[0]
    axes = ["batch", "history, oldest first", "channel"]
    inputs = {IMAGE: (image, [*axes, "row, from the top", "column"]), PROPRIOCEPTION: (own, axes)}
    if not named[PROPRIOCEPTION]:
        del inputs[PROPRIOCEPTION]
    told = {name: {"axes": where, "channels": named[name]} for name, (_, where) in inputs.items()}
    return Bundle(
        predict="functional_sl.models.visual_policy:predict",
        arguments=visual_policy.arguments(task.architecture),
        tensors=tree.named({"params": params, "scales": buffers}),
        about=chunks.about(task.config, schema, "bc_visual", told),
        inputs={name: value for name, (value, _) in inputs.items()},
    )


def _draw(task: Task, params: Parameters, buffers: Scales, folder: str, schema: Schema, validation: Frames) -> None:
    device = buffers.action.mean.device
    parts = list(chunks.batches(task.config, tree.to(validation, device), _PLANNED))
    planned = torch.cat([visual_policy.act(params, buffers, task.architecture, part.observation) for part in parts])
    recorded = tree.concatenate(part._replace(observation=part.valid) for part in parts)
    channels = {feature.name: feature.channels for feature in schema.features}[ACTION]
    chunk_pictures.draw(folder, planned, recorded, int(validation.end[0]), channels, schema.step_dt)
