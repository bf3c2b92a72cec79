"""`python -m functional_sac.train`: trains FlashSAC and leaves a run folder with curve, metrics and snapshots."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from typing import Any

from functional_sac import presets
from functional_sac.config import TrainConfig
from functional_sl.run import cli

DESCRIPTION = (
    "Trains FlashSAC. Without flags: pendulum swing-up at a size for two CPU cores. The last line on stdout is one "
    "JSON object that sums the run up."
)


def run(config: TrainConfig, given: frozenset[str] = frozenset()) -> dict[str, Any]:
    """Trains as configured and returns the summary.

    Args:
      config: the run; with `resume`, fields of `given` override those of the run that goes on.
      given: names of the fields that were set on purpose.

    Returns:
      `run_dir, task, env_steps, updates, eval_return_mean, eval_return_std, seconds, env_steps_per_s,
      updates_per_s`, and `stopped` (the signal's name) if a signal ended the run early.

    Raises:
      cli.UsageError: for settings that cannot be met, before anything is written.
    """
    if config.deterministic:
        # cuBLAS reads it when CUDA starts.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    from functional_sac.loop import train  # torch and chex take seconds, which `--help` need not wait for

    return train(config, given)


def main(argv: Sequence[str] | None = None) -> None:
    """Reads the flags, trains, and prints the summary."""
    with cli.exit_on_usage_error("functional-sac"):
        parsed = cli.parse(
            TrainConfig,
            argv,
            program="functional-sac",
            description=DESCRIPTION,
            presets=presets.PRESETS,
            default_preset=presets.DEFAULT,
        )
        summary = run(parsed.config, parsed.given)
    print(json.dumps(summary), flush=True)
    if "stopped" in summary:
        sys.exit(130 if summary["stopped"] == "SIGINT" else 143)


if __name__ == "__main__":
    main()
