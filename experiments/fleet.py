"""Learners of several seeds, of several simulated ranks each, around their environments on the host.

Seeds and ranks are axes of `torch.func.vmap`: one process computes all of them at once, on CUDA as graphs. Policies
are judged by other processes on the CPU, so learning does not wait for whole episodes.
"""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from functional_sac import envs, evaluation, hosted, plan
from functional_sac.config import TrainConfig
from functional_sac.cycle import make_learner
from functional_sac.envs.host import HostEnv
from functional_sac.iteration import Iteration, TrainState, make_iteration
from functional_sac.transition import Observation
from functional_sac.updates import SACState
from functional_sl import capture, keys, tree
from functional_sl.parallel import collectives
from functional_sl.step import StepState

EVALUATION_STREAM = 0x5EED  # apart from every stream that training draws from the seed

Policy = tuple[Any, Any]  # parameters and statistics of one actor, leaves are arrays


class Fleet:
    """`num_seeds` learners of a config, each on `ranks` simulated ranks.

    Attributes:
      config: the run.
      env_steps: steps taken by each seed, over its ranks.
      updates: of each seed.
    """

    def __init__(self, config: TrainConfig, device: torch.device, ranks: int = 1) -> None:
        """Makes fresh learners and opens their environments.

        Args:
          config: its `num_envs`, replay and batch are a rank's; `lr_decay_updates` must be set.
          device: of everything but the environments.
          ranks: simulated data-parallel ranks of each learner.
        """
        self.config, self._ranks = config, ranks
        self.env_steps, self.updates, self._vector_steps = 0, 0, 0
        self._env: HostEnv = envs.make(config.task, config.sim)

        def wrap(region: capture.Function) -> capture.Function:
            mapped = _over(region, ranks)
            return capture.compiled(mapped) if config.compile == "true" else mapped

        across = collectives.simulated(ranks) if ranks > 1 else collectives.single()
        self._learner = make_learner(config, self._env.spec, across, wrap)
        iteration = make_iteration(config, self._env, self._learner, across)
        graphs = device.type == "cuda" and config.compile == "true"
        region = (capture.Captured if graphs else capture.Eager)(_stages(iteration, ranks, wrap))
        self._iterate = hosted.Hosted(region, self._env)
        self._state = tree.stack([_seed(iteration, seed, ranks, device) for seed in self.seeds])

    @property
    def seeds(self) -> range:
        """The learners' seeds."""
        return range(self.config.seed, self.config.seed + self.config.num_seeds)

    def step(self) -> None:
        """Takes one step in every environment, and learns if it is time."""
        turn = plan.turn(self.config, self._vector_steps, learned=self.updates > 0)
        phase = self.updates // self.config.updates_per_step % self._learner.phases if turn.learn else None
        self._state, _ = self._iterate(self._state, random=turn.random, phase=phase)
        self._vector_steps += 1
        self.env_steps += self.config.num_envs * self._ranks
        self.updates += self.config.updates_per_step if turn.learn else 0

    def policies(self) -> list[Policy]:
        """Returns the policy of every seed."""
        actor = self._state.sac.actor
        every = tree.map(lambda x: x.cpu().numpy(), (actor.params, actor.stats))
        every = tree.map(lambda x: x[:, 0], every) if self._ranks > 1 else every
        return [tree.map(lambda x, i=i: x[i].copy(), every) for i in range(self.config.num_seeds)]

    def skipped(self) -> int:
        """Returns how many updates the gates have held back so far, over all seeds and optimizers."""
        sac = self._state.sac
        return sum(int(part.gate.skipped.sum()) for part in (sac.actor, sac.critic, sac.temperature))

    def close(self) -> None:
        """Frees the graphs and ends the environments."""
        self._iterate.close()
        self._env.close()


@contextlib.contextmanager
def opened(config: TrainConfig, device: torch.device, ranks: int = 1) -> Iterator[Fleet]:
    """Yields a fleet and closes it."""
    torch.set_num_threads(1)
    with torch.no_grad(), contextlib.closing(Fleet(config, device, ranks)) as fleet:
        yield fleet


@functools.cache
def _environment(task: str) -> HostEnv:
    return envs.make(task, "gym")


class Played(NamedTuple):
    """An evaluation of one policy."""

    returns: list[float]
    seconds: float


def play(task: str, policy: Policy, seed: int, episodes: int) -> Played:
    """Plays whole episodes with deterministic actions, on a CPU in float32, from the same starts in every evaluation.

    Args:
      task: gymnasium id.
      policy: of one seed.
      seed: the learner's.
      episodes: how many.
    """
    torch.set_num_threads(1)
    env, begin = _environment(task), time.monotonic()
    key = keys.fold_in(keys.key(seed), EVALUATION_STREAM)
    with torch.no_grad():
        params, stats = tree.map(torch.from_numpy, policy)
        found = evaluation.evaluate(env, params, stats, key, episodes)
    return Played(found.returns.tolist(), time.monotonic() - begin)


def _seed(iteration: Iteration, seed: int, ranks: int, device: torch.device) -> TrainState:
    states = [iteration.init(keys.key(seed, device), rank) for rank in range(ranks)]
    return tree.stack(states) if ranks > 1 else states[0]


def _over(region: capture.Function, ranks: int) -> capture.Function:
    """Returns the region mapped over seeds, and within each over its ranks."""
    return capture.mapped(capture.mapped(region) if ranks > 1 else region)


def _stages(iteration: Iteration, ranks: int, wrap: Callable[[capture.Function], capture.Function]) -> Callable:
    """Returns both halves of an iteration, see `hosted.stages`, with what they have in kernels wrapped by `wrap`."""

    def act(random: bool) -> Callable[..., tuple[tree.Tree, dict[str, Tensor]]]:
        def region(part: tree.Tree, actor: StepState, seen: Observation, done: Tensor) -> tuple[tree.Tree, dict]:
            state = _only(TrainState, key=part[0], noise=part[1], sac=_only(SACState, actor=actor))
            state, action = iteration.act(state._replace(observation=seen, done=done), random)
            return (state.key, state.noise), {"action": action}

        return region

    # Moving at random lasts a few seconds, less than compiling it.
    regions = {True: _over(act(True), ranks), False: wrap(act(False))}
    keep = wrap(lambda part, *arrived: (iteration.store(part, *arrived), {}))

    def half(state: TrainState, random: bool) -> tuple[TrainState, Tensor]:
        inputs = (state.sac.actor, state.observation, state.done)
        (key, noise), found = regions[random]((state.key, state.noise), *inputs)
        return state._replace(key=key, noise=noise), found["action"]

    def store(state: TrainState, *arrived: tree.Tree) -> TrainState:
        untouched = {name: getattr(state, name) for name in ("sac", "noise", "key", "metrics", "recorded")}
        part, _ = keep(state._replace(**dict.fromkeys(untouched, ())), *arrived)
        return part._replace(**untouched)

    return hosted.stages(lambda random: functools.partial(half, random=random), store, iteration.learn)


def _only(kind: type, **fields: tree.Tree) -> tree.Tree:
    """Returns a NamedTuple with nothing in its other fields."""
    return kind(**dict.fromkeys(kind._fields, ()) | fields)
