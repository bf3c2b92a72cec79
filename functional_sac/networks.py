"""FlashSAC's actor and critic as init/apply pairs over parameter pytrees (arXiv 2604.04539, section 4).

A network is `batch norm -> unit linear -> blocks -> RMS norm -> head`. Linear weights have rows of norm one
and no bias; after every optimizer step `project` restores the norms. Parameters and statistics are for one
network; the double critic stacks two along a leading axis and vmaps `critic`.
"""

from __future__ import annotations

from typing import NamedTuple

import chex
import torch
import torch.nn.functional as F
from torch import Tensor

from functional_sac.padding import padded, padded_rows
from functional_sl import keys, tree

BN_MOMENTUM = 0.01
BN_EPS = 1e-5
RMS_EPS = 1e-6
NORM_EPS = 1e-8
EXPANSION = 4
LOG_STD_MIN, LOG_STD_MAX = -10.0, 2.0


class BatchNorm(NamedTuple):
    """The affine map behind a batch norm of F features."""

    scale: Tensor  # [F]
    bias: Tensor  # [F]


class Block(NamedTuple):
    """An inverted residual block of width H."""

    w1: Tensor  # [4H, H]
    norm1: BatchNorm  # [4H]
    w2: Tensor  # [H, 4H]
    norm2: BatchNorm  # [H]


class Trunk(NamedTuple):
    """What actor and critic share: everything up to the head, for I inputs."""

    norm: BatchNorm  # [I]
    w: Tensor  # [H, I]
    blocks: tuple[Block, ...]
    post_scale: Tensor  # [H]


class Stats(NamedTuple):
    """Running statistics of all batch norms of a network, concatenated in the order of the layers: S features."""

    mean: Tensor  # [S]
    var: Tensor  # [S], unbiased


class Actor(NamedTuple):
    """Parameters of a policy over A action dimensions."""

    trunk: Trunk
    mean_w: Tensor  # [A, H]
    mean_b: Tensor  # [A]
    std_w: Tensor  # [A, H]
    std_b: Tensor  # [A]


class Critic(NamedTuple):
    """Parameters of one critic; the double critic has a leading axis [2] on every leaf."""

    trunk: Trunk
    w: Tensor  # [bins, H]
    b: Tensor  # [bins]


def init_actor(key: Tensor, observation_dim: int, action_dim: int, width: int, blocks: int) -> tuple[Actor, Stats]:
    """Returns orthogonal, projected actor parameters and fresh statistics."""
    trunk_key, mean_key, std_key = keys.split(key, 3)
    trunk, stats = _init_trunk(trunk_key, observation_dim, width, blocks)
    zeros = torch.zeros(action_dim, device=key.device)
    params = Actor(
        trunk=trunk,
        mean_w=_orthogonal(mean_key, action_dim, width),
        mean_b=zeros,
        std_w=_orthogonal(std_key, action_dim, width),
        std_b=zeros.clone(),
    )
    return project(params), stats


def init_critic(key: Tensor, input_dim: int, bins: int, width: int, blocks: int) -> tuple[Critic, Stats]:
    """Returns orthogonal, projected parameters and fresh statistics of one critic over [observation, action]."""
    trunk_key, head_key = keys.split(key, 2)
    trunk, stats = _init_trunk(trunk_key, input_dim, width, blocks)
    params = Critic(trunk=trunk, w=_orthogonal(head_key, bins, width), b=torch.zeros(bins, device=key.device))
    return project(params), stats


def actor(
    params: Actor, stats: Stats, observation: Tensor, *, training: bool, dtype: torch.dtype = torch.float32
) -> tuple[tuple[Tensor, Tensor], Stats]:
    """Maps observations to the mean and log standard deviation of the pre-tanh Gaussian.

    Args:
      params: actor parameters.
      stats: running batch-norm statistics.
      observation: [B, O] float32.
      training: normalise by the batch (and move the running statistics) instead of by the running statistics.
      dtype: compute type of the matrix products; parameters, statistics and outputs stay float32.

    Returns:
      ((mean [B, A], log_std [B, A] in (-10, 2)), statistics after the forward pass).
    """
    chex.assert_rank(observation, 2)
    h, stats = _trunk(params.trunk, stats, observation, training, dtype)
    mean = _linear(h, params.mean_w, dtype).to(observation.dtype) + params.mean_b
    raw = _linear(h, params.std_w, dtype).to(observation.dtype) + params.std_b
    return (mean, bounded(raw)), stats


def bounded(raw: Tensor) -> Tensor:
    """Returns the log standard deviation in (-10, 2) of a head's output."""
    return LOG_STD_MIN + 0.5 * (LOG_STD_MAX - LOG_STD_MIN) * (1.0 + torch.tanh(raw))


def critic(
    params: Critic,
    stats: Stats,
    observation: Tensor,
    action: Tensor,
    *,
    training: bool,
    dtype: torch.dtype = torch.float32,
) -> tuple[Tensor, Stats]:
    """Maps observation-action pairs to the log-probabilities of the return's bins.

    Args:
      params: parameters of one critic.
      stats: running batch-norm statistics.
      observation: [B, C] float32.
      action: [B, A] float32 in [-1, 1].
      training: as in `actor`.
      dtype: as in `actor`.

    Returns:
      (log-probabilities [B, bins] float32, statistics after the forward pass).
    """
    chex.assert_rank([observation, action], 2)
    h, stats = _trunk(params.trunk, stats, torch.cat([observation, action], -1), training, dtype)
    logits = _linear(h, params.w, dtype).to(observation.dtype) + params.b
    return torch.log_softmax(logits, -1), stats


def project(params: tree.Tree) -> tree.Tree:
    """Restores the norms of a network's parameters; leading axes (an ensemble) are free.

    Linear rows get norm one, batch norm's (scale, bias) jointly and RMS norm's scale get norm sqrt(F); head
    biases stay. A zero row stays zero.

    Args:
      params: `Actor` or `Critic`.

    Returns:
      Parameters of the same structure.
    """
    projected = {field: _unit_rows(x) for field, x in params._asdict().items() if field.endswith("w")}
    return params._replace(trunk=_project_trunk(params.trunk), **projected)


def _project_trunk(trunk: Trunk) -> Trunk:
    blocks = tuple(
        Block(_unit_rows(b.w1), _project_norm(b.norm1), _unit_rows(b.w2), _project_norm(b.norm2)) for b in trunk.blocks
    )
    scale = trunk.post_scale
    square = (scale * scale).sum(-1, keepdim=True)
    post_scale = scale * torch.sqrt(scale.shape[-1] / (square + NORM_EPS))
    return Trunk(_project_norm(trunk.norm), _unit_rows(trunk.w), blocks, post_scale)


def _unit_rows(w: Tensor) -> Tensor:
    return w / torch.linalg.vector_norm(w, dim=-1, keepdim=True).clamp_min(NORM_EPS)


def _project_norm(norm: BatchNorm) -> BatchNorm:
    square = (norm.scale * norm.scale + norm.bias * norm.bias).sum(-1, keepdim=True)
    factor = torch.sqrt(norm.scale.shape[-1] / (square + NORM_EPS))
    return BatchNorm(norm.scale * factor, norm.bias * factor)


def norm_widths(params: Trunk) -> list[int]:
    """Returns the features of each batch norm, in the order in which `Stats` concatenates them."""
    norms = [params.norm, *(norm for block in params.blocks for norm in (block.norm1, block.norm2))]
    return [norm.scale.shape[-1] for norm in norms]


def _trunk(params: Trunk, stats: Stats, x: Tensor, training: bool, dtype: torch.dtype) -> tuple[Tensor, Stats]:
    normalise = _BatchNorms(params, stats, training)
    h = _linear(normalise(params.norm, x), params.w, dtype)
    for block in params.blocks:
        y = torch.relu(normalise(block.norm1, _linear(h, block.w1, dtype)))
        h = h + torch.relu(normalise(block.norm2, _linear(y, block.w2, dtype)))
    return rms_norm(params.post_scale, h), normalise.stats(rows=x.shape[0])


def _linear(x: Tensor, w: Tensor, dtype: torch.dtype) -> Tensor:
    if x.is_cuda and torch.compiler.is_compiling():
        outputs = w.shape[0]
        x, w = padded(x), padded_rows(padded(w))
        return _product(x, w, dtype)[..., :outputs]
    return _product(x, w, dtype)


def _product(x: Tensor, w: Tensor, dtype: torch.dtype) -> Tensor:
    if dtype == torch.float32:  # keeps float64 inputs float64, for tests in higher precision
        return F.linear(x, w)
    return F.linear(x.to(dtype), w.to(dtype))


def moved(stats: Stats, mean: Tensor, inverse_std: Tensor, rows: int) -> Stats:
    """Returns running statistics after a batch of so many rows with this mean and biased inverse deviation [..., S]."""
    unbiased = (inverse_std**-2 - BN_EPS) * (rows / (rows - 1))
    return Stats(torch.lerp(stats.mean, mean, BN_MOMENTUM), torch.lerp(stats.var, unbiased, BN_MOMENTUM))


class _BatchNorms:
    """One forward pass through a trunk's batch norms (Ioffe and Szegedy 2015, arXiv 1502.03167).

    The biased batch variance normalises, the unbiased one enters the running average. The statistics of all
    layers move together at the end: two operations in place of two a layer.
    """

    def __init__(self, params: Trunk, stats: Stats, training: bool) -> None:
        widths = norm_widths(params)
        self._old, self._training = stats, training
        inverse_std = torch.rsqrt(stats.var + BN_EPS)
        self._running = iter(zip(stats.mean.split(widths), inverse_std.split(widths), strict=True))
        self._batch: list[tuple[Tensor, Tensor]] = []

    def __call__(self, params: BatchNorm, x: Tensor) -> Tensor:
        if not self._training:
            mean, inverse_std = next(self._running)
            slope = params.scale * inverse_std
            return torch.addcmul(params.bias - mean * slope, x.to(slope.dtype), slope).to(x.dtype)
        # Its derivative under vmap takes one type alone.
        wide = x.to(params.scale.dtype)
        y, *batch = torch.native_batch_norm(wide, params.scale, params.bias, None, None, True, 0.0, BN_EPS)
        self._batch.append(batch)
        return y.to(x.dtype)

    def stats(self, rows: int) -> Stats:
        if not self._training:
            return self._old
        mean, inverse_std = (torch.cat(parts).detach() for parts in zip(*self._batch, strict=True))
        return moved(self._old, mean, inverse_std, rows)


def rms_norm(scale: Tensor, x: Tensor) -> Tensor:
    """Returns x [..., H] divided by its root mean square and scaled, in the type of the scale."""
    x = x.to(scale.dtype)
    return x * torch.rsqrt((x * x).mean(-1, keepdim=True) + RMS_EPS) * scale


def _init_trunk(key: Tensor, input_dim: int, width: int, blocks: int) -> tuple[Trunk, Stats]:
    embed_key, *block_keys = keys.split(key, 1 + 2 * blocks)
    inner = EXPANSION * width
    params = Trunk(
        norm=_fresh_norm(input_dim, key.device),
        w=_orthogonal(embed_key, width, input_dim),
        blocks=tuple(
            Block(
                w1=_orthogonal(block_keys[2 * i], inner, width),
                norm1=_fresh_norm(inner, key.device),
                w2=_orthogonal(block_keys[2 * i + 1], width, inner),
                norm2=_fresh_norm(width, key.device),
            )
            for i in range(blocks)
        ),
        post_scale=torch.ones(width, device=key.device),
    )
    features = sum(norm_widths(params))
    stats = Stats(torch.zeros(features, device=key.device), torch.ones(features, device=key.device))
    return params, stats


def _orthogonal(key: Tensor, rows: int, columns: int) -> Tensor:
    """Saxe et al. 2014: the Q of a Gaussian matrix, its signs fixed by R's diagonal."""
    tall = rows >= columns
    shape = (rows, columns) if tall else (columns, rows)
    q, r = torch.linalg.qr(keys.normal(key, shape))
    q = q * torch.where(torch.diagonal(r, dim1=-2, dim2=-1) < 0, -1.0, 1.0)
    return q if tall else q.mT.contiguous()


def _fresh_norm(features: int, device: torch.device) -> BatchNorm:
    return BatchNorm(torch.ones(features, device=device), torch.zeros(features, device=device))
