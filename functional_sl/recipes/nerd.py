"""Neural Robot Dynamics (arXiv:2508.15755): a transformer learns a robot's next state from its last ten.

Every position of a window is supervised (contexts of 1 to 10 frames) by the change of the state that the simulator
made, relative to that position, in units of its standard deviation over the training set. There is no rollout in the
loss; open-loop rollouts on held-out passive motion judge the model.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from functional_sl import keys, tree
from functional_sl.models import nerd, normalizer, transformer
from functional_sl.models.articulation import ROBOTS, Robot
from functional_sl.models.nerd import Convention, Statistics
from functional_sl.models.transformer import Architecture, Parameters
from functional_sl.recipe import Recipe
from functional_sl.recipes import nerd_bundle, nerd_windows
from functional_sl.recipes.nerd_windows import Transitions
from functional_sl.run import checks, figures, files
from functional_sl.run.cli import option
from functional_sl.sources import nerd_data
from functional_sl.sources.nerd_data import Trajectories
from functional_sl.step import Aux

_GREATEST = 1e6  # an error of a roll-out
_STREAMS = {"training": 0, "validation": 10, "passive": 500}  # of the seed; no two share a number


@dataclasses.dataclass(frozen=True)
class NeRD:
    """Settings of the task; seeds are those of the data alone."""

    robot: str = option("cartpole", "The robot.", choices=tuple(ROBOTS), group="Data")
    source: str = option(
        "analytic", "What integrates the motion; analytic: the cartpole without MuJoCo.", choices=nerd_data.SOURCES
    )
    path: str | None = option(
        None, "Folder of training.safetensors, validation and passive: each is read, or generated and written there."
    )
    trajectories: int = option(1000, "Trajectories of training data.")
    steps: int = option(100, "Steps of a trajectory.")
    validation_trajectories: int = option(50, "Held-out trajectories like those.")
    data_seed: int = option(0, "Seed of training data; held-out data have their own.")
    effort: float = option(1.0, "Share of every joint's greatest effort from which training data draw.")
    start: str = option(
        "wide", "First states; slow: the cartpole within 1 m/s and 1 rad/s, not 10.", choices=nerd_data.STARTS
    )
    frame: str = option("body", "Frame of the network's inputs.", choices=nerd.FRAMES)
    embedding: str = option(
        "identity", "How a continuous angle enters; sinusoidal: as sine and cosine.", choices=nerd.EMBEDDINGS
    )
    history: int = option(10, "Frames of time in a window.", group="Network")
    width: int = option(64, "Width of a token.")
    layers: int = option(2, "Blocks of the transformer.")
    heads: int = option(4, "Attention heads.")
    context: int = option(32, "Positions that the network has; the history uses the first of them.")
    horizons: tuple[int, ...] = option((100, 500, 1000), "Steps of open-loop prediction.", group="Evaluation")
    evaluation_trajectories: int = option(64, "Held-out passive trajectories that are predicted open loop.")

    def __post_init__(self) -> None:
        """Raises ValueError for the first setting, or pair of settings, that cannot be meant."""
        checks.integers(self, but=("data_seed",))
        for small, large in (("history", "steps"), ("history", "context")):
            if getattr(self, small) > getattr(self, large):
                raise ValueError(f"{small}={self.__dict__[small]}: must not exceed {large}={self.__dict__[large]}")
        if not 0 <= self.effort <= 1:
            raise ValueError(f"effort={self.effort}: must lie in [0, 1]")
        if self.width % self.heads:
            raise ValueError(f"width={self.width}: must be a multiple of heads={self.heads}")
        if self.source == "analytic" and self.robot != "cartpole":
            raise ValueError(f"source=analytic: {self.robot} needs --source=mujoco")


class Task(NamedTuple):
    """The static part of one build."""

    config: NeRD
    robot: Robot
    convention: Convention


def build(config: NeRD) -> Recipe:
    """Generates or reads the data and returns the task."""
    robot = ROBOTS[config.robot]
    convention = nerd.convention(robot, config.frame, config.embedding)
    wide = {"steps": config.steps, "effort": config.effort, "start": config.start}
    still = {"steps": max(config.horizons), "effort": 0.0, "start": "slow"}
    training, simulator = _trajectories(config, "training", count=config.trajectories, **wide)
    held_out, second = _trajectories(config, "validation", count=config.validation_trajectories, **wide)
    passive, third = _trajectories(config, "passive", count=config.evaluation_trajectories, **still)
    if len({simulator, second, third}) > 1:
        raise ValueError(f"{config.path}: its files come from {simulator}, {second} and {third}; make them with one")
    data, validation = (nerd_windows.transitions(robot, convention, x) for x in (training, held_out))
    statistics = nerd_windows.fit(data)
    architecture = Architecture(
        data.inputs.shape[-1], robot.state_size, config.width, config.layers, config.heads, config.context
    )
    task = Task(config, robot, convention)
    schema = nerd_bundle.schema(robot, convention, config.history, simulator)
    return Recipe(
        name=f"nerd_{robot.name}",
        schema=schema,
        data=data,
        validation=validation,
        init=lambda key: (transformer.init(key, architecture), tree.to(tree.clone(statistics), key.device)),
        sample=functools.partial(nerd_windows.sample, history=config.history),
        count=functools.partial(nerd_windows.count, active=int(statistics.active.sum())),
        loss=functools.partial(loss, heads=config.heads),
        batches=functools.partial(nerd_windows.batches, history=config.history),
        validate=functools.partial(validate, heads=config.heads),
        evaluate=functools.partial(evaluate, task, passive),
        score=functools.partial(_score, horizon=min(config.horizons)),
        bundle=functools.partial(nerd_bundle.bundle, robot, convention, architecture, schema, held_out),
        draw=functools.partial(draw, task, passive),
    )


def error(params: Parameters, statistics: Statistics, batch: Transitions, heads: int) -> Tensor:
    """Returns prediction less target [B, h, S] in units of the targets' std; zero in channels that are not active."""
    output = transformer.apply(params, normalizer.normalize(statistics.inputs, batch.inputs), heads)
    return torch.where(statistics.active, output - normalizer.normalize(statistics.targets, batch.targets), 0.0)


def loss(
    params: Parameters, statistics: Statistics, batch: Transitions, key: Tensor, *, heads: int
) -> tuple[Tensor, Aux]:
    """Returns the summed squared error of all positions, teacher-forced; the statistics stay as they are."""
    gap = error(params, statistics, batch, heads)
    return gap.square().sum(), Aux(statistics, {"absolute_error": gap.detach().abs().sum()})


def validate(params: Parameters, statistics: Statistics, batch: Transitions, *, heads: int) -> dict[str, Tensor]:
    """Returns the summed squared and absolute errors of held-out windows."""
    gap = error(params, statistics, batch, heads)
    return {"loss": gap.square().sum(), "absolute_error": gap.abs().sum()}


def predict_open_loop(task: Task, passive: Trajectories, params: Parameters, statistics: Statistics) -> Tensor:
    """Returns predicted passive trajectories [N, H + 1, S] float32 on the host."""
    like = params["norm"]
    start, actuation = passive.states[:, 0].to(like), passive.actuation.to(like)
    ground = (passive.normals.to(like), passive.offsets.to(like))
    with torch.no_grad():
        predicted = nerd.roll_out(
            params,
            statistics,
            task.convention,
            task.robot,
            start,
            actuation,
            ground,
            heads=task.config.heads,
            history=task.config.history,
        )
    return predicted.cpu()


def evaluate(task: Task, passive: Trajectories, params: Parameters, statistics: Statistics) -> Mapping[str, float]:
    """Returns the open-loop errors averaged over all steps up to each horizon, and the baseline that stands still.

    Keys are such as `cart_m_100` and `hold_cart_m_100`; `gain_100` is the smallest ratio of baseline to error. An
    error is cut at 1e6, also where a prediction is no longer finite.
    """
    true = passive.states
    predicted = predict_open_loop(task, passive, params, statistics).to(true.dtype)
    found = nerd.errors(task.robot, predicted[:, 1:], true[:, 1:])
    held = nerd.errors(task.robot, true[:, :1].expand_as(true[:, 1:]), true[:, 1:])
    figures_ = {}
    for horizon in task.config.horizons:
        own = {name: float(_cut(x[:, :horizon]).mean()) for name, x in found.items()}
        still = {name: float(x[:, :horizon].mean()) for name, x in held.items()}
        figures_ |= {f"{name}_{horizon}": x for name, x in own.items()}
        figures_ |= {f"hold_{name}_{horizon}": x for name, x in still.items()}
        figures_[f"gain_{horizon}"] = min(still[name] / max(own[name], 1e-12) for name in own)
    return figures_


def _cut(gap: Tensor) -> Tensor:
    return torch.nan_to_num(gap, nan=_GREATEST).clamp(max=_GREATEST)


def _score(found: Mapping[str, float], *, horizon: int) -> float:
    return found[f"gain_{horizon}"]


def _trajectories(config: NeRD, name: str, **drawn: Any) -> tuple[Trajectories, str]:
    """Reads trajectories and their simulator from the folder, or generates them and keeps them there."""
    robot, file = ROBOTS[config.robot], Path(config.path or "").expanduser() / f"{name}.safetensors"
    asked = {"seed": config.data_seed, **drawn}
    if config.path and file.exists():
        return nerd_data.read(file, robot, asked)
    data = nerd_data.generate(robot, config.source, keys.fold_in(keys.key(config.data_seed), _STREAMS[name]), **drawn)
    if config.path:
        files.keep(file, lambda file: nerd_data.write(file, robot, config.source, data, asked), 8 * tree.size(data))
    return data, nerd_data.simulator(config.source)


def draw(task: Task, passive: Trajectories, params: Parameters, statistics: Statistics, folder: str) -> None:
    """Draws every error over the horizon beside the baseline, and the joints of one trajectory beside the truth."""
    true = passive.states
    predicted = predict_open_loop(task, passive, params, statistics).to(true.dtype)
    time = torch.arange(true.shape[1]) * task.robot.frame_dt
    found = nerd.errors(task.robot, predicted, true)
    held = nerd.errors(task.robot, true[:, :1].expand_as(true), true)
    for name in found:
        curves = [figures.Series(label, time, x[name].mean(0)) for label, x in (("NeRD", found), ("hold last", held))]
        text = {
            "title": f"{task.robot.name}: open-loop error",
            "xlabel": "time (s)",
            "ylabel": name.replace("_", " in "),
        }
        figures.learning_curve(Path(folder) / f"error_{name}.png", curves, **text)
    base = 7 if task.robot.floating else 0
    for i, joint in enumerate(task.robot.joints, start=base):
        curves = [
            figures.Series(label, time, _broken(x[0, :, i])) for label, x in (("true", true), ("NeRD", predicted))
        ]
        unit = "m" if joint.kind == "slide" else "rad"
        text = {"title": f"{joint.name} of one passive trajectory", "xlabel": "time (s)", "ylabel": unit}
        figures.learning_curve(Path(folder) / f"trajectory_{joint.name}.png", curves, **text)


def _broken(angle: Tensor) -> Tensor:
    """Leaves a gap where an angle jumps by a full turn."""
    jump = torch.diff(angle, prepend=angle[:1]).abs() > torch.pi
    return torch.where(jump, torch.nan, angle)


_TRAIN = {"learning_rate": 1e-3, "lr_schedule": "linear", "clip_norm": 1.0}
# The reduced run of the paper's cartpole.
_PAPER = {
    "train": _TRAIN | {"updates": 100_000, "batch_size": 512, "lr_end": 1e-4, "validate_every": 25_000},
    "recipe": {
        "trajectories": 10_000,
        "validation_trajectories": 200,
        "frame": "world",
        "width": 192,
        "layers": 6,
        "heads": 12,
        "evaluation_trajectories": 2048,
    },
}
# Two CPU cores, under 20 minutes: an easier frame, an easier embedding and gentler data.
_SMALL = {
    "train": _TRAIN | {"updates": 15_000, "batch_size": 128, "lr_end": 0.0, "validate_every": 5_000},
    "recipe": {
        "trajectories": 2_000,
        "effort": 0.2,
        "start": "slow",
        "frame": "translation",
        "embedding": "sinusoidal",
    },
}
SIZES = {"small": _SMALL, "paper": _PAPER}
PLACES = ("path",)
