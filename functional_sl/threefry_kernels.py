"""The kernels of `threefry` on a GPU, in Triton.

They launch on the current stream, allocate from torch's caching allocator and read nothing on the host, so a CUDA graph
captures them; each is compiled at its first launch, which a capture's warm-up makes. Floats keep the bits of the plain
operations: additions and products are not fused, and the one function that could round otherwise, log1p, is torch's.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 256
# Up to this many numbers their places, and those in the last block behind them, are counted in 32 bits.
_NARROW = 2**30
# One binary serves all sizes and places in memory: what a warm-up has launched, a capture finds compiled.
_SIZES = ["row_stride", "word_stride", "count_stride", "size", "total"]
_VIEWS = ["key", "count"]


def draw(key: Tensor, size: int, form: str) -> Tensor:
    """Returns what `threefry.draw` does of `words`, `bits` and `fraction`, in one kernel."""
    trailing = (2,) if form == "words" else ()
    dtype = torch.float32 if form == "fraction" else torch.int64
    result = torch.empty((*key.shape[:-1], size, *trailing), dtype=dtype, device=key.device)
    _launch_draw(key, result, size, form)
    return result


def normal(key: Tensor, size: int, centre: tuple[float, ...], tail: tuple[float, ...]) -> Tensor:
    """Returns normal numbers [..., size] float32 in three kernels.

    Args:
      key: [..., 2] int64.
      size: of each key's draw.
      centre: coefficients of the polynomial of erfinv for w < 5, highest power first.
      tail: of the one for other w.
    """
    # Beside each argument x of erfinv lies -x^2, which becomes -w.
    pair = torch.empty((2, *key.shape[:-1], size), dtype=torch.float32, device=key.device)
    _launch_draw(key, pair, size, "symmetric")
    pair[1].log1p_()
    result = torch.empty_like(pair[0])
    _launch(_normal, key, result.numel(), pair, result, CENTRE=centre, TAIL=tail)
    return result


def hashed(key: Tensor, count: Tensor) -> Tensor:
    """Returns what `threefry.hashed` does, in one kernel."""
    shape = torch.broadcast_shapes(key.shape[:-1], count.shape)
    rows, counts = key.expand(*shape, 2).reshape(-1, 2), count.expand(shape).reshape(-1)
    result = torch.empty((*shape, 2), dtype=torch.int64, device=key.device)
    _launch(_hash, key, counts.numel(), rows, counts, result, *rows.stride(), *counts.stride())
    return result


def _launch_draw(key: Tensor, result: Tensor, size: int, form: str) -> None:
    rows = key.reshape(-1, 2)
    _launch(_draw, key, rows.shape[0] * size, rows, result, *rows.stride(), size, FORM=form)


def _launch(kernel: Any, key: Tensor, total: int, *arguments: Any, **static: Any) -> None:
    """Launches a kernel over `total` numbers on the key's device."""
    if total == 0:
        return
    with torch.cuda.device_of(key):
        kernel[(triton.cdiv(total, _BLOCK),)](
            *arguments, total, **static, WIDE=total > _NARROW, BLOCK=_BLOCK, enable_fp_fusion=False
        )


@triton.jit
def _places(total, WIDE: tl.constexpr, BLOCK: tl.constexpr):
    block = tl.program_id(0)
    if WIDE:
        block = block.to(tl.int64)
    places = block * BLOCK + tl.arange(0, BLOCK)
    return places, places < total


@triton.jit
def _four_rounds(left, right, A: tl.constexpr, B: tl.constexpr, C: tl.constexpr, D: tl.constexpr):
    left += right
    right = ((right << A) | (right >> (32 - A))) ^ left
    left += right
    right = ((right << B) | (right >> (32 - B))) ^ left
    left += right
    right = ((right << C) | (right >> (32 - C))) ^ left
    left += right
    right = ((right << D) | (right >> (32 - D))) ^ left
    return left, right


@triton.jit
def _threefry(first, second, count):
    third = first ^ second ^ 0x1BD11BDA
    left, right = _four_rounds(first, count + second, 13, 15, 26, 6)
    left, right = _four_rounds(left + second, right + third + 1, 17, 29, 16, 24)
    left, right = _four_rounds(left + third, right + first + 2, 13, 15, 26, 6)
    left, right = _four_rounds(left + first, right + second + 3, 17, 29, 16, 24)
    left, right = _four_rounds(left + second, right + third + 4, 13, 15, 26, 6)
    return left + third, right + first + 5


@triton.jit
def _word(address, inside):
    return tl.load(address, mask=inside, other=0).to(tl.uint32)


@triton.jit(do_not_specialize=_SIZES, do_not_specialize_on_alignment=_VIEWS)
def _hash(
    key, count, result, row_stride, word_stride, count_stride, total, WIDE: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    place, inside = _places(total, WIDE, BLOCK)
    place = place.to(tl.int64)
    row = key + place * row_stride
    counts = _word(count + place * count_stride, inside)
    left, right = _threefry(_word(row, inside), _word(row + word_stride, inside), counts)
    tl.store(result + 2 * place, left.to(tl.int64), mask=inside)
    tl.store(result + 2 * place + 1, right.to(tl.int64), mask=inside)


@triton.jit(do_not_specialize=_SIZES, do_not_specialize_on_alignment=_VIEWS)
def _draw(
    key, result, row_stride, word_stride, size, total, FORM: tl.constexpr, WIDE: tl.constexpr, BLOCK: tl.constexpr
):
    place, inside = _places(total, WIDE, BLOCK)
    row = key + (place // size).to(tl.int64) * row_stride
    count = (place % size).to(tl.uint32)
    left, right = _threefry(_word(row, inside), _word(row + word_stride, inside), count)
    if FORM == "words":
        address = result + 2 * place.to(tl.int64)
        tl.store(address, left.to(tl.int64), mask=inside)
        tl.store(address + 1, right.to(tl.int64), mask=inside)
    elif FORM == "bits":
        tl.store(result + place, (left ^ right).to(tl.int64), mask=inside)
    else:
        integers = ((left ^ right) >> 9).to(tl.int32)
        if FORM == "fraction":
            tl.store(result + place, integers.to(tl.float32) * 2.0**-23, mask=inside)
        else:
            x = (integers * 4 + (1 - 2**24)).to(tl.float32) * 2.0**-24
            tl.store(result + place, x, mask=inside)
            tl.store(result + total + place, -x * x, mask=inside)


@triton.jit
def _polynomial(COEFFICIENTS: tl.constexpr, x):
    value = COEFFICIENTS[0] * x + COEFFICIENTS[1]
    for i in tl.static_range(2, 9):
        value = value * x + COEFFICIENTS[i]
    return value


@triton.jit(do_not_specialize=_SIZES)
def _normal(
    pair, result, total, CENTRE: tl.constexpr, TAIL: tl.constexpr, WIDE: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    place, inside = _places(total, WIDE, BLOCK)
    x = tl.load(pair + place, mask=inside, other=0.0)
    w = -tl.load(pair + total + place, mask=inside, other=0.0)
    near = _polynomial(CENTRE, w - 2.5)
    far = _polynomial(TAIL, tl.sqrt_rn(w) - 3.0)
    tl.store(result + place, tl.where(w < 5.0, near, far) * x * 1.4142135623730951, mask=inside)
