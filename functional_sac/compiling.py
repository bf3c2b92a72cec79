"""How a run's iteration is computed: compiled or not, mapped over seeds, captured as CUDA graphs."""

from __future__ import annotations

import functools
import shutil
from collections.abc import Callable

from functional_sac import hosted, plan
from functional_sac.config import TrainConfig
from functional_sac.envs.env import Env
from functional_sac.envs.host import HostEnv
from functional_sac.iteration import Iteration, TrainState, overlapped
from functional_sac.replicas import Replicas
from functional_sl import capture, tree
from functional_sl.parallel.world import agree

COMPILED_UPDATES = 20_000
Runner = capture.Captured | capture.Eager | hosted.Hosted


def compiles(config: TrainConfig, ranks: Replicas) -> str:
    """Returns what `--compile=auto` comes to, which the run keeps, resumes included."""
    if config.compile != "auto" or config.simulated_ranks > 1:
        return "false" if config.compile == "auto" else config.compile
    # On a CPU compiling takes about a minute and then halves an update's time.
    many = plan.total_updates(config, ranks.size) >= COMPILED_UPDATES
    worthwhile = many and any(map(shutil.which, ("c++", "g++", "clang++")))
    return "true" if ranks.world.device.type == "cuda" or worthwhile else "false"


def _suited(config: TrainConfig, ranks: Replicas) -> bool:
    """Tells whether iterations can be captured: compiled ones on a GPU, without a scaler for float16."""
    compiled = ranks.world.device.type == "cuda" and config.compile == "true"
    return compiled and config.compute_dtype != "float16"


def fuses(config: TrainConfig, ranks: Replicas) -> bool:
    """Tells whether gradients are taken as they are written out, which are for one seed."""
    return _suited(config, ranks) and config.num_seeds == 1


def wrapper(config: TrainConfig) -> Callable[[capture.Function], capture.Function]:
    """Returns what is done to a region of the cycle: mapped over seeds where there are several, compiled if asked."""

    def wrap(region: capture.Function) -> capture.Function:
        region = capture.mapped(region) if config.num_seeds > 1 else region
        return capture.compiled(region) if config.compile == "true" else region

    return wrap


def runner(iteration: Iteration, config: TrainConfig, ranks: Replicas, env: Env | HostEnv) -> Runner:
    """Returns one training iteration, captured as CUDA graphs where that is possible and wanted."""

    # The learner's regions are mapped over seeds already.
    def over_seeds(fn: Callable[..., tree.Tree], **static: bool) -> Callable[..., tree.Tree]:
        bound = functools.partial(fn, **static)
        return capture.mapped(bound) if config.num_seeds > 1 else bound

    def iterate(state: TrainState, random: bool, phase: int | None) -> tuple[TrainState, tuple[()]]:
        if config.overlap and phase is not None:
            return overlapped(iteration, over_seeds, state, random, phase), ()
        state = over_seeds(iteration.step, random=random)(state)
        return (state if phase is None else iteration.learn(state, phase)), ()

    captured = _suited(config, ranks) and (ranks.size == 1 or config.dp_whole_cycle_cuda_graph)
    region = functools.partial(capture.Captured if captured else capture.Eager, hooks=_hooks(ranks))
    if isinstance(env, HostEnv):
        act = functools.partial(over_seeds, iteration.act)
        halves = hosted.stages(lambda random: act(random=random), over_seeds(iteration.store), iteration.learn)
        return hosted.Hosted(region(halves), env, config.overlap)
    return region(iterate)


def _hooks(ranks: Replicas) -> capture.Hooks:
    """Returns the hooks by which ranks start a capture together, and one's failure is an error of all."""
    where = functools.partial(agree, ranks.world, where="capturing the iteration")
    return capture.Hooks(before_capture=functools.partial(where, None), after_capture=where)
