"""The projected Bellman target against the dense hat-function sum in numpy's float64."""

from __future__ import annotations

import functools

import numpy as np
import pytest
import torch
from equal import assert_bits_equal
from torch import Tensor

from functional_sac import value

ATOMS = value.support(-5.0, 5.0, 101)
FALSE = torch.tensor(False)
DISCOUNTS = [1.0, 0.99, 0.97, 0.97**3, 0.97**5, 0.5, 0.5**3]


@pytest.fixture(autouse=True, params=["eager", "compiled"])
def path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Runs every test on the formula of an eager CPU and on that of compiled code and of GPUs."""
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: request.param == "compiled")
    return request.param


def dense(probs: Tensor, reward: float, terminated: bool, entropy: float, atoms: Tensor, discount: float) -> np.ndarray:
    """Every pair of atoms, C51's equation 7 as it is written."""
    p, v = (np.asarray(x, np.float64) for x in (probs, atoms))
    moved = np.clip(reward + (0.0 if terminated else discount) * (v - entropy), v[0], v[-1])
    distance = np.abs(moved[:, None] - v[None, :]) * (len(v) - 1) / (v[-1] - v[0])
    return p @ np.clip(1.0 - distance, 0.0, None)


def check(probs: Tensor, reward: float, terminated: bool, entropy: float, atoms: Tensor, discount: float) -> Tensor:
    """Positions are of size `bins`, so float32 shares are off by up to bins * 2^-22 of a mass of at most one."""
    numbers = (torch.tensor(x, dtype=probs.dtype) for x in (reward, entropy))
    reward_, entropy_ = numbers
    found = value.bellman_target(probs, reward_, torch.tensor(terminated), entropy_, atoms, discount)
    expected = dense(probs, reward_.item(), terminated, entropy_.item(), atoms, discount)
    tolerance = len(atoms) * 2.0**-22 if probs.dtype == torch.float32 else 1e-12
    np.testing.assert_allclose(found.numpy(), expected, rtol=0, atol=tolerance)
    assert abs(found.double().sum().item() - 1) < tolerance
    assert found.min() >= 0
    return found


def distribution(generator: torch.Generator, bins: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.softmax(3 * torch.randn(bins, generator=generator, dtype=dtype), 0)


@pytest.mark.parametrize("discount", DISCOUNTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_random_transitions(dtype: torch.dtype, discount: float) -> None:
    """Rewards from far below to far above the support."""
    generator = torch.Generator().manual_seed(int(discount * 1000))
    for bins, low, high in ((101, -5.0, 5.0), (2, -1.0, 1.0), (51, 0.0, 7.0)):
        atoms = torch.linspace(low, high, bins, dtype=dtype)
        for i in range(25):
            reward, entropy = torch.randn(2, generator=generator).tolist()
            check(distribution(generator, bins, dtype), 4 * reward, i % 5 == 0, entropy, atoms, discount)


@pytest.mark.parametrize("terminated", [False, True])
@pytest.mark.parametrize("discount", DISCOUNTS)
@pytest.mark.parametrize("reward", [-1e30, -5.0, -0.1, 0.0, 0.1, 0.25, 4.95, 5.0, 10.0, 1e30])
def test_edges(reward: float, discount: float, terminated: bool) -> None:
    """Targets exactly on atoms, on the ends and beyond them; one-hot and uniform sources."""
    for probs in (torch.eye(101)[0], torch.eye(101)[50], torch.eye(101)[100], torch.full((101,), 1 / 101)):
        found = check(probs, reward, terminated, 0.0, ATOMS, discount)
        if reward == 1e30:
            assert found[-1] == pytest.approx(1.0, abs=1e-6)


def test_by_hand() -> None:
    """Atoms -1, 0, 1 halved and raised by 0.75 lie at 0.25, 0.75, 1.25, the last clipped to 1."""
    probs, atoms = torch.tensor([0.2, 0.4, 0.4]), torch.tensor([-1.0, 0.0, 1.0])
    target = functools.partial(value.bellman_target, probs, torch.tensor(0.75), atoms=atoms, discount=0.5)
    # 0.2 * (0.75, 0.25) + 0.4 * (0.25, 0.75) + 0.4 * (0, 1) on the atoms 0 and 1.
    torch.testing.assert_close(target(FALSE, torch.tensor(0.0)), torch.tensor([0.0, 0.25, 0.75]))
    torch.testing.assert_close(target(~FALSE, torch.tensor(9.0)), torch.tensor([0.0, 0.25, 0.75]))
    # An entropy term of 1.5 takes 0.75 away again: the atoms lie at -0.5, 0, 0.5.
    torch.testing.assert_close(target(FALSE, torch.tensor(1.5)), torch.tensor([0.1, 0.7, 0.2]))


def test_identity() -> None:
    """No discount, no reward: the distribution stays, but for the rounding of positions."""
    probs = distribution(torch.Generator().manual_seed(0), 101)
    zero = torch.tensor(0.0)
    torch.testing.assert_close(
        value.bellman_target(probs, zero, FALSE, zero, ATOMS, 1.0), probs, rtol=0, atol=101 * 2.0**-22
    )


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("place", ["reward", "entropy", "both, terminated"])
def test_bad_numbers_reach_the_gate(place: str, bad: float) -> None:
    """Neither an index out of range nor a target that looks healthy."""
    reward = torch.tensor(0.5 if place == "entropy" else bad)
    entropy = torch.tensor(0.5 if place == "reward" else bad)
    probs = torch.full((101,), 1 / 101)
    found = value.bellman_target(probs, reward, torch.tensor("terminated" in place), entropy, ATOMS, 0.99)
    assert found.isnan().all()


@pytest.mark.parametrize("discount", [1.0, 0.97, 0.5])
def test_a_batch_by_vmap_is_each_transition_alone(discount: float) -> None:
    """To 1e-6, as sums may run in another order; a second call gives the first one's bits."""
    generator = torch.Generator().manual_seed(1)
    probs = torch.softmax(torch.randn(64, 101, generator=generator), -1)
    reward, entropy, coin = torch.randn(3, 64, generator=generator)
    batch = (probs, 3 * reward, coin > 1, entropy)
    function = torch.func.vmap(functools.partial(value.bellman_target, discount=discount), (0, 0, 0, 0, None))
    found = function(*batch, ATOMS)
    for i in range(64):
        single = value.bellman_target(*(x[i] for x in batch), ATOMS, discount)
        torch.testing.assert_close(found[i], single, rtol=0, atol=1e-6)
    assert_bits_equal(function(*batch, ATOMS), found)


def test_support_and_expectation() -> None:
    assert ATOMS.shape == (101,)
    np.testing.assert_allclose(ATOMS, np.linspace(-5, 5, 101), rtol=0, atol=1e-6)
    probs = torch.tensor([[0.25, 0.25, 0.5], [0.0, 0.0, 1.0]])
    atoms = torch.tensor([-1.0, 0.0, 3.0])
    torch.testing.assert_close(value.expectation(probs.log(), atoms), torch.tensor([1.25, 3.0]))


def test_pessimistic_takes_the_lower_mean_row_by_row() -> None:
    """Means are (1, 0), (-1, 0) and a tie, in which member 0 is taken."""
    low, mid, high = torch.eye(3).clamp_min(1e-30).log()
    tie = torch.tensor([0.5, 1e-30, 0.5]).log()
    first, second = torch.stack([high, low, tie]), torch.stack([mid, mid, mid])
    found = value.pessimistic(torch.stack([first, second]), torch.tensor([-1.0, 0.0, 1.0]))
    assert_bits_equal(found, torch.stack([mid, low, tie]))
