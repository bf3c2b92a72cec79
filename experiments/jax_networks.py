"""FlashSAC's networks in JAX, for the learner that the functional one is compared with.

The mathematics is that of `functional_sac.networks`; parameters have the order of its trees' leaves.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

BN_MOMENTUM, BN_EPS, RMS_EPS, NORM_EPS = 0.01, 1e-5, 1e-6, 1e-8
LOG_STD_MIN, LOG_STD_MAX = -10.0, 2.0


class Norm(NamedTuple):
    """The affine map of a batch norm."""

    scale: Array  # [F]
    bias: Array  # [F]


class Block(NamedTuple):
    """An inverted residual block of width H."""

    w1: Array  # [4H, H]
    norm1: Norm
    w2: Array  # [H, 4H]
    norm2: Norm


class Trunk(NamedTuple):
    """Everything below the heads."""

    norm: Norm
    w: Array  # [H, I]
    blocks: tuple[Block, ...]
    post_scale: Array  # [H]


class Actor(NamedTuple):
    """A tanh Gaussian policy."""

    trunk: Trunk
    mean_w: Array  # [A, H]
    mean_b: Array  # [A]
    std_w: Array  # [A, H]
    std_b: Array  # [A]


class Critic(NamedTuple):
    """A critic; the double critic has a leading axis [2]."""

    trunk: Trunk
    w: Array  # [bins, H]
    b: Array  # [bins]


class Stats(NamedTuple):
    """Running statistics of a network's batch norms, concatenated."""

    mean: Array  # [S]
    var: Array  # [S]


@dataclasses.dataclass(frozen=True)
class Networks:
    """The forward passes; each takes parameters and statistics, and returns the statistics after it.

    Attributes:
      bfloat16: whether matrix products are in BF16.
      precision: of float32 products on a GPU: HIGHEST for full float32, DEFAULT for TF32.
    """

    bfloat16: bool
    precision: jax.lax.Precision

    def actor(self, params: Actor, stats: Stats, x: Array, training: bool) -> tuple[tuple[Array, Array], Stats]:
        """Returns mean and log standard deviation [B, A] for observations [B, O]."""
        h, stats = self._trunk(params.trunk, stats, x, training)
        mean = self._linear(h, params.mean_w).astype(x.dtype) + params.mean_b
        raw = self._linear(h, params.std_w).astype(x.dtype) + params.std_b
        return (mean, LOG_STD_MIN + 0.5 * (LOG_STD_MAX - LOG_STD_MIN) * (1.0 + jnp.tanh(raw))), stats

    def critics(
        self, params: Critic, stats: Stats, observation: Array, action: Array, training: bool
    ) -> tuple[Array, Stats]:
        """Returns both critics' log-probabilities of the bins [2, B, bins]."""
        x = jnp.concatenate([observation, action], -1)

        def member(params: Critic, stats: Stats) -> tuple[Array, Stats]:
            h, stats = self._trunk(params.trunk, stats, x, training)
            return jax.nn.log_softmax(self._linear(h, params.w).astype(x.dtype) + params.b), stats

        return jax.vmap(member)(params, stats)

    def _trunk(self, params: Trunk, stats: Stats, x: Array, training: bool) -> tuple[Array, Stats]:
        norms = [params.norm, *(norm for block in params.blocks for norm in (block.norm1, block.norm2))]
        edges = np.cumsum([len(norm.scale) for norm in norms])[:-1]
        running, batch = iter(zip(jnp.split(stats.mean, edges), jnp.split(stats.var, edges), strict=True)), []

        def normalise(norm: Norm, x: Array) -> Array:
            wide = x.astype(norm.scale.dtype)
            mean, var = next(running)
            if training:
                mean = wide.mean(0)
                var = jnp.maximum((wide * wide).mean(0) - mean * mean, 0.0)
                batch.append((mean, var))
            return ((wide - mean) * (norm.scale * jax.lax.rsqrt(var + BN_EPS)) + norm.bias).astype(x.dtype)

        rows = len(x)
        h = self._linear(normalise(params.norm, x), params.w)
        for block in params.blocks:
            y = jax.nn.relu(normalise(block.norm1, self._linear(h, block.w1)))
            h = h + jax.nn.relu(normalise(block.norm2, self._linear(y, block.w2)))
        h = h.astype(params.post_scale.dtype)
        h = h * jax.lax.rsqrt((h * h).mean(-1, keepdims=True) + RMS_EPS) * params.post_scale
        if training:
            mean, var = (jnp.concatenate(parts) for parts in zip(*batch, strict=True))
            moved = Stats(mean, var * (rows / (rows - 1)))
            stats = jax.tree.map(lambda old, new: old + BN_MOMENTUM * (new - old), stats, moved)
        return h, stats

    def _linear(self, x: Array, w: Array) -> Array:
        if self.bfloat16:
            x, w = x.astype(jnp.bfloat16), w.astype(jnp.bfloat16)
        return jnp.matmul(x, w.T, precision=self.precision)


def sample(mean: Array, log_std: Array, noise: Array) -> tuple[Array, Array]:
    """Returns squashed actions [B, A] and their log-probabilities [B]."""
    u = mean + jnp.exp(log_std) * noise
    gaussian = -0.5 * noise * noise - log_std - 0.5 * math.log(2.0 * math.pi)
    jacobian = 2.0 * (math.log(2.0) - u - jax.nn.softplus(-2.0 * u))
    return jnp.tanh(u), (gaussian - jacobian).sum(-1)


def project(params: Any) -> Any:
    """Restores the norms of an actor's or critics' parameters; a temperature stays."""
    if not isinstance(params, (Actor, Critic)):
        return params
    heads = {name: _unit(x) for name, x in params._asdict().items() if name.endswith("w")}
    trunk = params.trunk
    blocks = tuple(
        Block(_unit(b.w1), _project_norm(b.norm1), _unit(b.w2), _project_norm(b.norm2)) for b in trunk.blocks
    )
    square = (trunk.post_scale**2).sum(-1, keepdims=True)
    post_scale = trunk.post_scale * jnp.sqrt(trunk.post_scale.shape[-1] / (square + NORM_EPS))
    return params._replace(trunk=Trunk(_project_norm(trunk.norm), _unit(trunk.w), blocks, post_scale), **heads)


def _unit(w: Array) -> Array:
    return w / jnp.maximum(jnp.linalg.norm(w, axis=-1, keepdims=True), NORM_EPS)


def _project_norm(norm: Norm) -> Norm:
    square = (norm.scale**2 + norm.bias**2).sum(-1, keepdims=True)
    factor = jnp.sqrt(norm.scale.shape[-1] / (square + NORM_EPS))
    return Norm(norm.scale * factor, norm.bias * factor)
