"""The states of Python's, NumPy's and torch's own generators, from which a recipe's host code may draw."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from functional_sl import keys

_CUDA_BYTES = 16


class Generators(NamedTuple):
    """The states as tensors on the CPU; shapes are the same on every machine."""

    python: Tensor  # [625] int64, of `random`
    python_gauss: Tensor  # [2] float64: whether a second normal number waits, and which
    numpy: Tensor  # [626] int64, of `numpy.random`: 624 words, the position, whether a second normal number waits
    numpy_gauss: Tensor  # () float64
    torch_cpu: Tensor  # [5056] uint8
    torch_cuda: Tensor  # [16] uint8 of this rank's device, zeros without one


def seed(key: Tensor) -> None:
    """Seeds all of them from a key [2]."""
    word = int(keys.bits(key))
    random.seed(word)
    np.random.seed(word)  # noqa: NPY002
    torch.manual_seed(word)


def read(device: torch.device) -> Generators:
    """Returns the present states; of CUDA that of `device`."""
    _, words, gauss = random.getstate()
    _, array, position, waits, cached = np.random.get_state()  # noqa: NPY002
    cuda = torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.zeros(_CUDA_BYTES, dtype=torch.uint8)
    return Generators(
        python=torch.tensor(words, dtype=torch.int64),
        python_gauss=torch.tensor([gauss is not None, gauss or 0.0], dtype=torch.float64),
        numpy=torch.tensor([*array.tolist(), position, waits], dtype=torch.int64),
        numpy_gauss=torch.tensor(cached, dtype=torch.float64),
        torch_cpu=torch.get_rng_state(),
        torch_cuda=cuda,
    )


def write(states: Generators, device: torch.device) -> None:
    """Sets all of them; that of CUDA where `device` is one and a state of one was read."""
    waits, gauss = states.python_gauss.tolist()
    random.setstate((3, tuple(states.python.tolist()), gauss if waits else None))
    *words, position, has_gauss = states.numpy.tolist()
    array = np.array(words, np.uint32)
    np.random.set_state(("MT19937", array, position, has_gauss, float(states.numpy_gauss)))  # noqa: NPY002
    torch.set_rng_state(states.torch_cpu)
    if device.type == "cuda" and states.torch_cuda.any():
        torch.cuda.set_rng_state(states.torch_cuda, device)


@contextlib.contextmanager
def preserved(device: torch.device) -> Iterator[None]:
    """Sets them back at the end to what they were at the start."""
    before = read(device)
    try:
        yield
    finally:
        write(before, device)
