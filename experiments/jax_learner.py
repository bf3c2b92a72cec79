"""FlashSAC's cycle as one `jax.jit`, for comparison: the usual JAX style, no kernel of its own.

The mathematics is that of `functional_sac.cycle` in the official order, the gate on finite gradients included;
parameters have the order of its trees' leaves. The double critic is a vmap, XLA fuses what it can.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from experiments.jax_networks import Actor, Block, Critic, Networks, Norm, Stats, Trunk, project, sample
from functional_sac.config import SACConfig
from functional_sac.cycle import SACState, with_actor
from functional_sac.envs.env import EnvSpec
from functional_sac.replay import fields
from functional_sl import tree

B1, B2, ADAM_EPS = 0.9, 0.999, 1e-8


class Part(NamedTuple):
    """What one optimizer changes, with Adam's moments."""

    params: Any
    stats: Any
    count: Array  # () int32
    mu: Any
    nu: Any
    skipped: Array  # () int32


class State(NamedTuple):
    """Everything that learning changes."""

    key: Array
    actor: Part
    critic: Part  # statistics: of the critics, of their targets
    target: Critic
    temperature: Part


def from_torch(state: SACState, config: SACConfig) -> State:
    """Copies a fresh functional learner; leaves are matched by their order."""
    norm = Norm(0, 0)
    trunk = Trunk(norm, 0, (Block(0, norm, 0, norm),) * config.num_blocks, 0)
    actor, critic = Actor(trunk, 0, 0, 0, 0), Critic(trunk, 0, 0)

    def copy(template: Any, values: tree.Tree) -> Any:
        leaves = [jnp.asarray(leaf.cpu().numpy()) for leaf in tree.leaves(values)]
        return jax.tree.unflatten(jax.tree.structure(template), leaves)

    def part(template: Any, stats: Any, values: Any) -> Part:
        params = copy(template, values.params)
        zeros, count = jax.tree.map(jnp.zeros_like, params), jnp.zeros((), jnp.int32)
        return Part(params, copy(stats, values.stats), count, zeros, jax.tree.map(jnp.copy, zeros), jnp.copy(count))

    pair = (Stats(0, 0), Stats(0, 0))
    key = jax.random.wrap_key_data(jnp.asarray(state.key.cpu().numpy().astype(np.uint32)))
    return State(
        key, part(actor, Stats(0, 0), state.actor), part(critic, pair, state.critic), copy(critic, state.target),
        part(0, (), state.temperature),
    )  # fmt: skip


@dataclasses.dataclass(frozen=True)
class JaxLearner:
    """The pure functions of one configuration.

    Attributes:
      config: the algorithm; `compute_dtype` is float32 or bfloat16.
      spec: sizes.
      precision: of float32 products on a GPU: HIGHEST for full float32, DEFAULT for TF32.
    """

    config: SACConfig
    spec: EnvSpec
    precision: jax.lax.Precision = jax.lax.Precision.HIGHEST

    @property
    def _networks(self) -> Networks:
        return Networks(self.config.compute_dtype == "bfloat16", self.precision)

    def cycle(self, state: State, replay: Array, size: Array, divisor: Array) -> tuple[State, dict[str, Array]]:
        """Makes K updates with their sampling.

        Args:
          state: the learner.
          replay: [capacity, width] packed rows.
          size: () int32, rows that hold a transition.
          divisor: () of the rewards.
        """
        key, rows, noise = self.sample(state.key, replay, size)
        return self.updates(state._replace(key=key), rows, noise, divisor)

    def updates(self, state: State, rows: Array, noise: Array, divisor: Array) -> tuple[State, dict[str, Array]]:
        """Makes K updates on rows [K, B, width] with noise [K, 3B, A]; metrics are means over them."""
        history = []
        for k, acts in enumerate(with_actor(self.config, 0)):
            state, metrics = self.update(state, rows[k], noise[k], divisor, acts)
            history.append(metrics)
        names = sorted({name for metrics in history for name in metrics})
        return state, {name: jnp.stack([m[name] for m in history if name in m]).mean(0) for name in names}

    def sample(self, key: Array, replay: Array, size: Array) -> tuple[Array, Array, Array]:
        """Returns the next key, the rows [K, B, width] and the noise [K, 3B, A] of a cycle."""
        k, b = self.config.updates_per_step, self.config.batch_size
        key, rows_key, noise_key = jax.random.split(key, 3)
        indices = jax.random.randint(rows_key, (k * b,), 0, size, jnp.int32)
        noise = jax.random.normal(noise_key, (k, 3 * b, self.spec.action_dim), jnp.float32)
        return key, replay[indices].reshape(k, b, -1), noise

    def update(
        self, state: State, rows: Array, noise: Array, divisor: Array, acts: bool
    ) -> tuple[State, dict[str, Array]]:
        """Updates actor and temperature (if `acts`), then critics and targets, on rows [B, width]."""
        batch, metrics = self._unpack(rows, divisor), {}
        cut = 2 * self.config.batch_size
        if acts:
            frozen = (state.critic.params, state.critic.stats[0], state.temperature.params, batch, noise[:cut])
            actor, _, metrics = self._step(state.actor, self._actor_loss, *frozen)
            temperature, _, heat = self._step(state.temperature, self._temperature_loss, metrics["entropy"])
            state, metrics = state._replace(actor=actor, temperature=temperature), metrics | heat
        goal = self._goal(state, batch, noise[cut:])
        critic, ok, found = self._step(state.critic, self._critic_loss, *goal)
        moved = jax.tree.map(lambda old, new: old + self.config.tau * (new - old), state.target, critic.params)
        return state._replace(critic=critic, target=_where(ok, moved, state.target)), metrics | found

    def _unpack(self, rows: Array, divisor: Array) -> tuple[Array, ...]:
        parts = jnp.split(rows, np.cumsum(fields(self.spec).widths)[:-1], -1)
        actor, critic, action, next_actor, next_critic, reward, terminated, _ = parts
        critic, next_critic = (critic, next_critic) if self.spec.critic_dim else (actor, next_actor)
        return actor, critic, action, reward[:, 0] / divisor, terminated[:, 0] > 0.5, next_actor, next_critic

    def _actor_loss(
        self, params: Actor, stats: Stats, critic: Critic, critic_stats: Stats, log_temperature: Array,
        batch: tuple[Array, ...], noise: Array,
    ) -> tuple[Array, Any]:  # fmt: skip
        observation, critic_observation, *_, next_observation, _ = batch
        rows = len(observation)
        (mean, log_std), stats = self._networks.actor(
            params, stats, jnp.concatenate([observation, next_observation]), True
        )
        action, log_prob = (x[:rows] for x in sample(mean, log_std, noise))
        log_probs, _ = self._networks.critics(critic, critic_stats, critic_observation, action, False)
        q = (jnp.exp(log_probs) @ self._atoms(log_probs)).min(0)
        loss = (jnp.exp(log_temperature) * log_prob - q).mean()
        metrics = {"actor_loss": loss, "entropy": -log_prob.mean(), "mean_action": action.mean(), "q": q.mean()}
        return loss, (stats, metrics)

    def _temperature_loss(self, log_temperature: Array, stats: tuple[()], entropy: Array) -> tuple[Array, Any]:
        goal = 0.5 * self.spec.action_dim * math.log(2.0 * math.pi * math.e * self.config.target_sigma**2)
        temperature = jnp.exp(log_temperature)
        loss = temperature * (entropy - goal)
        return loss, (stats, {"temperature_loss": loss, "temperature": temperature})

    def _goal(self, state: State, batch: tuple[Array, ...], noise: Array) -> tuple[Array, ...]:
        config = self.config
        _, observation, action, reward, terminated, next_actor, next_observation = batch
        (mean, log_std), _ = self._networks.actor(state.actor.params, state.actor.stats, next_actor, False)
        next_action, log_prob = sample(mean, log_std, noise)
        observation, action = jnp.concatenate([observation, next_observation]), jnp.concatenate([action, next_action])
        log_probs, target_stats = self._networks.critics(state.target, state.critic.stats[1], observation, action, True)
        after = log_probs[:, len(reward) :]
        atoms = self._atoms(log_probs)
        first, second = jnp.exp(after) @ atoms
        probs = jnp.exp(jnp.where((second < first)[:, None], after[1], after[0]))
        entropy_term = jnp.exp(state.temperature.params) * log_prob
        discount = jnp.where(terminated, 0.0, config.gamma**config.n_step)[:, None]
        moved = reward[:, None] + discount * (atoms - entropy_term[:, None])
        position = (jnp.clip(moved, config.min_value, config.max_value) - atoms[0]) * (
            (config.bins - 1) / (config.max_value - config.min_value)
        )
        shares = jnp.maximum(1.0 - jnp.abs(position[:, :, None] - jnp.arange(config.bins)), 0.0)
        projected = (probs[:, :, None] * shares).sum(1) + 0.0 * (reward + entropy_term)[:, None]
        return projected, observation, action, target_stats, entropy_term.max()

    def _critic_loss(
        self, params: Critic, stats: tuple[Stats, Stats], goal: Array, observation: Array, action: Array,
        target_stats: Stats, bonus: Array,
    ) -> tuple[Array, Any]:  # fmt: skip
        log_probs, online = self._networks.critics(params, stats[0], observation, action, True)
        loss = -(goal * log_probs[:, : len(goal)]).sum(-1).mean()
        return loss, ((online, target_stats), {"critic_loss": loss, "max_entropy_bonus": bonus})

    def _atoms(self, like: Array) -> Array:
        return jnp.linspace(self.config.min_value, self.config.max_value, self.config.bins, dtype=like.dtype)

    def _step(self, part: Part, loss: Any, *inputs: Any) -> tuple[Part, Array, dict[str, Array]]:
        (value, (stats, metrics)), grads = jax.value_and_grad(loss, has_aux=True)(part.params, part.stats, *inputs)
        ok = jnp.isfinite(value) & jnp.stack([jnp.isfinite(g).all() for g in jax.tree.leaves(grads)]).all()
        t = (part.count + 1).astype(value.dtype)
        step, root = self._rate(part.count, value.dtype) / (1.0 - B1**t), jnp.sqrt(1.0 - B2**t)
        mu = jax.tree.map(lambda m, g: m + (1.0 - B1) * (g - m), part.mu, grads)
        nu = jax.tree.map(lambda v, g: B2 * v + (1.0 - B2) * g * g, part.nu, grads)
        params = jax.tree.map(lambda p, m, v: p - step * m / (jnp.sqrt(v) / root + ADAM_EPS), part.params, mu, nu)
        new = Part(project(params), stats, part.count + 1, mu, nu, part.skipped)
        return _where(ok, new, part._replace(skipped=part.skipped + 1)), ok, metrics

    def _rate(self, count: Array, dtype: Any) -> Array:
        c, s = self.config, count.astype(dtype)
        warmup = c.lr_init + (c.lr_peak - c.lr_init) * s / max(c.lr_warmup_updates, 1)
        phase = jnp.minimum((s - c.lr_warmup_updates) / max(c.lr_decay_updates - c.lr_warmup_updates, 1), 1.0)
        cosine = c.lr_end + (c.lr_peak - c.lr_end) * (1.0 + jnp.cos(math.pi * phase)) / 2
        return jnp.where(s < c.lr_warmup_updates, warmup, cosine)


def _where(ok: Array, new: Any, old: Any) -> Any:
    return jax.tree.map(lambda n, o: jnp.where(ok, n, o), new, old)
