"""One learner cycle on a GPU: captured as one CUDA graph against the same compiled regions launched one by one.

    python -m experiments.bench_capture --compute_dtype=bfloat16

Both start from the same state; after the timed cycles they must agree bit by bit.
"""

from __future__ import annotations

import dataclasses
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from experiments.bench_learner import SIZES, machine, setting
from experiments.learner_agreement import as_transition, transitions
from functional_sac import replay, reward_scale
from functional_sac.cycle import make_learner
from functional_sl import capture, keys, tree
from functional_sl.run import cli

ROWS = 100_000


@dataclasses.dataclass(frozen=True)
class Settings:
    """The flags."""

    size: str = cli.option("g1", "Networks, batch and observations.", choices=tuple(SIZES))
    updates: int = cli.option(6, "Critic updates in a cycle; every second one updates the actor.")
    compute_dtype: str = cli.option("float32", "Type of the matrix products.", choices=("float32", "bfloat16"))
    compile: bool = cli.option(True, "Compile the regions.")
    cycles: int = cli.option(100, "Timed cycles of each.")
    json: str | None = cli.option(None, "File to which the results are appended as one line.")


def build(settings: Settings) -> tuple[tree.Tree, Callable[[tree.Tree], tuple[tree.Tree, dict[str, torch.Tensor]]]]:
    """Returns a state (learner, replay, reward scale) and its cycle."""
    config, spec = setting(settings.size)
    config = dataclasses.replace(config, updates_per_step=settings.updates, compute_dtype=settings.compute_dtype)
    wrap = {"wrap": capture.compiled} if settings.compile else {}
    learner = make_learner(config, spec, **wrap)
    columns = replay.fields(spec)
    empty = replay.init(columns, ROWS, ROWS, device="cuda")
    buffer = replay.insert(empty, as_transition(spec, transitions(spec, ROWS, "cuda")), columns, config.gamma)
    state = (learner.init(keys.key(0, "cuda")), buffer, reward_scale.init(1, device="cuda"))

    def cycle(state: tree.Tree) -> tuple[tree.Tree, dict[str, torch.Tensor]]:
        sac, metrics = learner.cycle(*state, 0)
        return (sac, *state[1:]), metrics

    return state, cycle


def milliseconds(run: Callable[[], None], cycles: int) -> dict[str, float]:
    """Returns median, minimum and maximum of single cycles, by device events."""
    times = []
    for _ in range(cycles):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        run()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end))
    return {"median": statistics.median(times), "min": min(times), "max": max(times)}


def kernels(run: Callable[[], None]) -> int:
    """Returns the number of kernels that one cycle launches."""
    activities = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        run()
        torch.cuda.synchronize()
    return sum(event.device_type == torch.autograd.DeviceType.CUDA for event in profile.events())


@torch.no_grad()
def measure(settings: Settings) -> dict[str, Any]:
    """Times both ways of running the cycle and checks that they agree."""
    state, cycle = build(settings)
    begin = time.perf_counter()
    plain, _ = cycle(state)
    torch.cuda.synchronize()
    compile_s = time.perf_counter() - begin
    captured, owned = capture.Captured(cycle), tree.clone(state)
    begin = time.perf_counter()
    owned, _ = captured(owned)
    torch.cuda.synchronize()
    capture_s = time.perf_counter() - begin

    def launch() -> None:
        nonlocal plain
        plain, _ = cycle(plain)

    def replay_graph() -> None:
        captured(owned)

    found = {
        "uncaptured": milliseconds(launch, settings.cycles),
        "captured": milliseconds(replay_graph, settings.cycles),
    }
    equal = tree.bits_equal(plain[0], owned[0])
    launched = kernels(replay_graph)
    captured.close()
    return {
        **machine(), **dataclasses.asdict(settings), "ms_per_cycle": found, "equal": equal, "kernels": launched,
        "compile_s": round(compile_s, 1), "capture_s": round(capture_s, 1),
    }  # fmt: skip


def main() -> None:
    """Times both and prints the result; exits with 1 if they disagree."""
    with cli.exit_on_usage_error("bench_capture"):
        settings = cli.parse(Settings, program="bench_capture", description=__doc__).config
        if not torch.cuda.is_available():
            raise cli.UsageError("torch sees no CUDA device, and a CUDA graph needs one")
    result = measure(settings)
    print(json.dumps(result))
    if settings.json:
        with Path(settings.json).open("a") as file:
            file.write(json.dumps(result) + "\n")
    raise SystemExit(0 if result["equal"] else 1)


if __name__ == "__main__":
    main()
