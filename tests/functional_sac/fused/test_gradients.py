"""Gradients that are written out against `torch.func.grad` of the losses, and batch norm against torch's."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from devices import DEVICES
from equal import assert_bits_equal
from torch import library

from functional_sac import losses, updates
from functional_sac.config import SACConfig
from functional_sac.distributions import Sample
from functional_sac.envs.env import EnvSpec
from functional_sac.fused import batch_norm, gradients, trunk
from functional_sac.transition import Observation, Transition
from functional_sl import keys, tree
from functional_sl.parallel.collectives import single
from functional_sl.step import Aux

CONFIG = SACConfig(
    batch_size=12, actor_width=8, critic_width=8, num_blocks=2, bins=11, lr_decay_updates=50, bc_alpha=0.1
)
SPEC = EnvSpec("probe", actor_dim=5, critic_dim=7, action_dim=3, max_episode_steps=10, control_dt=0.1)


def batch(dtype: torch.dtype) -> Transition:
    """Returns 12 transitions, some of them terminal."""
    draw = iter(keys.split(keys.key(4), 9))

    def normal(*shape: int) -> torch.Tensor:
        return keys.normal(next(draw), shape).to(dtype)

    return Transition(
        Observation(normal(12, 5), normal(12, 7)), normal(12, 3).tanh(), normal(12), normal(12) > 1, normal(12) > 9,
        Observation(normal(12, 5), normal(12, 7)),
    )  # fmt: skip


def start(dtype: torch.dtype, **changes: object) -> tuple[losses.Losses, updates.SACState]:
    """Returns losses and a state in which no statistic and no affine map is at its first value."""
    config = dataclasses.replace(CONFIG, **changes)
    made = updates.make_updates(config, SPEC, single())
    state, noise = made.init(keys.key(1)), iter(keys.split(keys.key(2), 200))

    def moved(x: torch.Tensor) -> torch.Tensor:
        return (x + 0.1 * keys.uniform(next(noise), tuple(x.shape))).to(dtype) if x.is_floating_point() else x

    return made.loss, tree.map(moved, state)


# Products and batch norm add in another order: float64 to 1e-11, float32 to 2e-5, in BF16 a few roundings of 2^-8.
KINDS = [("float32", torch.float64, 1e-11), ("float32", torch.float32, 2e-5), ("bfloat16", torch.float32, 0.1)]


def agree(found: tuple, expected: tuple, tolerance: float) -> None:
    """Compares trees leaf by leaf, relative to the largest number of a leaf; matrices may be in the products' type."""
    for name, a in tree.named(found).items():
        b = tree.named(expected)[name]
        assert a.shape == b.shape, name
        assert a.dtype in (b.dtype, torch.bfloat16), name
        assert (a - b).abs().max() <= tolerance * b.abs().max().clamp_min(1e-3), name


SHAPES = [{}, {"num_blocks": 1, "critic_width": 5, "actor_width": 9, "bins": 7, "bc_alpha": 0.0, "n_step": 3}]


@pytest.mark.parametrize(("products", "dtype", "tolerance"), KINDS)
@pytest.mark.parametrize("changes", SHAPES, ids=["even", "odd"])
def test_the_critics_gradient(products: str, dtype: torch.dtype, tolerance: float, changes: dict) -> None:
    loss, state = start(dtype, compute_dtype=products, **changes)
    values, noise = batch(dtype), keys.normal(keys.key(5), (12, 3)).to(dtype)
    policy = loss.next_policy(state.actor.params, state.actor.stats, values, noise)
    frozen = (policy, state.temperature.params, values)
    goal = loss.critic_goal(state.target, state.critic.stats.target, *frozen)
    grads, (value, aux) = torch.func.grad_and_value(loss.critic, has_aux=True)(
        state.critic.params, state.critic.stats, goal
    )
    found = gradients.Gradients(loss).critic(state.critic.params, state.critic.stats, state.target, *frozen)
    agree(found, (grads, value, aux), tolerance)


@pytest.mark.parametrize(("products", "dtype", "tolerance"), KINDS)
@pytest.mark.parametrize("changes", SHAPES, ids=["even", "odd"])
def test_the_actors_gradient(products: str, dtype: torch.dtype, tolerance: float, changes: dict) -> None:
    loss, state = start(dtype, compute_dtype=products, **changes)
    values, noise = batch(dtype), keys.normal(keys.key(5), (24, 3)).to(dtype)
    frozen = (state.critic.params, state.critic.stats.online, state.temperature.params, values, noise)
    grads, (value, aux) = torch.func.grad_and_value(loss.actor, has_aux=True)(
        state.actor.params, state.actor.stats, *frozen
    )
    written = gradients.Gradients(loss)
    forward = written.actor_forward(state.actor.params, values, noise)
    own, loss_value, (stats, metrics, _) = written.actor(state.actor.params, state.actor.stats, forward, *frozen)
    metrics |= loss.behaviour(Sample(forward.seen[:, -3:], forward.log_prob))
    agree((own, loss_value, Aux(stats, metrics)), (grads, value, aux), tolerance)


@pytest.mark.parametrize(("products", "dtype", "tolerance"), KINDS)
@pytest.mark.parametrize("changes", SHAPES, ids=["even", "odd"])
def test_the_next_policy(products: str, dtype: torch.dtype, tolerance: float, changes: dict) -> None:
    loss, state = start(dtype, compute_dtype=products, **changes)
    given = (state.actor.params, state.actor.stats, batch(dtype), keys.normal(keys.key(5), (12, 3)).to(dtype))
    agree(gradients.Gradients(loss).next_policy(*given), loss.next_policy(*given), tolerance)


def three_updates(made: updates.Updates, state: updates.SACState) -> updates.SACState:
    values = batch(torch.float32)
    for i in range(3):
        noise = keys.normal(keys.key(6 + i), (36, 3))
        policy = updates.PolicyPart(state.actor, state.temperature, state.scale, state.actor_copies)
        critic = (state.critic.params, state.critic.stats.online)
        policy, _ = made.policy(policy, *critic, values, noise[:24], state.critic_copies)
        state = state._replace(**policy._asdict())
        part = updates.CriticPart(state.critic, state.target, state.scale, state.critic_copies)
        sample = made.next_policy(state.actor.params, state.actor.stats, values, noise[24:], state.actor_copies)
        part, _ = made.critics(part, sample, state.temperature.params, values)
        state = state._replace(**part._asdict())
    return state


def test_three_fused_updates_are_three_updates() -> None:
    """In float32, from one state; the largest parameter is about 1."""
    states = []
    for fast in (False, True):
        made = updates.make_updates(CONFIG, SPEC, single(), fast)
        state = three_updates(made, made.init(keys.key(1)))
        states.append((state.actor.params, state.critic.params, state.target, state.actor.stats, state.critic.stats))
    torch.testing.assert_close(states[1], states[0], rtol=0, atol=2e-5)


@pytest.mark.parametrize("products", ["float32", "bfloat16"])
def test_copies_of_the_weights_follow_them(products: str) -> None:
    made = updates.make_updates(dataclasses.replace(CONFIG, compute_dtype=products), SPEC, single(), True)
    state = made.init(keys.key(1))
    plain, copied = three_updates(made, state), three_updates(made, made.copies(state))
    assert plain.actor_copies == plain.critic_copies == ()
    assert tree.bits_equal(copied, made.copies(plain))
    assert copied.actor_copies[2].dtype == copied.critic_copies[2].dtype == getattr(torch, products)


@pytest.mark.parametrize("number", [torch.nan, torch.inf])
@pytest.mark.parametrize("where", ["reward", "observation", "next_observation"])
def test_numbers_that_are_not_finite_close_the_gate(where: str, number: float) -> None:
    made = updates.make_updates(CONFIG, SPEC, single(), True)
    state, values = made.init(keys.key(1)), batch(torch.float32)
    broken = tree.clone(values)
    for leaf in tree.leaves(getattr(broken, where)):
        leaf.reshape(-1)[0] = number
    part = updates.CriticPart(state.critic, state.target, state.scale)
    sample = made.next_policy(state.actor.params, state.actor.stats, broken, keys.normal(keys.key(3), (12, 3)))
    after, _ = made.critics(part, sample, state.temperature.params, broken)
    assert tree.bits_equal((after.critic.params, after.target), (part.critic.params, part.target))
    assert after.critic.gate.skipped == 1


@pytest.mark.parametrize("number", [torch.nan, torch.inf])
@pytest.mark.parametrize("where", ["observation", "noise", "critic", "statistics"])
def test_numbers_that_are_not_finite_close_the_policys_gate(where: str, number: float) -> None:
    made = updates.make_updates(CONFIG, SPEC, single(), True)
    state = made.init(keys.key(1))
    values, noise = tree.clone(batch(torch.float32)), keys.normal(keys.key(3), (24, 3))
    critic, stats = tree.clone((state.critic.params, state.critic.stats.online))
    places = {"observation": values.observation.actor, "noise": noise, "critic": critic.w, "statistics": stats.mean}
    places[where].view(-1)[0] = number
    part = updates.PolicyPart(state.actor, state.temperature, state.scale)
    after, _ = made.policy(part, critic, stats, values, noise)
    assert tree.bits_equal(after.actor[:3], part.actor[:3])
    assert after.actor.gate.skipped == 1


def test_float16_is_refused() -> None:
    with pytest.raises(ValueError, match="float16"):
        updates.make_updates(dataclasses.replace(CONFIG, compute_dtype="float16"), SPEC, single(), True)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("shape", "given"), [((3, 37, 20), 12), ((1, 1500, 18), 1500), ((5, 40, 1000), 20)])
@pytest.mark.parametrize("add", [False, True])
def test_batch_norm_is_torchs(device: str, dtype: torch.dtype, shape: tuple, given: int, add: bool) -> None:
    """Means of 5 beside spreads of 1. BF16 within two roundings, 2^-7; float32 sums of 1500 rows to 1e-4."""
    draw = iter(keys.split(keys.key(0), 5))
    x = (keys.normal(next(draw), shape) + 5).to(dtype)
    scale, bias = (keys.uniform(next(draw), (shape[0], shape[2])) + 0.5 * i for i in (1, 0))
    dy, rest = keys.normal(next(draw), shape).to(dtype), keys.normal(next(draw), shape).to(dtype)
    dy[:, given:] = 0
    tolerance = {"rtol": 2**-7, "atol": 2**-5} if dtype == torch.bfloat16 else {"rtol": 1e-4, "atol": 1e-4}
    # Moments of several norms lie in one tensor.
    moments = [torch.full((shape[0], shape[2] + 8), -7.0, device=device) for _ in range(2)]
    given_x = [t.to(device) for t in (x, scale, bias)]
    views, whole = [t[:, 4:-4] for t in moments], torch.full(shape, 9.0, dtype=dtype, device=device)
    y = batch_norm.forward(*given_x, rest.to(device) if add else None, *views, 1e-5)
    back = batch_norm.backward(dy[:, :given].to(device), *given_x, *views, whole)
    assert torch.equal(whole.cpu(), dy)
    assert all((t[:, :4] == -7).all() and (t[:, -4:] == -7).all() for t in moments)
    for n in range(shape[0]):
        leaves = [t[n].float().requires_grad_() for t in (x, scale, bias)]
        normal, mean, inverse = torch.native_batch_norm(*leaves, None, None, True, 0.0, 1e-5)
        expected = torch.autograd.grad(torch.relu(normal), leaves, dy[n].float())
        out = torch.relu(normal) + rest[n].float() if add else torch.relu(normal)
        got = [t[n].float().cpu() for t in (y, *views, *back)]
        torch.testing.assert_close(got[:1] + got[3:4], [out.detach(), expected[0]], **tolerance)
        torch.testing.assert_close(got[1:3] + got[4:], [mean, inverse, *expected[1:]], rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("rows", "features", "width", "count"), [(37, 5, 8, 4), (1500, 45, 48, 1), (300, 64, 64, 2)])
def test_batch_norm_of_a_common_input_is_torchs(
    device: str, dtype: torch.dtype, rows: int, features: int, width: int, count: int
) -> None:
    """As above; columns behind the features stay zero.

    The gradients are those through a product behind it: whole tensors, to a few roundings.
    """
    draw = iter(keys.split(keys.key(0), 5))
    x = torch.nn.functional.pad(keys.normal(next(draw), (rows, features)) + 5, (0, width - features))
    scale, bias = (keys.uniform(next(draw), (count, features)) + 0.5 * i for i in (1, 0))
    d, w = keys.normal(next(draw), (count, rows, 64)).to(dtype), keys.normal(next(draw), (count, 64, width)).to(dtype)
    tolerance = {"rtol": 2**-7, "atol": 2**-7} if dtype == torch.bfloat16 else {"rtol": 1e-4, "atol": 1e-4}
    moments = [torch.empty(count, features, device=device) for _ in range(2)]
    affine = [t.to(device) for t in (scale, bias)]
    y, z = batch_norm.common(x.to(device), *affine, *moments, dtype, 1e-5)
    back = batch_norm.common_backward(d.to(device), z, *affine, w.to(device))
    assert (y.dtype, y.shape) == (dtype, (count, rows, width))
    assert not y[..., features:].any()
    assert not back[2][..., features:].any()
    for n in range(count):
        leaves = [t.float().requires_grad_() for t in (scale[n].clone(), bias[n].clone(), w[n, :, :features])]
        normal, *stats = torch.native_batch_norm(x[:, :features], *leaves[:2], None, None, True, 0.0, 1e-5)
        expected = torch.autograd.grad(normal @ leaves[2].T, leaves, d[n].float())
        got = [t[n, ..., :features].float().cpu() for t in (y, *moments, *back)]
        torch.testing.assert_close(got[0], normal.detach(), **tolerance)
        torch.testing.assert_close(got[1:3], stats, rtol=1e-3, atol=1e-3)
        for a, b in zip(got[3:], expected, strict=True):
            assert (a - b).norm() <= (2**-7 if dtype == torch.bfloat16 else 1e-4) * b.norm()


@pytest.mark.parametrize("device", DEVICES)
def test_an_operator_agrees_with_its_shapes_and_changes_nothing(device: str) -> None:
    """In BF16: types and shapes by the fake kernels, inputs left alone, gradients of weights in float32.

    What is behind is whole numbers, which add up exactly.
    """
    draw = iter(keys.split(keys.key(0), 20))

    def normal(*shape: int) -> torch.Tensor:
        return keys.normal(next(draw), shape).to(device)

    leaves = [normal(3, 6), normal(3, 6), normal(3, 8, 16).bfloat16()]
    for _ in range(2):
        leaves += [normal(3, 32, 8).bfloat16(), normal(3, 32), normal(3, 32)]
        leaves += [normal(3, 8, 32).bfloat16(), normal(3, 8), normal(3, 8)]
    x = torch.nn.functional.pad(normal(24, 6), (0, 10))
    checks = ("test_schema", "test_faketensor")
    library.opcheck(trunk.forward, (x, leaves, 1e-5, 2), test_utils=checks)
    kept = trunk.forward(x, leaves, 1e-5, 2)
    dh = normal(2, 7, 8).bfloat16()
    dy, y, *parts = (
        keys.randint(keys.key(1), shape, -9, 9).to(x) for shape in ((2, 7, 16), (2, 7, 8), (6, 2, 3), (9,))
    )
    behind = [dy.bfloat16(), y.bfloat16(), *parts]
    library.opcheck(trunk.backward, (dh, leaves, kept, behind), test_utils=checks)
    library.opcheck(trunk.backward_block, (dh, leaves, kept, 1, behind), test_utils=checks)
    library.opcheck(trunk.backward_block, (dh, leaves, kept, 0, []), test_utils=checks)
    whole = trunk.backward_block(dh, leaves, kept, 1, [])[0]
    library.opcheck(trunk.backward_input, (whole, leaves, kept), test_utils=checks)
    found = trunk.backward(dh, leaves, kept, behind)
    assert [(t.shape, t.dtype) for t in found[:-3]] == [(t[1:].shape, torch.float32) for t in leaves]
    for of_behind in (found[-3:], trunk.backward_block(dh, leaves, kept, 1, behind)[-3:]):
        assert_bits_equal(of_behind, [torch.einsum("nbo,nbk->nok", dy, y), *(t.sum(0) for t in parts)])
