"""The sides of the learners' comparison: each makes whole cycles, sampling included, over the same transitions."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch

from experiments import unilab_learner
from experiments.learner_agreement import as_transition, load
from experiments.module_learner import Batch, ModuleLearner
from functional_sac import replay, reward_scale
from functional_sac.config import SACConfig
from functional_sac.cycle import make_learner
from functional_sac.envs.env import EnvSpec
from functional_sl import capture, keys, tree

PRECISIONS = ("bfloat16", "float32", "tf32")  # tf32: float32 with products in TF32


@dataclasses.dataclass(frozen=True)
class Case:
    """What every side is built from."""

    config: SACConfig  # its compute_dtype is overruled by `precision`
    spec: EnvSpec
    data: Batch
    precision: str
    compile: bool
    num_seeds: int = 1

    @property
    def algorithm(self) -> SACConfig:
        """The configuration at this precision."""
        dtype = "bfloat16" if self.precision == "bfloat16" else "float32"
        # All cycles are of one kind: the actor is counted anew in each.
        return dataclasses.replace(self.config, compute_dtype=dtype, actor_count="cycle")

    @property
    def device(self) -> torch.device:
        """Where the transitions lie and torch computes."""
        return self.data.reward.device


class Side(NamedTuple):
    """One learner, ready.

    Attributes:
      cycle: makes one cycle; it may return before the device is done. What it returns is the side's own.
      wait: returns when the device is done.
      events: whether CUDA events on torch's stream see its work.
      how: a few words on how it runs.
    """

    cycle: Callable[[], object]
    wait: Callable[[], None]
    events: bool
    how: str


class Missing(RuntimeError):
    """A side that cannot run here, with the reason or what to install."""


@contextlib.contextmanager
def products(precision: str) -> Iterator[None]:
    """Has torch make float32 products in full, or in TF32 where that is asked for."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high" if precision == "tf32" else "highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def build(name: str, case: Case) -> Side:
    """Builds a side by its name and makes its first cycle, which compiles and captures.

    Raises:
      Missing: if it cannot run here.
    """
    with products(case.precision):
        side = SIDES[name](case)
        side.cycle()
        side.wait()
    return side


def functional(case: Case) -> Side:
    """Ours: on CUDA captured as one graph, elsewhere called; several seeds are mapped over."""
    config, spec, device = case.algorithm, case.spec, case.device

    def wrap(region: capture.Function) -> capture.Function:
        region = capture.mapped(region) if case.num_seeds > 1 else region
        return capture.compiled(region) if case.compile else region

    fused = case.compile and device.type == "cuda" and case.num_seeds == 1
    learner = make_learner(config, spec, wrap=wrap, fused=fused)
    columns, rows = replay.fields(spec), len(case.data.reward)
    empty = replay.init(columns, rows, rows, device=device)
    buffer = replay.insert(empty, as_transition(spec, case.data), columns, config.gamma)
    # The window is over; it would only take memory.
    buffer, scale = buffer._replace(window=buffer.window[:, :1].clone()), reward_scale.init(1, device=device)
    states = [tree.clone((learner.init(keys.key(i, device)), buffer, scale)) for i in range(case.num_seeds)]
    state = tree.stack(states) if case.num_seeds > 1 else states[0]

    def cycle(state: tree.Tree) -> tuple[tree.Tree, dict[str, torch.Tensor]]:
        sac, metrics = learner.cycle(*state, 0)
        return (sac, *state[1:]), metrics

    captured = device.type == "cuda"
    run = capture.Captured(cycle) if captured else capture.Eager(cycle)

    @torch.no_grad()
    def once() -> None:
        nonlocal state
        state, _ = run(state)

    how = f"{'compiled' if case.compile else 'not compiled'}, {'one CUDA graph' if captured else 'launched'}"
    return Side(once, _wait(device), captured, how)


def modules(case: Case) -> Side:
    """Plain modules, eager."""
    if case.precision != "float32":
        raise Missing("float32 only")
    scale = reward_scale.init(1, device=case.device)
    module = ModuleLearner(case.algorithm, case.spec, case.data, scale.var, scale.max_abs)
    load(module, make_learner(case.algorithm, case.spec).init(keys.key(0, case.device)))

    def once() -> None:
        for _ in range(case.config.updates_per_step):
            module.step()

    return Side(once, _wait(case.device), case.device.type == "cuda", "eager")


def unilab(case: Case, mode: str) -> Side:
    """UniLab's, compiled in one of its two modes where it compiles."""
    if not unilab_learner.installed():
        raise Missing(f"not installed: {unilab_learner.INSTALL}")
    cuda = case.device.type == "cuda"
    if not cuda and (case.precision != "float32" or mode != "default"):
        raise Missing("on CUDA only; on a CPU it runs in float32 without compilation")
    learner = unilab_learner.UniLabLearner(case.algorithm, case.spec, case.data, mode)
    learner.cycle()
    how = "one CUDA graph" if learner.captured else "launched"
    return Side(learner.cycle, _wait(case.device), cuda, f"compiled ({mode}), {how}" if cuda else how)


def jax(case: Case) -> Side:
    """The same in one `jax.jit`, which donates the state; timed by the host's clock."""
    import jax as jax_
    from jax import numpy as jnp

    from experiments import jax_learner

    kind = {"cuda": "gpu", "cpu": "cpu"}[case.device.type]
    if jax_.default_backend() != kind:
        raise Missing(f"jax sees no {kind}, only {jax_.default_backend()}: pip install 'jax[cuda13]'")
    precision = jax_.lax.Precision.DEFAULT if case.precision == "tf32" else jax_.lax.Precision.HIGHEST
    config, spec = case.algorithm, case.spec
    learner = jax_learner.JaxLearner(config, spec, precision)
    rows = replay.pack(as_transition(spec, case.data)).cpu().numpy()
    inputs = jnp.asarray(rows), jnp.int32(len(rows)), jnp.ones(())
    state = jax_learner.from_torch(make_learner(config, spec).init(keys.key(0)), config)
    run = jax_.jit(learner.cycle, donate_argnums=0).lower(state, *inputs).compile()

    def once() -> tuple[jax_learner.State, dict[str, jax_.Array]]:
        nonlocal state
        state, metrics = run(state, *inputs)
        return state, metrics

    def wait() -> None:
        jax_.block_until_ready(state)

    return Side(once, wait, False, f"jax {jax_.__version__} on {jax_.devices()[0].device_kind}, one jit")


def _wait(device: torch.device) -> Callable[[], None]:
    return torch.cuda.synchronize if device.type == "cuda" else lambda: None


SIDES: dict[str, Callable[[Case], Side]] = {
    "ours": functional,
    "modules": modules,
    "unilab-default": lambda case: unilab(case, "default"),
    "unilab-max-autotune": lambda case: unilab(case, "max-autotune"),
    "jax": jax,
}
