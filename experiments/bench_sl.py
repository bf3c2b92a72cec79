"""The update of `functional_sl` against `nn.Module`, `torch.optim.AdamW` and DistributedDataParallel.

    python -m experiments.bench_sl
    torchrun --standalone --nproc-per-node=2 -m experiments.bench_sl --device=cpu
    python -m experiments.bench_sl --size=paper --device=cuda --compile=both
    python -m experiments.bench_sl --recipe=rwm --size=paper --batch_size=1024 --device=cuda --compile=module

Compiling `rwm` here takes minutes, since its forecasts are unrolled: there the module alone may be compiled.

Both train the recipe's model (by default NeRD's transformer on the analytic cartpole) from the same parameters. First
they take the same batches, and their losses must agree to `--tolerance`, relative; then each is timed with a sampler
of its own kind, and every rate is told as soon as it is known.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import sys
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from experiments import twins
from experiments.twins import Twin
from functional_sl import capture, keys, tree
from functional_sl import recipe as recipes
from functional_sl.parallel import collectives
from functional_sl.parallel.world import World, gather, world
from functional_sl.recipe import Recipe
from functional_sl.run import cli
from functional_sl.training import admission, update
from functional_sl.training.config import TrainConfig

LEARNING_RATE, CLIP_NORM = 1e-3, 1.0
WARM_UPS = 5
COMPILED = ("none", "module", "both")


@dataclasses.dataclass(frozen=True)
class Settings:
    """The flags."""

    recipe: str = cli.option("nerd", "Whose model.", choices=tuple(twins.TWINS))
    size: str = cli.option("small", "Of the network: one of the recipe's, such as small, medium or paper.")
    batch_size: int = cli.option(64, "Samples of a rank.")
    agree: int = cli.option(20, "Updates whose losses are compared.")
    updates: int = cli.option(30, "Timed updates of each.")
    tolerance: float = cli.option(5e-4, "Largest relative difference of a loss; a GPU adds in another order.")
    device: str = cli.option("auto", "Where both run.", choices=("auto", "cpu", "cuda"))
    compile: str = cli.option(
        "none", "What is compiled too: the module with its loss, or also the whole update.", choices=COMPILED
    )

    def __post_init__(self) -> None:
        """Raises ValueError for a size that the recipe does not have."""
        sizes = recipes.load(f"functional_sl.recipes.{self.recipe}:build").sizes
        if self.size not in sizes:
            raise ValueError(f"size={self.size}: the sizes of {self.recipe} are {', '.join(sizes)}")


class Setting(NamedTuple):
    """What both sides share."""

    twin: Twin
    task: Any  # the recipe's settings
    recipe: Recipe
    config: TrainConfig
    training: update.Training
    state: update.TrainState


def prepare(settings: Settings, here: World) -> Setting:
    """Returns recipe, functions and the common start."""
    twin = twins.load(settings.recipe)
    task = twin.settings(settings.size)
    recipe = twin.build(task)
    recipe = recipe._replace(data=tree.to(recipe.data, here.device), validation=tree.to(recipe.validation, here.device))
    config = TrainConfig(
        optimizer="adamw", learning_rate=LEARNING_RATE, clip_norm=CLIP_NORM, batch_size=settings.batch_size
    )
    params, buffers = tree.to(recipe.init(keys.key(0)), here.device)
    training = update.make_training(recipe, config, collectives.over(here), here.device)
    names = admission.check(recipe, params, buffers, config.batch_size, keys.key(1, here.device))
    return Setting(twin, task, recipe, config, training, training.init(params, buffers, names, here.rank))


def functional(setting: Setting, here: World, compiled: bool, graph: bool) -> capture.Captured | capture.Eager:
    """Returns the update as the trainer runs it."""

    def one(state: update.TrainState) -> tuple[update.TrainState, dict]:
        return setting.training.update(state, setting.recipe.data)

    chosen = capture.compiled(one) if compiled else one
    return capture.Captured(chosen) if graph and here.device.type == "cuda" else capture.Eager(chosen)


def modular(setting: Setting, here: World, compiled: bool) -> Callable[[Any, Tensor | None], Tensor]:
    """Returns the update of the module: (batch, key of its noise or None for torch's generator) -> loss."""
    module = setting.twin.module(setting.task, setting.state.step.params, setting.state.step.stats)
    if here.data_group is not None:
        module = DistributedDataParallel(module)
    module = setting.twin.compile(module) if compiled else module
    step = twins.make_update(module, LEARNING_RATE, CLIP_NORM)
    return lambda batch, key: step(setting.twin.inputs(setting.task, batch, key))


def compare(setting: Setting, here: World, settings: Settings) -> float:
    """Returns the largest relative difference of this rank's losses over the first updates."""
    advance, step = functional(setting, here, False, False), modular(setting, here, False)
    state, largest = setting.state, 0.0
    for _ in range(settings.agree):
        draw, noise = keys.split(keys.fold_in(state.own.key, state.own.cursor)).unbind(0)
        batch = setting.recipe.sample(setting.recipe.data, draw, settings.batch_size)
        expected = float(step(batch, keys.split(noise, 1)[0]))
        before = state.own
        with torch.no_grad():
            state, _ = advance(state)
        items = int(state.own.items - before.items)
        found = float(state.own.sums["loss"] - before.sums["loss"]) / items
        largest = max(largest, abs(found / expected - 1))
    return largest


def rate(call: Callable[[], Any], updates: int, device: torch.device) -> float:
    """Returns calls a second, after warm-ups."""
    wait = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    for _ in range(WARM_UPS):
        call()
    wait()
    begin = time.perf_counter()
    for _ in range(updates):
        call()
    wait()
    return updates / (time.perf_counter() - begin)


def functional_rate(setting: Setting, here: World, settings: Settings, compiled: bool, graph: bool) -> float:
    """Returns updates a second as the trainer takes them."""
    advance, state = functional(setting, here, compiled, graph), tree.clone(setting.state)

    def call() -> None:
        nonlocal state
        state, _ = advance(state)

    with torch.no_grad(), contextlib.closing(advance):
        return rate(call, settings.updates, here.device)


def modular_rate(setting: Setting, here: World, settings: Settings, compiled: bool) -> float:
    """Returns updates a second of the module, whose batches and noise torch's own generator draws."""
    step, data = modular(setting, here, compiled), setting.recipe.data
    return rate(
        lambda: step(setting.twin.draw(setting.task, data, settings.batch_size), None), settings.updates, here.device
    )


def ways(setting: Setting, here: World, settings: Settings) -> dict[str, Callable[[], float]]:
    """Returns how to find the updates a second of every way of taking one."""
    functional_ways = {"eager": (False, False)}
    if settings.compile == "both":
        functional_ways["compiled"] = (True, False)
    if here.device.type == "cuda":
        functional_ways["captured"] = (False, True)
        if settings.compile == "both":
            functional_ways["compiled_captured"] = (True, True)
    modes = [False] if settings.compile == "none" else [False, True]
    return {
        f"functional_{name}": functools.partial(functional_rate, setting, here, settings, *how)
        for name, how in functional_ways.items()
    } | {
        f"module_{'compiled' if compiled else 'eager'}": functools.partial(
            modular_rate, setting, here, settings, compiled
        )
        for compiled in modes
    }


def measure(settings: Settings, here: World) -> dict[str, Any]:
    """Compares, then times every way of taking an update."""
    setting = prepare(settings, here)
    largest = max(gather(here, compare(setting, here, settings)))
    rates = {}
    for name, rate_of in ways(setting, here, settings).items():
        rates[name] = round(rate_of(), 2)
        if here.rank == 0:
            print(f"{name}: {rates[name]} updates/s", file=sys.stderr, flush=True)
    return {
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name() if here.device.type == "cuda" else "cpu",
        "threads": torch.get_num_threads(),
        "ranks": here.size,
        **dataclasses.asdict(settings),
        "parameters": tree.size(setting.state.step.params),
        "largest_difference": largest,
        "updates_per_s": rates,
    }


def main() -> None:
    """Prints the result as one JSON line on rank 0; exits with 1 if the losses disagree."""
    with cli.exit_on_usage_error("bench_sl"):
        settings = cli.parse(Settings, program="bench_sl", description=__doc__).config
    with world(settings.device) as here:
        result = measure(settings, here)
        if here.rank == 0:
            print(json.dumps(result))
    raise SystemExit(0 if result["largest_difference"] <= settings.tolerance else 1)


if __name__ == "__main__":
    main()
