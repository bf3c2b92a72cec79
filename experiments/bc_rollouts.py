"""Behaviour cloning judged by what the policy does: success in its own world, seed by seed, after one short run each.

    python -m experiments.bc_rollouts --worlds=pendulum,reacher,cartpole_swingup --seeds=3

Success is 0 for random actions and 1 for the expert that demonstrated.
"""

from __future__ import annotations

import dataclasses
import json
import statistics
import sys
from pathlib import Path
from typing import Any

from functional_sl import train
from functional_sl.run import cli

RECIPE = "functional_sl.recipes.bc_state:build"
# The recipe's defaults suit the pendulum; the others take twice as long.
WORLDS: dict[str, dict[str, Any]] = {
    "pendulum": {"world": "functional_sac.envs.pendulum:pendulum"},
    "reacher": {"world": "functional_sac.envs.reacher:reacher", "updates": 4000},
    "cartpole_swingup": {"world": "functional_sac.envs.cartpole:cartpole_swingup", "updates": 4000},
}


@dataclasses.dataclass(frozen=True)
class Settings:
    """The flags."""

    worlds: str = cli.option("pendulum", f"Worlds, separated by commas: {', '.join(WORLDS)}.")
    losses: str = cli.option("mse", "Losses, separated by commas: mse, l1, gmm.")
    seeds: int = cli.option(1, "Runs of each.")
    updates: int | None = cli.option(None, "Updates of a run; by default what the world needs.")
    device: str = cli.option("auto", "Where the runs are.", choices=("auto", "cpu", "cuda"))
    root: str = cli.option("runs/bc_rollouts", "Folder of the runs.")
    json: str | None = cli.option(None, "File to which the results are appended, one line each.")

    def __post_init__(self) -> None:
        unknown = [name for name in self.worlds.split(",") if name not in WORLDS]
        if unknown:
            raise ValueError(f"worlds: there is no {unknown[0]!r}; choose from {', '.join(WORLDS)}")


def clone(world: str, loss: str, seed: int, settings: Settings) -> dict[str, Any]:
    """Trains one policy and returns its last figures."""
    asked = {
        **WORLDS[world],
        "expert": f"functional_sac.envs.experts:{world}",
        "loss": loss,
        "seed": seed,
        "data_seed": seed,
        "device": settings.device,
        "run_dir": str(Path(settings.root) / f"{world}_{loss}_{seed}"),
    }
    if settings.updates is not None:
        asked["updates"] = settings.updates
    config, task = train.settings(RECIPE, **asked)
    summary = train.run(config, task)
    return {
        "world": world,
        "objective": loss,
        "seed": seed,
        **{name: summary[name] for name in ("updates", "seconds", "samples_per_s")},
        **{name: round(value, 4) for name, value in summary["validation"].items()},
    }


def main(argv: list[str] | None = None) -> None:
    """Reads the flags, trains every policy and prints its figures as JSON, then the worst and median success."""
    with cli.exit_on_usage_error("bc_rollouts"):
        settings = cli.parse(Settings, argv, program="bc_rollouts", description=__doc__.splitlines()[0]).config
    for world in settings.worlds.split(","):
        for loss in settings.losses.split(","):
            rows = [clone(world, loss, seed, settings) for seed in range(settings.seeds)]
            found = [row["success"] for row in rows]
            total = {"world": world, "objective": loss, "worst": min(found), "median": statistics.median(found)}
            lines = [json.dumps(row) + "\n" for row in (*rows, total)]
            sys.stdout.writelines(lines)
            if settings.json:
                with open(settings.json, "a", encoding="utf-8") as file:
                    file.writelines(lines)


if __name__ == "__main__":
    main()
