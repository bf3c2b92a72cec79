"""PRNG keys as tensors: threefry-2x32 with the names, argument order and values of `jax.random`.

A key is an int64 tensor [..., 2] of two uint32 words; leading axes are a batch of keys, and every draw puts
them in front of its own shape, equal to one draw per key. Several draws therefore cost one hash:
`normal(split(key, 3), (4,))` is three draws of four. The values are those of jax's partitionable layout
(`jax_threefry_partitionable`, its default), where word i of a draw depends on the key and i alone.

Every function is pure and reads no device value on the host, so it runs under `torch.func`, `torch.compile` and
in a CUDA graph. What is not a key raises TypeError (dtype) or ValueError (shape), a negative size ValueError.
Hash: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from functional_sl import threefry

Shape = Sequence[int]

_WORD = 0xFFFFFFFF
_DIGITS = 52  # of a float64 fraction
_INT32_MIN, _INT32_MAX = -(2**31), 2**31 - 1


def key(seed: int, device: torch.device | str | None = None) -> Tensor:
    """Returns the key of an integer seed, the words of `jax.random.key` with 64-bit types off (jax's default).

    Only the seed modulo 2^32 counts: -1 and 2^32 - 1 give one key, and so do 0 and 2^32.

    Args:
      seed: a Python int in [-2^63, 2^63).
      device: where the key lives; torch's default device if None.

    Returns:
      [2] int64.

    Raises:
      TypeError: if `seed` is not an int.
      ValueError: if it needs more than 64 bits.
    """
    if not isinstance(seed, int):
        raise TypeError(f"seed must be a Python int, got {seed!r}")
    if not -(2**63) <= seed < 2**63:
        raise ValueError(f"seed must lie in [-2**63, 2**63), got {seed}")
    return torch.tensor([0, seed & _WORD], dtype=torch.int64, device=device)


def split(key: Tensor, num: int | Shape = 2) -> Tensor:
    """Returns `num` new keys; child i is the same for every `num` > i.

    Args:
      key: [..., 2] int64.
      num: how many, or a shape of keys.

    Returns:
      [..., num, 2] int64.
    """
    shape = (num,) if isinstance(num, int) else tuple(num)
    return _drawn(key, shape, "words", (2,))


def fold_in(key: Tensor, data: int | Tensor) -> Tensor:
    """Returns the key that belongs to `data`, which equals `split(key, n)[..., data, :]`.

    Args:
      key: [..., 2] int64.
      data: an int in [0, 2^32), or an int64 tensor of which the low 32 bits count and whose axes broadcast
        against the key's leading axes.

    Returns:
      [..., 2] int64.

    Raises:
      ValueError: if an int `data` is outside the range.
    """
    _check_key(key)
    if isinstance(data, int):
        if not 0 <= data <= _WORD:
            raise ValueError(f"data must lie in [0, 2**32), got {data}: take it modulo 2**32 first")
        data = torch.full((), data, dtype=torch.int64, device=key.device)
    return threefry.hashed(key, data)


def bits(key: Tensor, shape: Shape = ()) -> Tensor:
    """Returns uniform 32-bit words, exactly those of `jax.random.bits`.

    Args:
      key: [..., 2] int64.
      shape: the shape of one key's draw.

    Returns:
      [..., *shape] int64 in [0, 2^32).
    """
    return _drawn(key, shape, "bits")


def uniform(
    key: Tensor,
    shape: Shape = (),
    minval: float | Tensor = 0.0,
    maxval: float | Tensor = 1.0,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Returns uniform numbers in [minval, maxval); in [0, 1) exactly those of `jax.random.uniform`.

    For another range the exact fraction is scaled in float64 and rounded once, where jax rounds the bounds and
    each operation: in float32 the two differ by less than 2^-21 max(|minval|, |maxval|). In both, the last
    rounding may give `maxval` itself.

    Args:
      key: [..., 2] int64.
      shape: the shape of one key's draw.
      minval: lower bound, a number or a tensor that broadcasts to the result.
      maxval: upper bound, likewise; with tensors `minval <= maxval` is the caller's duty.
      dtype: float32 or float64 (the values of jax with 64-bit types on).

    Returns:
      [..., *shape] of `dtype`.

    Raises:
      ValueError: for another dtype, numbers with `minval > maxval`, or a tensor that does not broadcast.
    """
    _check_dtype(dtype)
    if dtype == torch.float64:
        fractions = _integers(key, shape).to(dtype) * 2.0**-_DIGITS
    else:
        fractions = _drawn(key, shape, "fraction")
    if not isinstance(minval, Tensor) and not isinstance(maxval, Tensor):
        if minval > maxval:
            raise ValueError(f"uniform needs minval <= maxval, got {minval} and {maxval}")
        if (minval, maxval) == (0.0, 1.0):
            return fractions
    start, end = (_bound("uniform", x, fractions.shape, torch.float64) for x in (minval, maxval))
    return (fractions.to(torch.float64) * (end - start) + start).to(dtype)


def normal(key: Tensor, shape: Shape = (), dtype: torch.dtype = torch.float32) -> Tensor:
    """Returns standard normal numbers, within 4 ulp of `jax.random.normal` on CPU.

    Args:
      key: [..., 2] int64.
      shape: the shape of one key's draw.
      dtype: float32, or float64 (within 1e-10 of jax with 64-bit types on).

    Returns:
      [..., *shape] of `dtype`.

    Raises:
      ValueError: for another dtype.
    """
    _check_dtype(dtype)
    if dtype == torch.float32:
        return _drawn(key, shape, "normal")
    return torch.erfinv(threefry.symmetric(_integers(key, shape), _DIGITS, dtype)) * math.sqrt(2.0)


def truncated_normal(
    key: Tensor, lower: float, upper: float, shape: Shape = (), dtype: torch.dtype = torch.float32
) -> Tensor:
    """Returns standard normal numbers conditioned on the open interval (lower, upper).

    The draws are those of `jax.random.truncated_normal`; within |bounds| <= 3 they agree to 1e-5 in float32.
    Further out jax loses digits in erf, which is evaluated in float64 here.

    Args:
      key: [..., 2] int64.
      lower: finite lower bound.
      upper: finite upper bound.
      shape: the shape of one key's draw.
      dtype: float32 or float64.

    Returns:
      [..., *shape] of `dtype`.

    Raises:
      ValueError: for another dtype, or bounds that are not finite or not in order.
    """
    if not -math.inf < lower < upper < math.inf:
        raise ValueError(f"truncated_normal needs finite lower < upper, got {lower} and {upper}")
    start, end = (math.erf(x / math.sqrt(2.0)) for x in (lower, upper))
    u = uniform(key, shape, start, end, dtype)
    largest = 1.0 - torch.finfo(dtype).eps / 2
    u = u.clamp(-largest, largest)
    number = np.float32 if dtype == torch.float32 else np.float64
    inside = (float(np.nextafter(number(x), number(to))) for x, to in ((lower, math.inf), (upper, -math.inf)))
    inverse = torch.erfinv if dtype == torch.float64 else threefry.erfinv
    return (inverse(u) * math.sqrt(2.0)).clamp(*inside)


def exponential(key: Tensor, shape: Shape = (), dtype: torch.dtype = torch.float32) -> Tensor:
    """Returns exponential numbers of rate 1, within 2 ulp of `jax.random.exponential` on CPU.

    Args:
      key: [..., 2] int64.
      shape: the shape of one key's draw.
      dtype: float32, or float64 (within 1e-12 relative of jax with 64-bit types on).

    Returns:
      [..., *shape] of `dtype`.

    Raises:
      ValueError: for another dtype.
    """
    return -torch.log1p(-uniform(key, shape, dtype=dtype))


def bernoulli(key: Tensor, p: float | Tensor = 0.5, shape: Shape | None = None) -> Tensor:
    """Returns booleans that are true with probability `p`, exactly those of `jax.random.bernoulli`.

    Args:
      key: [..., 2] int64.
      p: probability, a number or a float32 tensor that broadcasts to the result.
      shape: the shape of one key's draw; that of `p` if None.

    Returns:
      [..., *shape] bool.

    Raises:
      ValueError: if `p` does not broadcast to the result.
    """
    if shape is None:
        shape = p.shape if isinstance(p, Tensor) else ()
    u = uniform(key, shape)
    return u < _bound("bernoulli", p, u.shape, u.dtype)


def randint(key: Tensor, shape: Shape, minval: int | Tensor, maxval: int | Tensor) -> Tensor:
    """Returns integers in [minval, maxval), exactly the int32 values of `jax.random.randint`.

    Any span up to 2^32 - 1 works. As in jax, a span that is no power of two has a relative bias of about
    span * 2^-64 up to span 2^16, and of span * 2^-32 above.

    Args:
      key: [..., 2] int64.
      shape: the shape of one key's draw.
      minval: inclusive lower bound in the int32 range, an int or an integer tensor that broadcasts to the result.
      maxval: exclusive upper bound, likewise.

    Returns:
      [..., *shape] int64. Where a tensor bound gives `maxval <= minval` the result is `minval`, as in jax.

    Raises:
      ValueError: for a number that is no int in the int32 range, two ints with `minval >= maxval` (jax returns
        `minval` then), or a tensor that does not broadcast.
    """
    for name, value in (("minval", minval), ("maxval", maxval)):
        if not isinstance(value, Tensor) and not (isinstance(value, int) and _INT32_MIN <= value <= _INT32_MAX):
            raise ValueError(f"randint needs {name} to be an int in the int32 range or a tensor, got {value!r}")
    higher, lower = bits(split(key), shape).unbind(key.ndim - 1)
    start, end = (_bound("randint", x, lower.shape, torch.int64) for x in (minval, maxval))
    span = end - start
    if isinstance(span, Tensor):
        span = span.clamp(min=1)
    elif span < 1:
        raise ValueError(f"randint needs minval < maxval, got {minval} and {maxval}")
    # 2^32 modulo span, with the overflow of jax's uint32 square: zero above a span of 2^16.
    multiplier = ((2**16 % span) ** 2 & _WORD) % span
    return (higher % span * multiplier + lower % span) % span + start


def permutation(key: Tensor, n: int) -> Tensor:
    """Returns a random order of 0 .. n - 1, exactly that of `jax.random.permutation`.

    Args:
      key: [..., 2] int64.
      n: a Python int.

    Returns:
      [..., n] int64.
    """
    _check_key(key)
    _check_shape((n,))
    order = torch.arange(n, device=key.device).repeat(*key.shape[:-1], 1)
    # Equal sort keys keep their order, so jax sorts again until three times log2(n) bits have been used.
    for _ in range(math.ceil(3 * math.log(max(n, 1)) / math.log(_WORD))):
        key, subkey = split(key).unbind(-2)
        order = order.gather(-1, torch.sort(bits(subkey, (n,)), stable=True).indices)
    return order


def _integers(key: Tensor, shape: Shape) -> Tensor:
    """Returns integers in [0, 2^52), the fractions of float64 numbers."""
    high, low = _drawn(key, shape, "words", (2,)).unbind(-1)
    return (high << 20) | (low >> 12)


def _bound(function: str, value: float | Tensor, shape: Shape, dtype: torch.dtype) -> float | Tensor:
    """Returns a parameter of a distribution in `dtype`, refusing one that would enlarge the result."""
    if not isinstance(value, Tensor):
        return value
    if value.ndim and torch.broadcast_shapes(value.shape, shape) != tuple(shape):
        raise ValueError(f"{function}: a bound of shape {tuple(value.shape)} does not broadcast to {tuple(shape)}")
    return value.to(dtype)


def _drawn(key: Tensor, shape: Shape, form: threefry.Form, trailing: Shape = ()) -> Tensor:
    """Returns the numbers of `threefry.draw` as [..., *shape, *trailing]."""
    _check_key(key)
    _check_shape(shape)
    return threefry.draw(key, math.prod(shape), form).reshape((*key.shape[:-1], *shape, *trailing))


def _check_dtype(dtype: torch.dtype) -> None:
    if dtype not in (torch.float32, torch.float64):
        raise ValueError(f"dtype must be float32 or float64, got {dtype}: draw float32 and convert")


def _check_key(key: Tensor) -> None:
    if not isinstance(key, Tensor) or key.dtype != torch.int64:
        found = key.dtype if isinstance(key, Tensor) else type(key).__name__
        raise TypeError(f"a key is an int64 tensor [..., 2], got {found}: make one with keys.key(seed)")
    if key.ndim == 0 or key.shape[-1] != 2:
        raise ValueError(f"a key is an int64 tensor [..., 2], got shape {tuple(key.shape)}")


def _check_shape(shape: Shape) -> None:
    if any(size < 0 for size in shape) or math.prod(shape) > _WORD:
        raise ValueError(f"sizes must be at least 0 and their product below 2**32, got {tuple(shape)}")
