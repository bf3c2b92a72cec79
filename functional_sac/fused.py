"""The gradients of critics and actor written out layer by layer: the fast way to what `losses` defines.

Networks are stacked, so that both critics and both target critics go forward as one batch of four. Activations are
kept once, in the type of the products; weights are cast once an update; batch norm is an op of its own in both
directions (`batch_norm`); inputs and heads are padded to multiples of eight, which matrix units want, with zeros that
change nothing. What follows the trunk is differentiated by `torch.func.grad` as everywhere else.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from functional_sac import batch_norm, critic_heads, distributions, frozen_critics, networks
from functional_sac.losses import CriticStats, Losses
from functional_sac.networks import BN_EPS, BN_MOMENTUM, Actor, BatchNorm, Block, Critic, Stats, Trunk
from functional_sac.transition import Transition, critic_view
from functional_sl import tree
from functional_sl.step import Aux


class Normalised(NamedTuple):
    """A batch norm's input and what it was normalised by."""

    x: Tensor  # [N, B, F]
    mean: Tensor  # [N, F]
    inverse_std: Tensor  # [N, F]


class BlockTape(NamedTuple):
    """What a block's backward pass reads."""

    h: Tensor  # [N, B, H], its input
    first: Normalised
    y: Tensor  # [N, B, 4H], after the first ReLU
    second: Normalised


class Tape(NamedTuple):
    """What a trunk's backward pass reads."""

    first: Normalised
    y: Tensor  # [N, B, I], the normalised input
    blocks: tuple[BlockTape, ...]


def aligned(trunk: Trunk, dtype: torch.dtype) -> Trunk:
    """Returns a stacked trunk with its input padded and its matrices in the type of the products."""
    (scale, bias), w = (networks.padded(x) for x in trunk.norm), networks.padded(trunk.w).to(dtype)
    blocks = tuple(block._replace(w1=block.w1.to(dtype), w2=block.w2.to(dtype)) for block in trunk.blocks)
    return Trunk(BatchNorm(scale, bias), w, blocks, trunk.post_scale)


def forward(trunk: Trunk, stats: Stats, x: Tensor) -> tuple[Tensor, Stats, Tape]:
    """Takes N stacked networks through a trunk, normalising by the batch.

    Args:
      trunk: as `aligned` returns it, leaves [N, ...].
      stats: running statistics [N, S].
      x: [B, I], the common input, not padded.

    Returns:
      (activations before the RMS norm [N, B, H], moved statistics, what `backward` reads).
    """
    inputs, dtype = x.shape[-1], trunk.w.dtype
    x = networks.padded(x).expand(trunk.w.shape[0], -1, -1)
    y, mean, inverse_std = batch_norm.forward(x, *trunk.norm, None, False, dtype, BN_EPS)
    moments = [(mean[:, :inputs], inverse_std[:, :inputs])]
    first, h, blocks = Normalised(x, mean, inverse_std), torch.bmm(y, trunk.w.mT), []
    for block in trunk.blocks:
        raw = torch.bmm(h, block.w1.mT)
        inner, *one = batch_norm.forward(raw, *block.norm1, None, True, dtype, BN_EPS)
        back = torch.bmm(inner, block.w2.mT)
        out, *two = batch_norm.forward(back, *block.norm2, h, True, dtype, BN_EPS)
        blocks.append(BlockTape(h, Normalised(raw, *one), inner, Normalised(back, *two)))
        moments += [one, two]
        h = out
    return h, _moved(stats, moments, x.shape[1]), Tape(first, y, tuple(blocks))


def backward(trunk: Trunk, tape: Tape, dh: Tensor, inputs: int) -> Trunk:
    """Returns the gradients of a trunk, without that of the RMS norm behind it (zeros).

    Args:
      trunk: as given to `forward`.
      tape: of that pass.
      dh: [N, B, H], of its result.
      inputs: I, the width of the input before it was padded.
    """
    blocks = []
    for block, saved in zip(reversed(trunk.blocks), reversed(tape.blocks), strict=True):
        d, *norm2 = _unnormalise(dh, saved.second, block.norm2)
        w2 = torch.bmm(d.mT, saved.y)
        d, *norm1 = _unnormalise(torch.bmm(d, block.w2), saved.first, block.norm1)
        w1 = torch.bmm(d.mT, saved.h)
        dh = torch.baddbmm(dh, d, block.w1)
        blocks.append(Block(w1, BatchNorm(*norm1), w2, BatchNorm(*norm2)))
    w = torch.bmm(dh.mT, tape.y)[..., :inputs]
    _, scale, bias = batch_norm.backward(
        torch.bmm(dh, trunk.w), tape.first.x, *trunk.norm, *tape.first[1:], False, False
    )
    norm = BatchNorm(scale[:, :inputs], bias[:, :inputs])
    return Trunk(norm, w, tuple(reversed(blocks)), torch.zeros_like(trunk.post_scale))


@dataclasses.dataclass(frozen=True)
class Gradients:
    """The gradients of `losses` in the parameters, as `(gradients, value, Aux)`."""

    losses: Losses

    def critic(
        self,
        params: Critic,
        stats: CriticStats,
        target: Critic,
        policy: distributions.Sample,
        log_temperature: Tensor,
        batch: Transition,
    ) -> tuple[Critic, Tensor, Aux]:
        """Returns what `losses.critic` towards `losses.critic_goal` comes to; arguments as there."""
        loss = self.losses
        x = torch.cat(loss.critic_input(batch, policy), -1)
        dtype = _products(loss.dtype, x)
        four = aligned(tree.map(_joined, params.trunk, target.trunk), dtype)
        h, moved, tape = forward(four, tree.map(_joined, stats.online, stats.target), x)
        of_online, of_target = (tree.map(lambda leaf, i=i: leaf[i : i + 2], moved) for i in (0, 2))
        entropy_term = loss.entropy_term(policy, log_temperature)
        backup = critic_heads.Backup(batch.reward, batch.terminated, entropy_term, *loss.atoms, loss.discount)
        head = critic_heads.loss(h, params, target, backup)
        trunk = backward(*tree.map(lambda leaf: leaf[:2], (four, tape)), head.h, x.shape[-1])
        trunk = trunk._replace(post_scale=head.post_scale)
        aux = Aux(
            CriticStats(of_online, of_target), {"critic_loss": head.loss, "max_entropy_bonus": entropy_term.amax()}
        )
        return _like(params, Critic(trunk, head.w, head.b)), head.loss, aux

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
        trunk = aligned(tree.map(lambda leaf: leaf.unsqueeze(0), params.trunk), dtype)
        h, moved, tape = forward(trunk, tree.map(lambda leaf: leaf.unsqueeze(0), stats), x)

        def sample(h: Tensor, post_scale: Tensor, *heads: Tensor) -> distributions.Sample:
            return _sample(h, post_scale, heads, noise[:rows], dtype)

        def value(action: Tensor, log_prob: Tensor, q: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
            return loss.policy_value(distributions.Sample(action, log_prob), q, log_temperature, batch)

        policy, pullback = torch.func.vjp(sample, h[0, :rows], params.trunk.post_scale, *params[1:])
        seen = torch.cat([critic_view(batch.observation), policy.action], -1)
        actions = policy.action.shape[-1]
        q, slope = frozen_critics.lower_value(critic, critic_stats, seen, actions, dtype, *loss.atoms)
        (daction, dlog_prob, dq), (found, metrics) = torch.func.grad_and_value(value, (0, 1, 2), has_aux=True)(
            *policy, q
        )
        daction = daction + dq.unsqueeze(-1) * slope
        dh, post_scale, *heads = pullback(distributions.Sample(daction, dlog_prob))
        found_trunk = backward(trunk, tape, F.pad(dh, (0, 0, 0, rows)).unsqueeze(0), x.shape[-1])
        own = tree.map(lambda leaf: leaf.squeeze(0), found_trunk)._replace(post_scale=post_scale)
        return _like(params, Actor(own, *heads)), found, Aux(tree.map(lambda leaf: leaf.squeeze(0), moved), metrics)

    def next_policy(self, actor: Actor, stats: Stats, batch: Transition, noise: Tensor) -> distributions.Sample:
        """Returns what `losses.next_policy` comes to; arguments as there."""
        x = batch.next_observation.actor
        dtype = _products(self.losses.dtype, x)
        h = frozen_critics.activations(*tree.map(lambda leaf: leaf.unsqueeze(0), (actor.trunk, stats)), x, dtype)
        return _sample(h[0], actor.trunk.post_scale, actor[1:], noise, dtype)


def _joined(first: Tensor, second: Tensor) -> Tensor:
    return torch.cat([first, second])


def _products(dtype: torch.dtype, x: Tensor) -> torch.dtype:
    """Returns the type of the products; float64 inputs stay float64, for tests in higher precision."""
    return x.dtype if dtype == torch.float32 else dtype


def _sample(
    h: Tensor, post_scale: Tensor, heads: tuple[Tensor, ...], noise: Tensor, dtype: torch.dtype
) -> distributions.Sample:
    """Samples a policy from its last activations [B, H]; both heads are one product."""
    mean_w, mean_b, std_w, std_b = heads
    normal = networks.rms_norm(post_scale, h)
    raw = _product(normal, torch.cat([mean_w, std_w]), dtype) + torch.cat([mean_b, std_b])
    mean, deviation = raw.chunk(2, -1)
    return distributions.sample(mean, networks.bounded(deviation), noise)


def _unnormalise(dy: Tensor, saved: Normalised, norm: BatchNorm) -> tuple[Tensor, Tensor, Tensor]:
    return batch_norm.backward(dy, saved.x, *norm, saved.mean, saved.inverse_std, True, True)


def _moved(stats: Stats, moments: list[tuple[Tensor, Tensor]], rows: int) -> Stats:
    mean, inverse_std = (torch.cat(parts, -1) for parts in zip(*moments, strict=True))
    unbiased = (inverse_std**-2 - BN_EPS) * (rows / (rows - 1))
    return Stats(torch.lerp(stats.mean, mean, BN_MOMENTUM), torch.lerp(stats.var, unbiased, BN_MOMENTUM))


def _product(x: Tensor, w: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns x [..., B, K] times w [..., M, K] transposed, rows of w padded, in the type of x."""
    wide = F.pad(w, (0, 0, 0, -w.shape[-2] % networks.ALIGNMENT)).to(dtype)
    return torch.matmul(x.to(dtype), wide.mT)[..., : w.shape[-2]].to(x.dtype)


def _like(params: tree.Tree, gradients: tree.Tree) -> tree.Tree:
    return tree.map(lambda p, g: g.to(p.dtype), params, gradients)
