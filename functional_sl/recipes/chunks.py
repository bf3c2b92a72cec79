"""What the recipes that clone chunks of actions share: settings, the error of a chunk, what is told of the data.

An item is one supervised step of a chunk; its error is a mean over the action's channels, in units of the
normaliser. What stands in steps that are not supervised changes no bit of loss and gradient, and neither does what is
observed in a window without a supervised step.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from functional_sl import keys
from functional_sl.models import chunk_policy, mixture, normalizer
from functional_sl.models.chunk_policy import Architecture, Scales
from functional_sl.models.mlp import ACTIVATIONS
from functional_sl.run.cli import option
from functional_sl.sources import demonstrations, episodes, windows, worlds
from functional_sl.sources.demonstrations import ACTION
from functional_sl.sources.episodes import Episodes, Schema
from functional_sl.sources.windows import Frames, Windows

LOSSES = ("mse", "l1", "gmm")
DEMONSTRATIONS, EVALUATION, SPLIT = range(3)  # streams of the data's seed


@dataclasses.dataclass(frozen=True)
class Settings:
    """Settings that every such recipe has."""

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
        for name in ("disturbance", "observation_noise"):
            if not 0.0 <= getattr(self, name) < math.inf:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be finite and not negative")
        if not 0.0 < self.std_floor < math.inf:
            raise ValueError(f"std_floor is {self.std_floor}; it must be finite and positive")
        if any(width < 1 for width in self.hidden):
            raise ValueError(f"hidden is {self.hidden}; a layer has at least 1 unit")
        if not 1 <= self.execute <= self.chunk:
            raise ValueError(f"execute is {self.execute}; it must be between 1 and chunk={self.chunk}")
        if not 0.0 < self.held_out < 1.0 or not 0.0 <= self.dropout < 1.0:
            raise ValueError(f"held_out {self.held_out} and dropout {self.dropout} are shares below 1; held_out > 0")
        if self.demonstrations is None and None in (self.world, self.expert):
            raise ValueError("without demonstrations both world and expert must be named")


def key_of(config: Settings, stream: int) -> Tensor:
    """Returns the key [2] of a stream of the data's seed."""
    return keys.fold_in(keys.key(config.data_seed), stream)


def demonstrate(config: Settings) -> Episodes:
    """Returns the demonstrations of the configured expert in its world."""
    key = key_of(config, DEMONSTRATIONS)
    return demonstrations.generate(config.world, config.expert, key, config.episodes, config.disturbance)


def head(config: Settings, observation: int, action: int) -> Architecture:
    """Returns the architecture of the head that plans chunks from a history of `observation` numbers each."""
    return Architecture(
        observation=observation,
        action=action,
        history=config.history,
        chunk=config.chunk,
        hidden=config.hidden,
        activation=config.activation,
        components=config.components if config.loss == "gmm" else 0,
    )


def scales(config: Settings, observation: Tensor, frames: Frames) -> Scales:
    """Returns the normalisers of observations [T, O] and of actions, over the frames that count."""
    return Scales(
        normalizer.fit(observation, frames.valid, config.std_floor),
        normalizer.fit(frames.action, frames.valid, config.std_floor),
    )


def observed(observation: Tensor, batch: Windows) -> Tensor:
    """Returns observations [B, H, O] that are zero in windows without a supervised step.

    Before any arithmetic: a NaN there would be one in the gradient, whatever its weight.
    """
    return torch.where(batch.valid.any(1)[:, None, None], observation, 0.0)


def disturbed(config: Settings, observation: Tensor, key: Tensor | None) -> Tensor:
    """Returns normalised observations with the configured noise; without a key as they are."""
    if key is None or config.observation_noise == 0.0:
        return observation
    return observation + config.observation_noise * keys.normal(key, tuple(observation.shape))


def errors(kind: str, architecture: Architecture, scales: Scales, output: Tensor, batch: Windows) -> dict[str, Tensor]:
    """Returns `loss` and `absolute_error` (in the units of the action), summed over the supervised steps.

    Args:
      kind: one of `LOSSES`.
      architecture: of the head.
      scales: the normalisers.
      output: the head's numbers [B, F, ...].
      batch: what was asked for.
    """
    # Before any arithmetic: zero times NaN would be NaN in the gradient.
    action = torch.where(batch.valid[..., None], batch.action, 0.0)
    error = _error(kind, architecture, output, normalizer.normalize(scales.action, action))
    absolute = (chunk_policy.answer(scales, architecture, output) - action).abs().mean(-1)
    found = {"loss": error, "absolute_error": absolute}
    return {name: torch.where(batch.valid, x, 0.0).sum() for name, x in found.items()}


def _error(kind: str, architecture: Architecture, output: Tensor, target: Tensor) -> Tensor:
    if kind == "gmm":
        return mixture.nll(chunk_policy.as_mixture(architecture, output), target)
    gap = output - target
    return (gap.square() if kind == "mse" else gap.abs()).mean(-1)


def window(config: Settings, frames: Frames, anchor: Tensor) -> Windows:
    """Returns the windows of some frames."""
    return windows.window(frames, anchor, config.history, config.chunk, config.padding)


def batches(config: Settings, frames: Frames, batch_size: int) -> Iterator[Windows]:
    """Yields the windows of all frames, in order."""
    for anchor in torch.arange(len(frames.valid), device=frames.valid.device).split(batch_size):
        yield window(config, frames, anchor)


def success(config: Settings, world: Any, expert: Any, plan: Callable[[Tensor], Tensor], device: torch.device) -> dict:
    """Returns `worlds.success` of a policy that plans again after every `execute` steps.

    Args:
      config: settings.
      world: see `functional_sl.sources.worlds`.
      expert: a `demonstrations.Expert`.
      plan: the world's observations [N, H, O] -> actions [N, F, A].
      device: where the world is simulated.
    """
    policy = worlds.receding(plan, config.history, config.execute)
    start = key_of(config, EVALUATION).to(device)
    return worlds.success(world, policy, worlds.memoryless(expert.act), start, config.evaluation_episodes)


def check_world(config: Settings, world: Any, observation: int, action: int, about: Mapping[str, Any]) -> None:
    """Refuses demonstrations of another world.

    Raises:
      ValueError: names file, world and widths.
    """
    spec = world.spec
    told = about.get("world", config.world)
    if told != config.world or (observation, action) != (spec.actor_dim, spec.action_dim):
        raise ValueError(
            f"{config.demonstrations}: its {observation} observations and {action} actions are of "
            f"{told if told != config.world else 'another world'}; {config.world} has {spec.actor_dim} and "
            f"{spec.action_dim}: name the world of the data, or world=none"
        )


def schema(config: Settings, stored: Episodes, training: Frames, name: str, observation: Tensor) -> dict[str, Any]:
    """Returns what makes data compatible, and what was decided about it: padding, constant channels, shares.

    Args:
      config: settings.
      stored: all demonstrations.
      training: the frames that are learnt from.
      name: the feature of the normalised observations.
      observation: [T, O], its training frames.
    """
    anchors = torch.arange(len(training.valid))
    chunks = windows.window(training._replace(observation=()), anchors, 1, config.chunk, config.padding).valid
    dead = {
        name: normalizer.constant(observation, training.valid, config.std_floor),
        ACTION: normalizer.constant(training.action, training.valid, config.std_floor),
    }
    named = channels(stored.schema)
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


def channels(schema: Schema) -> dict[str, list[list[str]]]:
    """Returns name and unit of every channel by feature."""
    return {feature.name: [list(channel) for channel in feature.channels] for feature in schema.features}


def about(config: Settings, schema: Schema, name: str, inputs: Mapping[str, Any]) -> dict[str, Any]:
    """Returns what a bundle tells of a policy beside its numbers."""
    return {
        "recipe": name,
        "inputs": dict(inputs),
        "outputs": {ACTION: {"axes": ["batch", "step", "channel"], "channels": channels(schema)[ACTION]}},
        "step_dt": schema.step_dt,
        "start": "before the history is full, the first observation stands for those that are missing",
        "use": f"execute the first {config.execute} of {config.chunk} actions, clamped to their range, then plan again",
        "normalisation": "(x - mean) / std; std is 1 for a channel that was constant in training",
        "data": dict(schema.about),
    }
