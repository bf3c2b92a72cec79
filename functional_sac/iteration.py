"""One training iteration as a pure function: act, step the environments, insert, learn.

Where the environments live on the host, the step is not part of it: `act` before and `store` after it are pure.

A step whose reward, observation or successor is not finite is refused: it leaves no row in the replay, no trace in
the reward scale and no episode in the totals, but counts as an environment step. Its environment begins a new episode
(the environment sees to that), and n-step windows end before it as at a truncation.

The state of a run is one `TrainState` a rank. A leading axis of seeds is added by `torch.func.vmap`: N learners with
their environments in one process.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from functional_sac import acting, noise, replay, reward_scale
from functional_sac.config import TrainConfig
from functional_sac.cycle import Learner
from functional_sac.envs.env import Env, TimeStep, finite
from functional_sac.envs.host import HostEnv
from functional_sac.losses import METRICS
from functional_sac.noise import NoiseState
from functional_sac.replay import ReplayState
from functional_sac.reward_scale import RewardScaleState
from functional_sac.transition import Observation, Transition
from functional_sac.updates import SACState
from functional_sl import keys, streams
from functional_sl.parallel.collectives import Collectives, single

RANK_STREAM = 0x4A4E  # apart from every stream that one rank draws from the seed


class Episodes(NamedTuple):
    """Running totals over finished training episodes."""

    count: Tensor  # () int64
    returns: Tensor  # () float64, unscaled
    lengths: Tensor  # () int64


class TrainState(NamedTuple):
    """Everything that a run changes."""

    sac: SACState
    replay: ReplayState
    scale: RewardScaleState
    noise: NoiseState
    env: NamedTuple  # the environment's own state
    observation: Observation  # [N, ...], what the policy acts on next
    done: Tensor  # [N] bool, an episode ended in the last step
    key: Tensor  # [2] int64, of acting
    env_steps: Tensor  # () int64, over all environments of all ranks
    refused: Tensor  # () int64, steps of this rank whose numbers were not finite
    episodes: Episodes
    recorded: tuple[Tensor, ...]  # the environment's running sums at the last record, see `stacked`
    metrics: dict[str, Tensor]  # () float32 each, the last value of every metric of the learner; NaN before the first


@dataclasses.dataclass(frozen=True)
class Iteration:
    """The functions of one run, each pure but for the rows of the replay."""

    config: TrainConfig
    env: Env | HostEnv  # of this rank
    learner: Learner  # built with the same collectives
    across: Collectives  # how reward moments meet those of other ranks

    def init(self, key: Tensor, rank: int = 0) -> TrainState:
        """Returns a rank's first state.

        Args:
          key: the same on every rank. What all ranks share starts equal; environments, acting and sampling draw from
            keys of the rank's own.
          rank: of the state.
        """
        config, spec, device = self.config, self.env.spec, key.device
        learner_key, env_key, acting_key = keys.split(key, 3)
        sac = self.learner.init(learner_key)
        if rank > 0:
            own = keys.fold_in(keys.fold_in(key, RANK_STREAM), rank)
            sampling_key, env_key, acting_key = keys.split(own, 3)
            sac = sac._replace(key=sampling_key.clone())
        env_state, observation = self.env.init(env_key, config.num_envs)
        prior = reward_prior(config)
        return TrainState(
            sac=sac,
            replay=replay.init(replay.fields(spec), config.replay_capacity, config.num_envs, config.n_step, device),
            scale=reward_scale.init(config.num_envs, prior_count=prior.count, device=device),
            noise=noise.init(config.num_envs, spec.action_dim, shared=not config.noise_per_env, device=device),
            env=env_state,
            observation=observation,
            done=torch.zeros(config.num_envs, dtype=torch.bool, device=device),
            key=acting_key.clone(),
            env_steps=torch.zeros((), dtype=torch.int64, device=device),
            refused=torch.zeros((), dtype=torch.int64, device=device),
            episodes=Episodes(
                count=torch.zeros((), dtype=torch.int64, device=device),
                returns=torch.zeros((), dtype=torch.float64, device=device),
                lengths=torch.zeros((), dtype=torch.int64, device=device),
            ),
            recorded=stacked({} if self.env.metrics is None else self.env.metrics(env_state)),
            metrics={name: torch.full((), math.nan, device=device) for name in METRICS},
        )

    def act(self, state: TrainState, random: bool) -> tuple[TrainState, Tensor]:
        """Returns the state and the actions [N, A]: uniform if `random`, else the policy explores."""
        config = self.config
        key, first, second = keys.split(state.key, 3)
        state = state._replace(key=key)
        if random:
            return state, acting.uniform(first, config.num_envs, self.env.spec.action_dim)
        cdf = noise.zeta_cdf(config.noise_mu, config.noise_max_repeat, key.device)
        held = noise.update(state.noise, first, second, cdf, state.done if config.noise_per_env else None)
        policy, dtype = state.sac.actor, getattr(torch, config.compute_dtype)
        action = acting.explore(policy.params, policy.stats, state.observation.actor, held.noise, dtype)
        return state._replace(noise=held), action

    def store(
        self, state: TrainState, action: Tensor, env_state: NamedTuple, step: TimeStep, present: Tensor | None = None
    ) -> TrainState:
        """Returns the state after a step of the environments.

        Args:
          state: after `act`.
          action: [N, A], as taken.
          env_state: after the step.
          step: what came of it.
          present: [N] bool, where a step was taken at all; everywhere if left out.
        """
        gamma, eps = self.config.gamma, reward_prior(self.config).old_count_eps
        sound = finite(state.observation, step.reward) & finite(step.final_observation, step.reward)
        valid, refused = (sound, ~sound) if present is None else (sound & present, ~sound & present)
        taken = self.config.num_envs if present is None else present.sum()
        done = (step.terminated | step.truncated) & valid
        transition = Transition(
            state.observation, action, step.reward, step.terminated, step.truncated, step.final_observation
        )
        return state._replace(
            replay=replay.insert(state.replay, transition, replay.fields(self.env.spec), gamma, valid),
            scale=reward_scale.update(
                state.scale, step.reward, done, gamma, valid=valid, old_count_eps=eps, collectives=self.across
            ),
            env=env_state,
            observation=step.observation,
            done=done | refused,
            env_steps=state.env_steps + taken * self.across.size,
            refused=state.refused + refused.sum(),
            episodes=_count(state.episodes, step, done),
        )

    def restart(self, state: TrainState, env_state: NamedTuple, observation: Observation) -> TrainState:
        """Returns the state that goes on with new episodes."""
        return state._replace(
            replay=replay.cut(state.replay),
            scale=state.scale._replace(returns=torch.zeros_like(state.scale.returns)),
            env=env_state,
            observation=observation,
            done=torch.ones_like(state.done),
        )

    def step(self, state: TrainState, random: bool) -> TrainState:
        """Returns the state after one vector step."""
        state, action = self.act(state, random)
        return self.store(state, action, *self.env.step(state.env, action))

    def learn(self, state: TrainState, phase: int) -> TrainState:
        """Returns the state after one cycle of updates."""
        sac, metrics = self.learner.cycle(state.sac, state.replay, state.scale, phase)
        return state._replace(sac=sac, metrics=state.metrics | metrics)


def make_iteration(
    config: TrainConfig, env: Env | HostEnv, learner: Learner, collectives: Collectives | None = None
) -> Iteration:
    """Returns the iteration of a configuration, an environment and a learner; on one rank by default."""
    return Iteration(config, env, learner, collectives or single())


Mapped = Callable[..., Callable[..., Any]]


def overlapped(iteration: Iteration, mapped: Mapped, state: TrainState, random: bool, phase: int) -> TrainState:
    """Returns the state after one vector step and one cycle, of which neither waits for the other.

    The cycle draws from the replay and the reward scale as they were before the step; of a full replay the rows that
    the step overwrites are left out, so that a capture's warm-ups, which write them too, change nothing. Its policy
    acts in the next step, as after `step` and `learn`.

    Args:
      iteration: of a run whose environments are pure and whose learner reserves a vector step's rows.
      mapped: `(function, **static) -> function`, over seeds where there are several.
      state: of the run.
      random: see `Iteration.act`.
      phase: of the cycle.
    """
    state, action = mapped(iteration.act, random=random)(state)
    learned, stepped = streams.side_by_side(
        lambda: iteration.learn(state, phase), lambda: mapped(iteration.env.step)(state.env, action), action.device
    )
    return mapped(iteration.store)(learned, action, *stepped)


def stacked(sums: Mapping[str, Tensor]) -> tuple[Tensor, ...]:
    """Returns M sums of an environment, see `Env.metrics`, as one [..., M] in the order of their names; () for none."""
    return (torch.stack([sums[name] for name in sorted(sums)], dim=-1),) if sums else ()


class Prior(NamedTuple):
    """How the return's moments start."""

    count: float
    old_count_eps: float


def reward_prior(config: TrainConfig) -> Prior:
    """Returns the official rule (count 0, 1e-4 beside the old count) or UniLab's (count 1e-4 throughout)."""
    official = config.reward_prior == "official"
    return Prior(0.0, reward_scale.OLD_COUNT_EPS) if official else Prior(reward_scale.OLD_COUNT_EPS, 0.0)


def _count(episodes: Episodes, step: TimeStep, done: Tensor) -> Episodes:
    return Episodes(
        count=episodes.count + done.sum(),
        returns=episodes.returns + torch.where(done, step.episode_return, 0.0).sum(dtype=torch.float64),
        lengths=episodes.lengths + torch.where(done, step.episode_length, 0).sum(),
    )
