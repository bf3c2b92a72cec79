"""The op over critics' logits against the losses that it stands for, and RMS norm against its derivative by torch."""

from __future__ import annotations

import pytest
import torch
from devices import DEVICES, needs_gpu

from functional_sac import distributions, losses, networks, value
from functional_sac.config import SACConfig
from functional_sac.fused import categorical, rms_norm
from functional_sac.transition import Observation, Transition
from functional_sl import keys

WIDTH, BINS, ROWS = 16, 11, 37

# Sums add in another order; gradients in BF16 are rounded to 2^-8 of themselves. A GPU's exponential is less exact.
KINDS = [
    ("cpu", torch.float64, torch.float64, 1e-12),
    ("cpu", torch.float32, torch.float32, 1e-5),
    ("cpu", torch.bfloat16, torch.float32, 2**-8),
    pytest.param("cuda", torch.float32, torch.float32, 1e-4, marks=needs_gpu),
    pytest.param("cuda", torch.bfloat16, torch.float32, 2**-8, marks=needs_gpu),
]


def draws(logits: torch.dtype, dtype: torch.dtype, discount: float) -> tuple:
    """Returns arguments of `categorical.loss`: rewards that leave the atoms, terminal rows, and columns of no bin."""
    draw = iter(keys.split(keys.key(3), 6))
    raw, reward = 3 * keys.normal(next(draw), (4, ROWS, WIDTH)), 4 * keys.normal(next(draw), (ROWS,))
    bias = [keys.normal(next(draw), (2, BINS)).to(dtype) for _ in range(2)]
    terminated = keys.uniform(next(draw), (ROWS,)) < 0.3
    entropy_term = keys.normal(next(draw), (ROWS,))
    return raw.to(logits), *bias, reward.to(dtype), terminated, entropy_term.to(dtype), -5.0, 5.0, discount


def near(found: torch.Tensor, expected: torch.Tensor, tolerance: float) -> None:
    assert (found.cpu() - expected).abs().max() <= tolerance * expected.abs().max()


@pytest.mark.parametrize(("device", "logits", "dtype", "tolerance"), KINDS)
@pytest.mark.parametrize(("gamma", "n_step"), [(0.97, 3), (1.0, 1), (0.4, 1)])
def test_the_loss_is_that_of_the_losses(
    device: str, logits: torch.dtype, dtype: torch.dtype, tolerance: float, gamma: float, n_step: int
) -> None:
    made = losses.make_losses(SACConfig(bins=BINS, gamma=gamma, n_step=n_step), 3)
    raw, bias, target_bias, reward, terminated, entropy_term, *rest = draws(logits, dtype, made.discount)
    nothing, observation = torch.zeros(()), Observation(torch.zeros(ROWS, 1), None)
    transition = Transition(observation, torch.zeros(ROWS, 1), reward, terminated, terminated, observation)
    policy = distributions.Sample(nothing, entropy_term)
    target = torch.log_softmax(raw[2:, :, :BINS].to(dtype) + target_bias.unsqueeze(1), -1)
    probs, _ = made.backup(target, policy, torch.zeros((), dtype=dtype), transition)

    def loss(raw: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        return made.cross_entropy(probs, torch.log_softmax(raw + bias.unsqueeze(1), -1))

    online = raw[:2, :, :BINS].to(dtype)
    (draw, dbias), expected = torch.func.grad_and_value(loss, argnums=(0, 1))(online, bias)
    given = (raw, bias, target_bias, reward, terminated, entropy_term)
    found, gradient, in_parts = categorical.loss(*(t.to(device) for t in given), *rest)
    assert (gradient.dtype, gradient.shape) == (logits, (2, ROWS, WIDTH))
    assert (gradient[..., BINS:] == 0).all()
    near(gradient[..., :BINS].to(dtype), draw, tolerance)
    near(in_parts.sum(0), dbias, min(tolerance, 1e-4))
    near(found.sum(), expected, min(tolerance, 2e-5))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("terminal", [False, True])
@pytest.mark.parametrize("number", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("where", ["logit", "target", "reward", "entropy_term"])
def test_numbers_that_are_not_finite_stay_in_their_row(where: str, number: float, terminal: bool, device: str) -> None:
    """Row 20 is of the third part, rows 16 to 23; an infinite logit of a target critic can lose to the other one."""
    raw, bias, target_bias, reward, terminated, entropy_term, *rest = draws(torch.float32, torch.float32, 0.97)
    terminated[20] = terminal
    raw[2:, 20, 1] = number if where == "target" else 0.0
    raw[1, 20, 1] = number if where == "logit" else 0.0
    reward[20] = number if where == "reward" else 0.0
    entropy_term[20] = number if where == "entropy_term" else 0.0
    given = (raw, bias, target_bias, reward, terminated, entropy_term)
    found, gradient, dbias = (t.cpu() for t in categorical.loss(*(t.to(device) for t in given), *rest))
    if where == "target" and number == -torch.inf:
        assert found.isfinite().all()  # a probability of zero
        return
    assert found.isfinite().tolist() == [True, True, False, True, True]
    assert dbias.isfinite().all(-1).all(-1).tolist() in (found.isfinite().tolist(), [True] * 5)
    finite = gradient.isfinite().all(-1).all(0)
    assert finite.tolist() in ([row != 20 for row in range(ROWS)], [True] * ROWS)
    assert (gradient[..., BINS:] == 0).all()


@pytest.mark.parametrize("device", DEVICES)
def test_equal_target_critics_give_the_first(device: str) -> None:
    """Mirrored logits have opposite means; two atoms share the mass of a mean of zero alike in both members."""
    raw = torch.zeros(4, 2, 8)
    raw[2, 0, :3], raw[3, 0, :3] = torch.tensor([0.0, -9.0, 0.0]), torch.tensor([-9.0, 0.0, -9.0])
    none, zero = torch.zeros(2), torch.zeros(2, 3)
    _, gradient, _ = categorical.loss(*(t.to(device) for t in (raw, zero, zero, none, none > 0, none)), -1.0, 1.0, 1.0)
    # Uniform critics: the gradient is (1/3 - target) / (critics times rows).
    target = 1 / 3 - 4 * gradient[0, 0, :3].cpu()
    torch.testing.assert_close(target, torch.softmax(raw[2, 0, :3], 0), rtol=0, atol=1e-6)


@pytest.mark.parametrize(("device", "logits", "dtype", "tolerance"), KINDS)
def test_the_lower_value_and_its_derivative(
    device: str, logits: torch.dtype, dtype: torch.dtype, tolerance: float
) -> None:
    raw, bias, *_ = draws(logits, dtype, 1.0)
    raw, bias = raw[:2], bias.clone()
    atoms = value.support(-5.0, 5.0, BINS).to(dtype)

    def lower(raw: torch.Tensor) -> torch.Tensor:
        return value.expectation(torch.log_softmax(raw + bias.unsqueeze(1), -1), atoms).amin(0)

    online = raw[..., :BINS].to(dtype)
    expected = torch.func.grad(lambda raw: lower(raw).sum())(online)
    found, derivative = categorical.lower_value(raw.to(device), bias.to(device), -5.0, 5.0)
    near(found, lower(online), min(tolerance, 2e-5))
    near(derivative[..., :BINS].to(dtype), expected, tolerance)
    assert derivative.dtype == logits
    assert (derivative[..., BINS:] == 0).all()
    raw[:, 3, 0] = torch.nan
    found, derivative = categorical.lower_value(raw.to(device), bias.to(device), -5.0, 5.0)
    assert found.isnan().sum() == 1
    assert derivative[:, 3, :BINS].isnan().all()


@pytest.mark.parametrize(("device", "kind", "dtype", "tolerance"), KINDS)
@pytest.mark.parametrize("width", [20, 256])
def test_rms_norm_and_its_derivative(
    device: str, kind: torch.dtype, dtype: torch.dtype, tolerance: float, width: int
) -> None:
    draw = iter(keys.split(keys.key(7), 3))
    h, dy = (
        keys.normal(next(draw), (2, 2, 2 * ROWS, width)).to(kind),
        keys.normal(next(draw), (2, ROWS, width)).to(kind),
    )
    scale = (keys.uniform(next(draw), (2, 2, width)) + 0.5).to(dtype)
    x = h.unflatten(2, (2, ROWS)).diagonal(0, 0, 2).movedim(-1, 0)
    leaves = (x[0].to(dtype), scale[0])
    y, pullback = torch.func.vjp(lambda x, scale: networks.rms_norm(scale.unsqueeze(1), x), *leaves)
    expected = pullback(dy.to(dtype))
    on = h.to(device).unflatten(2, (2, ROWS)).diagonal(0, 0, 2).movedim(-1, 0)
    found = rms_norm.forward(on, scale.to(device), kind, networks.RMS_EPS)
    near(found[0].to(dtype), y, tolerance)
    near(found[1].to(dtype), networks.rms_norm(scale[1].unsqueeze(1), x[1].to(dtype)), tolerance)
    assert torch.equal(rms_norm.forward(on[1], scale[1].to(device), kind, networks.RMS_EPS), found[1])
    dx, dscale = rms_norm.backward(dy.to(device), on[0], scale[0].to(device), networks.RMS_EPS)
    assert (dx.dtype, dx.shape) == (kind, (2, ROWS, width))
    near(dx.to(dtype), expected[0], tolerance)
    near(dscale.sum(0), expected[1], min(tolerance, 1e-4))
