"""`python -m functional_sac.play SNAPSHOT`: evaluates a trained policy, and films it."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Sequence
from typing import Any

from functional_sl.run import cli, metrics
from functional_sl.run.checks import require
from functional_sl.run.manifest import SnapshotError
from functional_sl.run.runlog import RunError

PROGRAM = "python -m functional_sac.play"
DESCRIPTION = (
    "Plays whole episodes of a snapshot's policy with deterministic actions, as the evaluation in training does, and "
    "changes nothing. SNAPSHOT is a snapshot, a run or 'latest'. The last line on stdout is one JSON object."
)


@dataclasses.dataclass(frozen=True)
class Settings:
    """The flags."""

    snapshot: str | None = cli.option(None, "Folder of a snapshot, or of a run (its newest), or 'latest' or 'best'.")
    episodes: int = cli.option(50, "Episodes; number i starts alike whatever the policy and the other flags but seed.")
    num_envs: int = cli.option(0, "Environments side by side; 0 for as many as episodes.")
    seed: int | None = cli.option(None, "Seed of the episodes; the run's own by default, as in its evaluations.")
    learner: int = cli.option(0, "Which learner, in a run of several seeds.")
    sim: str | None = cli.option(
        None, "Simulator of a robot: the run's own if not given.", choices=("mujoco", "mjwarp")
    )
    motion: str | None = cli.option(None, "Motions to track, as in training; the run's own if not given.")
    tracking_error: str | None = cli.option(
        None, "Draw how far each body is from its reference in the filmed episode into this .png file."
    )
    video: str | None = cli.option(None, "Film one episode into this .gif or .mp4 file, without a display.")
    device: str = cli.option(
        "auto", "Where everything runs: auto takes CUDA where there is one.", choices=("auto", "cpu", "cuda")
    )

    def __post_init__(self) -> None:
        """Raises ValueError for the first setting that cannot be meant."""
        require(self, self.episodes > 0, ("episodes",), "must be positive")
        require(self, self.num_envs >= 0, ("num_envs",), "must not be negative")
        require(self, self.seed is None or 0 <= self.seed < 2**32, ("seed",), "must lie in 0 .. 2**32 - 1")


def run(settings: Settings) -> dict[str, Any]:
    """Plays the episodes, writes the film, and returns the figures; see `functional_sac.playing.figures`.

    Raises:
      cli.UsageError: for what cannot be read, played or drawn, before the first episode where that can be told.
    """
    if settings.snapshot is None:
        raise cli.UsageError("no snapshot given; call it with a snapshot, a run or 'latest'")
    from functional_sac import playing  # torch and chex take seconds, which `--help` need not wait for

    try:
        return playing.play(**dataclasses.asdict(settings))
    except (ValueError, OSError, RunError, SnapshotError) as error:
        raise cli.UsageError(str(error)) from error


def main(argv: Sequence[str] | None = None) -> None:
    """Plays, and prints a table and the figures as JSON; exits with 2 for what cannot be played."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if arguments and not arguments[0].startswith("-"):
        arguments[0] = f"--snapshot={arguments[0]}"
    with cli.exit_on_usage_error(PROGRAM):
        figures = run(cli.parse(Settings, arguments, program=PROGRAM, description=DESCRIPTION).config)
    cli.emit(sys.stdout, f"{table(figures)}\n{json.dumps(metrics.plain(figures), allow_nan=False)}\n")


def table(figures: dict[str, Any]) -> str:
    """Returns the figures as a short table."""
    head = f"{'':10}{'mean':>11}{'std':>11}{'95 % interval of the mean':>30}{'min':>11}{'max':>11}"
    rows = [f"{figures['task']}, {figures['env_steps']} environment steps: {figures['snapshot']}", head]
    for name in ("return", "length"):
        low, high = figures[f"{name}_interval"]
        numbers = [f"{figures[f'{name}_{which}']:>11.2f}" for which in ("mean", "std", "min", "max")]
        rows.append(f"{name:10}" + "".join([*numbers[:2], f"{f'{low:.2f} .. {high:.2f}':>30}", *numbers[2:]]))
    ended = (
        f"{figures['episodes']} episodes, {100 * figures['terminated']:.1f} % terminated, the others ran out of time"
    )
    unfinished = f"; {figures['unfinished']} did not end and do not count" if figures["unfinished"] else ""
    return "\n".join([*rows, ended + unfinished])


if __name__ == "__main__":
    main()
