"""The gradients of critics and actor written out layer by layer: the fast way to what `losses` defines.

Networks are stacked, so that both critics and both target critics go forward as one batch of four. Activations are
kept once, in the type of the products; weights are cast once an update; a trunk is an operator of its own in both
directions (`trunk`); inputs and heads are padded to multiples of eight, which matrix units want, with zeros that
change nothing. What follows the trunk is in `critic_heads`, `actor_head` and `frozen_networks`; `torch.func` only
differentiates the policy's density and the actor's loss in it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from functional_sac import distributions, networks
from functional_sac.fused import actor_head, critic_heads, frozen_networks, inputs, trunk
from functional_sac.fused.alignment import BLOCK_LEAVES, aligned
from functional_sac.losses import CriticStats, Losses
from functional_sac.networks import BN_EPS, Actor, BatchNorm, Block, Critic, Stats, Trunk
from functional_sac.transition import Transition, critic_view
from functional_sl import tree
from functional_sl.step import Aux

Send = Callable[[list[Tensor], Tensor], None]  # see `make_step`
Finish = Callable[[list[Tensor]], tuple[Tensor, list[Tensor]]]  # see `through_trunk`


def trunk_like(params: Trunk, found: list[Tensor], post_scale: Tensor) -> Trunk:
    """Returns the gradients of `aligned` leaves as a trunk like params, with that of the RMS norm's scale."""
    scale, bias, w, *rest = found
    blocks = (rest[i : i + BLOCK_LEAVES] for i in range(0, len(rest), BLOCK_LEAVES))
    return Trunk(
        norm=BatchNorm(scale, bias),
        w=w[..., : params.w.shape[-1]],
        blocks=tuple(Block(b[0], BatchNorm(*b[1:3]), b[3], BatchNorm(*b[4:])) for b in blocks),
        post_scale=post_scale,
    )


def through_trunk(
    dh: Tensor,
    leaves: list[Tensor],
    kept: list[Tensor],
    behind: list[Tensor],
    finish: Finish,
    send: Send | None,
) -> tuple[list[Tensor], Tensor, list[Tensor]]:
    """Goes backward through a trunk, and sends each block's gradients before those of the blocks below are computed.

    Args:
      dh: see `trunk.backward`.
      leaves: likewise.
      kept: likewise.
      behind: likewise.
      finish: takes what it comes to, and returns the loss and the gradients of the leaves behind the blocks, which go
        with the last block's.
      send: see `make_step`.

    Returns:
      (gradients of `leaves`, and what `finish` returned: loss, gradients).
    """
    if send is None:
        found = trunk.backward(dh, leaves, kept, behind)
        return found[: len(leaves)], *finish(found[len(leaves) :])
    *below, last = range(trunk.block_count(leaves))
    dh, *found = trunk.backward_block(dh, leaves, kept, last, behind)
    loss, of_behind = finish(found[BLOCK_LEAVES:])
    found = found[:BLOCK_LEAVES]
    send([*found, *of_behind], loss)
    for index in reversed(below):
        dh, *of_block = trunk.backward_block(dh, leaves, kept, index, [])
        send(of_block, loss)
        found = of_block + found
    return trunk.backward_input(dh, leaves, kept) + found, loss, of_behind


class Forward(NamedTuple):
    """What an update of the actor computes before it meets the critics."""

    leaves: list[Tensor]  # see `trunk.forward`
    kept: list[Tensor]  # what it returned
    raw: Tensor  # [B, 2A], means and raw deviations
    normal: Tensor  # [B, H], see `actor_head.Tape`
    w: Tensor  # [2A, H], likewise
    seen: Tensor  # [B, C + A], what the critics see: observations and the policy's actions
    log_prob: Tensor  # [B], of the actions


@dataclasses.dataclass(frozen=True)
class Gradients:
    """The gradients of `losses` in the parameters, as `(gradients, value, Aux)`; leaves have types of their own."""

    losses: Losses

    def critic(
        self,
        params: Critic,
        stats: CriticStats,
        target: Critic,
        policy: distributions.Sample,
        log_temperature: Tensor,
        batch: Transition | inputs.Batch,
        copies: Sequence[Tensor] = (),
        send: Send | None = None,
    ) -> tuple[Critic, Tensor, Aux]:
        """Returns what `losses.critic` towards `losses.critic_goal` comes to; arguments as there and in `make_step`.

        `copies` are the weights of both, `alignment.aligned`, where they are there already.
        """
        loss, lying = self.losses, inputs.batch(batch)
        x, batch = lying.critic_input(policy.action), lying.transition()
        *leaves, scale, w = list(copies) or aligned([params, target], product_dtype(loss.dtype, x))
        mean, inverse_std, *_, h = kept = trunk.forward(x, leaves, BN_EPS, params.b.shape[0])
        of_online = networks.moved(stats.online, mean[:2], inverse_std[:2], x.shape[0])
        of_target = networks.moved(stats.target, mean[2:], inverse_std[2:], x.shape[0])
        entropy_term = loss.entropy_term(policy, log_temperature)
        backup = critic_heads.Backup(batch.reward, batch.terminated, entropy_term, *loss.atoms, loss.discount)
        dh, behind = critic_heads.loss_gradient(h, scale, w, params, target, backup)
        of_trunk, value, of_behind = through_trunk(dh, leaves, kept, behind, critic_heads.finished, send)
        post_scale, *heads = of_behind
        own = trunk_like(params.trunk, of_trunk, post_scale)
        metrics = {"critic_loss": value, "max_entropy_bonus": entropy_term.amax()}
        return Critic(own, *heads), value, Aux(CriticStats(of_online, of_target), metrics)

    def actor_forward(
        self, params: Actor, batch: Transition | inputs.Batch, noise: Tensor, copies: Sequence[Tensor] = ()
    ) -> Forward:
        """Returns what `actor` needs and the critics have no part in; arguments as in `losses.actor`.

        `copies` are the actor's weights, `alignment.aligned`.
        """
        lying = inputs.batch(batch)
        # The next observations share the batch statistics, not the loss.
        x, batch = lying.actor_input(), lying.transition()
        rows = batch.reward.shape[0]
        *leaves, scale, w = list(copies) or _aligned(params, product_dtype(self.losses.dtype, x))
        kept = trunk.forward(x, leaves, BN_EPS, 1)
        raw, tape = actor_head.forward(kept[-1][:, :rows], scale, w, params, x.dtype)
        policy = _sample(raw, noise[:rows])
        seen = torch.cat([critic_view(batch.observation), policy.action], -1)
        return Forward(leaves, kept, raw, tape.normal, tape.w, seen, policy.log_prob)

    def actor(
        self,
        params: Actor,
        stats: Stats,
        forward: Forward,
        critic: Critic,
        critic_stats: Stats,
        log_temperature: Tensor,
        batch: Transition | inputs.Batch,
        noise: Tensor,
        critic_copies: Sequence[Tensor] = (),
        send: Send | None = None,
    ) -> tuple[Actor, Tensor, Aux]:
        """Returns what `losses.actor` comes to, but for the metrics of what the policy does, see `losses.behaviour`.

        Arguments are as there and in `make_step`, and what `actor_forward` left.
        `critic_copies` are those that `critic` takes.
        """
        batch = inputs.batch(batch).transition()
        mean, inverse_std, *_, h = forward.kept
        stacked, old = tree.map(lambda leaf: leaf.unsqueeze(0), (params.trunk, stats))
        new = networks.moved(old, mean, inverse_std, h.shape[1])
        weights = [leaf[: critic.b.shape[0]] for leaf in critic_copies] or aligned([critic], h.dtype)
        draw, found, metrics = self._raw_gradient(forward, critic, critic_stats, weights, log_temperature, batch, noise)
        tape = actor_head.Tape(h[:, : draw.shape[0]], forward.normal, forward.w)
        dh, behind = actor_head.backward(params, tape, draw)
        send_own = None if send is None else lambda leaves, loss: send([leaf.squeeze(0) for leaf in leaves], loss)
        of_trunk, _, (post_scale, *heads) = through_trunk(
            dh, forward.leaves, forward.kept, behind,
            lambda behind: (found, actor_head.finished(behind)), send_own,
        )  # fmt: skip
        own = Actor(trunk_like(stacked, of_trunk, post_scale), *heads)
        own, new = tree.map(lambda leaf: leaf.squeeze(0), (own, new))
        return own, found, Aux(new, metrics)

    def _raw_gradient(
        self,
        forward: Forward,
        critic: Critic,
        critic_stats: Stats,
        weights: list[Tensor],
        log_temperature: Tensor,
        batch: Transition,
        noise: Tensor,
    ) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        """Returns the gradient of `forward.raw`, the actor's loss and its metrics; `weights` are the critics'."""
        rows, actions = batch.reward.shape[0], noise.shape[-1]

        def sample(raw: Tensor) -> distributions.Sample:
            return _sample(raw, noise[:rows])

        def value(action: Tensor, log_prob: Tensor, q: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
            return self.losses.policy_value(distributions.Sample(action, log_prob), q, log_temperature, batch)

        atoms = self.losses.atoms
        q, slope = frozen_networks.lower_value(critic, critic_stats, weights, forward.seen, actions, *atoms)
        (daction, dlog_prob, dq), (found, metrics) = torch.func.grad_and_value(value, (0, 1, 2), has_aux=True)(
            forward.seen[:, -actions:], forward.log_prob, q
        )
        _, pullback = torch.func.vjp(sample, forward.raw)
        daction = daction + dq.unsqueeze(-1) * slope
        (draw,) = pullback(distributions.Sample(daction, dlog_prob))
        return draw, found, metrics

    def next_policy(
        self,
        actor: Actor,
        stats: Stats,
        batch: Transition | inputs.Batch,
        noise: Tensor,
        copies: Sequence[Tensor] = (),
    ) -> distributions.Sample:
        """Returns what `losses.next_policy` comes to; arguments as there, and `copies` as `actor` takes them."""
        lying = inputs.batch(batch)
        stacked = tree.map(lambda leaf: leaf.unsqueeze(0), (actor.trunk, stats))
        *leaves, scale, w = list(copies) or _aligned(actor, product_dtype(self.losses.dtype, lying.rows))
        h = frozen_networks.activations(*stacked, leaves, lying)
        return _sample(actor_head.forward(h, scale, w, actor, lying.rows.dtype)[0], noise)


def product_dtype(dtype: torch.dtype, x: Tensor) -> torch.dtype:
    """Returns the type of the products for tensors like x; float64 ones stay float64, for tests in higher precision."""
    return x.dtype if dtype == torch.float32 else dtype


def _aligned(actor: Actor, dtype: torch.dtype) -> list[Tensor]:
    return aligned([tree.map(lambda leaf: leaf.unsqueeze(0), actor)], dtype)


def _sample(raw: Tensor, noise: Tensor) -> distributions.Sample:
    """Returns actions by means and raw deviations side by side, [B, 2A]."""
    mean, deviation = raw.chunk(2, -1)
    return distributions.sample(mean, networks.bounded(deviation), noise)
