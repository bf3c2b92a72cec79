"""Neural Robot Dynamics (arXiv:2508.15755): a transformer learns a robot's next state from its last ten.

Every position of a window is supervised (contexts of 1 to 10 frames) by the change of the state that the simulator
made, relative to that position, in units of its standard deviation over the training set. There is no rollout in the
loss; open-loop rollouts on held-out passive motion judge the model.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from functional_sl import keys, tree
from functional_sl.bundle import Bundle
from functional_sl.models import articulation, nerd, normalizer, transformer
from functional_sl.models.articulation import ROBOTS, Robot
from functional_sl.models.nerd import Convention, Statistics
from functional_sl.models.transformer import Architecture, Parameters
from functional_sl.recipe import Recipe
from functional_sl.run import checks, figures, files
from functional_sl.run.cli import option
from functional_sl.sources import nerd_data
from functional_sl.sources.nerd_data import Trajectories
from functional_sl.step import Aux

EPS = 1e-5  # under the root of a channel's variance
_INACTIVE = 1e-9  # a target with a smaller standard deviation never changes
_GREATEST = 1e6  # an error of a roll-out
_STREAMS = {"training": 0, "validation": 10, "passive": 500}  # of the seed; no two share a number
_CHUNK = 512  # trajectories whose features are computed at once


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


class Transitions(NamedTuple):
    """Network inputs and targets of every step, a row a trajectory."""

    inputs: Tensor  # [N, T, F] float32
    targets: Tensor  # [N, T, S] float32


class Task(NamedTuple):
    """The static part of one build."""

    config: NeRD
    robot: Robot
    convention: Convention
    architecture: Architecture
    simulator: str


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
    data, validation = (transitions(robot, convention, x) for x in (training, held_out))
    statistics = fit(data)
    architecture = Architecture(
        data.inputs.shape[-1], robot.state_size, config.width, config.layers, config.heads, config.context
    )
    task = Task(config, robot, convention, architecture, simulator)
    return Recipe(
        name=f"nerd_{robot.name}",
        schema=schema(task),
        data=data,
        validation=validation,
        init=lambda key: (transformer.init(key, architecture), tree.to(tree.clone(statistics), key.device)),
        sample=functools.partial(sample, history=config.history),
        count=functools.partial(count, active=int(statistics.active.sum())),
        loss=functools.partial(loss, heads=config.heads),
        batches=functools.partial(batches, history=config.history),
        validate=functools.partial(validate, heads=config.heads),
        evaluate=functools.partial(evaluate, task, passive),
        score=functools.partial(_score, horizon=min(config.horizons)),
        bundle=functools.partial(bundle, task, held_out),
        draw=functools.partial(draw, task, passive),
    )


def transitions(robot: Robot, convention: Convention, data: Trajectories) -> Transitions:
    """Returns inputs and targets, computed in float64 and rounded once."""
    parts = []
    for i in range(0, len(data.states), _CHUNK):
        states, actuation, normals, offsets = (x[i : i + _CHUNK] for x in data)
        now, after = states[:, :-1], states[:, 1:]
        ground = (normals[:, None].expand(*now.shape[:2], 3), offsets[:, None].expand(now.shape[:2]))
        inputs = nerd.features(convention, now, actuation, *_contacts(robot, now, ground), _down(now))
        targets = nerd.relative(convention, nerd.to_frame(convention, now, now), nerd.to_frame(convention, after, now))
        parts.append(Transitions(inputs.to(torch.float32), targets.to(torch.float32)))
    return tree.concatenate(parts)


def fit(data: Transitions) -> Statistics:
    """Returns the statistics of the training set: std = sqrt(var + 1e-5), and 1 for a channel that does not vary."""
    return Statistics(
        inputs=normalizer.fit(data.inputs, eps=EPS),
        targets=normalizer.fit(data.targets, floor=_INACTIVE, eps=EPS),
        active=~normalizer.constant(data.targets, floor=_INACTIVE),
    )


def sample(data: Transitions, key: Tensor, batch_size: int, *, history: int) -> Transitions:
    """Returns windows [B, h, ...] drawn uniformly from every slice of `history` steps of every trajectory."""
    trajectories, steps = data.inputs.shape[:2]
    starts = steps - history + 1
    drawn = keys.randint(key, (batch_size,), 0, trajectories * starts)
    return _windows(data, drawn // starts, drawn % starts, history)


def batches(data: Transitions, batch_size: int, *, history: int) -> Iterator[Transitions]:
    """Yields every window once, a trajectory after the other."""
    trajectories, steps = data.inputs.shape[:2]
    starts = steps - history + 1
    for windows in torch.arange(trajectories * starts, device=data.inputs.device).split(batch_size):
        yield _windows(data, windows // starts, windows % starts, history)


def count(batch: Transitions, *, active: int) -> Tensor:
    """Returns the number of supervised (window, position, channel) triples, () int64."""
    windows, positions = batch.targets.shape[:2]
    return torch.full((), windows * positions * active, dtype=torch.int64, device=batch.targets.device)


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


def _contacts(
    robot: Robot, states: Tensor, ground: tuple[Tensor, Tensor]
) -> tuple[articulation.Contacts | None, Tensor | None]:
    if not robot.ground:
        return None, None
    return articulation.ground_contacts(robot, states, *ground), articulation.thickness(robot, states)


def _down(like: Tensor) -> Tensor:
    return like.new_tensor((0.0, 0.0, -1.0)).expand(*like.shape[:-1], 3)


def _windows(data: Transitions, trajectory: Tensor, start: Tensor, history: int) -> Transitions:
    steps = start[:, None] + torch.arange(history, device=start.device)
    return Transitions(*(x[trajectory[:, None], steps] for x in data))


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


def input_features(task: Task) -> list[dict[str, Any]]:
    """Returns name, width, frame and unit of the network's inputs, in order."""
    own = {"world": "world", "body": "base of the same step", "translation": "origin at the base of the same step"}
    frame, slots, robot = own[task.config.frame], len(task.robot.slots), task.robot
    listed = []
    for feature in target_features(task):
        name, unit = feature["name"], feature["unit"]
        circle = task.config.embedding == "sinusoidal" and feature["operator"] == "wrap"
        listed += [(f"{f} {name}", 1, frame, "") for f in ("sin", "cos")] if circle else [(name, 1, frame, unit)]
    if slots:
        listed += [("contact_normals", 3 * slots, frame, ""), ("contact_points_1", 3 * slots, frame, "m")]
        listed += [("contact_depths", slots, "", "m")]
    listed += [(f"effort_{j.name}", 1, "joint", "N" if j.kind == "slide" else "N m") for j in robot.joints]
    listed += [("gravity_dir", 3, frame, "")] if task.config.frame == "body" else []
    return [dict(zip(("name", "width", "frame", "unit"), row, strict=True)) for row in listed]


def target_features(task: Task) -> list[dict[str, Any]]:
    """Returns name, channel, operator and unit of the network's targets, in order."""
    operator = [kind for kind, i, j in nerd.operators(task.convention) for _ in range(i, j)]
    return [
        {"name": name, "channel": i, "operator": operator[i], "unit": unit}
        for i, (name, unit) in enumerate(nerd_data.channels(task.robot))
    ]


def schema(task: Task) -> dict[str, Any]:
    """Returns what makes data compatible with the model, as JSON."""
    return {
        "inputs": input_features(task),
        "targets": target_features(task),
        "history": task.config.history,
        "frame": task.config.frame,
        "conventions": nerd_data.conventions(task.robot, task.simulator),
    }


def bundle(task: Task, held_out: Trajectories, params: Parameters, statistics: Statistics) -> Bundle:
    """Returns the model with all that reading its numbers takes, and two held-out windows to check itself."""
    c = task.convention
    return Bundle(
        predict="functional_sl.models.nerd:predict",
        arguments={
            **c._asdict(),
            "continuous": list(c.continuous),
            "travel": list(c.travel),
            "heads": task.config.heads,
        },
        tensors=tree.named(nerd.tensors(params, statistics)),
        about=schema(task)
        | {
            "architecture": task.architecture._asdict() | {"bias_in_blocks": False, "dropout": 0.0},
            "input_width": task.architecture.inputs,
            "normalization": f"(x - mean) / std, std = sqrt(var + {EPS:g}) stored; 1 for a channel that does not vary",
            "inactive_targets": "predicted by their mean: the network's output is replaced by 0 before its scaling",
            "quaternion_target": "q_next times q_inverse, prediction normalised, then multiplied from the left",
            "short_history": "the frames there are, oldest first; what stands behind them changes no output at them",
            "contact_gate": f"depth < max({nerd.GATE_RATIO:g} thickness, {nerd.GATE_DISTANCE:g} m), else zeros",
            "contact_point": "centre of the shape's sphere projected onto the ground",
        },
        inputs=model_inputs(task, held_out, slice(0, 2)),
    )


def model_inputs(task: Task, data: Trajectories, chosen: slice) -> dict[str, Tensor]:
    """Returns the inputs of `nerd.predict` for the first window of the chosen trajectories, float32."""
    states, actuation, normals, offsets = (x[chosen] for x in data)
    history = task.config.history
    states, actuation = states[:, :history], actuation[:, :history]
    found = {"states": states, "joint_acts": actuation, "gravity_dir": _down(states)}
    ground = (normals[:, None].expand(*states.shape[:2], 3), offsets[:, None].expand(states.shape[:2]))
    contacts, thickness = _contacts(task.robot, states, ground)
    if contacts is not None:
        found |= {
            "contact_normals": contacts.normals,
            "contact_points_1": contacts.points,
            "contact_depths": contacts.depths,
            "contact_thicknesses": thickness.expand_as(contacts.depths),
        }
    return {name: x.to(torch.float32).contiguous() for name, x in found.items()}


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
