"""Quaternions against MuJoCo's own functions, and rotations that a reader can check by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from functional_sl.sim import rotation

mujoco = pytest.importorskip("mujoco")


def quaternions(seed: int, n: int = 50) -> torch.Tensor:
    q = torch.from_numpy(np.random.default_rng(seed).normal(size=(n, 4)))
    return q / q.norm(dim=1, keepdim=True)


def by_mujoco(size: int, fn, *arguments: torch.Tensor) -> torch.Tensor:
    """Returns `fn(result, *row)` row by row."""
    found = np.empty((len(arguments[0]), size))
    for row, *values in zip(found, *(x.numpy() for x in arguments), strict=True):
        fn(row, *values)
    return torch.from_numpy(found)


def close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-12)


def test_products_and_rotations_are_mujocos() -> None:
    a, b = quaternions(0), quaternions(1)
    v = torch.from_numpy(np.random.default_rng(2).normal(size=(50, 3)))
    close(rotation.multiply(a, b), by_mujoco(4, mujoco.mju_mulQuat, a, b))
    close(rotation.conjugate(a), by_mujoco(4, mujoco.mju_negQuat, a))
    close(rotation.rotate(a, v), by_mujoco(3, lambda r, v, q: mujoco.mju_rotVecQuat(r, v, q), v, a))
    close(rotation.rotate_inverse(a, rotation.rotate(a, v)), v)
    close(rotation.matrix(a).flatten(1), by_mujoco(9, mujoco.mju_quat2Mat, a))


def test_one_vector_is_turned_by_many_rotations() -> None:
    up = torch.tensor([0.0, 0.0, 1.0], dtype=torch.float64)
    close(rotation.rotate(quaternions(0), up), rotation.matrix(quaternions(0))[..., 2])


def test_the_logarithm_is_mujocos_and_the_inverse_of_the_exponential() -> None:
    q = quaternions(3)
    q = torch.where(q[:, :1] < 0, -q, q)
    v = rotation.to_vector(q)
    close(v, by_mujoco(3, lambda r, q: mujoco.mju_quat2Vel(r, q, 1.0), q))
    close(rotation.from_vector(v), q)
    close(rotation.to_vector(-q), v)


def test_no_rotation_has_the_zero_vector_and_finite_derivatives() -> None:
    identity = torch.tensor([1.0, 0.0, 0.0, 0.0])
    assert rotation.to_vector(identity).tolist() == [0, 0, 0]
    assert rotation.from_vector(torch.zeros(3)).tolist() == identity.tolist()
    assert rotation.angle(identity, -identity).item() == 0


def test_quarter_turns_by_hand() -> None:
    quarter, zero = torch.tensor(math.pi / 2), torch.tensor(0.0)
    left = rotation.from_yaw(quarter)
    torch.testing.assert_close(rotation.rotate(left, torch.tensor([1.0, 0.0, 0.0])), torch.tensor([0.0, 1.0, 0.0]))
    # Columns of a quarter turn to the left are (0, 1, 0) and (-1, 0, 0); row by row: 0 -1, 1 0, 0 0.
    torch.testing.assert_close(rotation.sixd(left), torch.tensor([0.0, -1.0, 1.0, 0.0, 0.0, 0.0]))
    torch.testing.assert_close(rotation.angle(left, rotation.from_yaw(zero)), quarter)
    torch.testing.assert_close(rotation.yaw(left), quarter)
    pitched = rotation.from_euler(zero, quarter, zero)  # the nose goes down
    torch.testing.assert_close(rotation.rotate(pitched, torch.tensor([1.0, 0.0, 0.0])), torch.tensor([0.0, 0.0, -1.0]))


def test_euler_angles_are_three_turns_about_fixed_axes_and_yaw_reads_the_last() -> None:
    roll, pitch, yaw = torch.tensor([0.3, -0.2]), torch.tensor([-0.5, 1.1]), torch.tensor([2.0, -3.0])
    zero = torch.zeros(2)
    one_by_one = rotation.multiply(
        rotation.from_euler(zero, zero, yaw),
        rotation.multiply(rotation.from_euler(zero, pitch, zero), rotation.from_euler(roll, zero, zero)),
    )
    torch.testing.assert_close(rotation.from_euler(roll, pitch, yaw), one_by_one)
    torch.testing.assert_close(rotation.yaw(one_by_one), yaw)
