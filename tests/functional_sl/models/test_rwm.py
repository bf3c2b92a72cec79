"""The recurrent cell against `torch.nn.GRU`; the forecast against a plain loop; the spread against an empirical one."""

from __future__ import annotations

import math

import pytest
import torch
from equal import assert_bits_equal

from functional_sl import keys, optim, schedules, tree
from functional_sl.models import mlp, recurrent, rwm
from functional_sl.models.normalizer import Normalizer
from functional_sl.models.rwm import Architecture, Model, Scales
from functional_sl.step import Aux, make_step

TINY = Architecture(states=3, actions=2, contacts=2, hidden=5, layers=2, head=4)
ROWS, M, N = 4, 6, 3


def module(params: recurrent.GRU) -> torch.nn.GRU:
    layers, hidden = len(params), params[0].weight_hh.shape[-1]
    made = torch.nn.GRU(params[0].weight_ih.shape[-1], hidden, layers, batch_first=True, dtype=torch.float64)
    made.load_state_dict({f"{name}_l{i}": x for i, layer in enumerate(params) for name, x in layer._asdict().items()})
    return made


def double(value: tree.Tree) -> tree.Tree:
    return tree.map(torch.Tensor.double, value)


@pytest.mark.parametrize("layers", [1, 2, 3])
def test_values_and_gradients_are_those_of_torchs_gru(layers: int) -> None:
    """A scan of six inputs, then two steps, in float64 to 1e-12."""
    params = double(recurrent.init(keys.key(1), 4, 5, layers))
    x = keys.normal(keys.key(2), (3, 8, 4), torch.float64)

    def run(params: recurrent.GRU) -> torch.Tensor:
        hidden = recurrent.scan(params, x[:, :6])
        for t in (6, 7):
            hidden = recurrent.step(params, x[:, t], hidden)
        return torch.stack(hidden)

    oracle = module(params)
    expected = oracle(x)[1]
    torch.testing.assert_close(run(params), expected, rtol=0, atol=1e-12)
    direction = keys.normal(keys.key(3), tuple(expected.shape), torch.float64)
    gradients = torch.func.grad(lambda p: (run(p) * direction).sum())(params)
    (expected * direction).sum().backward()
    for i, layer in enumerate(gradients):
        for name, found in layer._asdict().items():
            torch.testing.assert_close(found, getattr(oracle, f"{name}_l{i}").grad, rtol=0, atol=1e-12)


def inputs(dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
    states, actions = keys.split(keys.key(5)).unbind(0)
    return keys.normal(states, (ROWS, M, 3), dtype), keys.normal(actions, (ROWS, M + N - 1, 2), dtype)


def by_hand(params: Model, states: torch.Tensor, actions: torch.Tensor, noise: torch.Tensor, member: int) -> list:
    """One member's forecast with `torch.nn.GRU`, which reads the whole past again at every step."""
    bases = [module(tree.index(params.bases, i)) for i in range(2)]
    heads, past, found = tree.index(params.heads, member), states, []
    mean = states[:, -1]
    for k in range(N):
        x = torch.cat([past, actions[:, : M + k]], -1)
        own, privileged = (base(x)[0][:, -1] for base in bases)
        mean = torch.sigmoid(heads.keep) * mean + mlp.apply(heads.mean, own)
        raw = mlp.apply(heads.log_std, own)
        log_std = -5 + torch.log1p(torch.exp(1 - torch.log1p(torch.exp(1 - raw)) + 5))
        found.append((mean, log_std, mlp.apply(heads.contact, privileged), mlp.apply(heads.termination, privileged)))
        past = torch.cat([past, (mean + log_std.exp() * noise[:, k])[:, None]], 1) if k < N - 1 else past
    return [torch.stack(parts, 1) for parts in zip(*found, strict=True)]


def test_a_forecast_goes_on_from_its_own_draws_and_every_member_from_the_history() -> None:
    """Against a loop that keeps no hidden state, in float64 to 1e-12: no member sees what another one left."""
    params = double(rwm.init(keys.key(4), TINY._replace(members=3)))
    states, actions = inputs(torch.float64)
    noise = keys.normal(keys.key(6), (3, ROWS, N - 1, 3), torch.float64)
    found = rwm.forecast(params, states, actions, noise)
    for member in range(3):
        mean, log_std, contact, termination = by_hand(params, states, actions, noise[member], member)
        torch.testing.assert_close(found.mean[member], mean, rtol=0, atol=1e-12)
        torch.testing.assert_close(found.log_std[member], log_std, rtol=0, atol=1e-12)
        torch.testing.assert_close(found.contact[member], contact, rtol=0, atol=1e-12)
        torch.testing.assert_close(found.termination[member], termination[..., 0], rtol=0, atol=1e-12)


def test_a_member_does_not_depend_on_the_others() -> None:
    params = rwm.init(keys.key(4), TINY._replace(members=3))
    states, actions = inputs()
    noise = keys.normal(keys.key(6), (3, ROWS, N - 1, 3))
    changed = tree.map(lambda x: torch.cat([x[:1] + 1, x[1:]]), params.heads)
    found, other = (rwm.forecast(params._replace(heads=h), states, actions, noise) for h in (params.heads, changed))
    assert not torch.equal(found.mean[0], other.mean[0])
    assert_bits_equal(tree.map(lambda x: x[1:], found), tree.map(lambda x: x[1:], other))
    assert not torch.equal(found.mean[1], found.mean[2])


@pytest.mark.parametrize("k", range(N))
def test_a_step_depends_on_its_action_and_on_none_behind_it(k: int) -> None:
    """The state at M + k is that after the action of frame M + k - 1."""
    params = rwm.init(keys.key(4), TINY)
    states, actions = inputs()
    other = actions.clone()
    other[:, M - 1 + k] += 1
    found, moved = (rwm.forecast(params, states, x) for x in (actions, other))
    assert_bits_equal(tree.map(lambda x: x[:, :, :k], found), tree.map(lambda x: x[:, :, :k], moved))
    assert all(not torch.equal(a[:, :, k], b[:, :, k]) for a, b in zip(found, moved, strict=True))


def test_the_noise_moves_later_steps_alone_and_has_a_gradient_through_the_mean() -> None:
    params = rwm.init(keys.key(4), TINY)
    states, actions = inputs()
    noise = keys.normal(keys.key(6), (1, ROWS, N - 1, 3))
    still, drawn = rwm.forecast(params, states, actions), rwm.forecast(params, states, actions, noise)
    assert torch.equal(still.mean[:, :, 0], drawn.mean[:, :, 0])
    assert not torch.equal(still.mean[:, :, 1], drawn.mean[:, :, 1])
    assert_bits_equal(rwm.forecast(params, states, actions, torch.zeros_like(noise)), still)

    def later(params: Model) -> torch.Tensor:
        return rwm.forecast(params, states, actions, noise).mean[:, :, -1].square().sum()

    gradient = torch.func.grad(later)(params).heads
    assert all(bool(x.any()) for x in tree.leaves(gradient.mean))
    assert not any(bool(x.any()) for x in tree.leaves(gradient.log_std))


@pytest.mark.parametrize("block", [1, 2, 3, 8])
def test_a_long_forecast_reads_the_last_frames_anew_after_every_block(block: int) -> None:
    """Seven steps of two members, each alone and from a window that is cut by hand, in float64 to 1e-12."""
    params = double(rwm.init(keys.key(4), TINY._replace(members=2)))
    states, _ = inputs(torch.float64)
    actions = keys.normal(keys.key(7), (ROWS, M + 6, 2), torch.float64)
    found = rwm.roll_out(params, states, actions, block)
    assert found.log_std.shape == (2, ROWS, 7, 3)
    for member in range(2):
        alone = params._replace(heads=tree.map(lambda x, i=member: x[i : i + 1], params.heads))
        for k in range(7):
            begin = k // block * block
            past = torch.cat([states, found.mean[member, :, :begin]], 1)[:, -M:]
            part = rwm.forecast(alone, past, actions[:, begin : M + k])
            for whole, own in zip(found, part, strict=True):
                torch.testing.assert_close(whole[member, :, k], own[0, :, k - begin], rtol=0, atol=1e-12)
    if block == 8:
        assert_bits_equal(found, rwm.forecast(params, states, actions))


def test_parameters_of_the_papers_sizes() -> None:
    """45 states, 12 actions, 8 contacts: 2 * 636,672 of the GRUs, 77,402 and 66,953 of the heads, 45 shares."""
    paper = Architecture(45, 12, 8)
    shapes = [rwm.init(keys.key(0), paper._replace(members=n)) for n in (1, 2)]
    assert tree.size(shapes[0].bases) == 2 * 636_672
    assert tree.size(shapes[0].heads) == 77_402 + 66_953 + 45
    assert tree.size(shapes[1].heads) == 2 * (77_402 + 66_953 + 45)


@pytest.mark.parametrize("beta", [0.0, 0.5, 1.0])
def test_the_best_spread_of_the_likelihood_is_that_of_the_errors(beta: float) -> None:
    """Fixed errors of spreads 0.1 and 3: where the gradient to log std is zero, std is their root mean square."""
    target = torch.tensor([0.1, 3.0]) * keys.normal(keys.key(0), (500, 2))
    best = target.square().mean(0).sqrt().log()

    def value(log_std: torch.Tensor) -> torch.Tensor:
        return rwm.likelihood(torch.zeros(500, 2), log_std.expand(500, 2), target, beta).mean()

    for shift, sign in ((0.0, 0), (0.2, 1), (-0.2, -1)):
        slope = torch.func.grad(value)(best + shift)
        assert bool((torch.sign(torch.round(slope * 1e5)) == sign).all()), (shift, slope)
    at_zero = rwm.likelihood(torch.zeros(1), torch.tensor([math.log(2.0)]), torch.ones(1), 0.0)
    assert float(at_zero) == pytest.approx(0.5 / 4 + math.log(2.0))


def toy(key: torch.Tensor, rows: int, steps: int, spread: float) -> tuple[torch.Tensor, torch.Tensor]:
    """x' = 0.9 x + a + spread * noise, x of one channel."""
    start, push, kick = keys.split(key, 3).unbind(0)
    x, a, e = keys.normal(start, (rows,)), keys.normal(push, (rows, steps)), keys.normal(kick, (rows, steps))
    found = [x]
    for t in range(steps - 1):
        found.append(0.9 * found[-1] + a[:, t] + spread * e[:, t])
    return torch.stack(found, 1)[..., None], a[..., None]


def trained(shift: int, updates: int) -> Model:
    """Trains on the toy with noise of 0.5; a shift of 1 pairs every state with the action that led to it."""
    architecture = Architecture(1, 1, 1, hidden=16, layers=1, head=16)

    def loss(params: Model, stats: tuple, x: torch.Tensor, a: torch.Tensor, noise: torch.Tensor) -> tuple:
        found = rwm.forecast(params, x[:, :3], a, noise)
        return rwm.likelihood(found.mean[0], found.log_std[0], x[:, 3:], 0.5).mean(), Aux(stats, {})

    step = make_step(loss, optim.adam(schedules.linear(2e-2, 0.0, updates)))
    state = step.init(rwm.init(keys.key(0), architecture), ())
    for i in range(updates):
        key = keys.fold_in(keys.key(1), i)
        x, a = toy(key, 256, 6 + shift, 0.5)
        noise = keys.normal(keys.fold_in(key, 9), (1, 256, 2, 1))
        state, _, _ = step.update(state, x[:, shift : 6 + shift], a[:, :5], noise)
    return state.params


def rms(x: torch.Tensor) -> torch.Tensor:
    return x.square().mean((0, 2)).sqrt()


def test_the_spread_is_the_empirical_one_and_actions_are_aligned() -> None:
    """One step errs by the noise, 0.5, two by 0.5 sqrt(1 + 0.81), and so on; errors in units of the std are 1 on
    average, and nearly so at every step although the model hardly tells one from the next after so short a training.

    With the actions that led to the states the first step errs by an unknown push too: sqrt(1 + 0.25).
    """
    x, a = toy(keys.key(7), 4000, 7, 0.5)
    with torch.no_grad():
        found = rwm.forecast(trained(0, 120), x[:, :3], a[:, :5])
        late = rwm.forecast(trained(1, 40), x[:, 1:4], a[:, :5])
    gap = found.mean[0] - x[:, 3:6]
    expected = [0.5 * math.sqrt(sum(0.81**i for i in range(k))) for k in (1, 2, 3)]
    torch.testing.assert_close(rms(gap), torch.tensor(expected), rtol=0.15, atol=0)
    ratio = rms(gap * torch.exp(-found.log_std[0]))
    assert float(ratio.square().mean().sqrt()) == pytest.approx(1, abs=0.1)
    assert bool(((ratio > 0.7) & (ratio < 1.3)).all()), ratio
    assert float(rms(late.mean[0] - x[:, 4:7])[0]) > 1.1


@pytest.mark.parametrize("members", [1, 2])
def test_a_bundles_function_repeats_the_forecast_in_units_of_the_data(members: int) -> None:
    params = rwm.init(keys.key(4), TINY._replace(members=members))
    scales = Scales(
        Normalizer(torch.tensor([1.0, 2.0, 3.0]), torch.tensor([0.5, 2.0, 4.0])),
        Normalizer(torch.zeros(2), torch.full((2,), 3.0)),
    )
    states, actions = inputs()
    raw = {"states": states * scales.state.std + scales.state.mean, "actions": 3 * actions}
    out = rwm.predict(rwm.named(params, scales), raw, block=N)
    found = rwm.forecast(params, states, actions)
    torch.testing.assert_close(
        out["states"], found.mean.mean(0) * scales.state.std + scales.state.mean, rtol=1e-5, atol=1e-5
    )
    assert_bits_equal(rwm.unnamed(rwm.named(params, scales)), (params, scales))
    shapes = {name: tuple(x.shape) for name, x in out.items()}
    assert shapes == {
        "states": (ROWS, N, 3), "std": (ROWS, N, 3), "spread": (ROWS, N, 3), "contacts": (ROWS, N, 2),
        "terminations": (ROWS, N),
    }  # fmt: skip
    assert bool(out["spread"].any()) == (members > 1)
