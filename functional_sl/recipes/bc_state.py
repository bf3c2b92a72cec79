"""Behaviour cloning from state: chunks of actions from a short history, judged by what the policy does in its world.

    episodes (stored, or demonstrated by an expert) -> windows with masks -> MLP -> MSE, L1 or mixture of normals
    evaluation: success = (return - random's) / (expert's - random's) over whole episodes

An item is one supervised step of a chunk; its error is a mean over the action's channels, in units of the
normaliser. What stands in steps that are not supervised changes no bit of loss and gradient.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from functional_sl import data, keys, tree
from functional_sl.bundle import Bundle
from functional_sl.models import chunk_policy, mixture, normalizer
from functional_sl.models.chunk_policy import Architecture, Scales
from functional_sl.models.mlp import ACTIVATIONS, MLP
from functional_sl.recipe import Recipe
from functional_sl.recipes import chunk_pictures
from functional_sl.run.cli import option
from functional_sl.sources import demonstrations, episodes, windows, worlds
from functional_sl.sources.demonstrations import ACTION, OBSERVATION, Expert
from functional_sl.sources.episodes import Episodes
from functional_sl.sources.windows import Frames, Windows
from functional_sl.step import Aux

LOSSES = ("mse", "l1", "gmm")
DEMONSTRATIONS, EVALUATION, SPLIT = range(3)  # streams of the data's seed


@dataclasses.dataclass(frozen=True)
class BCState:
    """Settings of behaviour cloning from state."""

    world: str | None = option(
        "functional_sac.envs.pendulum:pendulum",
        "Function that makes the world, as package.module:function; none: stored demonstrations, no rollouts.",
        group="demonstrations and evaluation",
    )
    expert: str | None = option(
        "functional_sac.envs.experts:pendulum", "Expert of that world, as package.module:name; none: no rollouts."
    )
    demonstrations: str | None = option(None, "File of episodes; without it the expert demonstrates.")
    episodes: int = option(192, "Demonstrations to generate.")
    disturbance: float = option(0.3, "Noise on executed demonstrations; the undisturbed action is recorded.")
    data_seed: int = option(0, "Seed of the generated demonstrations and of the held-out choice.")
    held_out: float = option(0.1, "Share of the episodes that is kept for validation.")
    evaluation_episodes: int = option(64, "Episodes of each rollout evaluation.")
    history: int = option(1, "Observations that the policy sees.", group="policy")
    chunk: int = option(8, "Actions that it plans.")
    execute: int = option(2, "Actions that it executes before it plans again.")
    padding: str = option("mask", "What stands behind the end of an episode.", choices=windows.PADDING)
    loss: str = option("mse", "Error of a step.", choices=LOSSES)
    components: int = option(5, "Components of the mixture where loss=gmm.")
    hidden: tuple[int, ...] = option((256, 256, 256), "Widths of the hidden layers.")
    activation: str = option("gelu", "Between layers.", choices=tuple(ACTIVATIONS))
    dropout: float = option(0.0, "Share of hidden units dropped in training.")
    observation_noise: float = option(0.0, "Noise on normalised observations in training.")
    std_floor: float = option(1e-6, "A channel whose standard deviation is smaller counts as constant.")

    def __post_init__(self) -> None:
        for name in ("episodes", "evaluation_episodes", "history", "chunk", "components"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be at least 1")
        for name in ("disturbance", "observation_noise", "std_floor"):
            if not getattr(self, name) >= 0.0:
                raise ValueError(f"{name} is {getattr(self, name)}; it must not be negative")
        if not 1 <= self.execute <= self.chunk:
            raise ValueError(f"execute is {self.execute}; it must be between 1 and chunk={self.chunk}")
        if not 0.0 < self.held_out < 1.0 or not 0.0 <= self.dropout < 1.0:
            raise ValueError(f"held_out {self.held_out} and dropout {self.dropout} are shares below 1; held_out > 0")
        if self.demonstrations is None and None in (self.world, self.expert):
            raise ValueError("without demonstrations both world and expert must be named")


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
    stored = _episodes(config)
    parts = episodes.split(stored, config.held_out, _key(config, SPLIT))
    training, validation = (windows.frames(part, OBSERVATION, ACTION) for part in parts)
    task = Task(config, _architecture(config, training), _scales(config, training))
    if world:
        _check_world(config, world, task.architecture, stored.schema.about)
    return Recipe(
        name="bc_state",
        schema=_schema(config, stored, training),
        data=training,
        validation=validation,
        init=lambda key: (chunk_policy.init(key, task.architecture), tree.to(tree.clone(task.scales), key.device)),
        sample=lambda frames, key, size: task.windows(frames, data.rows(key, len(frames.valid), size)),
        count=lambda batch: batch.valid.sum(),
        loss=functools.partial(loss, task),
        batches=lambda frames, size: _batches(task, frames, size),
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

    def windows(self, frames: Frames, anchor: Tensor) -> Windows:
        """Returns the windows of some frames."""
        return windows.window(frames, anchor, self.config.history, self.config.chunk, self.config.padding)


def loss(task: Task, params: MLP, buffers: Scales, batch: Windows, key: Tensor) -> tuple[Tensor, Aux]:
    """Returns the error summed over the supervised steps; noise and dropout are drawn from the key [2]."""
    noise, dropout = keys.split(key).unbind(0)
    errors, absolute = _errors(task, params, buffers, batch, noise, dropout)
    return errors, Aux(buffers, {"absolute_error": absolute})


def validate(task: Task, params: MLP, buffers: Scales, batch: Windows) -> dict[str, Tensor]:
    """Returns the sums of `loss` without noise and dropout."""
    errors, absolute = _errors(task, params, buffers, batch)
    return {"loss": errors, "absolute_error": absolute}


def _errors(
    task: Task,
    params: MLP,
    scales: Scales,
    batch: Windows,
    noise: Tensor | None = None,
    dropout: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    config, architecture = task.config, task.architecture
    observation = normalizer.normalize(scales.observation, batch.observation)
    if noise is not None and config.observation_noise > 0.0:
        observation = observation + config.observation_noise * keys.normal(noise, tuple(observation.shape))
    head = chunk_policy.output(params, architecture, observation, config.dropout, dropout)
    # Before any arithmetic: zero times NaN would be NaN in the gradient.
    action = torch.where(batch.valid[..., None], batch.action, 0.0)
    error = _error(config.loss, architecture, head, normalizer.normalize(scales.action, action))
    absolute = (chunk_policy.answer(scales, architecture, head) - action).abs().mean(-1)
    return tuple(torch.where(batch.valid, x, 0.0).sum() for x in (error, absolute))


def _error(kind: str, architecture: Architecture, head: Tensor, target: Tensor) -> Tensor:
    if kind == "gmm":
        return mixture.nll(chunk_policy.as_mixture(architecture, head), target)
    gap = head - target
    return (gap.square() if kind == "mse" else gap.abs()).mean(-1)


def evaluate(task: Task, world: Any, expert: Expert, params: MLP, buffers: Scales) -> dict[str, float]:
    """Returns `worlds.success` of the policy, which plans again after every `execute` steps."""
    config = task.config
    policy = worlds.receding(
        lambda past: chunk_policy.act(params, buffers, task.architecture, past), config.history, config.execute
    )
    start = _key(config, EVALUATION).to(params[0].weight.device)
    return worlds.success(world, policy, worlds.memoryless(expert.act), start, config.evaluation_episodes)


def _episodes(config: BCState) -> Episodes:
    if config.demonstrations:
        return episodes.read(config.demonstrations)
    key = _key(config, DEMONSTRATIONS)
    return demonstrations.generate(config.world, config.expert, key, config.episodes, config.disturbance)


def _key(config: BCState, stream: int) -> Tensor:
    return keys.fold_in(keys.key(config.data_seed), stream)


def _architecture(config: BCState, frames: Frames) -> Architecture:
    return Architecture(
        observation=frames.observation.shape[1],
        action=frames.action.shape[1],
        history=config.history,
        chunk=config.chunk,
        hidden=config.hidden,
        activation=config.activation,
        components=config.components if config.loss == "gmm" else 0,
    )


def _scales(config: BCState, frames: Frames) -> Scales:
    return Scales(
        normalizer.fit(frames.observation, floor=config.std_floor),
        normalizer.fit(frames.action, frames.valid, config.std_floor),
    )


def _check_world(config: BCState, world: Any, found: Architecture, about: Mapping[str, Any]) -> None:
    spec = world.spec
    told = about.get("world", config.world)
    if told != config.world or (found.observation, found.action) != (spec.actor_dim, spec.action_dim):
        raise ValueError(
            f"{config.demonstrations}: its {found.observation} observations and {found.action} actions are of "
            f"{told if told != config.world else 'another world'}; {config.world} has {spec.actor_dim} and "
            f"{spec.action_dim}: name the world of the data, or world=none"
        )


def _schema(config: BCState, stored: Episodes, training: Frames) -> dict[str, Any]:
    """Returns what makes data compatible, and what was decided about it: padding, constant channels, shares."""
    anchors = torch.arange(len(training.valid))
    chunks = windows.window(training, anchors, 1, config.chunk, config.padding).valid
    dead = {
        OBSERVATION: normalizer.constant(training.observation, None, config.std_floor),
        ACTION: normalizer.constant(training.action, training.valid, config.std_floor),
    }
    named = {feature.name: feature.channels for feature in stored.schema.features}
    return {
        **episodes.as_json(stored.schema),
        "digest": episodes.digest(stored),
        "window": {"history": config.history, "chunk": config.chunk, "padding": config.padding},
        "supervised_steps": int(chunks.sum()),
        "steps": chunks.numel(),
        "constant_channels": {
            name: [channel for (channel, _), is_dead in zip(named[name], mask.tolist(), strict=True) if is_dead]
            for name, mask in dead.items()
        },
    }


def _batches(task: Task, frames: Frames, batch_size: int) -> Iterator[Windows]:
    for anchor in torch.arange(len(frames.valid), device=frames.valid.device).split(batch_size):
        yield task.windows(frames, anchor)


def _bundle(task: Task, params: MLP, buffers: Scales, schema: episodes.Schema, validation: Frames) -> Bundle:
    architecture, config = task.architecture, task.config
    named = {feature.name: [list(channel) for channel in feature.channels] for feature in schema.features}
    layers = {f"layers/{name}": leaf for name, leaf in tree.named(params).items()}
    anchors = torch.linspace(0, len(validation.valid) - 1, 8).long()
    about = {
        "recipe": "bc_state",
        "inputs": {
            OBSERVATION: {"axes": ["batch", "history, oldest first", "channel"], "channels": named[OBSERVATION]}
        },
        "outputs": {ACTION: {"axes": ["batch", "step", "channel"], "channels": named[ACTION]}},
        "step_dt": schema.step_dt,
        "start": "before the history is full, the first observation stands for those that are missing",
        "use": f"execute the first {config.execute} of {config.chunk} actions, clamped to their range, then plan again",
        "normalisation": "(x - mean) / std; std is 1 for a channel that was constant in training",
        "data": dict(schema.about),
    }
    return Bundle(
        predict="functional_sl.models.chunk_policy:predict",
        arguments={**dataclasses.asdict(architecture), "hidden": list(architecture.hidden)},
        tensors={**layers, **tree.named(buffers)},
        about=about,
        inputs={OBSERVATION: task.windows(validation, anchors).observation},
    )


def _draw(task: Task, params: MLP, buffers: Scales, folder: str, schema: episodes.Schema, validation: Frames) -> None:
    validation = tree.to(validation, params[0].weight.device)
    recorded = task.windows(validation, torch.arange(len(validation.valid), device=validation.valid.device))
    planned = chunk_policy.act(params, buffers, task.architecture, recorded.observation)
    channels = {feature.name: feature.channels for feature in schema.features}[ACTION]
    chunk_pictures.draw(folder, planned, recorded, int(validation.end[0]), channels, schema.step_dt)
