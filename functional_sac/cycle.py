"""One cycle of FlashSAC: K updates with their sampling as one pure function.

An update in the official order is actor, temperature, critic, target; `critic_first` puts the critic before the
actor. The actor takes part in every `actor_update_period`-th update, by a count over the whole run. That count
modulo the period is the cycle's static phase, so a cycle exists in a few variants and never branches on a tensor.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from functional_sac import losses, networks, replay, reward_scale
from functional_sac.config import SACConfig
from functional_sac.envs.env import EnvSpec
from functional_sac.networks import Critic
from functional_sac.transition import Transition
from functional_sl import keys, loss_scale, optim, schedules, tree
from functional_sl.loss_scale import LossScaleState
from functional_sl.parallel.collectives import Collectives
from functional_sl.step import Step, StepState, make_step


class SACState(NamedTuple):
    """Everything that learning changes, but the replay."""

    key: Tensor  # [2] int64
    updates: Tensor  # () int64, updates over the whole run
    actor: StepState
    critic: StepState  # both critics stacked [2, ...]; its statistics are a CriticStats
    target: Critic  # parameters of both target critics, stacked [2, ...]
    temperature: StepState  # params: the log temperature, ()
    scale: LossScaleState  # of the float16 loss; at rest otherwise


class Draws(NamedTuple):
    """The random numbers of a cycle of K updates."""

    rows: Tensor  # [K, B] int64, replay rows
    noise: Tensor  # [K, 3B, A] standard normal: 2B rows for the actor, B for the critic


class Learner(NamedTuple):
    """The functions of one configuration.

    Attributes:
      init: `key -> SACState`.
      update: `(state, batch, actor_noise [2B, A], critic_noise [B, A], with_actor) -> (state, metrics)`, one
        update on a batch whose rewards are scaled.
      cycle: `(state, replay, scale, phase) -> (state, metrics)`, K updates with their sampling; metrics are means
        over the cycle.
      phases: number of variants of the cycle.
      rate: learning rate at a count of optimizer steps.
    """

    init: Callable[[Tensor], SACState]
    update: Callable[..., tuple[SACState, dict[str, Tensor]]]
    cycle: Callable[..., tuple[SACState, dict[str, Tensor]]]
    phases: int
    rate: schedules.Schedule


def phases(config: SACConfig) -> int:
    """Returns the number of variants of a cycle: `period / gcd(K, period)`, or 1 for a count within the cycle."""
    period = config.actor_update_period
    return 1 if config.actor_count == "cycle" else period // math.gcd(config.updates_per_step, period)


def with_actor(config: SACConfig, phase: int) -> tuple[bool, ...]:
    """Tells for each of a cycle's K updates whether the actor takes part; `phase` counts cycles."""
    start = 0 if config.actor_count == "cycle" else phase * config.updates_per_step
    return tuple((start + k) % config.actor_update_period == 0 for k in range(config.updates_per_step))


def make_learner(config: SACConfig, spec: EnvSpec, collectives: Collectives | None = None) -> Learner:
    """Builds the learner of a configuration for a task.

    Args:
      config: the algorithm; `lr_decay_updates` must be set.
      spec: sizes of observations and actions.
      collectives: how gradients meet those of other ranks; one rank by default.
    """
    if config.lr_decay_updates == 0:
        raise ValueError("lr_decay_updates=0: a learner does not know the run's length; set its number of updates")
    columns = replay.fields(spec)
    loss = losses.make_losses(config, spec.action_dim)
    scaler = loss_scale.dynamic()
    scaled = config.compute_dtype == "float16"

    rate = schedules.warmup_cosine(
        config.lr_init, config.lr_peak, config.lr_end, config.lr_warmup_updates, config.lr_decay_updates
    )

    def step(loss: Callable, project: Callable | None = None) -> Step:
        wire = config.dp_gradient_wire_dtype
        return make_step(loss, optim.adam(rate), collectives, wire_dtype=wire, project=project)

    actor_step = step(loss.actor, networks.project)
    critic_step = step(loss.critic, networks.project)
    temperature_step = step(loss.temperature)

    def init(key: Tensor) -> SACState:
        key, actor_key, critic_key = keys.split(key, 3)
        actor = networks.init_actor(actor_key, spec.actor_dim, spec.action_dim, config.actor_width, config.num_blocks)
        critic_dim = (spec.critic_dim or spec.actor_dim) + spec.action_dim
        members = [
            networks.init_critic(k, critic_dim, config.bins, config.critic_width, config.num_blocks)
            for k in keys.split(critic_key, 2)
        ]
        critic, stats = tree.stack(members)
        log_temperature = torch.full((), math.log(config.initial_temperature), device=key.device)
        return SACState(
            key=key.clone(),
            updates=torch.zeros((), dtype=torch.int64, device=key.device),
            actor=actor_step.init(*actor),
            critic=critic_step.init(critic, losses.CriticStats(stats, stats)),
            target=tree.clone(critic),
            temperature=temperature_step.init(log_temperature),
            scale=scaler.init(key.device),
        )

    def policy_update(state: SACState, batch: Transition, noise: Tensor) -> tuple[SACState, dict[str, Tensor]]:
        scale = state.scale.scale if scaled else None
        frozen = (state.critic.params, state.critic.stats.online, state.temperature.params)
        actor, ok, aux = actor_step.update(state.actor, *frozen, batch, noise, scale=scale)
        temperature, _, heat = temperature_step.update(state.temperature, aux.metrics["entropy"])
        if scaled:
            state = state._replace(scale=scaler.update(state.scale, ok))
        return state._replace(actor=actor, temperature=temperature), {**aux.metrics, **heat.metrics}

    def critic_update(state: SACState, batch: Transition, noise: Tensor) -> tuple[SACState, Tensor, dict[str, Tensor]]:
        scale = state.scale.scale if scaled else None
        policy = (state.actor.params, state.actor.stats, state.temperature.params)
        goal = loss.critic_goal(state.target, state.critic.stats.target, *policy, batch, noise)
        critic, ok, aux = critic_step.update(state.critic, goal, scale=scale)
        if scaled:
            state = state._replace(scale=scaler.update(state.scale, ok))
        return state._replace(critic=critic), ok, aux.metrics

    def update(
        state: SACState, batch: Transition, actor_noise: Tensor, critic_noise: Tensor, with_actor: bool
    ) -> tuple[SACState, dict[str, Tensor]]:
        metrics: dict[str, Tensor] = {}
        if with_actor and not config.critic_first:
            state, metrics = policy_update(state, batch, actor_noise)
        state, ok, critic_metrics = critic_update(state, batch, critic_noise)
        if with_actor and config.critic_first:
            state, metrics = policy_update(state, batch, actor_noise)
        target = tree.where(ok, tree.lerp(state.target, state.critic.params, config.tau), state.target)
        return state._replace(target=target, updates=state.updates + 1), {**critic_metrics, **metrics}

    def draw(state: SACState, buffer: replay.ReplayState) -> tuple[SACState, Draws]:
        key, rows_key, noise_key = keys.split(state.key, 3)
        k, b, a = config.updates_per_step, config.batch_size, spec.action_dim
        return state._replace(key=key), Draws(
            rows=replay.indices(buffer, rows_key, (k, b)),
            noise=keys.normal(noise_key, (k, 3 * b, a)),
        )

    def cycle(
        state: SACState, buffer: replay.ReplayState, scale: reward_scale.RewardScaleState, phase: int
    ) -> tuple[SACState, dict[str, Tensor]]:
        state, draws = draw(state, buffer)
        divisor = reward_scale.denominator(scale, config.return_bound) if config.scale_rewards else 1.0
        history, actor_rows = [], 2 * config.batch_size
        for k, acts in enumerate(with_actor(config, phase)):
            batch = replay.gather(buffer, draws.rows[k], columns)
            batch = batch._replace(reward=batch.reward / divisor)
            noise = draws.noise[k]
            state, metrics = update(state, batch, noise[:actor_rows], noise[actor_rows:], acts)
            history.append(metrics)
        return state, _mean(history)

    return Learner(init, update, cycle, phases(config), rate)


def _mean(history: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    names = sorted({name for metrics in history for name in metrics})
    series = {name: [metrics[name] for metrics in history if name in metrics] for name in names}
    return {name: values[0] if len(values) == 1 else torch.stack(values).mean() for name, values in series.items()}
