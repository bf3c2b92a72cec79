"""The step behind the gradient as one op, against the functions that define it."""

from __future__ import annotations

import pytest
import torch
from devices import DEVICES
from torch import library

from functional_sac import networks
from functional_sac.fused import alignment, descent
from functional_sac.networks import Actor, Critic
from functional_sl import keys, optim, tree, wire

RATE, TAU = 3e-3, 0.05


def network(kind: str, blocks: int = 2) -> Actor | Critic:
    """Returns an actor, or two stacked critics, of odd sizes, with no parameter at its first value."""
    if kind == "Actor":
        params = networks.init_actor(keys.key(1), 19, 5, 12, blocks)[0]
    else:
        params = tree.stack([networks.init_critic(k, 37, 11, 24, blocks)[0] for k in keys.split(keys.key(1), 2)])
    draw = iter(keys.split(keys.key(2), 60))
    return tree.map(lambda x: x + 0.1 * keys.uniform(next(draw), tuple(x.shape)), params)


def start(kind: str) -> tuple[Actor | Critic, Critic | tuple[()], optim.AdamState, torch.Tensor]:
    """Returns parameters, target, the state of Adam after four steps and a gradient, a third of it zeros."""
    params = network(kind)
    target = tree.map(lambda x: x + 0.01, params) if kind == "Critic" else ()
    draw, size = keys.split(keys.key(3), 3), tree.size(params)
    mu, nu, gradient = keys.normal(draw[0], (size,)), keys.uniform(draw[1], (size,)), keys.normal(draw[2], (size,))
    gradient[::3], mu[::6], nu[::6] = 0.0, 0.0, 0.0
    return params, target, optim.AdamState(torch.tensor(4), mu, nu), gradient


def defined(params: tree.Tree, target: tree.Tree, opt: optim.AdamState, gradient: torch.Tensor) -> tuple:
    flat = torch.cat([leaf.reshape(-1) for leaf in tree.leaves(params)])
    updates, opt = optim.adam(RATE).update(gradient, opt, flat)
    new = networks.project(wire.unpack(flat + updates, params))
    return new, tree.lerp(target, new, TAU) if target else (), opt


def descended(device: str, ok: bool, *arguments: tree.Tree, copies: torch.dtype | None = None) -> tuple:
    """Returns parameters, target and the optimizer's state, and the copies where there are to be any."""
    *rest, gradient = arguments
    rate = torch.tensor(RATE, dtype=torch.float64)
    given = tree.to((*rest, wire.unpack(gradient, rest[0]), torch.tensor(ok), rate), device)
    found = tree.to(tuple(descent.descend(*given, TAU, copies)), "cpu")
    return found if copies else found[:3]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", ["Actor", "Critic"])
def test_an_open_gate_takes_the_step(device: str, kind: str) -> None:
    """On a CPU to the bit. The kernel contracts products and divides within 2 ulp: parameters to 4 ulp.

    Parameters of a target and moments are sums of terms below 5: a few ulp of these.
    """
    arguments = start(kind)
    before, expected = tree.clone(arguments), defined(*arguments)
    found = descended(device, True, *arguments)
    assert tree.bits_equal(arguments, before)
    assert found[2].count == 5
    if device == "cpu":
        assert tree.bits_equal(found, expected)
    torch.testing.assert_close(found[0], expected[0], rtol=5e-7, atol=1e-8)
    torch.testing.assert_close(found[1:], expected[1:], rtol=1e-6, atol=1e-6)
    rows = found[0].trunk.blocks[1].w2
    torch.testing.assert_close(torch.linalg.vector_norm(rows, dim=-1), torch.ones(rows.shape[:-1]), rtol=1e-6, atol=0)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", ["Actor", "Critic"])
@pytest.mark.parametrize("number", [1.0, torch.nan])
def test_a_closed_gate_keeps_every_bit(device: str, kind: str, number: float) -> None:
    params, target, opt, gradient = start(kind)
    gradient[7] = number
    found = descended(device, False, params, target, opt, gradient)
    assert tree.bits_equal(found, (params, target, opt))


def assert_same(found: tree.Tree, expected: tree.Tree, device: str) -> None:
    """Bit for bit but for what a NaN holds; two kernels of a GPU round a product and a sum as one, or each."""
    exact = {"rtol": 0, "atol": 0} if device == "cpu" else {"rtol": 1e-6, "atol": 1e-7}
    torch.testing.assert_close(found, expected, equal_nan=True, **exact)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("ok", [True, False])
@pytest.mark.parametrize("kind", ["Actor", "Critic"])
def test_copies_are_those_of_what_is_left_behind(device: str, kind: str, ok: bool, dtype: torch.dtype) -> None:
    arguments = start(kind)
    arguments[0].trunk.w[..., 2, 3] = torch.nan
    *left, copies = descended(device, ok, *arguments, copies=dtype)
    stacked = [
        tree.map(lambda x: x if kind == "Critic" else x.unsqueeze(0), network) for network in left[:2] if network
    ]
    assert copies[alignment.INPUT_WEIGHT].shape[-1] == {"Actor": 24, "Critic": 40}[kind]
    assert not copies[alignment.INPUT_WEIGHT][..., stacked[0].trunk.w.shape[-1] :].any()
    assert_same(copies, tuple(alignment.aligned(stacked, dtype)), "cpu")
    assert_same(tuple(left), descended(device, ok, *arguments), device)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", ["Actor", "Critic"])
def test_gradients_may_have_gaps_and_narrow_types(device: str, kind: str) -> None:
    params, target, opt, gradient = start(kind)
    gaps = tree.map(
        lambda x: torch.nn.functional.pad(x.bfloat16(), (0, 3, 0, 2)[: 2 * x.ndim], value=torch.nan),
        wire.unpack(gradient, params),
    )
    given = tree.map(lambda x, p: x[tuple(slice(size) for size in p.shape)], gaps, params)
    packed = torch.cat([leaf.float().reshape(-1) for leaf in tree.leaves(given)])
    rate = torch.tensor(RATE, dtype=torch.float64)
    found = descent.descend(*tree.to((params, target, opt, given, torch.tensor(True), rate), device), TAU)
    assert_same(tree.to(tuple(found)[:3], "cpu"), descended(device, True, params, target, opt, packed), device)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", ["Actor", "Critic"])
@pytest.mark.parametrize("ranks", [3, 8])
def test_sums_over_ranks_are_divided_behind_their_type_on_the_wire(device: str, kind: str, ranks: int) -> None:
    """The sums are views of a BF16 vector, as they arrive; the mean is rounded in float32 alone."""
    params, target, opt, gradient = start(kind)
    arrived, rate = gradient.bfloat16(), torch.tensor(RATE, dtype=torch.float64)
    given = tree.to((params, target, opt, wire.unpack(arrived, params), torch.tensor(True), rate), device)
    found = tree.to(tuple(descent.descend(*given, TAU, ranks=ranks))[:3], "cpu")
    assert_same(found, descended(device, True, params, target, opt, arrived.float() / ranks), device)
    assert not tree.bits_equal(found[2], descended(device, True, params, target, opt, gradient / ranks)[2])


@pytest.mark.parametrize("device", DEVICES)
def test_a_parameter_that_is_not_finite_stays_in_its_row(device: str) -> None:
    params, target, opt, gradient = start("Critic")
    params.trunk.w[1, 2, 3], params.trunk.norm.bias[0, 4], params.b[1, 5] = torch.nan, torch.nan, torch.inf
    new, behind, _ = descended(device, True, params, target, opt, gradient)
    lost = {name: (~leaf.isfinite()).sum().item() for name, leaf in tree.named(new).items()}
    expected = {"trunk/w": 37, "trunk/norm/scale": 37, "trunk/norm/bias": 37, "b": 1}
    assert {name: count for name, count in lost.items() if count} == expected
    assert tree.bits_equal(tree.map(torch.isfinite, behind), tree.map(torch.isfinite, new))


@pytest.mark.parametrize("blocks", [1, 3])
@pytest.mark.parametrize("kind", ["Actor", "Critic"])
def test_a_skeleton_is_a_networks(kind: str, blocks: int) -> None:
    params = network(kind, blocks)
    assert tree.flatten(descent.skeleton(kind, len(tree.leaves(params))))[1] == tree.flatten(params)[1]


def test_the_op_is_what_a_compiler_takes_it_for() -> None:
    params, target, opt, gradient = start("Critic")
    corrections = optim.corrections(opt.count, torch.tensor(RATE, dtype=torch.float64))
    slopes = tree.leaves(wire.unpack(gradient, params))
    arguments = ("Critic", tree.leaves(params), tree.leaves(target), slopes, opt.mu, opt.nu, torch.tensor(True))
    library.opcheck(
        descent._descend,
        (*arguments, *corrections, TAU, 2, torch.bfloat16),
        test_utils=("test_schema", "test_faketensor"),
    )
