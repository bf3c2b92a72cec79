"""Losses of one example against torch.nn.functional over the batch, values and gradients."""

from __future__ import annotations

import math

import pytest
import torch
from torch.nn import functional as F

from functional_sl import losses

BATCH, SIZE = 6, 5


def draw(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * 2


A, B, C = (draw(seed, BATCH, SIZE) for seed in range(3))
PROBS = torch.softmax(C, dim=1)
LABELS = torch.tensor([0, 4, 2, 1, 4, 3])

CASES = {
    "squared_error": (losses.squared_error, (A, B), F.mse_loss),
    "huber": (losses.huber, (A, B), F.huber_loss),
    "huber, delta 0.3": (
        lambda x, y: losses.huber(x, y, delta=0.3),
        (A, B),
        lambda x, y: F.huber_loss(x, y, delta=0.3),
    ),
    "cross_entropy": (losses.cross_entropy, (A, PROBS), F.cross_entropy),
    "integer labels": (losses.softmax_cross_entropy_with_integer_labels, (A, LABELS), F.cross_entropy),
    "gaussian_nll": (
        losses.gaussian_nll,
        (A, B / 4, C),
        # torch takes variances, and means over components where a joint density sums.
        lambda m, s, y: SIZE * F.gaussian_nll_loss(m, y, torch.exp(2 * s), full=True, eps=1e-12),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_the_mean_over_a_batch_is_torchs(name: str) -> None:
    loss, inputs, reference = CASES[name]
    wanted = tuple(i for i, x in enumerate(inputs) if x.is_floating_point())
    batched = torch.func.grad_and_value(lambda *xs: torch.func.vmap(loss)(*xs).mean(), argnums=wanted)
    grads, value = batched(*inputs)
    leaves = [x.clone().requires_grad_(x.is_floating_point()) for x in inputs]
    expected = reference(*leaves)
    # Float32 sums of 30 terms in another order.
    torch.testing.assert_close(value, expected.detach(), rtol=1e-6, atol=1e-6)
    for grad, oracle in zip(grads, torch.autograd.grad(expected, [leaves[i] for i in wanted]), strict=True):
        torch.testing.assert_close(grad, oracle, rtol=1e-5, atol=1e-6)


def test_values_worked_by_hand() -> None:
    prediction, target = torch.tensor([0.5, 3.0]), torch.tensor([0.0, 0.0])
    assert losses.squared_error(prediction, target).item() == (0.25 + 9.0) / 2
    # 0.5^2 / 2 = 0.125 within delta = 1; 3 beyond it: 1/2 + (3 - 1) = 2.5.
    assert losses.huber(prediction, target).item() == (0.125 + 2.5) / 2
    uniform = torch.zeros(4)
    assert losses.cross_entropy(uniform, torch.full((4,), 0.25)).item() == pytest.approx(math.log(4), rel=1e-6)
    standard = losses.gaussian_nll(target, torch.zeros(2), target)
    assert standard.item() == pytest.approx(math.log(2 * math.pi), rel=1e-6)


def test_extreme_logits_stay_finite() -> None:
    logits = torch.tensor([1e4, 0.0, -math.inf])
    grad, value = torch.func.grad_and_value(losses.softmax_cross_entropy_with_integer_labels)(logits, torch.tensor(1))
    assert value.item() == 1e4
    assert grad.tolist() == [1.0, -1.0, 0.0]


@pytest.mark.parametrize("label", [-100, -1, SIZE])
def test_a_label_without_a_class_is_infinite(label: int) -> None:
    assert losses.softmax_cross_entropy_with_integer_labels(A[0], torch.tensor(label)).item() == math.inf


@pytest.mark.parametrize(
    "call",
    [
        lambda: losses.squared_error(A, B),
        lambda: losses.squared_error(A[0], A[0, :1]),
        lambda: losses.huber(A[0, 0], B[0, 0]),
        lambda: losses.cross_entropy(A, PROBS),
        lambda: losses.softmax_cross_entropy_with_integer_labels(A, LABELS),
        lambda: losses.gaussian_nll(A[0], B[0, 0], C[0]),
    ],
)
def test_a_batch_or_a_broadcast_is_refused(call) -> None:
    with pytest.raises(AssertionError):
        call()


@pytest.mark.parametrize("name", CASES)
def test_compiles_as_one_graph(name: str) -> None:
    loss, inputs, _ = CASES[name]
    step = torch.func.vmap(torch.func.grad_and_value(loss))
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(*inputs), step(*inputs), rtol=1e-6, atol=1e-6)
