"""NeRD's exported form: what the numbers of its inputs and targets mean, and how they are normalised."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from functional_sl import tree
from functional_sl.bundle import Bundle
from functional_sl.models import nerd
from functional_sl.models.articulation import Robot
from functional_sl.models.nerd import Convention, Statistics
from functional_sl.models.transformer import Architecture, Parameters
from functional_sl.recipes.nerd_windows import EPS, surroundings
from functional_sl.sources import nerd_data
from functional_sl.sources.nerd_data import Trajectories

_FRAMES = {"world": "world", "body": "base of the same step", "translation": "origin at the base of the same step"}


def schema(robot: Robot, convention: Convention, history: int, simulator: str) -> dict[str, Any]:
    """Returns what makes data compatible with the model, as JSON."""
    targets = _targets(robot, convention)
    return {
        "inputs": _inputs(robot, convention, targets),
        "targets": targets,
        "history": history,
        "frame": convention.frame,
        "conventions": nerd_data.conventions(robot, simulator),
    }


def bundle(
    robot: Robot,
    convention: Convention,
    architecture: Architecture,
    schema: Mapping[str, Any],
    held_out: Trajectories,
    params: Parameters,
    statistics: Statistics,
) -> Bundle:
    """Returns the model with all that reading its numbers takes, and two held-out windows to check itself.

    Args:
      robot: whose states these are.
      convention: of its states.
      architecture: the sizes.
      schema: of `schema`.
      held_out: at least two trajectories, no shorter than the history.
      params: the weights.
      statistics: of the training set.
    """
    c = convention
    return Bundle(
        predict="functional_sl.models.nerd:predict",
        arguments={
            **c._asdict(),
            "continuous": list(c.continuous),
            "travel": list(c.travel),
            "heads": architecture.heads,
        },
        tensors=tree.named(nerd.tensors(params, statistics)),
        about=dict(schema)
        | {
            "architecture": architecture._asdict() | {"bias_in_blocks": False, "dropout": 0.0},
            "input_width": architecture.inputs,
            "normalization": f"(x - mean) / std, std = sqrt(var + {EPS:g}) stored; 1 for a channel that does not vary",
            "inactive_targets": "predicted by their mean: the network's output is replaced by 0 before its scaling",
            "quaternion_target": "q_next times q_inverse, prediction normalised, then multiplied from the left",
            "short_history": "the frames there are, oldest first; what stands behind them changes no output at them",
            "contact_gate": f"depth < max({nerd.GATE_RATIO:g} thickness, {nerd.GATE_DISTANCE:g} m), else zeros",
            "contact_point": "centre of the shape's sphere projected onto the ground",
        },
        inputs=_first_windows(robot, tree.map(lambda x: x[:2], held_out), schema["history"]),
    )


def _inputs(robot: Robot, convention: Convention, targets: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns name, width, frame and unit of the network's inputs, in order."""
    frame, slots = _FRAMES[convention.frame], len(robot.slots)
    listed = []
    for feature in targets:
        name, unit = feature["name"], feature["unit"]
        circle = convention.embedding == "sinusoidal" and feature["operator"] == "wrap"
        listed += [(f"{f} {name}", 1, frame, "") for f in ("sin", "cos")] if circle else [(name, 1, frame, unit)]
    if slots:
        listed += [("contact_normals", 3 * slots, frame, ""), ("contact_points_1", 3 * slots, frame, "m")]
        listed += [("contact_depths", slots, "", "m")]
    listed += [(f"effort_{j.name}", 1, "joint", "N" if j.kind == "slide" else "N m") for j in robot.joints]
    listed += [("gravity_dir", 3, frame, "")] if convention.frame == "body" else []
    return [dict(zip(("name", "width", "frame", "unit"), row, strict=True)) for row in listed]


def _targets(robot: Robot, convention: Convention) -> list[dict[str, Any]]:
    """Returns name, channel, operator and unit of the network's targets, in order."""
    operator = [kind for kind, i, j in nerd.operators(convention) for _ in range(i, j)]
    return [
        {"name": name, "channel": i, "operator": operator[i], "unit": unit}
        for i, (name, unit) in enumerate(nerd_data.channels(robot))
    ]


def _first_windows(robot: Robot, data: Trajectories, history: int) -> dict[str, Tensor]:
    """Returns the inputs of `nerd.predict` for the first window of every trajectory, float32."""
    states, actuation = data.states[:, :history], data.actuation[:, :history]
    contacts, thickness, down = surroundings(robot, states, data.normals, data.offsets)
    found = {"states": states, "joint_acts": actuation, "gravity_dir": down}
    if contacts is not None:
        found |= {
            "contact_normals": contacts.normals,
            "contact_points_1": contacts.points,
            "contact_depths": contacts.depths,
            "contact_thicknesses": thickness.expand_as(contacts.depths),
        }
    return {name: x.to(torch.float32).contiguous() for name, x in found.items()}
