"""FlashSAC's three losses (arXiv 2604.04539; where paper and official code differ, the official code's numbers).

A loss is `loss(params, stats, *frozen, batch, noise) -> (0-d value, Aux)`, differentiated in `params` alone. It
knows no optimizer, no rank and no graph. The noise comes in as an argument, so a recorded draw replays exactly.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import torch
from torch import Tensor

from functional_sac import distributions, networks, value
from functional_sac.config import SACConfig
from functional_sac.networks import Actor, Critic, Stats
from functional_sac.transition import Transition, critic_view
from functional_sl import tree
from functional_sl.step import Aux

METRICS = (
    "actor_loss", "critic_loss", "entropy", "max_entropy_bonus", "mean_action", "q", "temperature", "temperature_loss",
)  # fmt: skip


class CriticStats(NamedTuple):
    """Batch-norm statistics of both ensembles, each stacked [2, ...]; the critic's loss moves both."""

    online: Stats
    target: Stats


class Goal(NamedTuple):
    """What the critics are drawn to."""

    probs: Tensor  # [B, bins], the projected Bellman target
    observation: Tensor  # [2B, C], the critics' input: observations, then next observations
    action: Tensor  # [2B, A], the batch's actions, then the policy's next ones
    target_stats: Stats  # of the target critics, stacked [2, ...], after their forward
    max_entropy_bonus: Tensor  # ()


def ensemble(
    params: Critic, stats: Stats, observation: Tensor, action: Tensor, *, training: bool, dtype: torch.dtype
) -> tuple[Tensor, Stats]:
    """Applies two stacked critics to the same input: log-probabilities [2, B, bins] and statistics [2, ...]."""

    def member(params: Critic, stats: Stats) -> tuple[Tensor, Stats]:
        return networks.critic(params, stats, observation, action, training=training, dtype=dtype)

    leaves, structure = tree.flatten((params, stats))
    if observation.device.type == "cpu" and not torch.compiler.is_compiling():
        # Eagerly on a CPU two plain passes beat a batched one, whose batch norm copies to transpose.
        members = zip(*(leaf.unbind(0) for leaf in leaves), strict=True)
        return tree.stack([member(*tree.unflatten(structure, leaves)) for leaves in members])
    # vmap takes flat lists faster than nested NamedTuples.
    return torch.func.vmap(lambda leaves: member(*tree.unflatten(structure, leaves)))(leaves)


@dataclasses.dataclass(frozen=True)
class Losses:
    """The critic's goal and the three losses over one static configuration."""

    config: SACConfig
    dtype: torch.dtype  # of the matrix products
    entropy_goal: float  # nats

    def critic_goal(
        self,
        target: Critic,
        target_stats: Stats,
        policy: distributions.Sample,
        log_temperature: Tensor,
        batch: Transition,
    ) -> Goal:
        """Returns the projected Bellman target of the more pessimistic target critic; nothing is differentiated.

        Args:
          target: both target critics, stacked [2, ...]; their forward normalises by the batch.
          target_stats: their statistics, which it moves.
          policy: see `next_policy`.
          log_temperature: ().
          batch: [B, ...], rewards scaled.
        """
        rows = batch.reward.shape[0]
        observation, action = self.critic_input(batch, policy)
        log_probs, target_stats = ensemble(target, target_stats, observation, action, training=True, dtype=self.dtype)
        probs, bonus = self.backup(log_probs[:, rows:], policy, log_temperature, batch)
        return Goal(probs, observation, action, target_stats, bonus)

    def next_policy(self, actor: Actor, stats: Stats, batch: Transition, noise: Tensor) -> distributions.Sample:
        """Returns what the policy does in the next observations [B, ...], by its running statistics.

        Each row stands by itself. `noise` is standard normal [B, A].
        """
        after = batch.next_observation.actor
        (mean, log_std), _ = networks.actor(actor, stats, after, training=False, dtype=self.dtype)
        return distributions.sample(mean, log_std, noise)

    def critic_input(self, batch: Transition, policy: distributions.Sample) -> tuple[Tensor, Tensor]:
        """Returns the observations [2B, C] and actions [2B, A] that critics share: now, then next."""
        observation = torch.cat([critic_view(batch.observation), critic_view(batch.next_observation)])
        return observation, torch.cat([batch.action, policy.action])

    def backup(
        self, log_probs: Tensor, policy: distributions.Sample, log_temperature: Tensor, batch: Transition
    ) -> tuple[Tensor, Tensor]:
        """Returns the projected target [B, bins] of the target critics' [2, B, bins], and the largest entropy term."""
        support = self._atoms(log_probs)
        chosen = value.pessimistic(log_probs, support)
        entropy_term = self.entropy_term(policy, log_temperature)
        probs = value.bellman_target(
            torch.exp(chosen), batch.reward, batch.terminated, entropy_term, support, discount=self.discount
        )
        return probs, entropy_term.amax()

    def entropy_term(self, policy: distributions.Sample, log_temperature: Tensor) -> Tensor:
        """Returns what entropy takes from the next values [B]: the temperature times the log-probability."""
        return torch.exp(log_temperature) * policy.log_prob

    def cross_entropy(self, probs: Tensor, log_probs: Tensor) -> Tensor:
        """Returns the cross-entropy () of critics' [2, B, bins] to targets [B, bins], meaned over critics and rows."""
        return -(probs * log_probs).sum(-1).mean()

    def critic(self, params: Critic, stats: CriticStats, goal: Goal) -> tuple[Tensor, Aux]:
        """Cross-entropy of both critics to the goal, meaned over critics and rows.

        Args:
          params: both online critics, stacked [2, ...]; their forward normalises by the batch.
          stats: statistics of the online critics (which it moves) and of the target critics (which the goal moved).
          goal: see `critic_goal`.
        """
        rows = goal.probs.shape[0]
        log_probs, online = ensemble(
            params, stats.online, goal.observation, goal.action, training=True, dtype=self.dtype
        )
        loss = self.cross_entropy(goal.probs, log_probs[:, :rows])
        metrics = {"critic_loss": loss, "max_entropy_bonus": goal.max_entropy_bonus}
        return loss, Aux(CriticStats(online, goal.target_stats), metrics)

    def actor(
        self,
        params: Actor,
        stats: Stats,
        critic: Critic,
        critic_stats: Stats,
        log_temperature: Tensor,
        batch: Transition,
        noise: Tensor,
    ) -> tuple[Tensor, Aux]:
        """Mean of temperature times log-probability minus the lower critic's value, plus behaviour cloning.

        Args:
          params: policy parameters.
          stats: the policy's statistics.
          critic: both online critics, stacked [2, ...], evaluated with running statistics.
          critic_stats: their statistics.
          log_temperature: ().
          batch: [B, ...].
          noise: [2B, A] standard normal: the next observations share the batch statistics, not the loss.
        """
        rows = batch.reward.shape[0]
        observation = torch.cat([batch.observation.actor, batch.next_observation.actor])
        (mean, log_std), stats = networks.actor(params, stats, observation, training=True, dtype=self.dtype)
        policy = distributions.sample(mean[:rows], log_std[:rows], noise[:rows])
        observed = critic_view(batch.observation)
        log_probs, _ = ensemble(critic, critic_stats, observed, policy.action, training=False, dtype=self.dtype)
        q = value.expectation(log_probs, self._atoms(log_probs)).amin(0)
        loss, metrics = self.policy_value(policy, q, log_temperature, batch)
        return loss, Aux(stats, {**metrics, **behaviour(policy)})

    def policy_value(
        self, policy: distributions.Sample, q: Tensor, log_temperature: Tensor, batch: Transition
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Returns the actor's loss and metrics for what the policy does [B, ...] and its value q [B]; see `actor`."""
        action, log_prob = policy
        loss = (torch.exp(log_temperature) * log_prob - q).mean()
        if self.config.bc_alpha > 0:
            loss = loss + self.config.bc_alpha * q.abs().mean().detach() * ((action - batch.action) ** 2).mean()
        return loss, {"actor_loss": loss, "q": q.mean()}

    def temperature(self, log_temperature: Tensor, stats: tuple[()], entropy: Tensor) -> tuple[Tensor, Aux]:
        """Drives the policy's entropy () to the target: `temperature * (entropy - target)`."""
        temperature = torch.exp(log_temperature)
        loss = temperature * (entropy - self.entropy_goal)
        return loss, Aux(stats, {"temperature_loss": loss, "temperature": temperature})

    @property
    def atoms(self) -> tuple[float, float]:
        """The lowest and the highest atom."""
        return self.config.min_value, self.config.max_value

    @property
    def discount(self) -> float:
        """Of what follows the n steps of a transition."""
        return self.config.gamma**self.config.n_step

    def _atoms(self, like: Tensor) -> Tensor:
        return value.support(*self.atoms, self.config.bins, like.device).to(like.dtype)


def make_losses(config: SACConfig, action_dim: int) -> Losses:
    """Returns the losses of a configuration."""
    goal = distributions.target_entropy(action_dim, config.target_sigma)
    return Losses(config, getattr(torch, config.compute_dtype), goal)


def behaviour(policy: distributions.Sample) -> dict[str, Tensor]:
    """Returns entropy and mean action, both (), of what a policy does [B, ...], whatever it is worth."""
    # Compiled, a row's mean is one more sum beside its log-probability; a mean over all is two kernels.
    return {"entropy": -policy.log_prob.mean(), "mean_action": policy.action.mean(-1).mean()}
