"""The Triton kernels of a batch norm's backward pass together with the product that makes its gradient.

The first kernel masks the product by the ReLU while it is still in registers, stores it, and adds it up in parts of the
rows; the second one adds the parts in their order and does the rest. Nothing is added atomically. The sizes are those
that are fastest on a Hopper GPU; `fits` says for what they are meant.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from functional_sac.fused.batch_norm_tile_kernels import totals
from functional_sl.kernels import launch, suits_hopper

ROWS, COLUMNS, WARPS = 64, 128, 4  # of a tile of the product; a program goes down several
PROGRAMS = 128  # about as many as the GPU has multiprocessors
REST_ROWS = 32  # of a tile of the second kernel


@triton.jit
def _norm(mean, inverse_std, scale, bias, network, column, moments, N: tl.constexpr):
    average = tl.load(mean + network * moments + column)
    slope = tl.load(scale + network * N + column) * tl.load(inverse_std + network * moments + column)
    return average, slope, tl.load(bias + network * N + column)


@triton.jit
def _halves(x, R: tl.constexpr, F: tl.constexpr):
    """Returns the left and the right half of a tile's columns, which lie where they lay."""
    return tl.split(tl.permute(tl.reshape(x, (R, 2, F)), (0, 2, 1)))


@triton.jit
def _finish(product, value, norm, target, sums, products, R: tl.constexpr, F: tl.constexpr, G: tl.constexpr):
    """Masks a tile as the forward pass did, stores it, and adds it up, plain and times the centred input."""
    average, slope, offset = norm
    centred = value.to(tl.float32) - average[None, :]
    kept = tl.where(centred * slope[None, :] + offset[None, :] > 0.0, product, 0.0)
    tl.store(target, kept)
    wide = kept.to(tl.float32)
    sums += tl.sum(tl.reshape(wide, (R // G, G, F)), 0)
    products += tl.sum(tl.reshape(wide * centred, (R // G, G, F)), 0)
    return sums, products


@triton.jit
def _store_part(
    sums, products, scratch, part, network, split, column,
    N: tl.constexpr, G: tl.constexpr, F: tl.constexpr, P: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    """Adds up what the P warps have, through memory: in shared memory it would lie in one bank for all lanes."""
    warp = tl.arange(0, P)[:, None]
    place = network * SPLITS + split
    own = scratch + place * P * 2 * N + column
    tl.store(own[None, :] + warp * 2 * N, tl.sum(tl.reshape(sums, (P, G // P, F)), 1))
    tl.store(own[None, :] + warp * 2 * N + N, tl.sum(tl.reshape(products, (P, G // P, F)), 1))
    tl.debug_barrier()
    total, weighted = totals(own, N, None, P, F)
    tl.store(part + place * 2 * N + column, total)
    tl.store(part + place * 2 * N + N + column, weighted)


@triton.jit
def _masked_product(
    d, w, x, scale, bias, mean, inverse_std, dy, scratch, part, moments, rows,
    K: tl.constexpr, N: tl.constexpr, R: tl.constexpr, C: tl.constexpr, G: tl.constexpr, P: tl.constexpr,
    TILES: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    """A program keeps C columns of w and goes down TILES tiles of d; the next tile of x is under way already."""
    network = tl.program_id(1).to(tl.int64)
    slabs: tl.constexpr = N // C
    F: tl.constexpr = C // 2
    slab, split = tl.program_id(0) % slabs, tl.program_id(0) // slabs
    weight = w.load([tl.program_id(1) * K, slab * C])
    # In one piece a tile would not fit into the registers beside the product.
    left = slab * C + tl.arange(0, F)
    norm1 = _norm(mean, inverse_std, scale, bias, network, left, moments, N)
    norm2 = _norm(mean, inverse_std, scale, bias, network, left + F, moments, N)
    begin, row = tl.program_id(1) * rows + split * (R * TILES), split * (R * TILES) + tl.arange(0, R)
    place = network * rows * N + row[:, None] * N + left[None, :]
    sums1, sums2 = tl.zeros((G, F), tl.float32), tl.zeros((G, F), tl.float32)
    products1, products2 = tl.zeros((G, F), tl.float32), tl.zeros((G, F), tl.float32)
    last = (split + 1) * (R * TILES) - R
    value1, value2 = tl.load(x + place), tl.load(x + place + F)
    for step in tl.range(0, TILES, num_stages=1):
        product = tl.dot(d.load([begin + step * R, 0]), weight).to(dy.dtype.element_ty)
        first, second = _halves(product, R, F)
        more = (row < last)[:, None]
        sums1, products1 = _finish(first, value1, norm1, dy + place, sums1, products1, R, F, G)
        value1 = tl.load(x + place + R * N, mask=more, other=0.0)
        sums2, products2 = _finish(second, value2, norm2, dy + place + F, sums2, products2, R, F, G)
        value2 = tl.load(x + place + R * N + F, mask=more, other=0.0)
        row += R
        place += R * N
    _store_part(sums1, products1, scratch, part, network, split, left, N, G, F, P, SPLITS)
    _store_part(sums2, products2, scratch, part, network, split, left + F, N, G, F, P, SPLITS)


@triton.jit
def _rest(
    dy, x, part, scale, mean, inverse_std, dx, dscale, dbias, moments, rows,
    N: tl.constexpr, SPLITS: tl.constexpr, R: tl.constexpr, F: tl.constexpr,
):  # fmt: skip
    network = tl.program_id(1).to(tl.int64)
    slabs: tl.constexpr = N // F
    slab, down = tl.program_id(0) % slabs, tl.program_id(0) // slabs
    column, row = slab * F + tl.arange(0, F), down * R + tl.arange(0, R)
    place = network * rows * N + row[:, None] * N + column[None, :]
    change = tl.load(dy + place, eviction_policy="evict_first")
    value = tl.load(x + place, eviction_policy="evict_first")
    total, weighted = totals(part + network * SPLITS * 2 * N + column, N, None, SPLITS, F)
    average = tl.load(mean + network * moments + column)
    inverse = tl.load(inverse_std + network * moments + column)
    slope = tl.load(scale + network * N + column) * inverse
    weighted *= inverse
    if down == 0:
        tl.store(dbias + network * N + column, total)
        tl.store(dscale + network * N + column, weighted)
    bend = -slope * inverse * weighted / rows
    level = -slope * total / rows - bend * average
    change = change.to(tl.float32) * slope[None, :] + value.to(tl.float32) * bend[None, :] + level[None, :]
    tl.store(dx + place, change.to(dx.dtype.element_ty))


def fits(d: Tensor, w: Tensor, x: Tensor) -> bool:
    """Tells whether `backward` takes these: half types on a Hopper GPU, whole tiles, and rows of w in shared memory."""
    whole = x.shape[1] % (ROWS * _splits(x)) == x.shape[2] % COLUMNS == 0
    return whole and w.shape[1] in (64, 128, 256) and suits_hopper(d, w, x)


def _splits(x: Tensor) -> int:
    """Returns the number of parts of the rows: the fewer the less to add up, if there are programs enough."""
    return 16 if x.shape[0] * x.shape[2] // COLUMNS * 16 >= PROGRAMS else 32


def backward(d: Tensor, w: Tensor, x: Tensor, saved: tuple[Tensor, ...]) -> tuple[Tensor, Tensor, Tensor]:
    """Launches `batch_norm.backward_of_product` from (scale, bias, mean, inverse_std)."""
    (networks, rows, features), inner, splits = x.shape, w.shape[1], _splits(x)
    scale, bias, mean, inverse_std = saved[0].contiguous(), saved[1].contiguous(), *saved[2:]
    dy, dx = (torch.empty_like(x) for _ in range(2))
    dscale, dbias = torch.empty_like(scale), torch.empty_like(scale)
    scratch, part = (scale.new_empty(networks, splits, size, features) for size in (WARPS * 2, 2))
    given = (
        TensorDescriptor.from_tensor(d.view(-1, inner), [ROWS, inner]),
        TensorDescriptor.from_tensor(w.view(-1, features), [inner, COLUMNS]),
    )
    launch(
        _masked_product, (features // COLUMNS * splits, networks), *given, x, scale, bias, mean, inverse_std, dy,
        scratch, part, mean.stride(0), rows, K=inner, N=features, R=ROWS, C=COLUMNS, G=ROWS // 4, P=WARPS,
        TILES=rows // (ROWS * splits), SPLITS=splits, num_warps=WARPS,
    )  # fmt: skip
    launch(
        _rest, (features // COLUMNS * (rows // REST_ROWS), networks), dy, x, part, scale, mean, inverse_std, dx,
        dscale, dbias, mean.stride(0), rows, N=features, SPLITS=splits, R=REST_ROWS, F=COLUMNS, num_warps=4,
    )  # fmt: skip
    return dx, dscale, dbias
