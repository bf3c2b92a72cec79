"""The gradients of critics and actor written out layer by layer: the fast way to what `losses` defines.

Networks are stacked, so that both critics and both target critics go forward as one batch of four. Activations are
kept once, in the type of the products; weights are cast once an update; a trunk is an operator of its own in both
directions (`trunk`); inputs and heads are padded to multiples of eight, which matrix units want, with zeros that
change nothing. What follows the trunk is differentiated by `torch.func.grad` as everywhere else.
"""

from __future__ import annotations

import dataclasses

import torch
import torch.nn.functional as F
from torch import Tensor

from functional_sac import networks, trunk
from functional_sac.losses import CriticStats, Losses
from functional_sac.networks import BN_EPS, BN_MOMENTUM, Actor, BatchNorm, Block, Critic, Stats, Trunk
from functional_sac.transition import Transition
from functional_sl import tree
from functional_sl.step import Aux


def aligned(params: Trunk, dtype: torch.dtype) -> list[Tensor]:
    """Returns the leaves of a stacked trunk for `trunk`: the input padded, matrices in the type of the products."""
    leaves = [*params.norm, networks.padded(params.w).to(dtype)]
    for w1, norm1, w2, norm2 in params.blocks:
        leaves += [w1.to(dtype), *norm1, w2.to(dtype), *norm2]
    return leaves


def gradients(params: Trunk, found: list[Tensor], post_scale: Tensor) -> Trunk:
    """Returns the gradients of `aligned` leaves as a trunk like params, with that of the RMS norm's scale."""
    scale, bias, w, *rest = found
    blocks = (rest[i : i + trunk.LEAVES] for i in range(0, len(rest), trunk.LEAVES))
    return Trunk(
        norm=BatchNorm(scale, bias),
        w=w[..., : params.w.shape[-1]],
        blocks=tuple(Block(b[0], BatchNorm(*b[1:3]), b[3], BatchNorm(*b[4:])) for b in blocks),
        post_scale=post_scale,
    )


def moved(stats: Stats, mean: Tensor, inverse_std: Tensor, rows: int) -> Stats:
    """Returns running statistics [N, S] after a batch of so many rows; `networks` has the rule."""
    unbiased = (inverse_std**-2 - BN_EPS) * (rows / (rows - 1))
    return Stats(torch.lerp(stats.mean, mean, BN_MOMENTUM), torch.lerp(stats.var, unbiased, BN_MOMENTUM))


@dataclasses.dataclass(frozen=True)
class Gradients:
    """The gradients of `losses` in the parameters, as `(gradients, value, Aux)`."""

    losses: Losses

    def critic(
        self,
        params: Critic,
        stats: CriticStats,
        target: Critic,
        actor: Actor,
        actor_stats: Stats,
        log_temperature: Tensor,
        batch: Transition,
        noise: Tensor,
    ) -> tuple[Critic, Tensor, Aux]:
        """Returns what `losses.critic` towards `losses.critic_goal` comes to; arguments as there."""
        rows, loss = batch.reward.shape[0], self.losses
        policy = loss.next_policy(actor, actor_stats, batch, noise)
        x = torch.cat(loss.critic_input(batch, policy), -1)
        dtype = _products(loss.dtype, x)
        x, leaves = networks.padded(x), aligned(tree.map(_joined, target.trunk, params.trunk), dtype)
        mean, inverse_std, *_, h = kept = trunk.forward(x, leaves, BN_EPS)
        of_target = moved(stats.target, mean[:2], inverse_std[:2], x.shape[0])
        of_online = moved(stats.online, mean[2:], inverse_std[2:], x.shape[0])
        after = _log_probs(h[:2, rows:], target.trunk.post_scale, target.w, target.b, dtype)
        probs, bonus = loss.backup(after, policy, log_temperature, batch)

        def value(*head: Tensor) -> Tensor:
            return loss.cross_entropy(probs, _log_probs(*head, dtype))

        head = (h[2:, :rows], params.trunk.post_scale, params.w, params.b)
        (dh, post_scale, w, b), found = torch.func.grad_and_value(value, argnums=(0, 1, 2, 3))(*head)
        # The next observations share the batch statistics, not the loss.
        own = gradients(params.trunk, trunk.backward(dh, x, leaves, kept), post_scale)
        aux = Aux(CriticStats(of_online, of_target), {"critic_loss": found, "max_entropy_bonus": bonus})
        return _like(params, Critic(own, w, b)), found, aux

    def actor(
        self,
        params: Actor,
        stats: Stats,
        critic: Critic,
        critic_stats: Stats,
        log_temperature: Tensor,
        batch: Transition,
        noise: Tensor,
    ) -> tuple[Actor, Tensor, Aux]:
        """Returns what `losses.actor` comes to; arguments as there."""
        rows, loss = batch.reward.shape[0], self.losses
        x = torch.cat([batch.observation.actor, batch.next_observation.actor])
        dtype = _products(loss.dtype, x)
        stacked, old = tree.map(lambda leaf: leaf.unsqueeze(0), (params.trunk, stats))
        x, leaves = networks.padded(x), aligned(stacked, dtype)
        mean, inverse_std, *_, h = kept = trunk.forward(x, leaves, BN_EPS)
        new = moved(old, mean, inverse_std, x.shape[0])

        def value(h: Tensor, post_scale: Tensor, *heads: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
            mean_w, mean_b, std_w, std_b = heads
            normal = networks.rms_norm(post_scale, h)
            raw = _product(normal, torch.cat([mean_w, std_w]), dtype) + torch.cat([mean_b, std_b])
            mean, deviation = raw.chunk(2, -1)
            return loss.policy_value(
                mean, networks.bounded(deviation), critic, critic_stats, log_temperature, batch, noise[:rows]
            )

        head = (h[0, :rows], params.trunk.post_scale, *params[1:])
        grads, (found, metrics) = torch.func.grad_and_value(value, argnums=tuple(range(6)), has_aux=True)(*head)
        dh, post_scale, *heads = grads
        of_trunk = gradients(stacked, trunk.backward(dh.unsqueeze(0), x, leaves, kept), post_scale.unsqueeze(0))
        own, new = tree.map(lambda leaf: leaf.squeeze(0), (of_trunk, new))
        return _like(params, Actor(own, *heads)), found, Aux(new, metrics)


def _joined(first: Tensor, second: Tensor) -> Tensor:
    return torch.cat([first, second])


def _products(dtype: torch.dtype, x: Tensor) -> torch.dtype:
    """Returns the type of the products; float64 inputs stay float64, for tests in higher precision."""
    return x.dtype if dtype == torch.float32 else dtype


def _log_probs(h: Tensor, post_scale: Tensor, w: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns log-probabilities [N, B, bins] of stacked critics from their last activations [N, B, H]."""
    normal = networks.rms_norm(post_scale.unsqueeze(1), h)
    return torch.log_softmax(_product(normal, w, dtype) + b.unsqueeze(1), -1)


def _product(x: Tensor, w: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns x [..., B, K] times w [..., M, K] transposed, rows of w padded, in the type of x."""
    wide = F.pad(w, (0, 0, 0, -w.shape[-2] % networks.ALIGNMENT)).to(dtype)
    return torch.matmul(x.to(dtype), wide.mT)[..., : w.shape[-2]].to(x.dtype)


def _like(params: tree.Tree, gradients: tree.Tree) -> tree.Tree:
    return tree.map(lambda p, g: g.to(p.dtype), params, gradients)
