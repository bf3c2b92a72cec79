"""Rotations as unit quaternions (w, x, y, z) over any leading axes."""

from __future__ import annotations

import torch
from torch import Tensor


def multiply(a: Tensor, b: Tensor) -> Tensor:
    """Returns the Hamilton product `a b` of quaternions [..., 4]: the rotation by `b`, then by `a`."""
    aw, ax, ay, az = a.unbind(-1)
    bw, bx, by, bz = b.unbind(-1)
    return torch.stack(
        (
            aw * bw - ax * bx - ay * by - az * bz,
            aw * bx + ax * bw + ay * bz - az * by,
            aw * by - ax * bz + ay * bw + az * bx,
            aw * bz + ax * by - ay * bx + az * bw,
        ),
        dim=-1,
    )


def conjugate(q: Tensor) -> Tensor:
    """Returns the inverse rotation [..., 4] of unit quaternions."""
    return torch.cat((q[..., :1], -q[..., 1:]), dim=-1)


def rotate(q: Tensor, v: Tensor) -> Tensor:
    """Returns vectors `v` [..., 3] turned by `q` [..., 4]."""
    axis, v = torch.broadcast_tensors(q[..., 1:], v)
    turned = 2.0 * torch.linalg.cross(axis, v)
    return v + q[..., :1] * turned + torch.linalg.cross(axis, turned)


def rotate_inverse(q: Tensor, v: Tensor) -> Tensor:
    """Returns vectors `v` [..., 3] turned by the inverse of `q`: world coordinates into those of the frame `q`."""
    return rotate(conjugate(q), v)


def matrix(q: Tensor) -> Tensor:
    """Returns the rotation matrices [..., 3, 3]; column i is axis i of the frame in world coordinates."""
    w, x, y, z = q.unbind(-1)
    rows = (
        torch.stack((1 - 2 * (y * y + z * z), 2 * (x * y - w * z), 2 * (x * z + w * y)), dim=-1),
        torch.stack((2 * (x * y + w * z), 1 - 2 * (x * x + z * z), 2 * (y * z - w * x)), dim=-1),
        torch.stack((2 * (x * z - w * y), 2 * (y * z + w * x), 1 - 2 * (x * x + y * y)), dim=-1),
    )
    return torch.stack(rows, dim=-2)


def sixd(q: Tensor) -> Tensor:
    """Returns the first two columns of the rotation matrix, row by row [..., 6]: R00, R01, R10, R11, R20, R21."""
    return matrix(q)[..., :2].flatten(-2)


def yaw(q: Tensor) -> Tensor:
    """Returns the heading [...]: the angle of rotation about z in the order z, y, x of intrinsic rotations."""
    w, x, y, z = q.unbind(-1)
    return torch.atan2(2 * (w * z + x * y), 1 - 2 * (y * y + z * z))


def from_yaw(angle: Tensor) -> Tensor:
    """Returns the rotations [..., 4] about the vertical by an angle [...]."""
    zero = torch.zeros_like(angle)
    return torch.stack((torch.cos(angle / 2), zero, zero, torch.sin(angle / 2)), dim=-1)


def from_euler(roll: Tensor, pitch: Tensor, yaw: Tensor) -> Tensor:
    """Returns the rotations [..., 4] by roll about x, then pitch about y, then yaw about z, all axes fixed."""
    cr, sr = torch.cos(roll / 2), torch.sin(roll / 2)
    cp, sp = torch.cos(pitch / 2), torch.sin(pitch / 2)
    cy, sy = torch.cos(yaw / 2), torch.sin(yaw / 2)
    return torch.stack(
        (
            cr * cp * cy + sr * sp * sy,
            sr * cp * cy - cr * sp * sy,
            cr * sp * cy + sr * cp * sy,
            cr * cp * sy - sr * sp * cy,
        ),
        dim=-1,
    )


def from_vector(v: Tensor) -> Tensor:
    """Returns the rotations [..., 4] by the angle |v| about the axis v [..., 3] (the exponential map)."""
    angle = torch.linalg.vector_norm(v, dim=-1, keepdim=True)
    # sinc keeps the limit at 0: sin(a/2)/a = sinc(a / (2 pi)) / 2
    return torch.cat((torch.cos(angle / 2), 0.5 * torch.sinc(angle / (2 * torch.pi)) * v), dim=-1)


def to_vector(q: Tensor) -> Tensor:
    """Returns axis times angle [..., 3], the angle within [0, pi] (the logarithm)."""
    q = torch.where(q[..., :1] < 0, -q, q)
    length = torch.linalg.vector_norm(q[..., 1:], dim=-1, keepdim=True)
    half = torch.atan2(length, q[..., :1])
    # At the identity half / length goes to 1.
    return 2.0 * q[..., 1:] * torch.where(length > 1e-12, half / length.clamp_min(1e-12), 1.0)


def angle(a: Tensor, b: Tensor) -> Tensor:
    """Returns the angle [...] in [0, pi] of the rotation that takes frame `b` into frame `a`."""
    difference = multiply(a, conjugate(b))
    return 2.0 * torch.atan2(torch.linalg.vector_norm(difference[..., 1:], dim=-1), difference[..., 0].abs())
