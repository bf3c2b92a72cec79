"""One update of FlashSAC in its two halves: actor with temperature, and the critics with their target.

Each half changes a part of the learner's state and reads the rest, so that a half can be compiled by itself.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from functional_sac import losses, networks
from functional_sac.config import SACConfig
from functional_sac.distributions import Sample
from functional_sac.envs.env import EnvSpec
from functional_sac.fused.alignment import aligned
from functional_sac.fused.descent import Descended, descend
from functional_sac.fused.gradients import Forward, Gradients, product_dtype
from functional_sac.fused.inputs import Batch
from functional_sac.losses import Losses
from functional_sac.networks import Actor, Critic, Stats
from functional_sac.transition import Transition
from functional_sl import gate, keys, loss_scale, optim, schedules, tree
from functional_sl.loss_scale import LossScale, LossScaleState
from functional_sl.parallel.collectives import Collectives
from functional_sl.schedules import Schedule
from functional_sl.step import Aux, Gradient, Loss, Step, StepState, make_step

Metrics = dict[str, Tensor]


class SACState(NamedTuple):
    """Everything that learning changes, but the replay."""

    key: Tensor  # [2] int64
    updates: Tensor  # () int64, updates over the whole run
    actor: StepState
    critic: StepState  # both critics stacked [2, ...]; its statistics are a CriticStats
    target: Critic  # parameters of both target critics, stacked [2, ...]
    temperature: StepState  # params: the log temperature, ()
    scale: LossScaleState  # of the float16 loss; at rest otherwise
    # Between the updates of a cycle, where they are fused: the weights as products read them, see `fused.alignment`.
    actor_copies: tuple[Tensor, ...] = ()
    critic_copies: tuple[Tensor, ...] = ()  # critics, then target critics


class PolicyPart(NamedTuple):
    """What an update of actor and temperature changes."""

    actor: StepState
    temperature: StepState
    scale: LossScaleState
    actor_copies: tuple[Tensor, ...] = ()


class Foreseen(NamedTuple):
    """What the critics have no part in of an update of actor and temperature."""

    forward: Forward
    temperature: StepState  # after its update
    metrics: Metrics  # of the temperature, and of what the policy does


class CriticPart(NamedTuple):
    """What an update of the critics changes."""

    critic: StepState
    target: Critic
    scale: LossScaleState
    critic_copies: tuple[Tensor, ...] = ()


@dataclasses.dataclass(frozen=True)
class Updates:
    """The static parts of a learner, and the pure functions over its state that they make."""

    config: SACConfig
    spec: EnvSpec
    loss: Losses
    actor: Step
    critic: Step
    temperature: Step
    scaler: LossScale
    rate: Schedule
    ranks: int
    fused: bool

    def init(self, key: Tensor) -> SACState:
        """Returns fresh networks, optimizers and counters; the target critics start as the critics."""
        config, spec = self.config, self.spec
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
            actor=self.actor.init(*actor),
            critic=self.critic.init(critic, losses.CriticStats(stats, stats)),
            target=tree.clone(critic),
            temperature=self.temperature.init(log_temperature),
            scale=self.scaler.init(key.device),
        )

    def copies(self, state: SACState) -> SACState:
        """Returns a state whose next updates need not make their copies of the weights."""
        if not self.fused:
            return state
        actor = tree.map(lambda leaf: leaf.unsqueeze(0), state.actor.params)
        critics = [state.critic.params, state.target]
        dtype = product_dtype(self.loss.dtype, actor.mean_w)
        actor, critics = (tuple(aligned(stacked, dtype)) for stacked in ([actor], critics))
        return state._replace(actor_copies=actor, critic_copies=critics)

    def foresee(
        self,
        temperature: StepState,
        actor: Actor,
        batch: Transition | Batch,
        noise: Tensor,
        copies: tuple[Tensor, ...] = (),
    ) -> Foreseen:
        """Returns what a fused update of the policy may begin with before the critics are known; see `policy`.

        `copies` are the actor's, see `SACState`.
        """
        forward = Gradients(self.loss).actor_forward(actor, batch, noise, copies)
        behaviour = losses.behaviour(Sample(forward.seen[:, -self.spec.action_dim :], forward.log_prob))
        temperature, _, heat = self.temperature.update(temperature, behaviour["entropy"])
        return Foreseen(forward, temperature, {**behaviour, **heat.metrics})

    def policy(
        self,
        part: PolicyPart,
        critic: Critic,
        stats: Stats,
        batch: Transition | Batch,
        noise: Tensor,
        critic_copies: tuple[Tensor, ...] = (),
        foreseen: Foreseen | tuple[()] = (),
    ) -> tuple[PolicyPart, Metrics]:
        """Updates the actor, then the temperature with the entropy of the actor before its step.

        Args:
          part: what changes.
          critic: both online critics, stacked [2, ...].
          stats: their statistics.
          batch: [B, ...], rewards scaled.
          noise: [2B, A] standard normal.
          critic_copies: see `SACState`.
          foreseen: of a fused update, what `foresee` returned for the same actor and temperature, if it was called.
        """
        inputs = (critic, stats, part.temperature.params, batch, noise)
        if self.fused:
            foreseen = foreseen or self.foresee(part.temperature, part.actor.params, batch, noise, part.actor_copies)
            inputs = (foreseen.forward, *inputs, critic_copies)
            actor, found, ok, aux = self._descend(self.actor, part.actor, (), part.actor_copies, inputs)
            temperature, others, copies = foreseen.temperature, foreseen.metrics, found.copies
        else:
            actor, ok, aux = self.actor.update(part.actor, *inputs, scale=self._scale(part))
            temperature, _, found = self.temperature.update(part.temperature, aux.metrics["entropy"])
            others, copies = found.metrics, ()
        return PolicyPart(actor, temperature, self._rescale(part.scale, ok), copies), {**aux.metrics, **others}

    def next_policy(
        self, actor: Actor, stats: Stats, batch: Transition | Batch, noise: Tensor, copies: tuple[Tensor, ...] = ()
    ) -> Sample:
        """Returns what the policy does in a batch's next observations; see `losses.Losses.next_policy`."""
        if self.fused:
            return Gradients(self.loss).next_policy(actor, stats, batch, noise, copies)
        return self.loss.next_policy(actor, stats, batch, noise)

    def critics(
        self, part: CriticPart, policy: Sample, log_temperature: Tensor, batch: Transition | Batch
    ) -> tuple[CriticPart, Metrics]:
        """Updates the critics, then moves the target towards them, unless the gate is closed.

        Args:
          part: what changes.
          policy: see `next_policy`.
          log_temperature: ().
          batch: [B, ...], rewards scaled.
        """
        inputs = (policy, log_temperature, batch)
        if self.fused:
            inputs = (part.target, *inputs, part.critic_copies)
            critic, found, ok, aux = self._descend(self.critic, part.critic, part.target, part.critic_copies, inputs)
            target, copies = found.target, found.copies
        else:
            copies = ()
            goal = self.loss.critic_goal(part.target, part.critic.stats.target, *inputs)
            critic, ok, aux = self.critic.update(part.critic, goal, scale=self._scale(part))
            target = tree.where(ok, tree.lerp(part.target, critic.params, self.config.tau), part.target)
        return CriticPart(critic, target, self._rescale(part.scale, ok), copies), aux.metrics

    def _descend(
        self, step: Step, state: StepState, target: Critic | tuple[()], copies: tuple[Tensor, ...], inputs: tuple
    ) -> tuple[StepState, Descended, Tensor, Aux]:
        """Does what `step.update` and the target's average do, as one op behind the gradient."""
        gradients, ok, aux = step.gradient(state, *inputs)
        rate = self.rate(state.opt.count)
        kind = product_dtype(self.loss.dtype, state.opt.mu) if copies else None
        found = descend(state.params, target, state.opt, gradients, ok, rate, self.config.tau, kind, self.ranks)
        stats = tree.where(ok, aux.stats, state.stats)
        return StepState(found.params, stats, found.opt, gate.update(state.gate, ok)), found, ok, aux

    def _scale(self, part: PolicyPart | CriticPart) -> Tensor | None:
        return part.scale.scale if self.config.compute_dtype == "float16" else None

    def _rescale(self, state: LossScaleState, ok: Tensor) -> LossScaleState:
        return self.scaler.update(state, ok) if self.config.compute_dtype == "float16" else state


def make_updates(config: SACConfig, spec: EnvSpec, collectives: Collectives, fused: bool = False) -> Updates:
    """Builds the updates of a configuration for a task.

    Args:
      config: the algorithm.
      spec: sizes of observations and actions.
      collectives: how gradients meet those of other ranks.
      fused: take the gradients that are written out (`fused`) in place of `torch.func.grad` of the losses. They do
        not run under `torch.func.vmap`.

    Raises:
      ValueError: if `lr_decay_updates` is not set, or a fused gradient is to be scaled.
    """
    if fused and config.compute_dtype == "float16":
        raise ValueError("compute_dtype='float16': fused gradients know no loss scale")
    if config.lr_decay_updates == 0:
        raise ValueError("lr_decay_updates=0: a learner does not know the run's length; set its number of updates")
    loss = losses.make_losses(config, spec.action_dim)
    rate = schedules.warmup_cosine(
        config.lr_init, config.lr_peak, config.lr_end, config.lr_warmup_updates, config.lr_decay_updates
    )

    def step(
        loss: Loss, project: Callable[[tree.Tree], tree.Tree] | None = None, gradient: Gradient | None = None
    ) -> Step:
        wire = config.dp_gradient_wire_dtype
        return make_step(loss, optim.adam(rate), collectives, wire_dtype=wire, project=project, gradient=gradient)

    written = Gradients(loss) if fused else None

    return Updates(
        config=config,
        spec=spec,
        loss=loss,
        actor=step(loss.actor, networks.project, written and written.actor),
        critic=step(loss.critic, networks.project, written and written.critic),
        temperature=step(loss.temperature),
        scaler=loss_scale.dynamic(),
        rate=rate,
        ranks=collectives.size,
        fused=fused,
    )
