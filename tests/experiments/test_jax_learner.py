"""The JAX side of the benchmark computes our cycle: the same draws, the same updates."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from experiments import jax_learner
from experiments.learner_agreement import as_transition, transitions
from functional_sac import replay, reward_scale
from functional_sac.config import SACConfig
from functional_sac.cycle import make_learner
from functional_sac.envs.env import EnvSpec
from functional_sl import keys, tree

# 81 bins, whose centres are exact: Adam's first steps magnify every rounding error as large as a gradient.
CONFIG = SACConfig(
    batch_size=16, actor_width=8, critic_width=16, bins=81, num_blocks=1, updates_per_step=2, n_step=3, lr_init=1e-5,
    lr_warmup_updates=2, lr_decay_updates=20,
)  # fmt: skip
SPECS = {"asymmetric": EnvSpec("asymmetric", 4, 7, 2, 100, 0.1), "symmetric": EnvSpec("symmetric", 3, 0, 1, 100, 0.1)}
ROWS = 200


@pytest.fixture(scope="module", params=[SPECS["asymmetric"], pytest.param(SPECS["symmetric"], marks=pytest.mark.slow)])
def case(request) -> Any:
    """Our learner and its state in float64, JAX's learner and its compiled updates, packed rows and a reward scale."""
    spec = request.param
    with jax.enable_x64(True):
        ours = make_learner(CONFIG, spec)
        state = tree.map(lambda x: x.double() if x.is_floating_point() else x, ours.init(keys.key(3)))
        rows = replay.pack(as_transition(spec, transitions(spec, ROWS))).double()
        learner = jax_learner.JaxLearner(CONFIG, spec)
        # Quick to compile; it runs only a few times.
        updates = jax.jit(learner.updates, compiler_options={"xla_backend_optimization_level": 0})
        scale = reward_scale.init(1)._replace(var=torch.tensor(4.0, dtype=torch.float64))
        yield ours, state, learner, updates, rows, scale


def drawn(key: torch.Tensor, rows: torch.Tensor, action_dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the rows [K, B, width] and the noise [K, 3B, A] that our cycle draws."""
    rows_key, noise_key = keys.split(key, 3)[1:]
    buffer = replay.ReplayState(rows, rows[:1, None], *(torch.tensor(x) for x in (ROWS, 0, ROWS)))
    k, b = CONFIG.updates_per_step, CONFIG.batch_size
    found = buffer.rows[replay.indices(buffer, rows_key, (k * b,))].reshape(k, b, -1)
    return found, keys.normal(noise_key, (k, 3 * b, action_dim))


def gap(a: tree.Tree, b: Any) -> float:
    pairs = zip(tree.leaves(a), jax.tree.leaves(b), strict=True)
    return max(float(np.abs(x.numpy() - np.asarray(y)).max()) for x, y in pairs)


def test_the_draws_of_a_cycle_are_the_same(case):
    _, state, learner, _, rows, _ = case
    expected, noise = drawn(state.key, rows, learner.spec.action_dim)
    other = jax_learner.from_torch(state, CONFIG)
    key, found, normal = jax.jit(learner.sample)(other.key, jnp.asarray(rows), jnp.int32(ROWS))
    assert np.array_equal(np.asarray(found), expected.numpy())
    assert np.array_equal(np.asarray(jax.random.key_data(key)), keys.split(state.key, 3)[0].numpy())
    # Ours differs from jax by at most 4 units in the last place of float32.
    assert np.asarray(normal) == pytest.approx(noise.numpy(), abs=2e-6)


def test_two_cycles_agree_to_the_rounding_of_float64(case):
    ours, state, learner, updates, rows, scale = case
    other = jax_learner.from_torch(state, CONFIG)
    divisor = jnp.asarray(reward_scale.denominator(scale, CONFIG.return_bound).numpy())
    for _ in range(2):
        chosen, noise = (jnp.asarray(x.numpy()) for x in drawn(state.key, rows, learner.spec.action_dim))
        buffer = replay.ReplayState(rows, rows[:1, None], *(torch.tensor(x) for x in (ROWS, 0, ROWS)))
        state, metrics = ours.cycle(state, buffer, scale, 0)
        other, found = updates(other, chosen, noise, divisor)
        assert found.keys() == metrics.keys()
        for name, value in metrics.items():
            assert float(value) == pytest.approx(float(found[name]), rel=1e-11, abs=1e-13), name
    # 2**-52 is 2.2e-16; Adam divides by sqrt(nu) + 1e-8, so a first step may enlarge rounding 1e4-fold (lr / eps).
    for name in ("actor", "critic", "temperature"):
        mine, theirs = getattr(state, name), getattr(other, name)
        assert gap((mine.params, mine.stats), (theirs.params, theirs.stats)) < 1e-11, name
    assert gap(state.target, other.target) < 1e-11


def test_a_batch_that_is_not_finite_changes_the_critics_by_nothing_but_a_count(case):
    _, state, learner, updates, rows, _ = case
    other = jax_learner.from_torch(state, CONFIG)
    chosen, noise = (jnp.asarray(x.numpy()) for x in drawn(state.key, rows, learner.spec.action_dim))
    new, _ = updates(other, chosen.at[:, 0, replay.REWARD].set(jnp.inf), noise, jnp.ones(()))
    assert (int(new.critic.skipped), int(new.critic.count), int(new.actor.skipped)) == (2, 0, 0)
    for part in ("critic", "target"):
        old, kept = getattr(other, part), getattr(new, part)
        old, kept = (x[:2] if part == "critic" else x for x in (old, kept))
        assert all(np.array_equal(a, b) for a, b in zip(jax.tree.leaves(old), jax.tree.leaves(kept), strict=True))
