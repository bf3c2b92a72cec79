"""Small arrays between the host and a device, all of one step in one transfer each way."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

ALIGNMENT = 8  # bytes, of the widest dtype


def fetch(*tensors: Tensor) -> list[np.ndarray]:
    """Returns tensors of one device as arrays; those of a CPU share their memory."""
    if tensors[0].device.type == "cpu":
        return [x.detach().numpy() for x in tensors]
    joined = torch.cat([x.detach().reshape(-1).view(torch.uint8) for x in tensors]).cpu().numpy()
    return split(joined, tensors)


def split(joined: np.ndarray, like: Sequence[Tensor]) -> list[np.ndarray]:
    """Returns copies of the bytes, which follow each other without gaps, with the shapes and dtypes of the tensors."""
    sizes = [x.numel() * x.element_size() for x in like]
    parts = [joined[end - size : end].tobytes() for size, end in zip(sizes, itertools.accumulate(sizes), strict=True)]
    dtypes = [str(x.dtype).removeprefix("torch.") for x in like]
    return [np.frombuffer(*pair).reshape(x.shape) for *pair, x in zip(parts, dtypes, like, strict=True)]


def send(arrays: Sequence[np.ndarray], device: torch.device) -> list[Tensor]:
    """Returns arrays as tensors on a device; those of a CPU share their memory, others that of one buffer.

    The copy is queued on the current stream: the arrays may be changed at once, and kernels see it done.
    """
    if device.type == "cpu":
        return [torch.from_numpy(x) for x in arrays]
    return unpack(pack(arrays, pinned=True).to(device, non_blocking=True), arrays)


def pack(arrays: Sequence[np.ndarray], *, pinned: bool) -> Tensor:
    """Returns the bytes of all arrays as one tensor on the host, each beginning at a multiple of `ALIGNMENT`."""
    # The allocator of pinned memory gives a block out again only when the copies from it are done.
    packed = torch.empty(_starts(arrays)[-1], dtype=torch.uint8, pin_memory=pinned)
    target = packed.numpy()
    for start, x in zip(_starts(arrays), arrays, strict=False):
        target[start : start + x.nbytes] = np.ascontiguousarray(x).reshape(-1).view(np.uint8)
    return packed


def unpack(packed: Tensor, like: Sequence[np.ndarray]) -> list[Tensor]:
    """Returns views of the bytes with the shapes and dtypes of the arrays that were packed."""
    return [
        packed[start : start + x.nbytes].view(getattr(torch, x.dtype.name)).view(x.shape)
        for start, x in zip(_starts(like), like, strict=False)
    ]


def _starts(arrays: Sequence[np.ndarray]) -> list[int]:
    """Returns where each array begins, and behind them the length of all."""
    return list(itertools.accumulate((-(-x.nbytes // ALIGNMENT) * ALIGNMENT for x in arrays), initial=0))
