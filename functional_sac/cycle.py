"""One cycle of FlashSAC: K updates with their sampling as one pure function.

An update in the official order is actor, temperature, critic, target; `critic_first` puts the critic before the
actor. The actor takes part in every `actor_update_period`-th update, by a count over the whole run. That count
modulo the period is the cycle's static phase, so a cycle exists in a few variants and never branches on a tensor.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from functional_sac import replay, reward_scale
from functional_sac.config import SACConfig
from functional_sac.distributions import Sample
from functional_sac.envs.env import EnvSpec
from functional_sac.foresight import Change, Foresee, Foresight
from functional_sac.fused.inputs import Batch
from functional_sac.losses import CriticStats
from functional_sac.networks import Actor, Critic, Stats
from functional_sac.transition import Transition
from functional_sac.updates import CriticPart, Foreseen, Metrics, PolicyPart, SACState, Updates, make_updates
from functional_sl import kernels, keys, schedules, tree
from functional_sl.parallel.collectives import Collectives, mean_over_ranks, over_sums, single
from functional_sl.step import StepState

Region = Callable[..., tuple[tree.Tree, Metrics]]  # (part, *inputs) -> (part, dict)
MOST_SHARING = 4  # updates; every number of them is compiled anew, and Dynamo refuses the ninth shape


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
    fused: bool = False,
    reserved: int = 0,
) -> Learner:
    """Builds the learner of a configuration for a task.

    Args:
      config: the algorithm; `lr_decay_updates` must be set.
      spec: sizes of observations and actions.
      collectives: how gradients, and after every cycle the batch-norm statistics, meet those of other ranks; one
        rank by default. Ranks that start from one state but their keys keep one state but their keys.
      wrap: applied to the regions of which the cycle is composed, each `(part, *inputs) -> (part, dict)`: the
        sampling, the policy's update (what the critics have no part in by itself, if it is fused), its samples for
        the critics, the critics' update, with several ranks the averaging of statistics, and the means of metrics. It
        may compile them or map them over seeds.
      fused: see `make_updates`; to be compiled, and not mapped.
      reserved: oldest rows of a full replay that are not sampled, see `replay.indices`.
    """
    across = collectives or single()
    updates = make_updates(config, spec, across, fused)
    regions = _Regions(updates, across, reserved)
    # The same kernels, those of a group, without a reduction, which a rank would wait in.
    deaf = over_sums(across.size, lambda x: x, lambda x: x)
    alone = _Regions(make_updates(config, spec, deaf, fused), deaf, reserved) if across.begin is not None else regions

    def built(name: str) -> Region:
        wrapped = wrap(getattr(regions, name))
        return kernels.ahead(getattr(alone, name), wrapped) if fused else wrapped

    copies = kernels.ahead(updates.copies, updates.copies) if fused else updates.copies
    cycle = _Cycle(
        config, across.size, copies, wrap(regions.sample), built("foresee") if fused else None, built("policy"),
        built("next_policies"), built("critics"), wrap(regions.average),
        tuple(wrap(regions.summary) for _ in range(phases(config))),
    )  # fmt: skip

    def update(
        state: SACState, batch: Transition, actor_noise: Tensor, critic_noise: Tensor, with_actor: bool
    ) -> tuple[SACState, Metrics]:
        def change_critics(state: SACState) -> tuple[SACState, Metrics]:
            sample = updates.next_policy(state.actor.params, state.actor.stats, batch, critic_noise)
            return _change_critics(updates.critics, state, sample, batch)

        change_policy = functools.partial(_change_policy, updates.policy, inputs=(batch, actor_noise))
        state, metrics = _update(config, state, change_policy if with_actor else None, change_critics)
        return state._replace(updates=state.updates + 1), metrics

    return Learner(updates.init, update, cycle.run, phases(config), updates.rate)


@dataclasses.dataclass(frozen=True)
class _Regions:
    """The functions that may be compiled. Each takes the rows of its own batch out of the replay."""

    updates: Updates
    across: Collectives
    reserved: int

    def sample(
        self, key: Tensor, buffer: replay.ReplayState, scale: reward_scale.RewardScaleState
    ) -> tuple[Tensor, Metrics]:
        config, action_dim = self.updates.config, self.updates.spec.action_dim
        key, rows_key, noise_key = keys.split(key, 3)
        k, b = config.updates_per_step, config.batch_size
        divisor = reward_scale.denominator(scale, config.return_bound)
        return key, {
            "places": replay.indices(buffer, rows_key, (k, b), self.reserved),
            "noise": keys.normal(noise_key, (k, 3 * b, action_dim)),  # 2B rows for the actor, B for the critics
            "divisor": divisor if config.scale_rewards else torch.ones_like(divisor),
        }

    def foresee(
        self, temperature: StepState, actor: Actor, copies: tuple[Tensor, ...], rows: Tensor, places: Tensor,
        divisor: Tensor, noise: Tensor,
    ) -> tuple[StepState, dict[str, dict]]:  # fmt: skip
        noise, batch = noise[: 2 * self.updates.config.batch_size], self._batch(rows, places, divisor)
        found = self.updates.foresee(temperature, actor, batch, noise, copies)
        return found.temperature, {"forward": found.forward._asdict(), "metrics": found.metrics}

    def policy(
        self, part: PolicyPart, critic: Critic, stats: Stats, rows: Tensor, places: Tensor, divisor: Tensor,
        noise: Tensor, critic_copies: tuple[Tensor, ...], foreseen: Foreseen | tuple[()],
    ) -> tuple[PolicyPart, Metrics]:  # fmt: skip
        noise, batch = noise[: 2 * self.updates.config.batch_size], self._batch(rows, places, divisor)
        return self.updates.policy(part, critic, stats, batch, noise, critic_copies, foreseen)

    def next_policies(
        self, nothing: tuple[()], actor: Actor, stats: Stats, rows: Tensor, places: Tensor, divisor: Tensor,
        noise: Tensor, copies: tuple[Tensor, ...],
    ) -> tuple[tuple[()], Metrics]:  # fmt: skip
        """Samples for the critics of several updates at once: places [g, B], noise [g, 3B, A]."""
        noise = noise[:, 2 * self.updates.config.batch_size :]
        batch = self._batch(rows, places.flatten(), divisor)
        sample = self.updates.next_policy(actor, stats, batch, noise.flatten(0, 1), copies)
        return nothing, {name: x.unflatten(0, places.shape) for name, x in sample._asdict().items()}

    def critics(
        self, part: CriticPart, policy: Sample, log_temperature: Tensor, rows: Tensor, places: Tensor, divisor: Tensor
    ) -> tuple[CriticPart, Metrics]:
        return self.updates.critics(part, policy, log_temperature, self._batch(rows, places, divisor))

    def average(self, stats: tuple[Stats, CriticStats]) -> tuple[tuple[Stats, CriticStats], Metrics]:
        return mean_over_ranks(self.across, stats), {}

    def summary(self, updates: Tensor, history: list[Metrics]) -> tuple[Tensor, Metrics]:
        names = sorted({name for metrics in history for name in metrics})
        series = {name: [metrics[name] for metrics in history if name in metrics] for name in names}
        means = {
            name: values[0] if len(values) == 1 else torch.stack(values).mean(0) for name, values in series.items()
        }
        return updates + len(history), means

    def _batch(self, rows: Tensor, places: Tensor, divisor: Tensor) -> Transition | Batch:
        columns = replay.fields(self.updates.spec)
        if self.updates.fused:
            return Batch(rows, places, columns, divisor)
        batch = replay.unpack(rows.index_select(0, places), columns)
        return batch._replace(reward=batch.reward / divisor)


@dataclasses.dataclass(frozen=True)
class _Cycle:
    """The cycle, composed of regions."""

    config: SACConfig
    ranks: int
    copies: Callable[[SACState], SACState]
    sample: Region
    foresee: Foresee | None
    policy: Region
    next_policies: Region
    critics: Region
    average: Region
    summaries: tuple[Region, ...]  # of each phase

    def run(
        self, state: SACState, buffer: replay.ReplayState, scale: reward_scale.RewardScaleState, phase: int
    ) -> tuple[SACState, Metrics]:
        key, drawn = self.sample(state.key, buffer, scale)
        state, history, samples = state._replace(key=key), [], []
        if self.config.updates_per_step > 1:
            state = self.copies(state)
        acting = with_actor(self.config, phase)
        batches = [(buffer.rows, drawn["places"].select(-2, k), drawn["divisor"]) for k in range(len(acting))]
        inputs = [(*batch, drawn["noise"].select(-3, k)) for k, batch in enumerate(batches)]
        foresight = Foresight(self.foresee, [given for given, acts in zip(inputs, acting, strict=True) if acts])
        for k, acts in enumerate(acting):
            change_policy = functools.partial(self._change_policy, foresight, inputs[k]) if acts else None
            ahead = functools.partial(self._ahead, buffer.rows, drawn, k, _sharing(self.config, acting[k:]))
            change_critics = functools.partial(self._change_critics, samples, ahead, batches[k])
            change_critics = functools.partial(foresight.beside, change_critics)
            state, metrics = _update(self.config, state, change_policy, change_critics)
            history.append(metrics)
        state = state._replace(actor_copies=(), critic_copies=())
        if self.ranks > 1:
            state = self._share_statistics(state)
        if len(history) == 1:
            return state._replace(updates=state.updates + 1), history[0]
        updates, means = self.summaries[phase](state.updates, history)
        return state._replace(updates=updates), means

    def _change_policy(self, foresight: Foresight, inputs: tuple, state: SACState) -> tuple[SACState, Metrics]:
        return _change_policy(self.policy, state, inputs, foresight.take(state))

    def _change_critics(
        self, samples: list[Sample], ahead: Callable[[SACState], list[Sample]], batch: tuple, state: SACState
    ) -> tuple[SACState, Metrics]:
        if not samples:
            samples.extend(ahead(state))
        return _change_critics(self.critics, state, samples.pop(0), *batch)

    def _ahead(self, rows: Tensor, drawn: Metrics, first: int, count: int, state: SACState) -> list[Sample]:
        """Returns the samples of `count` updates, from the first one, that share the state's policy."""
        places, noise = drawn["places"].narrow(-2, first, count), drawn["noise"].narrow(-3, first, count)
        inputs = (state.actor.params, state.actor.stats, rows, places, drawn["divisor"], noise, state.actor_copies)
        _, found = self.next_policies((), *inputs)
        return [Sample(found["action"].select(-3, i), found["log_prob"].select(-2, i)) for i in range(count)]

    def _share_statistics(self, state: SACState) -> SACState:
        (actor, critic), _ = self.average((state.actor.stats, state.critic.stats))
        return state._replace(actor=state.actor._replace(stats=actor), critic=state.critic._replace(stats=critic))


def _sharing(config: SACConfig, acting: tuple[bool, ...]) -> int:
    """Returns for how many of these updates, from the first one, the policy's samples are made in one pass.

    The critics meet one and the same policy in them.
    """
    # An actor's update comes before the critics' of the same number, or with the critic first behind them.
    changes = acting if config.critic_first else acting[1:]
    return min(MOST_SHARING, changes.index(True) + 1 if True in changes else len(acting))


def _change_policy(
    policy: Region, state: SACState, inputs: tuple, *foreseen: Foreseen | tuple[()]
) -> tuple[SACState, Metrics]:
    part = PolicyPart(state.actor, state.temperature, state.scale, state.actor_copies)
    part, metrics = policy(
        part, state.critic.params, state.critic.stats.online, *inputs, state.critic_copies, *foreseen
    )
    return state._replace(**part._asdict()), metrics


def _change_critics(critics: Region, state: SACState, sample: Sample, *batch: tree.Tree) -> tuple[SACState, Metrics]:
    part = CriticPart(state.critic, state.target, state.scale, state.critic_copies)
    part, metrics = critics(part, sample, state.temperature.params, *batch)
    return state._replace(**part._asdict()), metrics


def _update(config: SACConfig, state: SACState, policy: Change | None, critics: Change) -> tuple[SACState, Metrics]:
    """Runs one update in the config's order, but for its count."""
    order = [critics] if policy is None else [policy, critics]
    metrics: Metrics = {}
    for change in reversed(order) if config.critic_first else order:
        state, found = change(state)
        metrics |= found
    return state, metrics
