from __future__ import annotations

import os
from functools import partial

os.environ["JAX_PLATFORMS"] = "cpu"

import jax
import numpy as np
import pytest
import torch
from torch.func import grad, vmap

from functional_sl import keys, threefry

SEEDS = [0, 1, 42, -1, -5, 2**31, 2**32 + 5, -(2**40) - 3, 2**63 - 1]
SHAPES = [(), (0,), (5,), (257,), (2, 0, 3), (2, 3, 7)]
FLOATS = {
    "uniform": lambda k, shape: keys.uniform(k, shape, -2.0, 3.0),
    "normal": keys.normal,
    "exponential": keys.exponential,
    "truncated_normal": lambda k, shape: keys.truncated_normal(k, -2.0, 2.0, shape),
}
DRAWS = FLOATS | {
    "bits": keys.bits,
    "uniform64": lambda k, shape: keys.uniform(k, shape, dtype=torch.float64),
    "bernoulli": lambda k, shape: keys.bernoulli(k, 0.3, shape),
    "randint": lambda k, shape: keys.randint(k, shape, -7, 100),
    "permutation": lambda k, shape: keys.permutation(k, 11),
    "split": lambda k, shape: keys.split(k, 3),
    "fold_in": lambda k, shape: keys.fold_in(k, 9),
}


def same(ours: torch.Tensor, theirs: jax.Array) -> bool:
    theirs = np.asarray(theirs)
    expected = theirs.astype(np.int64) if theirs.dtype.kind in "iu" else theirs
    return ours.numpy().dtype == expected.dtype and np.array_equal(ours.numpy(), expected)


def words(key: jax.Array) -> jax.Array:
    return jax.random.key_data(key)


def ulps(a: np.ndarray, b: np.ndarray) -> int:
    """Returns how many float32 numbers lie between a and b at most; a negative number counts down from zero."""
    left, right = (np.where(x < 0, -(x & 0x7FFFFFFF), x) for x in (a.view(np.int32), b.view(np.int32)))
    return int(np.abs(left.astype(np.int64) - right).max())


@pytest.mark.parametrize("seed", SEEDS)
def test_key_split_and_fold_in_are_those_of_jax(seed):
    ours, theirs = keys.key(seed), jax.random.key(seed)
    assert same(ours, words(theirs))
    for num in (0, 1, 4, 5, (2, 3)):
        assert same(keys.split(ours, num), words(jax.random.split(theirs, num)))
    for data in (0, 1, 2**31, 2**32 - 1):
        assert same(keys.fold_in(ours, data), words(jax.random.fold_in(theirs, data)))
        assert same(keys.fold_in(ours, torch.tensor(data - 2**32)), words(jax.random.fold_in(theirs, data)))


@partial(jax.jit, static_argnums=1)
def jax_draws(key, shape):
    return (
        jax.random.bits(key, shape),
        jax.random.uniform(key, shape),
        jax.random.bernoulli(key, 0.3, shape),
        jax.random.randint(key, shape, -7, 100),
        jax.random.normal(key, shape),
    )


@pytest.mark.parametrize("shape", SHAPES)
def test_draws_are_those_of_jax(shape):
    for seed in SEEDS[:4]:
        key = keys.split(keys.key(seed))[1]
        *exact, normal = jax_draws(jax.random.split(jax.random.key(seed))[1], shape)
        ours = keys.bits(key, shape), keys.uniform(key, shape), keys.bernoulli(key, 0.3, shape)
        ours += (keys.randint(key, shape, -7, 100),)
        assert all(same(a, b) for a, b in zip(ours, exact, strict=True))
        np.testing.assert_array_max_ulp(keys.normal(key, shape).numpy(), normal, 4)


@pytest.mark.parametrize(
    ("minval", "maxval"),
    [(0, 1), (-3, -2), (0, 3), (0, 2**16), (0, 2**16 + 1), (5, 10**6), (-5, 2**31 - 1), (-(2**31), 2**31 - 1)],
)
def test_randint_is_that_of_jax_for_static_and_tensor_bounds(minval, maxval):
    expected = jax.random.randint(jax.random.key(3), (1000,), minval, maxval)
    assert same(keys.randint(keys.key(3), (1000,), minval, maxval), expected)
    assert same(keys.randint(keys.key(3), (1000,), torch.tensor(minval), torch.tensor(maxval)), expected)
    assert same(keys.randint(keys.key(3), (1000,), minval, torch.full((1000,), maxval)), expected)


def test_randint_with_an_empty_tensor_range_is_minval():
    assert keys.randint(keys.key(0), (3,), 5, torch.tensor([5, 4, 7])).tolist()[:2] == [5, 5]
    assert jax.random.randint(jax.random.key(0), (2,), 5, np.array([5, 4])).tolist() == [5, 5]


@pytest.mark.parametrize("n", [0, 1, 2, 1625, 1626])
def test_permutation_is_that_of_jax(n):
    for seed in (0, 9):
        assert same(keys.permutation(keys.key(seed), n), jax.random.permutation(jax.random.key(seed), n))


def test_float32_numbers_stay_within_the_documented_ulps_of_jax():
    ours, theirs, shape = keys.key(8), jax.random.key(8), (2**20,)
    assert ulps(keys.normal(ours, shape).numpy(), np.asarray(jax.random.normal(theirs, shape))) <= 4
    assert ulps(keys.exponential(ours, shape).numpy(), np.asarray(jax.random.exponential(theirs, shape))) <= 2
    assert same(keys.uniform(ours, shape), jax.random.uniform(theirs, shape))


def test_normal_reaches_the_ends_of_the_float32_range_of_erfinv():
    # The 2^23 arguments are odd multiples of 2^-24; Giles' tail polynomial serves the outermost ones.
    last = torch.tensor([1 - 2.0**-24, 1 - 3 * 2.0**-24, 2.0**-24, -(2.0**-24), -(1 - 2.0**-24)])
    expected = np.asarray(jax.lax.erf_inv(last.numpy()))
    np.testing.assert_array_max_ulp(threefry.erfinv(last).numpy(), expected, 4)


@pytest.mark.parametrize(("minval", "maxval"), [(-1.0, 1.0), (0.1, 0.3), (-0.1, 1000.0), (100.1, 100.2), (2.0, 2.0)])
def test_uniform_in_a_range_is_rounded_once(minval, maxval):
    shape = (10_000,)
    ours = keys.uniform(keys.key(1), shape, minval, maxval)
    fractions = keys.uniform(keys.key(1), shape).numpy().astype(np.float64)
    np.testing.assert_array_equal(ours.numpy(), (fractions * (maxval - minval) + minval).astype(np.float32))
    bounds = torch.tensor(minval, dtype=torch.float64), torch.full(shape, maxval, dtype=torch.float64)
    assert torch.equal(keys.uniform(keys.key(1), shape, *bounds), ours)
    theirs = np.asarray(jax.random.uniform(jax.random.key(1), shape, minval=minval, maxval=maxval))
    assert np.abs(ours.numpy() - theirs).max() < 2.0**-21 * max(abs(minval), abs(maxval))
    assert ours.min() >= np.float32(minval)
    assert ours.max() <= np.float32(maxval)


@pytest.mark.parametrize(("lower", "upper"), [(-2.0, 2.0), (-3.0, 3.0), (1.0, 3.0), (-1.0, 0.5)])
def test_truncated_normal_is_that_of_jax(lower, upper):
    ours = keys.truncated_normal(keys.key(4), lower, upper, (10_000,))
    theirs = jax.random.truncated_normal(jax.random.key(4), lower, upper, (10_000,))
    np.testing.assert_allclose(ours.numpy(), theirs, rtol=0, atol=1e-5)
    assert ours.min() > lower
    assert ours.max() < upper


def test_truncated_normal_far_out_stays_inside_and_finite():
    for lower, upper in ((5.0, 9.0), (-9.0, -6.0), (-9.0, 9.0)):
        x = keys.truncated_normal(keys.key(4), lower, upper, (1000,))
        assert torch.isfinite(x).all()
        assert ((lower < x) & (x < upper)).all()


def test_float64_numbers_are_those_of_jax_with_64_bit_types():
    ours, shape = keys.key(5), (10_000,)
    with jax.enable_x64(True):
        theirs = jax.random.key(5)
        assert same(keys.uniform(ours, shape, dtype=torch.float64), jax.random.uniform(theirs, shape, np.float64))
        normal = jax.random.normal(theirs, shape, np.float64)
        exponential = jax.random.exponential(theirs, shape, np.float64)
    np.testing.assert_allclose(keys.normal(ours, shape, torch.float64).numpy(), normal, rtol=0, atol=1e-10)
    np.testing.assert_allclose(keys.exponential(ours, shape, torch.float64).numpy(), exponential, rtol=1e-12)


def test_bernoulli_broadcasts_its_probability():
    p = torch.tensor([0.0, 0.2, 0.9, 1.0])
    assert same(keys.bernoulli(keys.key(2), p), jax.random.bernoulli(jax.random.key(2), p.numpy()))
    assert same(keys.bernoulli(keys.key(2), p, (50, 4)), jax.random.bernoulli(jax.random.key(2), p.numpy(), (50, 4)))


@pytest.mark.parametrize("name", DRAWS)
def test_batched_vmapped_and_single_keys_agree(name):
    def draw(k):
        return DRAWS[name](k, (3, 2))

    batch = keys.split(keys.key(6), (2, 3))
    singles = torch.stack([torch.stack([draw(k) for k in row]) for row in batch])
    assert torch.equal(draw(batch), singles)
    assert torch.equal(vmap(vmap(draw))(batch), singles)
    assert torch.equal(vmap(draw, in_dims=1, out_dims=1)(batch), singles)


def test_vmap_over_bounds_and_data_shares_the_key():
    key, bounds = keys.key(7), torch.tensor([3, 50, 70_000])
    expected = torch.stack([keys.randint(key, (4,), 0, int(n)) for n in bounds])
    assert torch.equal(vmap(lambda n: keys.randint(key, (4,), 0, n))(bounds), expected)
    children = keys.split(key, 5)
    assert torch.equal(keys.fold_in(key, torch.arange(5)), children)
    assert torch.equal(vmap(keys.fold_in, in_dims=(None, 0))(key, torch.arange(5)), children)
    data = torch.arange(5).expand(2, 5)
    rows = vmap(keys.fold_in, in_dims=(0, None))(children, torch.arange(3))
    assert torch.equal(rows, keys.split(children, 3))
    pairs = vmap(vmap(keys.fold_in, in_dims=(None, 0)), in_dims=(0, 0))(children[:2], data)
    assert torch.equal(pairs, keys.split(children[:2], 5))


def test_draws_inside_grad():
    # d/dw sum(w * e) = e, and d/db of a uniform in [0, b) is its fraction.
    key, w = keys.key(11), torch.ones(5)
    assert torch.equal(grad(lambda w, k: (w * keys.normal(k, (5,))).sum())(w, key), keys.normal(key, (5,)))
    fraction = grad(lambda b: keys.uniform(key, (), 0.0, b))(torch.tensor(3.0))
    assert torch.equal(fraction, keys.uniform(key))
    per_key = vmap(grad(lambda w, k: (w * keys.normal(k, (5,))).sum()), in_dims=(None, 0))(w, keys.split(key, 3))
    assert torch.equal(per_key, keys.normal(keys.split(key, 3), (5,)))


def every_draw(key, n, batch):
    drawn = tuple(draw(key, (3, 5)) for draw in DRAWS.values())
    return (*drawn, keys.randint(key, (6,), 0, n), vmap(lambda k: keys.uniform(k, (4,)))(batch))


def some_draws(key, n, batch):
    children = keys.split(key, 3)
    return (
        children,
        keys.randint(key, (9,), 0, n),
        vmap(lambda k: keys.uniform(k, (4,)))(batch),
        keys.normal(key, (65,)),
    )


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled_draws_equal_eager_ones(backend):
    arguments = keys.key(12), torch.tensor(1000), keys.split(keys.key(13), 3)
    compiled = torch.compile(every_draw, backend=backend, fullgraph=True)(*arguments)
    assert all(torch.equal(a, b) for a, b in zip(compiled, every_draw(*arguments), strict=True))


# Inductor itself imports what torch deprecates.
@pytest.mark.filterwarnings("ignore:.*torch.jit.script_method:DeprecationWarning")
def test_inductor_keeps_integers_and_fractions():
    arguments = keys.key(14), torch.tensor(1000), keys.split(keys.key(15), 3)
    *exact, normal = torch.compile(some_draws, fullgraph=True)(*arguments)
    *expected, expected_normal = some_draws(*arguments)
    assert all(torch.equal(a, b) for a, b in zip(exact, expected, strict=True))
    # Fused multiply-adds round the polynomial differently.
    torch.testing.assert_close(normal, expected_normal, rtol=1e-6, atol=1e-6)


def test_an_exported_program_draws_without_this_package():
    class Draws(torch.nn.Module):
        def forward(self, key):
            return keys.bits(key, (5,)), vmap(lambda k: keys.uniform(k, (2,)))(keys.split(key, 3))

    program = torch.export.export(Draws(), (keys.key(0),))
    assert "functional_sl" not in str(program.graph)
    for ours, expected in zip(program.module()(keys.key(16)), Draws()(keys.key(16)), strict=True):
        assert torch.equal(ours, expected)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_a_cuda_graph_draws_as_the_cpu_does():
    key, n, batch = keys.key(0, "cuda"), torch.tensor(1000, device="cuda"), keys.split(keys.key(13, "cuda"), 3)
    every_draw(key, n, batch)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        drawn = every_draw(key, n, batch)
    key.copy_(keys.key(12))
    graph.replay()
    for name, ours, expected in zip(
        [*DRAWS, "randint", "normal"], drawn, every_draw(keys.key(12), n.cpu(), batch.cpu()), strict=True
    ):
        tolerance = 1e-6 if name in FLOATS and name != "uniform" else 0.0
        torch.testing.assert_close(ours.cpu(), expected, rtol=tolerance, atol=tolerance)


def test_streams_differ_and_children_do_not_depend_on_num():
    key = keys.key(0)
    children = keys.split(key, 1000)
    assert torch.equal(keys.split(key, 3), children[:3])
    assert torch.equal(keys.fold_in(key, 2), children[2])
    assert children.unique(dim=0).shape == (1000, 2)
    # Among 10^6 words of 32 bits about 116 pairs collide by chance; a repeated stream would give thousands.
    assert keys.bits(children, (1000,)).unique().numel() > 999_500


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda k: keys.key(1.5), TypeError, "1.5"),
        (lambda k: keys.key(2**63), ValueError, "9223372036854775808"),
        (lambda k: keys.split(k.float()), TypeError, "float32"),
        (lambda k: keys.bits([0, 1], (2,)), TypeError, "list"),
        (lambda k: keys.normal(torch.zeros(3, dtype=torch.int64)), ValueError, r"\(3,\)"),
        (lambda k: keys.fold_in(torch.tensor(3), 1), ValueError, r"\(\)"),
        (lambda k: keys.split(k, -1), ValueError, "-1"),
        (lambda k: keys.bits(k, (2, -3)), ValueError, "-3"),
        (lambda k: keys.permutation(k, -1), ValueError, "-1"),
        (lambda k: keys.fold_in(k, -1), ValueError, "-1"),
        (lambda k: keys.randint(k, (2,), 3, 3), ValueError, "3 and 3"),
        (lambda k: keys.randint(k, (2,), 0, 2**31), ValueError, "maxval"),
        (lambda k: keys.randint(k, (2,), 0, 3.5), ValueError, "3.5"),
        (lambda k: keys.randint(k, (2,), -(2**31) - 1, torch.tensor(3)), ValueError, "minval"),
        (lambda k: keys.randint(k, (2,), 0, torch.tensor([[3, 4], [5, 6]])), ValueError, r"\(2, 2\)"),
        (lambda k: keys.uniform(k, (2,), 1.0, 0.5), ValueError, "0.5"),
        (lambda k: keys.uniform(k, (2,), dtype=torch.bfloat16), ValueError, "bfloat16"),
        (lambda k: keys.bernoulli(k, torch.ones(3), (1,)), ValueError, r"\(3,\)"),
        (lambda k: keys.truncated_normal(k, 2.0, 2.0), ValueError, "2.0"),
        (lambda k: keys.truncated_normal(k, 0.0, float("inf")), ValueError, "inf"),
    ],
)
def test_bad_arguments_are_named(call, error, message):
    with pytest.raises(error, match=message):
        call(keys.key(0))
