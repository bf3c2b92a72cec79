"""The world model's exported form: what the numbers of its inputs and outputs mean, and what they were learnt from."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from functional_sl.bundle import Bundle
from functional_sl.models import rwm
from functional_sl.models.rwm import Architecture, Model, Scales
from functional_sl.recipes.rwm_windows import Frames, window
from functional_sl.sources import episodes


def schema(recorded: episodes.Schema, history: int, forecast: int) -> dict[str, Any]:
    """Returns what makes data compatible with the model, as JSON."""
    return {**episodes.as_json(recorded), "history": history, "forecast": forecast}


def bundle(
    architecture: Architecture, schema: Mapping[str, Any], block: int, judged: Frames, params: Model, scales: Scales
) -> Bundle:
    """Returns the model with all that reading its numbers takes, and two held-out windows to check itself.

    Args:
      architecture: the sizes.
      schema: of `schema`.
      block: of `roll_out`.
      judged: held-out frames with at least two windows.
      params: the weights.
      scales: statistics of the training set.
    """
    history = schema["history"]
    state, action, *_ = window(judged, judged.anchor[:2], history, schema["forecast"])
    channels = {x["name"]: x["channels"] for x in schema["features"]}
    return Bundle(
        predict="functional_sl.models.rwm:predict",
        arguments={"block": block},
        tensors=rwm.named(params, scales),
        about={
            "recipe": "rwm",
            "architecture": architecture._asdict(),
            "inputs": {
                "states": {
                    "axes": ["batch", f"{history} frames, oldest first", "channel"],
                    "channels": channels["state"],
                },
                "actions": {
                    "axes": ["batch", "frames of the history, then of the forecast but for its last", "channel"],
                    "channels": channels["action"],
                },
            },
            "outputs": {
                "states": "mean forecast, units of the input",
                "std": "of a step as the model sees it (aleatoric)",
                "spread": "between members (epistemic); 0 for one member",
                "contacts": [name for name, _ in channels["contact"]],
                "terminations": "probability that the robot has fallen",
            },
            "normalisation": "(x - mean) / std; std is 1 for a channel that was constant in training",
            "step_dt": schema["step_dt"],
            "data": dict(schema["about"]),
        },
        inputs={"states": state[:, :history].contiguous(), "actions": action.contiguous()},
    )
