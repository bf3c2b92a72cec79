"""Rigid alignment against a singular value decomposition in float64: values, gradients, degenerate points."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from functional_sl.models import kabsch

EYE = torch.eye(3, dtype=torch.float64)


def oracle(reference: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """Kabsch's own way (Acta Cryst. A 32, 1976): the singular vectors, the last one turned where they would mirror."""
    p, q = reference.mean(-2, keepdim=True), target.mean(-2, keepdim=True)
    u, _, v = torch.linalg.svd((target - q).mT @ (reference - p))
    sign = torch.det(u @ v).detach()
    mirror = torch.diag_embed(torch.stack((torch.ones_like(sign), torch.ones_like(sign), sign), -1))
    turn = u @ mirror @ v
    return turn, (q - p @ turn.mT)[..., 0, :]


def rotations(count: int) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(count, 4, generator=generator, dtype=torch.float64)
    return kabsch.from_quaternion(q / q.norm(dim=-1, keepdim=True))


def problem(noise: float, flat: bool = False, count: int = 200) -> tuple[Tensor, Tensor]:
    """Points of a box's size, moved rigidly and then disturbed by a share of it."""
    generator = torch.Generator().manual_seed(1)
    draw = [torch.randn(count, 4, 3, generator=generator, dtype=torch.float64) for _ in range(2)]
    corners = torch.tensor([[1, 1, 1], [-1, -1, 1], [-1, 1, -1], [1, -1, -1]], dtype=torch.float64)
    reference = 0.1 * (corners + 0.3 * draw[0]) * torch.tensor([1.0, 1.0, 0.0 if flat else 1.0])
    shift = torch.linspace(-2, 2, count, dtype=torch.float64)[:, None, None]
    return reference, reference @ rotations(count).mT + shift + noise * 0.1 * draw[1]


def solve(reference: Tensor, target: Tensor, mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
    mask = torch.ones(reference.shape[:-1], dtype=torch.bool) if mask is None else mask
    otherwise = torch.eye(3, dtype=reference.dtype).expand(*reference.shape[:-2], 3, 3)
    return kabsch.align(reference, target, mask, otherwise)


@pytest.mark.parametrize("flat", [False, True])
@pytest.mark.parametrize("noise", [0.0, 0.05, 0.5])
@pytest.mark.parametrize(("dtype", "value", "slope"), [(torch.float64, 1e-11, 1e-9), (torch.float32, 2e-5, 2e-3)])
def test_value_and_gradient_are_those_of_the_decomposition(
    noise: float, flat: bool, dtype: torch.dtype, value: float, slope: float
) -> None:
    """Flat bodies too. float32 loses what a thin spread of points amplifies: 1e-6 in the median, 2e-3 at worst."""
    reference, target = problem(noise, flat)
    generator = torch.Generator().manual_seed(2)
    weights = [torch.randn(200, *shape, generator=generator, dtype=torch.float64) for shape in ((3, 3), (3,))]
    gradients = []
    for function, kind in ((oracle, torch.float64), (solve, dtype)):
        p, q = (x.to(kind).requires_grad_() for x in (reference, target))
        found = function(p, q)
        total = sum((w.to(kind) * x).sum() for w, x in zip(weights, found, strict=True))
        gradients.append([*torch.autograd.grad(total, q), *(x.detach() for x in found)])
    expected, own = gradients
    torch.testing.assert_close(own[1].double(), expected[1], rtol=0, atol=value)
    torch.testing.assert_close(own[2].double(), expected[2], rtol=0, atol=value)
    gap = (own[0] - expected[0]).abs().amax((-1, -2)) / expected[0].abs().amax((-1, -2))
    assert float(gap.max()) < slope
    assert float(gap.median()) < 20 * torch.finfo(dtype).eps
    orthonormal = own[1] @ own[1].mT - torch.eye(3, dtype=dtype)
    assert float(orthonormal.abs().max()) < 20 * torch.finfo(dtype).eps
    assert (torch.det(own[1]) > 0).all()


def test_gradient_in_the_reference_too_and_under_func_and_vmap() -> None:
    reference, target = problem(0.3, count=5)

    def total(function: object, p: Tensor, q: Tensor) -> Tensor:
        turn, shift = function(p, q)
        return turn[..., 0, :].sum() + (shift**2).sum()

    ours = [torch.func.grad(lambda *x: total(solve, *x), argnums=i)(reference, target) for i in range(2)]
    mapped = torch.func.vmap(torch.func.grad(lambda *x: total(solve, *x), argnums=(0, 1)))(reference, target)
    p, q = reference.requires_grad_(), target.requires_grad_()
    theirs = torch.autograd.grad(total(oracle, p, q), (p, q))
    for own, each, expected in zip(ours, mapped, theirs, strict=True):
        torch.testing.assert_close(own, expected, rtol=1e-8, atol=1e-9)
        torch.testing.assert_close(each, expected, rtol=1e-8, atol=1e-9)


def test_a_quarter_turn_by_hand() -> None:
    """(1, 0, 0) goes to (0, 1, 0) and (0, 1, 0) to (-1, 0, 0), everything 5 m up: a quarter turn about z."""
    reference = torch.tensor([[1.0, 0, 0], [-1, 0, 0], [0, 1, 0], [0, -1, 0]])
    target = torch.tensor([[0.0, 1, 5], [0, -1, 5], [-1, 0, 5], [1, 0, 5]])
    turn, shift = solve(reference, target)
    torch.testing.assert_close(turn, torch.tensor([[0.0, -1, 0], [1, 0, 0], [0, 0, 1]]), rtol=0, atol=1e-6)
    torch.testing.assert_close(shift, torch.tensor([0.0, 0, 5]))


def test_a_mirror_image_is_answered_by_a_rotation() -> None:
    reference, _ = problem(0.0)
    turn, _ = solve(reference, reference * torch.tensor([1.0, 1.0, -1.0]))
    torch.testing.assert_close(torch.det(turn), torch.ones(200, dtype=torch.float64))


@pytest.mark.parametrize("filler", [0.0, 7.0, math.nan, math.inf])
def test_points_that_are_not_valid_change_no_bit(filler: float) -> None:
    reference, target = problem(0.1, count=3)
    mask = torch.tensor([[True, True, True, False]] * 3)

    def run(fill: float) -> tuple[Tensor, Tensor, Tensor]:
        p, q = (torch.where(mask[..., None], x.detach(), fill).requires_grad_() for x in (reference, target))
        turn, shift = solve(p, q, mask)
        gradient, *_ = torch.autograd.grad((turn[..., 0].sum() + shift.sum()), q)
        assert not gradient[:, 3].any()
        return turn, shift, gradient

    for own, zero in zip(run(filler), run(0.0), strict=True):
        assert torch.equal(own, zero)
    three = solve(reference[:, :3], target[:, :3])
    torch.testing.assert_close(run(filler)[0], three[0], rtol=0, atol=1e-12)


LINE = torch.tensor([[0.0, 0, 0], [1, 0, 0], [2, 0, 0], [3, 0, 0]])
SQUARE = torch.tensor([[1.0, 0, 0], [-1, 0, 0], [0, 1, 0], [0, -1, 0]])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    ("reference", "target", "valid"),
    [
        (LINE, 2 * LINE + 1, 4),  # on a line
        (SQUARE, SQUARE, 2),
        (SQUARE, SQUARE, 1),
        (SQUARE, SQUARE, 0),
        (0 * SQUARE, SQUARE, 4),  # one point
        (SQUARE, 0 * SQUARE + 3, 4),  # predicted to collapse
        (SQUARE, LINE, 4),
    ],
)
def test_what_does_not_determine_a_rotation_gets_the_given_one_and_a_finite_gradient(
    reference: Tensor, target: Tensor, valid: int, dtype: torch.dtype
) -> None:
    mask, given = torch.arange(4) < valid, rotations(1)[0].to(dtype)
    q = target.to(dtype, copy=True).requires_grad_()
    turn, shift = kabsch.align(reference.to(dtype), q, mask, given)
    assert torch.equal(turn, given)
    assert torch.isfinite(shift).all()
    gradient, *_ = torch.autograd.grad(turn.sum() + shift.sum(), q)
    assert torch.isfinite(gradient).all()
    if valid:
        torch.testing.assert_close(gradient.sum(0), torch.ones(3, dtype=dtype))  # the mean alone is followed


def test_quaternions_and_matrices_go_both_ways() -> None:
    """Half turns, where the scalar part vanishes, included."""
    half = torch.diag_embed(torch.tensor([[1.0, -1, -1], [-1, 1, -1], [-1, -1, 1]], dtype=torch.float64))
    turns = torch.cat((rotations(50), half, EYE[None]))
    q = kabsch.to_quaternion(turns)
    torch.testing.assert_close(kabsch.from_quaternion(q), turns, rtol=0, atol=1e-12)
    torch.testing.assert_close(q.norm(dim=-1), torch.ones(54, dtype=torch.float64))
    assert (q[:, 0] >= 0).all()
