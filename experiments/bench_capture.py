"""One learner cycle on GPUs: captured as one CUDA graph against the same compiled regions launched one by one.

    python -m experiments.bench_capture --compute_dtype=bfloat16
    torchrun --standalone --nproc-per-node=2 -m experiments.bench_capture --compute_dtype=bfloat16

Both start from the same state; after the timed cycles they must agree bit by bit, and so must the ranks after
`--replays` more. Under torchrun, and with `--group` on one rank, the gradients of every update are reduced inside the
graph, once for each of `--transport` and `--wires`; the same cycle without reductions is timed beside it.
"""

from __future__ import annotations

import dataclasses
import itertools
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

from experiments import timing
from experiments.bench_learner import SIZES, setting
from experiments.learner_agreement import as_transition, transitions
from experiments.results import append, machine
from functional_sac import replay, reward_scale
from functional_sac.config import SACConfig
from functional_sac.cycle import make_learner
from functional_sac.updates import SACState
from functional_sl import capture, keys, tree, wire
from functional_sl.parallel import collectives
from functional_sl.parallel.collectives import Collectives
from functional_sl.parallel.world import World, agree, check_equal, gather, world
from functional_sl.run import cli

ROWS = 100_000
Cycle = Callable[[tree.Tree], tuple[tree.Tree, dict[str, torch.Tensor]]]


@dataclasses.dataclass(frozen=True)
class Settings:
    """The flags."""

    size: str = cli.option("g1", "Networks, batch and observations.", choices=tuple(SIZES))
    updates: int = cli.option(6, "Critic updates in a cycle; every second one updates the actor.")
    compute_dtype: str = cli.option("float32", "Type of the matrix products.", choices=("float32", "bfloat16"))
    wires: str = cli.option("float32,bfloat16", "Types in which gradients travel, with several ranks or --group.")
    transport: str = cli.option("nccl", "What they travel by: nccl, peer, or both by a comma.")
    group: bool = cli.option(False, "Reduce over a process group on one rank too.")
    compile: bool = cli.option(True, "Compile the regions.")
    fused: bool = cli.option(True, "Gradients as they are written out, instead of those of torch.func.grad.")
    cycles: int = cli.option(100, "Timed cycles of each.")
    replays: int = cli.option(1000, "With several ranks: captured cycles after which they must still agree.")
    profile: int = cli.option(0, "Print so many of the kernels that take the longest.")
    json: str | None = cli.option(None, "File to which the results are appended, a line each.")


def configure(settings: Settings, wire_dtype: str = "float32") -> SACConfig:
    """Returns the algorithm's configuration."""
    # All cycles are of one kind: the actor is counted anew in each.
    changes = {"updates_per_step": settings.updates, "compute_dtype": settings.compute_dtype, "actor_count": "cycle"}
    return dataclasses.replace(setting(settings.size)[0], **changes, dp_gradient_wire_dtype=wire_dtype)


def build(settings: Settings, config: SACConfig, across: Collectives, rank: int) -> tuple[tree.Tree, Cycle]:
    """Returns a state (learner, replay, reward scale) and its cycle over the ranks of `across`."""
    spec = setting(settings.size)[1]
    wrap = {"wrap": capture.compiled} if settings.compile else {}
    learner = make_learner(config, spec, across, fused=settings.fused, **wrap)
    columns = replay.fields(spec)
    empty = replay.init(columns, ROWS, ROWS, device="cuda")
    buffer = replay.insert(empty, as_transition(spec, transitions(spec, ROWS, "cuda")), columns, config.gamma)
    sac = learner.init(keys.key(0, "cuda"))
    state = (sac._replace(key=keys.fold_in(sac.key, rank)), buffer, reward_scale.init(1, device="cuda"))

    def cycle(state: tree.Tree) -> tuple[tree.Tree, dict[str, torch.Tensor]]:
        sac, metrics = learner.cycle(*state, 0)
        return (sac, *state[1:]), metrics

    return state, cycle


def wire_bytes(config: SACConfig, state: SACState) -> int:
    """Returns the bytes of gradients, with a sentinel a group, that one rank hands to all-reduces in one cycle."""
    total, actors = 0, -(-config.updates_per_step // config.actor_update_period)
    for name, updates in (("critic", config.updates_per_step), ("actor", actors), ("temperature", actors)):
        layout = wire.layout(getattr(state, name).params, config.dp_gradient_wire_dtype)
        total += updates * (layout.size + 1) * layout.travels_as.itemsize
    return total


def milliseconds(run: Callable[[], None], cycles: int) -> dict[str, float]:
    """Returns median, minimum and maximum of single cycles, by device events."""
    times = timing.by_events(run, cycles)
    return {"median": statistics.median(times), "min": min(times), "max": max(times)}


@torch.no_grad()
def measure(settings: Settings, here: World, wire_dtype: str, transport: str) -> dict[str, Any]:
    """Times the cycle launched and captured, checks that they and the ranks agree; the worst rank counts."""
    config = configure(settings, wire_dtype)
    state, cycle = build(settings, config, collectives.over(here, transport), here.rank)
    begin = time.perf_counter()
    plain, _ = cycle(state)
    torch.cuda.synchronize()
    compile_s = time.perf_counter() - begin
    hooks = capture.Hooks(after_capture=lambda error: agree(here, error, "capturing the cycle"))
    captured, owned = capture.Captured(cycle, hooks), tree.clone(state)
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
    if here.data_group:
        for _ in range(settings.replays):
            replay_graph()
        check_equal(here, "the learner", tree.digest(owned[0]._replace(key=())))
    launched = timing.kernels(replay_graph, torch.cuda.synchronize, settings.profile if here.rank == 0 else 0)
    captured.close()
    return {
        "wire": wire_dtype, "transport": transport,
        "ms_per_cycle": worst(here, found), "equal": all(gather(here, equal)),
        "kernels": launched, "wire_bytes": wire_bytes(config, state[0]) if here.data_group else 0,
        "compile_s": round(compile_s, 1), "capture_s": round(capture_s, 1),
    }  # fmt: skip


def worst(here: World, times: dict[str, dict[str, float]]) -> dict[str, dict[str, float]]:
    """Returns the longest times of any rank."""
    every = gather(here, times)
    return {way: {name: max(rank[way][name] for rank in every) for name in found} for way, found in times.items()}


def main() -> None:
    """Times all ways and prints the results; exits with 1 if they disagree."""
    with cli.exit_on_usage_error("bench_capture"):
        settings = cli.parse(Settings, program="bench_capture", description=__doc__).config
        if not torch.cuda.is_available():
            raise cli.UsageError("torch sees no CUDA device, and a CUDA graph needs one")
        for transport in settings.transport.split(","):
            if transport not in collectives.TRANSPORTS:
                raise cli.UsageError(f"transport={transport}: choose among {', '.join(collectives.TRANSPORTS)}")
    equal = True
    with world("cuda", force_group=settings.group) as here:
        alone = dataclasses.replace(here, data_group=None)
        ways = itertools.product(settings.transport.split(","), settings.wires.split(","))
        runs = [(alone, "nccl", "float32"), *((here, *way) for way in ways if here.data_group)]
        for ranks, transport, name in runs:
            result = measure(settings, ranks, name, transport)
            equal &= result["equal"]
            if here.rank == 0:
                report({**machine(), **dataclasses.asdict(settings), "ranks": here.size, **result}, ranks is alone)
    raise SystemExit(0 if equal else 1)


def report(result: dict[str, Any], alone: bool) -> None:
    """Prints one result and appends it to the file of results."""
    times = {way: f"{found['median']:.2f}" for way, found in result["ms_per_cycle"].items()}
    megabytes = result["wire_bytes"] / 1e6
    what = "no reduction" if alone else f"{result['wire']} wire by {result['transport']}, {megabytes:.2f} MB a cycle"
    print(
        f"{result['ranks']} ranks, {result['compute_dtype']}, {what}: captured {times['captured']} ms, launched "
        f"{times['uncaptured']} ms, {result['kernels']} kernels, equal {result['equal']}, compile "
        f"{result['compile_s']} s, capture {result['capture_s']} s",
        flush=True,
    )
    append(result["json"], {**result, "reduced": not alone})


if __name__ == "__main__":
    main()
