"""Held noise against the zeta law in float64 and a plain Python counter."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from equal import assert_bits_equal

from functional_sac import noise
from functional_sl import keys, tree


@pytest.mark.parametrize(("mu", "longest"), [(2.0, 16), (0.0, 4), (1.3, 1)])
def test_zeta_cdf(mu: float, longest: int) -> None:
    mass = np.arange(1, longest + 1, dtype=np.float64) ** -mu
    np.testing.assert_allclose(noise.zeta_cdf(mu, longest), np.cumsum(mass / mass.sum()), rtol=0, atol=1e-6)


def test_repeats() -> None:
    """The first index whose cumulative mass exceeds u, from 1; a cdf that ends below 1 still gives the last."""
    cdf = torch.tensor([0.5, 0.75, 0.9999999])
    u = torch.tensor([0.0, 0.4999, 0.5, 0.6, 0.75, 0.99, 1 - 2**-24])
    found = noise.repeats(u, cdf)
    assert found.tolist() == [1, 1, 2, 2, 3, 3, 3]
    assert found.dtype == torch.int64
    assert noise.repeats(torch.tensor(0.3), torch.tensor([1.0])) == 1


def test_repeats_follow_the_law() -> None:
    """20000 draws: chi-square of 16 classes, 15 degrees of freedom, below its 99.99 % point 44.3."""
    cdf = noise.zeta_cdf(2.0, 16)
    drawn = noise.repeats(keys.uniform(keys.key(0), (20_000,)), cdf)
    observed = torch.bincount(drawn, minlength=17)[1:].double()
    mass = torch.arange(1, 17, dtype=torch.float64) ** -2
    expected = 20_000 * mass / mass.sum()
    assert ((observed - expected) ** 2 / expected).sum() < 44.3


@pytest.mark.parametrize("shared", [True, False])
def test_redraw_follows_a_counter(shared: bool) -> None:
    """Noise is held for exactly as many steps as were drawn with it; an ended episode draws anew if it may."""
    generator = torch.Generator().manual_seed(0)
    envs, cdf = 3, noise.zeta_cdf(1.0, 5)
    state = noise.init(envs, 2, shared=shared)
    left, held, lengths = [0] * envs, [None] * envs, set()
    for _ in range(60):
        candidate = torch.randn(envs, 2, generator=generator)
        u = torch.rand(() if shared else (envs,), generator=generator)
        done = None if shared else torch.rand(envs, generator=generator) < 0.2
        state = noise.redraw(state, candidate, u, cdf, done)
        drawn = noise.repeats(u, cdf).expand(envs).tolist()
        for i in range(envs):
            if left[i] == 0 or (done is not None and done[i]):
                left[i], held[i] = drawn[i], candidate[i]
                lengths.add(drawn[i])
            left[i] -= 1
            assert_bits_equal(state.noise[i], held[i])
    assert lengths >= {1, 2, 3}


@pytest.mark.parametrize("shared", [True, False])
def test_update_draws_from_its_keys(shared: bool) -> None:
    cdf = noise.zeta_cdf(2.0, 16)
    state = noise.init(3, 2, shared=shared)
    before, first, second = tree.clone(state), keys.key(1), keys.key(2)
    after = noise.update(state, first, second, cdf)
    assert_bits_equal(state, before)
    assert_bits_equal(after.noise, keys.normal(first, (3, 2)))
    shape = () if shared else (3,)
    assert_bits_equal(after.length, noise.repeats(keys.uniform(second, shape), cdf))
    assert_bits_equal(after.count, torch.ones(shape, dtype=torch.int64))


def test_seeds_by_vmap_equal_single_runs() -> None:
    cdf, states = noise.zeta_cdf(2.0, 16), [noise.init(3, 2, shared=False) for _ in range(2)]
    stacked, done = tree.stack(states), torch.tensor([True, False, False])
    mapped = torch.func.vmap(lambda state, a, b: noise.update(state, a, b, cdf, done))
    for step in range(4):
        first, second = (keys.split(keys.key(10 * step + i), 2) for i in (0, 1))
        stacked = mapped(stacked, first, second)
        states = [noise.update(s, first[i], second[i], cdf, done) for i, s in enumerate(states)]
    assert_bits_equal(stacked, tree.stack(states))
