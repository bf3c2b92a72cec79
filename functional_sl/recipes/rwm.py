"""Robotic World Model (arXiv:2501.10100): forecasts of a quadruped that are trained on their own predictions.

    history of M (state, action) pairs -> N steps on drawn predictions -> sum over k of decay^k (L_state + L_privileged)

An item is one pair of a window and a forecast step k whose true state is in the window's episode; steps behind its end
are none, and neither a decay nor they change what the sum is divided by. N = 1 is teacher forcing. Free-running
forecasts of held-out episodes, up to hundreds of steps, judge the model (`rwm_forecasts`).
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from functional_sl import keys, tree
from functional_sl.models import normalizer, rwm
from functional_sl.models.rwm import Architecture, Model, Scales
from functional_sl.recipe import Recipe
from functional_sl.recipes import rwm_bundle, rwm_forecasts, rwm_windows
from functional_sl.recipes.rwm_forecasts import Judged
from functional_sl.recipes.rwm_windows import Frames, Windows
from functional_sl.run import checks, figures, files
from functional_sl.run.cli import option
from functional_sl.sources import episodes, quadruped
from functional_sl.sources.episodes import Episodes
from functional_sl.step import Aux

FILE = "rollouts.safetensors"
_AT_ONCE = 256  # forecasts
_SPLIT = quadruped.STREAM + 1  # of the data's seed


@dataclasses.dataclass(frozen=True)
class RWM:
    """Settings of the task; the seed is that of the data alone."""

    path: str | None = option(None, f"Folder of {FILE}: it is read, or generated and written there.", group="Data")
    worlds: int = option(64, "Robots that run side by side.")
    steps: int = option(2005, "Control steps of each, over all its episodes.")
    episode_steps: int = option(401, "Frames of an episode that no fall ends.")
    data_seed: int = option(0, "Seed of the roll-outs and of the held-out choice.")
    held_out: float = option(0.15, "Share of the episodes that is kept for validation and evaluation.")
    history: int = option(32, "M, frames that the model sees.", group="Objective")
    forecast: int = option(8, "N, steps that it forecasts on its own predictions; 1 is teacher forcing.")
    decay: float = option(1.0, "Weight of step k is decay^k.")
    beta: float = option(0.5, "Weight std^(2 beta) of the likelihood; 0 is the plain one.")
    hidden: int = option(256, "Units of each layer of each GRU.", group="Network")
    layers: int = option(2, "Layers of each GRU.")
    head: int = option(128, "Hidden units of each head.")
    members: int = option(1, "Members of the ensemble, each with a bootstrap sample of every batch.")
    horizons: tuple[int, ...] = option((1, 8, 32, 100, 368), "Steps of free-running forecasts.", group="Evaluation")
    block: int = option(8, "Steps after which a free-running forecast reads its own last M frames anew.")
    evaluation_every: int = option(120, "Frames of a held-out episode from one forecast to the next.")

    def __post_init__(self) -> None:
        """Raises ValueError for the first setting, or pair of settings, that cannot be meant."""
        checks.integers(self, but=("data_seed",))
        if not 0 < self.held_out < 1:
            raise ValueError(f"held_out={self.held_out}: a share above 0 and below 1")
        for name in ("decay", "beta"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"{name}={getattr(self, name)}: must lie in [0, 1]")
        needed = self.history + max(self.horizons, default=0)
        if not self.horizons or needed > self.episode_steps:
            raise ValueError(
                f"horizons={self.horizons}: history={self.history} and the longest need {needed} frames, but "
                f"episode_steps={self.episode_steps}"
            )


class Task(NamedTuple):
    """The static part of one build."""

    config: RWM
    architecture: Architecture
    scales: Scales
    schema: episodes.Schema


class Prepared(NamedTuple):
    """A task and its data on the CPU."""

    task: Task
    training: Frames
    held_out: Frames
    judged: Frames  # held-out, with the windows of `judged_windows`


def prepare(config: RWM) -> Prepared:
    """Generates or reads the roll-outs and splits them by whole episodes."""
    stored = _episodes(config)
    training, held_out = episodes.split(stored, config.held_out, keys.fold_in(keys.key(config.data_seed), _SPLIT))
    frames = rwm_windows.frames_of(training, config.history, 1)
    judged = judged_windows(held_out, config)
    scales = Scales(normalizer.fit(frames.state), normalizer.fit(frames.action))
    sizes = (frames.state.shape[1], frames.action.shape[1], frames.contact.shape[1])
    architecture = Architecture(*sizes, config.hidden, config.layers, config.head, config.members)
    task = Task(config, architecture, scales, stored.schema)
    return Prepared(task, frames, rwm_windows.frames_of(held_out, config.history, config.forecast), judged)


def build(config: RWM) -> Recipe:
    """Generates or reads the roll-outs and returns the task."""
    task, training, held_out, judged = prepare(config)
    cut = {"history": config.history, "forecast": config.forecast, "members": config.members}
    schema = rwm_bundle.schema(task.schema, config.history, config.forecast)
    return Recipe(
        name="rwm",
        schema=schema,
        data=training,
        validation=held_out,
        init=lambda key: (rwm.init(key, task.architecture), tree.to(tree.clone(task.scales), key.device)),
        sample=functools.partial(rwm_windows.sample, **cut),
        count=rwm_windows.count,
        loss=functools.partial(loss, task),
        batches=functools.partial(rwm_windows.batches, **cut),
        validate=functools.partial(validate, task),
        evaluate=functools.partial(evaluate, task, judged),
        score=lambda found: -found[f"nrmse_{max(config.horizons)}"],
        bundle=functools.partial(rwm_bundle.bundle, task.architecture, schema, config.block, judged),
        draw=functools.partial(draw, task, judged),
    )


def judged_windows(held_out: Episodes, config: RWM) -> Frames:
    """Returns held-out episodes with the windows that are forecast: one every `evaluation_every` frames of each.

    Raises:
      ValueError: if no episode has the longest horizon.
    """
    longest, needed = int(held_out.lengths.max()), config.history + max(config.horizons)
    if longest < needed:
        raise ValueError(
            f"no held-out episode has {needed} frames, the longest has {longest}: more steps, or shorter horizons"
        )
    return rwm_windows.frames_of(held_out, config.history, config.evaluation_every)


def loss(task: Task, params: Model, scales: Scales, batch: Windows, key: Tensor) -> tuple[Tensor, Aux]:
    """Returns the summed error of forecasts that go on from what they draw by the key; scales stay as they are."""
    members, (rows, steps) = task.config.members, batch.valid.shape
    noise = keys.normal(key, (members, rows, steps - 1, batch.state.shape[-1])) if steps > 1 else None
    sums = _errors(task, params, scales, batch, noise)
    return sums.pop("loss"), Aux(scales, tree.map(torch.Tensor.detach, sums))


def validate(task: Task, params: Model, scales: Scales, batch: Windows) -> dict[str, Tensor]:
    """Returns the sums of `loss` for forecasts that go on from their means."""
    return _errors(task, params, scales, batch, None)


def _errors(task: Task, params: Model, scales: Scales, batch: Windows, noise: Tensor | None) -> dict[str, Tensor]:
    c, valid = task.config, batch.valid
    # Before any arithmetic: zero times NaN would be NaN in the gradient.
    seen = valid.any(1)[:, None, None]
    states = torch.where(seen, batch.state[:, : c.history], 0.0)
    past, ahead = batch.action[:, : c.history - 1], batch.action[:, c.history - 1 :]
    actions = torch.cat([torch.where(seen, past, 0.0), torch.where(valid[..., None], ahead, 0.0)], 1)
    target = torch.where(valid[..., None], batch.state[:, c.history :], 0.0)
    contact, terminated = batch.contact.to(target), batch.terminated.to(target)

    states, target = (normalizer.normalize(scales.state, x) for x in (states, target))
    found = rwm.forecast(params, states, normalizer.normalize(scales.action, actions), noise)
    state = rwm.likelihood(found.mean, found.log_std, target, c.beta).mean(-1)
    bce = functools.partial(F.binary_cross_entropy_with_logits, reduction="none")
    touch = bce(found.contact, contact.expand_as(found.contact)).mean(-1)
    fall = bce(found.termination, terminated.expand_as(found.termination))
    decay = c.decay ** torch.arange(1, c.forecast + 1, device=state.device)
    right = ((found.contact > 0) == batch.contact).to(state).mean(-1)
    parts = {
        "loss": decay * (state + touch + fall),
        "state_squared_error": (found.mean - target).square().mean(-1),
        "contact_loss": touch,
        "contact_accuracy": right,
        "termination_loss": fall,
    }
    weight = (valid[..., None] * batch.weight[:, None]).permute(2, 0, 1)  # [members, B, N]
    return {name: torch.where(weight > 0, weight * part, 0.0).sum() for name, part in parts.items()}


def judge(task: Task, judged: Frames, params: Model, scales: Scales) -> Judged:
    """Returns the free-running forecasts of all windows of `judged`."""
    c = task.config
    windows = (rwm_windows.window(judged, part, c.history, max(c.horizons)) for part in judged.anchor.split(_AT_ONCE))
    episode = torch.unique(judged.end[judged.anchor], return_inverse=True)[1]
    return rwm_forecasts.judge(params, scales, c.history, c.block, windows, episode)


def evaluate(task: Task, judged: Frames, params: Model, scales: Scales) -> Mapping[str, float]:
    """Returns the figures of `rwm_forecasts.figures` over all held-out episodes, falls included."""
    return rwm_forecasts.figures(judge(task, judged, params, scales), task.config.horizons)


def draw(task: Task, judged: Frames, params: Model, scales: Scales, folder: str) -> None:
    """Draws the error at every step beside the floors', and the base's velocity in the first whole forecast."""
    c, found = task.config, judge(task, judged, params, scales)
    time = task.schema.step_dt * torch.arange(1, found.valid.shape[1] + 1)
    labels = {rwm_forecasts.MODEL: "RWM", rwm_forecasts.HOLD: "hold last", rwm_forecasts.MEAN: "training mean"}
    curves = [
        figures.Series(label, time, rwm_forecasts.by_step(found.errors[name].squared, found.valid).sqrt())
        for name, label in labels.items()
    ]
    text = {"title": "Free-running error", "xlabel": "time (s)", "ylabel": "RMSE (standard deviations)"}
    figures.learning_curve(Path(folder) / "error.png", curves, **text)
    first = judged.anchor[found.valid.all(1)][:1]
    state, action, *_ = rwm_windows.window(judged, first, c.history, max(c.horizons))
    run = rwm_forecasts.run(params, scales, c.history, c.block, state, action)
    names = [name for name, _ in task.schema.features[0].channels]
    for i in range(min(3, len(names))):
        curves = [figures.Series(label, time, x[0, :, i]) for label, x in (("true", run.true), ("RWM", run.mean))]
        text = {"title": f"{names[i]} of one episode", "xlabel": "time (s)", "ylabel": "standard deviations"}
        figures.learning_curve(Path(folder) / f"trajectory_{names[i]}.png", curves, **text)


def _episodes(config: RWM) -> Episodes:
    """Reads the roll-outs from the folder, or generates them and keeps them there."""
    drawn = {"seed": config.data_seed, "worlds": config.worlds, "steps": config.steps, "longest": config.episode_steps}
    file = Path(config.path or "").expanduser() / FILE
    if config.path and file.exists():
        return quadruped.read(file, drawn)
    made = quadruped.generate(**drawn)
    if config.path:
        files.keep(file, lambda file: episodes.write(file, made), 4 * tree.size(dict(made.values)))
    return made


_TRAIN = {"optimizer": "adamw", "weight_decay": 1e-5, "lr_schedule": "cosine", "clip_norm": 1.0}
_PAPER = {
    "train": _TRAIN
    | {"updates": 20_000, "batch_size": 1024, "learning_rate": 1e-3, "lr_end": 1e-5, "validate_every": 5_000},
    "recipe": {"worlds": 512, "steps": 4010},
}
# One CPU core, some minutes: a quarter of the units, half of the history.
_SMALL = {
    "train": _TRAIN
    | {"updates": 3_000, "batch_size": 64, "learning_rate": 3e-3, "lr_end": 1e-5, "validate_every": 1_000},
    "recipe": {"hidden": 64, "head": 64, "history": 16, "worlds": 192},
}
SIZES = {
    "small": _SMALL,
    "paper": _PAPER,
    "three_step": _PAPER | {"recipe": _PAPER["recipe"] | {"forecast": 3}},
}
PLACES = ("path",)
