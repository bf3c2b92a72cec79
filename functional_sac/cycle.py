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
from einops import rearrange
from torch import Tensor

from functional_sac import losses, networks, replay, reward_scale
from functional_sac.config import SACConfig
from functional_sac.envs.env import EnvSpec
from functional_sac.networks import Actor, Critic, Stats
from functional_sac.transition import Transition
from functional_sl import keys, loss_scale, optim, schedules, tree
from functional_sl.loss_scale import LossScaleState
from functional_sl.parallel.collectives import Collectives, mean_over_ranks, single
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


class PolicyPart(NamedTuple):
    """What an update of actor and temperature changes."""

    actor: StepState
    temperature: StepState
    scale: LossScaleState


class CriticPart(NamedTuple):
    """What an update of the critics changes."""

    critic: StepState
    target: Critic
    scale: LossScaleState


Metrics = dict[str, Tensor]
Region = Callable[..., tuple[tree.Tree, Metrics]]


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
    update: Callable[..., tuple[SACState, Metrics]]
    cycle: Callable[..., tuple[SACState, Metrics]]
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


def make_learner(
    config: SACConfig,
    spec: EnvSpec,
    collectives: Collectives | None = None,
    wrap: Callable[[Region], Region] = lambda region: region,
) -> Learner:
    """Builds the learner of a configuration for a task.

    Args:
      config: the algorithm; `lr_decay_updates` must be set.
      spec: sizes of observations and actions.
      collectives: how gradients, and after every cycle the batch-norm statistics, meet those of other ranks; one
        rank by default. Ranks that start from one state but their keys keep one state but their keys.
      wrap: applied to the regions of which the cycle is composed, each `(part, *inputs) -> (part, dict)`: the
        sampling, the critics' update, the policy's update and, with several ranks, the averaging of statistics. It
        may compile them or map them over seeds.
    """
    across = collectives or single()
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
        return make_step(loss, optim.adam(rate), across, wire_dtype=wire, project=project)

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

    def policy_update(
        part: PolicyPart, critic: Critic, stats: Stats, batch: Transition, noise: Tensor
    ) -> tuple[PolicyPart, Metrics]:
        scale = part.scale.scale if scaled else None
        log_temperature = part.temperature.params
        actor, ok, aux = actor_step.update(part.actor, critic, stats, log_temperature, batch, noise, scale=scale)
        temperature, _, heat = temperature_step.update(part.temperature, aux.metrics["entropy"])
        scale_state = scaler.update(part.scale, ok) if scaled else part.scale
        return PolicyPart(actor, temperature, scale_state), {**aux.metrics, **heat.metrics}

    def critic_update(
        part: CriticPart, actor: Actor, stats: Stats, log_temperature: Tensor, batch: Transition, noise: Tensor
    ) -> tuple[CriticPart, Metrics]:
        scale = part.scale.scale if scaled else None
        goal = loss.critic_goal(part.target, part.critic.stats.target, actor, stats, log_temperature, batch, noise)
        critic, ok, aux = critic_step.update(part.critic, goal, scale=scale)
        target = tree.where(ok, tree.lerp(part.target, critic.params, config.tau), part.target)
        scale_state = scaler.update(part.scale, ok) if scaled else part.scale
        return CriticPart(critic, target, scale_state), aux.metrics

    def sample(
        key: Tensor, buffer: replay.ReplayState, scale: reward_scale.RewardScaleState
    ) -> tuple[Tensor, dict[str, Tensor]]:
        key, rows_key, noise_key = keys.split(key, 3)
        k, b = config.updates_per_step, config.batch_size
        drawn = replay.indices(buffer, rows_key, (k * b,))
        rows = rearrange(replay.take(buffer, drawn), "(k b) width -> k b width", k=k)
        noise = keys.normal(noise_key, (k, 3 * b, spec.action_dim))
        divisor = reward_scale.denominator(scale, config.return_bound)
        return key, {
            "rows": rows,
            "noise": noise,
            "divisor": divisor if config.scale_rewards else torch.ones_like(divisor),
        }

    def batch_of(rows: Tensor, divisor: Tensor) -> Transition:
        batch = replay.unpack(rows, columns)
        return batch._replace(reward=batch.reward / divisor)

    def policy_region(part, critic, stats, rows, noise, divisor):
        return policy_update(part, critic, stats, batch_of(rows, divisor), noise[: 2 * config.batch_size])

    def critic_region(part, actor, stats, log_temperature, rows, noise, divisor):
        batch = batch_of(rows, divisor)
        return critic_update(part, actor, stats, log_temperature, batch, noise[2 * config.batch_size :])

    def compose(policy: Region, critic: Region, with_actor: bool) -> Callable[..., tuple[SACState, Metrics]]:
        """Returns one update of a `SACState`, `(state, policy's inputs, critic's inputs)`, in the config's order."""

        def change_policy(state: SACState, inputs: tuple) -> tuple[SACState, Metrics]:
            part = PolicyPart(state.actor, state.temperature, state.scale)
            part, metrics = policy(part, state.critic.params, state.critic.stats.online, *inputs)
            return state._replace(**part._asdict()), metrics

        def change_critic(state: SACState, inputs: tuple) -> tuple[SACState, Metrics]:
            part = CriticPart(state.critic, state.target, state.scale)
            frozen = (state.actor.params, state.actor.stats, state.temperature.params)
            part, metrics = critic(part, *frozen, *inputs)
            return state._replace(**part._asdict()), metrics

        def update(state: SACState, policy_inputs: tuple, critic_inputs: tuple) -> tuple[SACState, Metrics]:
            metrics: Metrics = {}
            changes = [(change_policy, policy_inputs)] * with_actor
            changes.insert(0 if config.critic_first else len(changes), (change_critic, critic_inputs))
            for change, inputs in changes:
                state, found = change(state, inputs)
                metrics |= found
            return state._replace(updates=state.updates + 1), metrics

        return update

    def update(
        state: SACState, batch: Transition, actor_noise: Tensor, critic_noise: Tensor, with_actor: bool
    ) -> tuple[SACState, Metrics]:
        one = compose(policy_update, critic_update, with_actor)
        return one(state, (batch, actor_noise), (batch, critic_noise))

    def average(stats: tuple[Stats, losses.CriticStats]) -> tuple[tuple[Stats, losses.CriticStats], Metrics]:
        return mean_over_ranks(across, stats), {}

    sampling, policy, critic, averaging = (wrap(f) for f in (sample, policy_region, critic_region, average))

    def share_statistics(state: SACState) -> SACState:
        (actor, critic), _ = averaging((state.actor.stats, state.critic.stats))
        return state._replace(actor=state.actor._replace(stats=actor), critic=state.critic._replace(stats=critic))

    def cycle(
        state: SACState, buffer: replay.ReplayState, scale: reward_scale.RewardScaleState, phase: int
    ) -> tuple[SACState, Metrics]:
        key, drawn = sampling(state.key, buffer, scale)
        state, history = state._replace(key=key), []
        for k, acts in enumerate(with_actor(config, phase)):
            inputs = (drawn["rows"].select(-3, k), drawn["noise"].select(-3, k), drawn["divisor"])
            state, metrics = compose(policy, critic, acts)(state, inputs, inputs)
            history.append(metrics)
        return share_statistics(state) if across.size > 1 else state, _mean(history)

    return Learner(init, update, cycle, phases(config), rate)


def _mean(history: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    names = sorted({name for metrics in history for name in metrics})
    series = {name: [metrics[name] for metrics in history if name in metrics] for name in names}
    return {name: values[0] if len(values) == 1 else torch.stack(values).mean(0) for name, values in series.items()}
