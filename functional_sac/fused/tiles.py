"""What the Triton kernels of the norms do to a tile."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def normalised(source, change, mask, average, inverse, factor, offset, RELU: tl.constexpr):
    """Loads a tile of x, normalised, and returns it with the output's gradient where the ReLU lets it through."""
    value = tl.load(source, mask=mask, other=0.0).to(tl.float32)
    change = change.to(tl.float32)
    value = (value - average[None, :]) * inverse[None, :]
    if RELU:
        change = tl.where(value * factor[None, :] + offset[None, :] > 0.0, change, 0.0)
    return value, change


@triton.jit
def rectified(value, residual, place, mask, y, ADD: tl.constexpr):
    """Returns a tile after the ReLU in the type of y, with a residual added where there is one."""
    # NaN stays NaN: the gate must see it.
    value = tl.where(value < 0.0, 0.0, value).to(y.dtype.element_ty)
    if ADD:
        other = tl.load(residual + place, mask=mask, other=0.0)
        value = (value.to(tl.float32) + other.to(tl.float32)).to(y.dtype.element_ty)
    return value
