"""The squashed Gaussian against `torch.distributions`."""

from __future__ import annotations

import math

import pytest
import torch
from torch.distributions import Independent, Normal, TanhTransform, TransformedDistribution

from functional_sac import distributions


def inputs(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    mean, log_std, noise = torch.randn(3, 500, 4, generator=generator, dtype=torch.float64)
    return (2 * mean).to(dtype), (log_std - 1).clamp(-10, 2).to(dtype), noise.to(dtype)


def reference(mean: torch.Tensor, log_std: torch.Tensor) -> TransformedDistribution:
    return TransformedDistribution(Independent(Normal(mean, log_std.exp()), 1), [TanhTransform(cache_size=1)])


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-4), (torch.float64, 1e-12)])
def test_against_torch(dtype: torch.dtype, tolerance: float) -> None:
    """Sums of four terms of size up to 40, in the dtype's precision."""
    mean, log_std, noise = inputs(dtype)
    action, log_prob = distributions.sample(mean, log_std, noise)
    policy = reference(mean, log_std)
    expected = policy.transforms[0](mean + log_std.exp() * noise)
    assert torch.equal(action, expected)
    torch.testing.assert_close(log_prob, policy.log_prob(expected), rtol=0, atol=tolerance)
    assert action.shape == (500, 4)
    assert log_prob.shape == (500,)


def test_gradients_against_torch() -> None:
    """The path through the action counts, as for a reparametrised sample."""
    mean, log_std, noise = inputs(torch.float64)
    leaves = [mean.requires_grad_(), log_std.requires_grad_()]
    action, log_prob = distributions.sample(mean, log_std, noise)
    found = torch.autograd.grad((log_prob.sin() + action.sum(-1)).sum(), leaves)
    policy = reference(mean, log_std)
    action = policy.transforms[0](mean + log_std.exp() * noise)
    expected = torch.autograd.grad((policy.log_prob(action).sin() + action.sum(-1)).sum(), leaves)
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("mean", [-60.0, -9.0, 9.0, 60.0])
def test_saturated_actions_have_finite_exact_densities(mean: float) -> None:
    """log p = log N(0) - 2 (ln 2 - |u|) for large |u|, though tanh u is 1 in float32."""
    action, log_prob = distributions.sample(torch.full((1,), mean), torch.zeros(1), torch.zeros(1))
    assert abs(action.item()) == pytest.approx(1.0, abs=1e-6)
    assert log_prob.item() == pytest.approx(-0.5 * math.log(2 * math.pi) - 2 * (math.log(2) - abs(mean)), rel=1e-5)


def test_a_density_integrates_to_one() -> None:
    """Over u in [-12, 12], p(tanh u) d tanh u, by the trapezoid rule."""
    u = torch.linspace(-12, 12, 20001, dtype=torch.float64)
    mean, log_std = torch.full_like(u, 0.3), torch.full_like(u, -0.4)
    action, log_prob = distributions.sample(*(x[:, None] for x in (mean, log_std, (u - mean) / log_std.exp())))
    assert torch.trapezoid(log_prob.exp(), action[:, 0]).item() == pytest.approx(1.0, abs=1e-6)


def test_shapes_must_agree() -> None:
    with pytest.raises(AssertionError):
        distributions.sample(torch.zeros(3, 2), torch.zeros(2), torch.zeros(3, 2))


@pytest.mark.parametrize("sigma", [0.15, 1.0])
def test_target_entropy(sigma: float) -> None:
    expected = Normal(0.0, torch.tensor(sigma, dtype=torch.float64)).entropy().item()
    assert distributions.target_entropy(3, sigma) == pytest.approx(3 * expected, rel=1e-12)
    assert distributions.target_entropy(1, 0.15) == pytest.approx(-0.4781814, abs=1e-6)
