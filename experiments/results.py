"""What a figure depends on, and the file in which figures gather."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from functional_sac.replaying import trace


def machine() -> dict[str, Any]:
    """Returns what the numbers depend on."""
    return {
        "cpu": trace.processor(),
        "cores": os.cpu_count(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "torch": torch.__version__,
        "torch_threads": torch.get_num_threads(),
    }


def append(path: str | None, result: Mapping[str, Any]) -> None:
    """Appends a result to a file as one line of JSON; without a path it does nothing."""
    if path:
        with Path(path).open("a") as file:
            file.write(json.dumps(result) + "\n")
