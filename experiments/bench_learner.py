"""What one FlashSAC update costs: the functional learner against the same networks as modules with `torch.optim`.

Both are timed in one process, in turns, with their sampling; an update is the mean of one with and one without
the actor. Before that both make the same three updates and their parameters are compared.

    python -m experiments.bench_learner --size=small --threads=1
"""

from __future__ import annotations

import dataclasses
import json
import os
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from experiments.learner_agreement import as_transition, disagreement, load, transitions
from experiments.module_learner import ModuleLearner
from functional_sac import replay, reward_scale
from functional_sac.config import SACConfig
from functional_sac.cycle import make_learner
from functional_sac.envs.env import EnvSpec
from functional_sl import capture, keys
from functional_sl.run import cli

ROWS = 100_000
# batch, actor width, critic width, blocks, actor observation, critic observation (0: the actor's), action
SIZES = {
    "small": (128, 32, 64, 1, 3, 0, 1),
    "large": (512, 128, 256, 2, 17, 0, 6),
    "g1": (2048, 128, 256, 2, 160, 289, 29),
}


@dataclasses.dataclass(frozen=True)
class Settings:
    """The flags."""

    size: str = cli.option("small", "Networks, batch and observations.", choices=tuple(SIZES))
    device: str = cli.option("cpu", "Where both learners run.", choices=("cpu", "cuda"))
    threads: int = cli.option(0, "CPU threads of torch; 0 keeps torch's own choice.")
    repeats: int = cli.option(11, "Timed turns of each learner.")
    seconds: float = cli.option(0.5, "Length of a turn, about.", unit="s")
    compile: bool = cli.option(False, "Compile the functional cycle.")
    json: str | None = cli.option(None, "File to which the results are appended as one line.")


def setting(size: str) -> tuple[SACConfig, EnvSpec]:
    """Returns the algorithm's configuration and the sizes of the observations."""
    batch, actor_width, critic_width, blocks, actor_dim, critic_dim, action_dim = SIZES[size]
    config = SACConfig(
        batch_size=batch, actor_width=actor_width, critic_width=critic_width, num_blocks=blocks,
        lr_decay_updates=100_000, replay_capacity=ROWS, learning_starts=ROWS,
    )  # fmt: skip
    return config, EnvSpec("benchmark", actor_dim, critic_dim, action_dim, max_episode_steps=1000, control_dt=0.02)


def turns(settings: Settings) -> dict[str, Callable[[int], None]]:
    """Returns for each learner a function that makes so many pairs of updates."""
    config, spec = setting(settings.size)
    data = transitions(spec, ROWS, settings.device)
    scale = reward_scale.init(1, device=settings.device)
    module = ModuleLearner(config, spec, data, scale.var, scale.max_abs)
    learner = make_learner(config, spec, **({"wrap": capture.compiled} if settings.compile else {}))
    state = learner.init(keys.key(0, device=settings.device))
    load(module, state)
    columns = replay.fields(spec)
    empty = replay.init(columns, ROWS, ROWS, device=settings.device)
    buffer = replay.insert(empty, as_transition(spec, data), columns, config.gamma)

    def functional(pairs: int) -> None:
        nonlocal state
        for _ in range(pairs):
            state, _ = learner.cycle(state, buffer, scale, 0)

    def modules(pairs: int) -> None:
        for _ in range(2 * pairs):
            module.step()

    return {"functional": functional, "modules": modules}


def timed(turn: Callable[[int], None], pairs: int, device: str) -> float:
    """Returns the milliseconds of one update."""
    if device == "cuda":
        torch.cuda.synchronize()
    start = time.perf_counter()
    turn(pairs)
    if device == "cuda":
        torch.cuda.synchronize()
    return (time.perf_counter() - start) * 1e3 / (2 * pairs)


def measure(settings: Settings) -> dict[str, Any]:
    """Times both learners in turns.

    Returns:
      Machine, settings, and for each learner the median, minimum and maximum milliseconds of an update.
    """
    learners = turns(settings)
    for turn in learners.values():
        turn(3)
    pairs = {
        name: max(1, round(settings.seconds * 500 / timed(turn, 2, settings.device))) for name, turn in learners.items()
    }
    times: dict[str, list[float]] = {name: [] for name in learners}
    for _ in range(settings.repeats):
        for name, turn in learners.items():
            times[name].append(timed(turn, pairs[name], settings.device))
    found = {name: {"median": statistics.median(t), "min": min(t), "max": max(t)} for name, t in times.items()}
    ratio = statistics.median(m / f for m, f in zip(times["modules"], times["functional"], strict=True))
    return {**machine(), **dataclasses.asdict(settings), "ms_per_update": found, "ratio": ratio}


def machine() -> dict[str, Any]:
    """Returns what the numbers depend on."""
    cpu_info = Path("/proc/cpuinfo")
    lines = cpu_info.read_text().splitlines() if cpu_info.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return {
        "cpu": names[0] if names else platform.processor(),
        "cores": os.cpu_count(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "torch": torch.__version__,
        "torch_threads": torch.get_num_threads(),
    }


def main() -> None:
    """Checks the agreement, times both and prints the result."""
    with cli.exit_on_usage_error("bench_learner"):
        settings = cli.parse(Settings, program="bench_learner", description=__doc__).config
    if settings.threads:
        torch.set_num_threads(settings.threads)
    gaps = disagreement(*setting(settings.size), device=settings.device)
    print("largest difference after 3 float64 updates:", ", ".join(f"{k} {v:.1e}" for k, v in gaps.items()))
    result = measure(settings)
    print(", ".join(f"{k} {v}" for k, v in result.items() if k not in ("ms_per_update", "ratio", "json")))
    for name, t in result["ms_per_update"].items():
        rate = 1e3 / t["median"]
        print(f"{name:>10}: {t['median']:8.3f} ms an update ({t['min']:.3f} to {t['max']:.3f}), {rate:.1f} updates/s")
    print(f"     ratio: {result['ratio']:.3f} (modules / functional, median over the turns)")
    if settings.json:
        with Path(settings.json).open("a") as file:
            file.write(json.dumps({**result, "difference": gaps}) + "\n")


if __name__ == "__main__":
    main()
