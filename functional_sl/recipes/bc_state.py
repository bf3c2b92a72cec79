"""Behaviour cloning from state: chunks of actions from a short history, judged by what the policy does in its world.

    episodes (stored, or demonstrated by an expert) -> windows with masks -> MLP -> MSE, L1 or mixture of normals
    evaluation: success = (return - random's) / (expert's - random's) over whole episodes

`functional_sl.recipes.chunks` says what an item is and what it costs.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, NamedTuple

import torch
from torch import Tensor

from functional_sl import data, keys, tree
from functional_sl.bundle import Bundle
from functional_sl.models import chunk_policy, normalizer
from functional_sl.models.chunk_policy import Architecture, Scales
from functional_sl.models.mlp import MLP
from functional_sl.recipe import Recipe
from functional_sl.recipes import chunk_pictures, chunks
from functional_sl.sources import demonstrations, episodes, windows, worlds
from functional_sl.sources.demonstrations import ACTION, OBSERVATION, Expert
from functional_sl.sources.episodes import Schema
from functional_sl.sources.windows import Frames, Windows
from functional_sl.step import Aux


@dataclasses.dataclass(frozen=True)
class BCState(chunks.Settings):
    """Settings of behaviour cloning from state."""


PLACES = ("demonstrations",)
SIZES: dict[str, dict[str, dict[str, Any]]] = {
    "small": {
        "train": {
            "updates": 2000,
            "batch_size": 256,
            "optimizer": "adamw",
            "learning_rate": 1e-3,
            "lr_schedule": "cosine",
            "weight_decay": 1e-6,
            "clip_norm": 1.0,
            "validate_every": 500,
        },
        "recipe": {},
    },
    # Low-dimensional, machine-generated data in Mandlekar et al., arXiv:2108.03298: 2000 epochs of 100 updates.
    "paper": {
        "train": {"updates": 200_000, "batch_size": 100, "learning_rate": 1e-3, "validate_every": 5000},
        "recipe": {"chunk": 1, "execute": 1, "hidden": (1024, 1024), "activation": "relu"},
    },
}


def build(config: BCState) -> Recipe:
    """Returns the recipe: reads or generates the demonstrations, splits them and freezes the normalisers."""
    world = worlds.load(config.world) if config.world else None
    expert = demonstrations.load_expert(config.expert) if config.expert else None
    stored = episodes.read(config.demonstrations) if config.demonstrations else chunks.demonstrate(config)
    parts = episodes.split(stored, config.held_out, chunks.key_of(config, chunks.SPLIT))
    training, validation = (windows.frames(part, OBSERVATION, ACTION) for part in parts)
    architecture = chunks.head(config, training.observation.shape[1], training.action.shape[1])
    task = Task(config, architecture, chunks.scales(config, training.observation, training))
    if world:
        chunks.check_world(config, world, architecture.observation, architecture.action, stored.schema.about)
    return Recipe(
        name="bc_state",
        schema=chunks.schema(config, stored, training, OBSERVATION, training.observation),
        data=training,
        validation=validation,
        init=lambda key: (chunk_policy.init(key, task.architecture), tree.to(tree.clone(task.scales), key.device)),
        sample=lambda frames, key, size: chunks.window(config, frames, data.rows(key, len(frames.valid), size)),
        count=lambda batch: batch.valid.sum(),
        loss=functools.partial(loss, task),
        batches=functools.partial(chunks.batches, config),
        validate=functools.partial(validate, task),
        evaluate=functools.partial(evaluate, task, world, expert) if world and expert else None,
        score=lambda figures: figures.get("success", -figures["loss"]),
        bundle=lambda params, buffers: _bundle(task, params, buffers, stored.schema, validation),
        draw=lambda params, buffers, folder: _draw(task, params, buffers, folder, stored.schema, validation),
    )


class Task(NamedTuple):
    """What the functions of the recipe close over."""

    config: BCState
    architecture: Architecture
    scales: Scales


def loss(task: Task, params: MLP, buffers: Scales, batch: Windows, key: Tensor) -> tuple[Tensor, Aux]:
    """Returns the error summed over the supervised steps; noise and dropout are drawn from the key [2]."""
    noise, dropout = keys.split(key).unbind(0)
    found = _errors(task, params, buffers, batch, noise, dropout)
    return found["loss"], Aux(buffers, {"absolute_error": found["absolute_error"]})


def validate(task: Task, params: MLP, buffers: Scales, batch: Windows) -> dict[str, Tensor]:
    """Returns the sums of `loss` without noise and dropout."""
    return _errors(task, params, buffers, batch)


def _errors(
    task: Task,
    params: MLP,
    scales: Scales,
    batch: Windows,
    noise: Tensor | None = None,
    dropout: Tensor | None = None,
) -> dict[str, Tensor]:
    config, architecture = task.config, task.architecture
    observation = normalizer.normalize(scales.observation, chunks.observed(batch.observation, batch))
    observation = chunks.disturbed(config, observation, noise)
    output = chunk_policy.output(params, architecture, observation, config.dropout, dropout)
    return chunks.errors(config.loss, architecture, scales, output, batch)


def evaluate(task: Task, world: Any, expert: Expert, params: MLP, buffers: Scales) -> dict[str, float]:
    """Returns `worlds.success` of the policy, which plans again after every `execute` steps."""

    def plan(past: Tensor) -> Tensor:
        return chunk_policy.act(params, buffers, task.architecture, past)

    return chunks.success(task.config, world, expert, plan, params[0].weight.device)


def _bundle(task: Task, params: MLP, buffers: Scales, schema: Schema, validation: Frames) -> Bundle:
    architecture = task.architecture
    layers = {f"layers/{name}": leaf for name, leaf in tree.named(params).items()}
    anchors = torch.linspace(0, len(validation.valid) - 1, 8).long()
    axes = {"axes": ["batch", "history, oldest first", "channel"], "channels": chunks.channels(schema)[OBSERVATION]}
    return Bundle(
        predict="functional_sl.models.chunk_policy:predict",
        arguments={**dataclasses.asdict(architecture), "hidden": list(architecture.hidden)},
        tensors={**layers, **tree.named(buffers)},
        about=chunks.about(task.config, schema, "bc_state", {OBSERVATION: axes}),
        inputs={OBSERVATION: chunks.window(task.config, validation, anchors).observation},
    )


def _draw(task: Task, params: MLP, buffers: Scales, folder: str, schema: Schema, validation: Frames) -> None:
    validation = tree.to(validation, params[0].weight.device)
    anchors = torch.arange(len(validation.valid), device=validation.valid.device)
    recorded = chunks.window(task.config, validation, anchors)
    planned = chunk_policy.act(params, buffers, task.architecture, recorded.observation)
    channels = {feature.name: feature.channels for feature in schema.features}[ACTION]
    chunk_pictures.draw(folder, planned, recorded, int(validation.end[0]), channels, schema.step_dt)
