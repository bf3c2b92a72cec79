"""Threefry-2x32 and the numbers made from its words, which `keys` gives their names and shapes.

On a GPU a draw is one Triton kernel, and one of normal numbers is three, in a compiled region too: Inductor would hash
anew for every number that is made of a draw. Elsewhere, and in an exported program, it is plain operations. Kernels
change no bit of them; Inductor may round a normal number otherwise on a CPU, by up to 5e-7. Where Triton or the C
compiler that it needs is missing, a GPU runs the plain operations too.
Hash: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, library

from functional_sl.kernels import buildable

Word = int | Tensor
Form = Literal["words", "bits", "fraction", "normal"]

_WORD = 0xFFFFFFFF
# Up to this many hashes Python's own integers are faster than numpy.
_FEW = 4
_PARITY = 0x1BD11BDA
# A word times this stands twice in 64 bits, where a right shift rotates it; with the word used once in a round,
# Inductor inlines a third of what the usual two shifts cost it.
_TWICE = 2**32 + 1
_ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))
# numpy converts a Python operand anew at each call; 0-d arrays make the hash a fifth faster.
_ROTATION_ARRAYS = tuple(
    tuple((np.array(r, np.uint32), np.array(32 - r, np.uint32)) for r in rotations) for rotations in _ROTATIONS
)
# Giles, "Approximating the erfinv function", GPU Computing Gems (Jade edition), 2012; highest power first.
_ERFINV_CENTRE = (2.81022636e-08, 3.43273939e-07, -3.5233877e-06, -4.39150654e-06, 0.00021858087)
_ERFINV_CENTRE += (-0.00125372503, -0.00417768164, 0.246640727, 1.50140941)
_ERFINV_TAIL = (-0.000200214257, 0.000100950558, 0.00134934322, -0.00367342844, 0.00573950773)
_ERFINV_TAIL += (-0.0076224613, 0.00943887047, 1.00167406, 2.83297682)


def hashed(key: Tensor, count: Tensor) -> Tensor:
    """Returns threefry-2x32 of the block (0, count) under `key`.

    Args:
      key: [..., 2] int64.
      count: int64, of which the low 32 bits count, broadcast against the key's leading axes.

    Returns:
      [..., 2] int64.
    """
    # A hash takes over a hundred torch operations: slow one by one, and slow for Inductor to fuse.
    # An exported program keeps the plain operations, since it must run without this package; programs are exported on
    # a CPU. Torch 2.11 takes every compiled region for an export.
    if key.device.type == "cpu" and torch.compiler.is_exporting():
        return _hash_torch(key, count)
    return torch.ops.functional_sl.threefry2x32(key, count)


def draw(key: Tensor, size: int, form: Form) -> Tensor:
    """Returns `size` numbers of every key, number i from the hash of i.

    Args:
      key: [..., 2] int64.
      size: below 2^32.
      form: `words`, both words of the hash; `bits`, their xor; `fraction`, its upper 23 bits in [0, 1); `normal`.

    Returns:
      [..., size, 2] int64 of `words`, [..., size] int64 of `bits`, [..., size] float32 of the others.
    """
    if key.device.type == "cpu":
        return _draw_torch(key, size, form)
    return torch.ops.functional_sl.threefry_draw(key, size, form)


def symmetric(integers: Tensor, digits: int, dtype: torch.dtype) -> Tensor:
    """Returns integers in [0, 2^digits) as odd multiples of 2^-(digits + 1) in (-1, 1), exact in `dtype`.

    They are the numbers at which jax too evaluates erfinv.
    """
    return (integers * 4 + (1 - 2 ** (digits + 1))).to(dtype) * 2.0 ** -(digits + 1)


def erfinv(x: Tensor) -> Tensor:
    """Returns the inverse error function of float32 numbers in (-1, 1) by Giles' polynomials."""
    w = -torch.log1p(-x * x)
    centre, tail = _polynomial(_ERFINV_CENTRE, w - 2.5), _polynomial(_ERFINV_TAIL, torch.sqrt(w) - 3.0)
    return torch.where(w < 5.0, centre, tail) * x


def _polynomial(coefficients: Sequence[float], x: Tensor) -> Tensor:
    # Adding 1 times a coefficient takes half as long as adding a number, of which torch makes a tensor first.
    one = torch.ones_like(x)
    result = torch.full_like(x, coefficients[0])
    for coefficient in coefficients[1:]:
        result = torch.add(result * x, one, alpha=coefficient)
    return result


def _draw_torch(key: Tensor, size: int, form: Form) -> Tensor:
    words = hashed(key.unsqueeze(-2), torch.arange(size, device=key.device))
    if form == "words":
        return words
    high, low = words.unbind(-1)
    bits = high ^ low
    if form == "bits":
        return bits
    if form == "fraction":
        return (bits >> 9).to(torch.float32) * 2.0**-23
    return erfinv(symmetric(bits >> 9, 23, torch.float32)) * math.sqrt(2.0)


def _draw_cuda(key: Tensor, size: int, form: Form) -> Tensor:
    from functional_sl import threefry_kernels

    if form == "normal":
        return threefry_kernels.normal(key, size, _ERFINV_CENTRE, _ERFINV_TAIL)
    return threefry_kernels.draw(key, size, form)


def _draw_fake(key: Tensor, size: int, form: Form) -> Tensor:
    shape = (*key.shape[:-1], size, 2) if form == "words" else (*key.shape[:-1], size)
    return key.new_empty(shape, dtype=torch.int64 if form in ("words", "bits") else torch.float32)


def _draw_vmap(info: Any, in_dims: tuple[int, None, None], key: Tensor, size: int, form: Form) -> tuple[Tensor, int]:
    return torch.ops.functional_sl.threefry_draw(key.movedim(in_dims[0], 0), size, form), 0


def _hash_torch(key: Tensor, count: Tensor) -> Tensor:
    return torch.stack(_rounds(*key.unbind(-1), count), -1)


def _rounds(first: Word, second: Word, count: Word) -> tuple[Word, Word]:
    schedule = (first, second, first ^ second ^ _PARITY)
    left, right = first, (count + second) & _WORD
    for group in range(5):
        for rotation in _ROTATIONS[group % 2]:
            left = (left + right) & _WORD
            right = ((right * _TWICE >> (32 - rotation)) & _WORD) ^ left
        left = (left + schedule[(group + 1) % 3]) & _WORD
        right = (right + schedule[(group + 2) % 3] + (group + 1)) & _WORD
    return left, right


def _hash_cpu(key: Tensor, count: Tensor) -> Tensor:
    first, second, counts = key[..., 0].numpy(), key[..., 1].numpy(), count.numpy()
    blocks = np.broadcast(first, second, counts)
    if blocks.size > _FEW:
        return torch.from_numpy(_hash_numpy(first, second, counts, blocks.shape))
    words = [_rounds(*map(int, block)) for block in blocks]
    return torch.from_numpy(np.array(words, np.int64).reshape(*blocks.shape, 2))


def _hash_numpy(first: np.ndarray, second: np.ndarray, count: np.ndarray, shape: Sequence[int]) -> np.ndarray:
    """The same as `_rounds` in wrapping uint32 arithmetic, in place."""
    first, second = first.astype(np.uint32), second.astype(np.uint32)
    schedule = (first, second, first ^ second ^ np.uint32(_PARITY))
    left, right, carry = np.empty(shape, np.uint32), np.empty(shape, np.uint32), np.empty(shape, np.uint32)
    left[...] = first
    np.add(count.astype(np.uint32), second, right)
    for group in range(5):
        for rotation, rest in _ROTATION_ARRAYS[group % 2]:
            np.add(left, right, left)
            np.right_shift(right, rest, carry)
            np.left_shift(right, rotation, right)
            np.bitwise_or(right, carry, right)
            np.bitwise_xor(right, left, right)
        np.add(left, schedule[(group + 1) % 3], left)
        np.add(right, schedule[(group + 2) % 3], right)
        np.add(right, group + 1, right)
    result = np.empty((*shape, 2), np.int64)
    result[..., 0], result[..., 1] = left, right
    return result


def _hash_cuda(key: Tensor, count: Tensor) -> Tensor:
    from functional_sl import threefry_kernels

    return threefry_kernels.hashed(key, count)


def _hash_fake(key: Tensor, count: Tensor) -> Tensor:
    return key.new_empty((*torch.broadcast_shapes(key.shape[:-1], count.shape), 2))


def _hash_vmap(info: Any, in_dims: tuple[int | None, int | None], key: Tensor, count: Tensor) -> tuple[Tensor, int]:
    key_rank, count_rank = key.ndim - 1 - (in_dims[0] is not None), count.ndim - (in_dims[1] is not None)
    rank = max(key_rank, count_rank)
    key, count = _batch_first(key, in_dims[0], rank - key_rank), _batch_first(count, in_dims[1], rank - count_rank)
    return torch.ops.functional_sl.threefry2x32(key, count), 0


def _batch_first(x: Tensor, dim: int | None, missing: int) -> Tensor:
    """Moves a vmapped axis to the front and puts `missing` axes of size one behind it, to broadcast as before."""
    return x if dim is None else x.movedim(dim, 0)[(slice(None), *[None] * missing)]


# `custom_op` would say the same at three times the cost of a call. An operator can be registered once in a
# process, while a module may be imported anew.
if not hasattr(torch.ops.functional_sl, "threefry2x32"):
    library.define("functional_sl::threefry2x32", "(Tensor key, Tensor count) -> Tensor")
    library.impl("functional_sl::threefry2x32", "default", _hash_torch)
    library.impl("functional_sl::threefry2x32", "cpu", _hash_cpu)
    library.register_fake("functional_sl::threefry2x32", _hash_fake)
    library.register_vmap("functional_sl::threefry2x32", _hash_vmap)
    library.define("functional_sl::threefry_draw", "(Tensor key, SymInt size, str form) -> Tensor")
    library.impl("functional_sl::threefry_draw", "default", _draw_torch)
    library.register_fake("functional_sl::threefry_draw", _draw_fake)
    library.register_vmap("functional_sl::threefry_draw", _draw_vmap)
    if buildable():
        library.impl("functional_sl::threefry2x32", "cuda", _hash_cuda)
        library.impl("functional_sl::threefry_draw", "cuda", _draw_cuda)
