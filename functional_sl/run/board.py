"""TensorBoard events of a run, beside its `metrics.jsonl`."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from typing import Any


class Board:
    """Scalars by step; a resumed run hides what an abandoned attempt wrote after the resume's step."""

    def __init__(self, folder: str | os.PathLike[str] | None, resume_step: int | None = None) -> None:
        """Opens the event file.

        Args:
          folder: where events go; None writes none.
          resume_step: the step from which a run goes on.
        """
        self._writer = None
        if folder is not None:
            from torch.utils.tensorboard import SummaryWriter

            purge = None if resume_step is None else resume_step + 1
            self._writer = SummaryWriter(os.fspath(folder), purge_step=purge)

    def write(self, step: int, values: Mapping[str, Any]) -> None:
        """Adds every finite number of `values` under its name."""
        if self._writer is None:
            return
        for name, value in values.items():
            if isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value):
                self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def close(self) -> None:
        """Ends the event file."""
        if self._writer is not None:
            self._writer.close()
