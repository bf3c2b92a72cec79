"""Learners of several seeds, of simulated ranks too where asked for, around their environments on the host.

One process computes all of them at once, on CUDA as graphs: seeds as branches of a graph, each the learner of a run of
its own; with simulated ranks, which exchange gradients, seeds and ranks are axes of `torch.func.vmap`. Policies are
judged by other processes on the CPU, so learning does not wait for whole episodes.
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
from functional_sac.plan import Clock
from functional_sac.transition import Observation
from functional_sac.updates import SACState
from functional_sl import capture, keys, streams, tree
from functional_sl.parallel import collectives
from functional_sl.step import StepState

Policy = tuple[Any, Any]  # parameters and statistics of one actor, leaves are arrays


class Fleet:
    """`num_seeds` learners of a config, each on `ranks` simulated ranks.

    Attributes:
      config: the run.
    """

    def __init__(self, config: TrainConfig, device: torch.device, ranks: int = 1) -> None:
        """Makes fresh learners and opens their environments.

        Args:
          config: its `num_envs`, replay and batch are a rank's; `lr_decay_updates` must be set.
          device: of everything but the environments.
          ranks: simulated data-parallel ranks of each learner.
        """
        self.config, self._ranks = config, ranks
        self._clock = Clock()
        self._env: HostEnv = envs.make(config.task, config.sim)

        mapped = _mapped if ranks > 1 else lambda region: region

        def wrap(region: capture.Function) -> capture.Function:
            return capture.compiled(mapped(region)) if config.compile == "true" else mapped(region)

        across = collectives.simulated(ranks) if ranks > 1 else collectives.single()
        graphs = device.type == "cuda" and config.compile == "true"
        fused = graphs and ranks == 1 and config.compute_dtype != "float16"
        self._learner = make_learner(config, self._env.spec, across, wrap, fused)
        halves = _Halves(make_iteration(config, self._env, self._learner, across), mapped, wrap)
        stages = _stages(halves if ranks > 1 else _Apart(halves, device))
        self._iterate = hosted.Hosted((capture.Captured if graphs else capture.Eager)(stages), self._env)
        states = [_seed(halves.iteration, seed, ranks, device) for seed in self.seeds]
        self._state = tree.stack(states) if ranks > 1 else _apart(states)

    @property
    def env_steps(self) -> int:
        """Steps taken by each seed, over its ranks."""
        return self._clock.env_steps

    @property
    def updates(self) -> int:
        """Updates of each seed."""
        return self._clock.updates

    @property
    def seeds(self) -> range:
        """The learners' seeds."""
        return range(self.config.seed, self.config.seed + self.config.num_seeds)

    def step(self) -> None:
        """Takes one step in every environment, and learns if it is time."""
        random, phase = plan.iteration(self.config, self._clock, self._learner.phases)
        self._state, _ = self._iterate(self._state, random=random, phase=phase)
        self._clock = plan.tick(self.config, self._clock, learned=phase is not None, ranks=self._ranks)

    def policies(self) -> list[Policy]:
        """Returns the policy of every seed."""
        if self._ranks == 1:
            actors = [state.sac.actor for state in self._state.each]
        else:
            actors = [tree.map(lambda x, i=i: x[i, 0], self._state.sac.actor) for i in range(self.config.num_seeds)]
        return [tree.map(lambda x: x.cpu().numpy().copy(), (actor.params, actor.stats)) for actor in actors]

    def skipped(self) -> int:
        """Returns how many updates the gates have held back so far, over all seeds and optimizers."""
        learners = [self._state.sac] if self._ranks > 1 else [state.sac for state in self._state.each]
        parts = [part for sac in learners for part in (sac.actor, sac.critic, sac.temperature)]
        return sum(int(part.gate.skipped.sum()) for part in parts)

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
    key = keys.fold_in(keys.key(seed), evaluation.STREAM)
    with torch.no_grad():
        params, stats = tree.map(torch.from_numpy, policy)
        found = evaluation.evaluate(env, params, stats, key, episodes)
    return Played(found.returns.tolist(), time.monotonic() - begin)


def _seed(iteration: Iteration, seed: int, ranks: int, device: torch.device) -> TrainState:
    states = [iteration.init(keys.key(seed, device), rank) for rank in range(ranks)]
    return tree.stack(states) if ranks > 1 else states[0]


def _mapped(region: capture.Function) -> capture.Function:
    """Returns a region mapped over seeds, and within each over its ranks."""
    return capture.mapped(capture.mapped(region))


class Seeds(NamedTuple):
    """States of seeds that are computed apart.

    Attributes:
      env: of all of them, leaves [S, ...].
      each: the rest of every seed's state.
    """

    env: Any
    each: tuple[TrainState, ...]


def _apart(states: list[TrainState]) -> Seeds:
    return Seeds(tree.stack([state.env for state in states]), tuple(state._replace(env=()) for state in states))


class _Halves:
    """Both halves of an iteration, see `hosted.stages`, with what they have in kernels wrapped."""

    def __init__(
        self,
        iteration: Iteration,
        mapped: Callable[[capture.Function], capture.Function],
        wrap: Callable[[capture.Function], capture.Function],
    ) -> None:
        self.iteration = iteration
        # Moving at random lasts a few seconds, less than compiling it.
        self._acts = {True: mapped(self._act(True)), False: wrap(self._act(False))}
        self._keep = wrap(lambda part, *arrived: (iteration.store(part, *arrived), {}))

    def _act(self, random: bool) -> Callable[..., tuple[tree.Tree, dict[str, Tensor]]]:
        def region(part: tree.Tree, actor: StepState, seen: Observation, done: Tensor) -> tuple[tree.Tree, dict]:
            state = _only(TrainState, key=part[0], noise=part[1], sac=_only(SACState, actor=actor))
            state, action = self.iteration.act(state._replace(observation=seen, done=done), random)
            return (state.key, state.noise), {"action": action}

        return region

    def act(self, state: TrainState, random: bool) -> tuple[TrainState, Tensor]:
        """Returns the state and the actions."""
        inputs = (state.sac.actor, state.observation, state.done)
        (key, noise), found = self._acts[random]((state.key, state.noise), *inputs)
        return state._replace(key=key, noise=noise), found["action"]

    def store(self, state: TrainState, *arrived: tree.Tree) -> TrainState:
        """Returns the state after a step of the environments."""
        untouched = {name: getattr(state, name) for name in ("sac", "noise", "key", "metrics", "recorded")}
        part, _ = self._keep(state._replace(**dict.fromkeys(untouched, ())), *arrived)
        return part._replace(**untouched)

    def learn(self, state: TrainState, phase: int) -> TrainState:
        """Returns the state after a cycle."""
        return self.iteration.learn(state, phase)


class _Apart:
    """The halves over seeds, one beside the other."""

    def __init__(self, halves: _Halves, device: torch.device) -> None:
        self._halves, self._device = halves, device

    def _each(self, seeds: Seeds, of: Callable[[int, TrainState], Any]) -> list[Any]:
        calls = [functools.partial(of, i, state) for i, state in enumerate(seeds.each)]
        return streams.all_side_by_side(calls, self._device)

    def act(self, seeds: Seeds, random: bool) -> tuple[Seeds, Tensor]:
        """Returns the state and the actions [S, N, A]."""
        states, actions = zip(*self._each(seeds, lambda _, state: self._halves.act(state, random)), strict=True)
        return seeds._replace(each=states), torch.stack(actions)

    def store(self, seeds: Seeds, action: Tensor, env: tree.Tree, *arrived: tree.Tree) -> Seeds:
        """Returns the state after a step of the environments, whose leaves are [S, ...]."""

        def one(i: int, state: TrainState) -> TrainState:
            return self._halves.store(state, action[i], (), *tree.index(arrived, i))

        return Seeds(env, tuple(self._each(seeds, one)))

    def learn(self, seeds: Seeds, phase: int) -> Seeds:
        """Returns the state after a cycle of every seed."""
        return seeds._replace(each=tuple(self._each(seeds, lambda _, state: self._halves.learn(state, phase))))


def _stages(halves: _Halves | _Apart) -> Callable[..., tuple[Any, tree.Tree]]:
    """Returns the halves as one function."""
    return hosted.stages(lambda random: functools.partial(halves.act, random=random), halves.store, halves.learn)


def _only(kind: type, **fields: tree.Tree) -> tree.Tree:
    """Returns a NamedTuple with nothing in its other fields."""
    return kind(**dict.fromkeys(kind._fields, ()) | fields)
