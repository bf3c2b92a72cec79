"""What the Triton kernels of batch norm have in common: what is done to a tile, and how parts are added up."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def normalised(value, change, average, inverse, factor, offset):
    """Returns a tile of x, normalised, and the output's gradient where the ReLU lets it through."""
    value = (value.to(tl.float32) - average[None, :]) * inverse[None, :]
    through = value * factor[None, :] + offset[None, :] > 0.0
    return value, tl.where(through, change.to(tl.float32), 0.0)


@triton.jit
def rectified(value, residual, place, mask, y, ADD: tl.constexpr):
    """Returns a tile after the ReLU in the type of y, with a residual added where there is one."""
    # NaN stays NaN: the gate must see it.
    value = tl.where(value < 0.0, 0.0, value).to(y.dtype.element_ty)
    if ADD:
        other = tl.load(residual + place, mask=mask, other=0.0)
        value = (value.to(tl.float32) + other.to(tl.float32)).to(y.dtype.element_ty)
    return value


@triton.jit
def totals(part, features, inside, PARTS: tl.constexpr, F: tl.constexpr):
    """Returns both sums over parts [PARTS, 2, features], where `inside`, if it is not None, says so.

    A thread adds up its own columns: nothing crosses shared memory, where many features would lie in few banks.
    """
    first, second = tl.zeros((F,), tl.float32), tl.zeros((F,), tl.float32)
    for step in tl.range(0, PARTS, loop_unroll_factor=16):
        first += tl.load(part + step * 2 * features, mask=inside)
        second += tl.load(part + step * 2 * features + features, mask=inside)
    return first, second
