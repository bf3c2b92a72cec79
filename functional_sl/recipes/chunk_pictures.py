"""Pictures of a policy that plans chunks of actions."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from functional_sl.run import figures
from functional_sl.sources.windows import Windows


def draw(
    folder: str, planned: Tensor, recorded: Windows, length: int, channels: Sequence[tuple[str, str]], step_dt: float
) -> None:
    """Writes one picture an action channel over the first episode, and `chunk_error.png`, the error by chunk step.

    Args:
      folder: where they go.
      planned: [T, F, A], the policy's answers to all windows.
      recorded: all T windows, in order.
      length: frames of the first episode.
      channels: name and unit of the actions.
      step_dt: seconds.
    """
    planned, recorded = planned.cpu(), Windows(*(x.cpu() for x in recorded))
    seconds = torch.arange(length) * step_dt
    for i, (name, unit) in enumerate(channels):
        pair = {"expert": recorded.action, "policy": planned}
        figures.learning_curve(
            Path(folder) / f"{name}.png",
            [figures.Series(label, seconds, action[:length, 0, i]) for label, action in pair.items()],
            title="A held-out demonstration: what the policy would have done",
            xlabel="time in s",
            ylabel=f"{name} in {unit}" if unit else name,
        )
    weight = recorded.valid.to(torch.float32)
    error = ((planned - recorded.action).abs().mean(-1) * weight).sum(0) / weight.sum(0)
    figures.learning_curve(
        Path(folder) / "chunk_error.png",
        [figures.Series("policy", torch.arange(1, planned.shape[1] + 1), error)],
        title="Error along the planned chunk, held-out demonstrations",
        xlabel="step of the chunk",
        ylabel="mean absolute error of the action",
    )
