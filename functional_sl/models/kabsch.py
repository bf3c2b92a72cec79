"""The rotation that best turns one set of points into another, differentiable and without a singular value
decomposition: torch's own reads back to the host on CUDA, so that it cannot be captured.

    quaternion matrix --squared to its dominant eigenvector--> R0 --one implicit Newton step--> R

The largest eigenvector of Horn's symmetric 4 x 4 matrix (JOSA A 4, 1987) is the quaternion of the rotation, reflections
excluded. Squaring the shifted matrix a fixed number of times isolates it. The gradient does not pass through that
iteration: it is that of the Newton step, which the implicit function theorem makes exact at the solution.
"""

from __future__ import annotations

import torch
from torch import Tensor

from functional_sl.models import precision

SQUARINGS = 14  # the dominant eigenvalue counts to the power 2^14
SPREAD = 1e-6  # least second moment in a second direction, relative to all, squared; below it points lie on a line


def align(reference: Tensor, target: Tensor, mask: Tensor, otherwise: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the rigid motion that takes `reference` closest to `target` in the least squares over the valid points.

    Points that are not valid, NaN included, change no bit of the result or its gradient.

    Args:
      reference: [..., A, 3] m.
      target: [..., A, 3] m.
      mask: [..., A] bool, which points are valid.
      otherwise: [..., 3, 3], the rotation where the points do not determine one: fewer than three valid ones, or all on
        a line. Its place is then that of their means, and no gradient passes through the rotation.

    Returns:
      Rotation [..., 3, 3] and translation [..., 3]: R reference + t. Zero translation without a valid point.
    """
    with precision.full(reference):
        target = target.to(reference.dtype)
        weight = mask.to(reference.dtype)[..., None]
        weight = weight / weight.sum(-2, keepdim=True).clamp_min(1.0)
        reference, target = (torch.where(mask[..., None], x, 0.0) for x in (reference, target))
        centre, goal = (weight * reference).sum(-2), (weight * target).sum(-2)
        p, q = reference - centre[..., None, :], target - goal[..., None, :]
        moment = p.mT @ (weight * p)
        size = moment.diagonal(dim1=-2, dim2=-1).sum(-1)
        sound = _spread(moment) > SPREAD * size.square()
        correlation = q.mT @ (weight * p) / torch.where(sound, size, 1.0)[..., None, None]
        turn = rotation(correlation, sound, otherwise)
        return turn, goal - (turn @ centre[..., None])[..., 0]


def rotation(correlation: Tensor, sound: Tensor, otherwise: Tensor) -> Tensor:
    """Returns the rotation R that maximises tr(R^T correlation), the nearest one to it.

    Args:
      correlation: [..., 3, 3], the sum of target times reference transposed, of order 1.
      sound: [...] bool, where it counts; elsewhere it may hold anything finite.
      otherwise: [..., 3, 3], the rotation elsewhere, and where the correlation does not determine one.

    Returns:
      [..., 3, 3], orthonormal to the rounding of the dtype.
    """
    correlation = torch.where(sound[..., None, None], correlation, _identity(correlation))
    start = from_quaternion(_dominant(correlation.detach()))
    aligned = start.mT @ correlation
    fixed = aligned.detach()
    fixed = (fixed + fixed.mT) / 2
    system = _trace(fixed)[..., None, None] * _identity(fixed) - fixed
    adjugate, determinant = _adjugate(system)
    sound = sound & (determinant > SPREAD * _trace(system).abs() ** 3)
    # This vector vanishes at the solution; its gradient does not.
    step = (adjugate @ twist(aligned)[..., None])[..., 0] / torch.where(sound, determinant, 1.0)[..., None]
    step = torch.where(sound[..., None], step, 0.0)
    return torch.where(sound[..., None, None], start @ _cayley(step), otherwise)


def from_quaternion(q: Tensor) -> Tensor:
    """Returns the rotation matrices [..., 3, 3] of unit quaternions wxyz [..., 4]."""
    with precision.full(q):
        eye = torch.eye(3, dtype=q.dtype, device=q.device).expand(*q.shape[:-1], 3, 3)
        # Of the vector part v: its matrix takes x to v x x. A table of coefficients could not be captured.
        cross = torch.linalg.cross(q[..., 1:, None], eye, dim=-2)
        return eye + 2 * (q[..., :1, None] * cross + cross @ cross)


def twist(matrix: Tensor) -> Tensor:
    """Returns the vector [..., 3] of M - M^T for M [..., 3, 3]: of a rotation 2 sin(angle) times its axis."""
    return torch.linalg.cross(_identity(matrix).expand_as(matrix), matrix, dim=-2).sum(-1)


def to_quaternion(matrix: Tensor) -> Tensor:
    """Returns the unit quaternions wxyz [..., 4] of rotation matrices [..., 3, 3], with w >= 0; no gradient."""
    q = _largest_column(_quaternion_matrix(matrix.detach()) + _identity(matrix.new_zeros(4, 4)))
    return torch.where(q[..., :1] < 0, -q, q)


def _dominant(correlation: Tensor) -> Tensor:
    """Returns the unit eigenvector [..., 4] of the largest eigenvalue of Horn's matrix."""
    horn = _quaternion_matrix(correlation)
    # Eigenvalues are sums of signed singular values, at most sqrt(3) Frobenius norms: the shift makes all positive.
    shift = 3**0.5 * torch.linalg.matrix_norm(correlation).clamp_min(torch.finfo(horn.dtype).tiny)
    power = horn + shift[..., None, None] * _identity(horn)
    power = power / _trace(power)[..., None, None]
    for i in range(SQUARINGS):
        power = power @ power
        # With trace 1 before, a quarter of the trace's square is left at least.
        if i % 2:
            power = power / _trace(power)[..., None, None]
    return _largest_column(power)


def _largest_column(matrix: Tensor) -> Tensor:
    """Returns the column with the largest diagonal entry, of length one: the vector of a matrix of rank one."""
    chosen = matrix.diagonal(dim1=-2, dim2=-1).argmax(-1, keepdim=True)
    at = torch.arange(matrix.shape[-1], device=matrix.device) == chosen
    column = (matrix * at[..., None, :]).sum(-1)
    return column / torch.linalg.vector_norm(column, dim=-1, keepdim=True)


def _quaternion_matrix(c: Tensor) -> Tensor:
    """Returns Horn's symmetric matrix [..., 4, 4], for which q^T N q = tr(R(q)^T c)."""
    trace, vector = _trace(c)[..., None, None], twist(c)[..., None]
    block = c + c.mT - trace * _identity(c)
    return torch.cat((torch.cat((trace, vector.mT), -1), torch.cat((vector, block), -1)), -2)


def _cayley(v: Tensor) -> Tensor:
    """Returns the rotations [..., 3, 3] by vectors [..., 3] to second order in them: quaternion (1, v / 2)."""
    q = torch.cat((torch.ones_like(v[..., :1]), v / 2), -1)
    return from_quaternion(q / torch.linalg.vector_norm(q, dim=-1, keepdim=True))


def _adjugate(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Returns adjugate [..., 3, 3] and determinant [...]: their quotient is the inverse."""
    a, b, c = matrix.unbind(-2)
    columns = (torch.linalg.cross(b, c), torch.linalg.cross(c, a), torch.linalg.cross(a, b))
    return torch.stack(columns, -1), (a * columns[0]).sum(-1)


def _spread(moment: Tensor) -> Tensor:
    """Returns the second invariant [...] of a second moment: zero if all points lie on a line."""
    return (_trace(moment).square() - (moment * moment.mT).sum((-2, -1))) / 2


def _trace(matrix: Tensor) -> Tensor:
    return matrix.diagonal(dim1=-2, dim2=-1).sum(-1)


def _identity(like: Tensor) -> Tensor:
    return torch.eye(like.shape[-1], dtype=like.dtype, device=like.device)
