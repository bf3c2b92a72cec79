"""RigidFormer's exported form: what the numbers of its inputs and outputs mean, and what they were learnt from."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from functional_sl import tree
from functional_sl.bundle import Bundle
from functional_sl.models.point_encoder import ANCHORS, FEATURES, LENGTH, NEAR, Parameters
from functional_sl.models.rigidformer import Architecture
from functional_sl.sources import rigid_bodies
from functional_sl.sources.rigid_bodies import FRAME_DT, Scenes

PLACE = (("x", "m"), ("y", "m"), ("z", "m"))
TURN = (("w", ""), ("x", ""), ("y", ""), ("z", ""))
PROPERTIES = (("mass", "kg"), ("friction", ""), ("restitution", ""))
ACCELERATION = (("x", "m/s^2"), ("y", "m/s^2"), ("z", "m/s^2"))
TIMES = "time: one step ago, now"


def schema(steps: tuple[int, ...], clip: int, simulator: str) -> dict[str, Any]:
    """Returns what makes data compatible with the model, as JSON."""
    features = (
        ("nearest", 3, "v / (|v| + 0.1 m) of the displacement v to another object's nearest point or to the ground"),
        ("contact", 3, f"v / (|v| + {NEAR} m)"),
        ("increment", 3, "since one step before"),
        ("velocity", 3, f"that over the frames of a step, in units of {NEAR} m a frame"),
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
        "steps": list(steps),
        "clip": clip,
        "conventions": rigid_bodies.CONVENTIONS | {"simulator": simulator},
    }


def bundle(
    architecture: Architecture,
    schema: Mapping[str, Any],
    data: Mapping[str, Any],
    held_out: Scenes,
    params: Parameters,
    buffers: tuple,
) -> Bundle:
    """Returns the model with all that reading its numbers takes, and two held-out scenes to check itself.

    Args:
      architecture: the sizes.
      schema: of `schema`.
      data: JSON, what it was trained on.
      held_out: scenes that last for two steps of the largest size.
      params: the weights.
      buffers: none.
    """
    start = max(schema["steps"])
    some = tree.map(lambda x: x[:2], held_out)
    inputs = {name: getattr(some, name) for name in ("points", "point_mask", "objects", "properties")}
    inputs |= {name: getattr(some, name)[:, [0, start]] for name in ("positions", "quaternions")}
    return Bundle(
        predict="functional_sl.models.rigidformer:predict",
        arguments={
            "architecture": architecture._asdict() | {"depths": list(architecture.depths)},
            "frame_dt": FRAME_DT,
        },
        tensors=tree.named(params),
        about=dict(schema) | described() | {"recipe": "rigidformer", "data": dict(data)},
        inputs={name: x.clone() for name, x in inputs.items()}
        | {"step": torch.full((len(some.lengths),), float(start))},
    )


def described() -> dict[str, Any]:
    """Returns every input and output by name: its axes, the width of the last one, names and units of its channels."""
    cloud, objects = ["batch", "object", "point"], ["batch", "object"]
    inputs = {
        "points": _vector(cloud, PLACE, "reference cloud in body axes about the centre of mass, in any order"),
        "point_mask": _scalar(cloud, "which points exist"),
        "objects": _scalar(objects, "which objects exist"),
        "properties": _vector(objects, PROPERTIES, ""),
        "positions": _vector(["batch", TIMES, "object"], PLACE, "of the centre of mass, world axes"),
        "quaternions": _vector(["batch", TIMES, "object"], TURN, "body axes to world axes"),
        "step": _scalar(["batch"], "frames from one time to the next and to what is predicted", "frames"),
    }
    outputs = {
        "positions": _vector(objects, PLACE, "one step later"),
        "quaternions": _vector(objects, TURN, "one step later, w >= 0"),
        "accelerations": _vector(["batch", "object", "anchor"], ACCELERATION, "of the anchors, world axes"),
    }
    rule = "q' = a dt^2 + 2 q - q_before, then the rigid motion of the reference anchors nearest to q'"
    return {"inputs": inputs, "outputs": outputs, "integration": rule, "step_dt": f"step x {FRAME_DT:.6g} s"}


def _vector(axes: list[str], channels: tuple[tuple[str, str], ...], about: str) -> dict[str, Any]:
    told = [list(channel) for channel in channels]
    return {"axes": [*axes, "channel"], "width": len(told), "channels": told, "about": about}


def _scalar(axes: list[str], about: str, unit: str = "") -> dict[str, Any]:
    return {"axes": axes, "width": 1, "unit": unit, "about": about}
