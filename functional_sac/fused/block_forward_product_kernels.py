"""The Gluon kernels of `block_forward`: the products of a block, with the moments of what each one stores.

What Triton would see to is written out here. Threads and the units that copy (TMA) and multiply (wgmma) see each
other's writes to shared memory only behind a fence; a slot is filled again only once a barrier tells that all warps
are done with it, and an asynchronous copy is only waited for by the thread that issued it. The allocator reuses shared
memory after its last use in the program, so what a copy may still read is kept alive until that copy has been waited
for. Registers that a product reads must not be written while it runs: here they hold weights, which nobody writes, and
what changes from step to step goes through shared memory.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_init,
    warpgroup_mma_wait,
)

# Its name from Triton 3.7 on, and before.
barrier = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier


@gluon.jit
def _load_rows(x, tiles, ready, row, slot):
    mbarrier.expect(ready.index(slot), x.block_type.nbytes)
    tma.async_copy_global_to_shared(x, [row, 0], ready.index(slot), tiles.index(slot))


@gluon.jit
def _store_tile(acc, y, staging, row, column, mean, squares, i: gl.constexpr, R: gl.constexpr):
    """Stores tile i [C, R], transposed, and joins its moments to those of the tiles before by Chan's rule."""
    out = acc.to(gl.bfloat16)
    value = out.to(gl.float32)
    average = gl.sum(value, 1) / R
    value = value - average[:, None]
    own = gl.sum(value * value, 1)
    gap = average - mean
    mean += gap / (i + 1)
    squares += own + gap * gap * (R * i / (i + 1))
    tma.store_wait(0)
    barrier()
    staging.permute((1, 0)).store(out)
    fence_async_shared()
    barrier()
    tma.async_copy_shared_to_global(y, [row, column], staging)
    return mean, squares


@gluon.jit
def wide_product(
    x, w, y, part, rows: gl.constexpr, N: gl.constexpr, K: gl.constexpr, R: gl.constexpr, C: gl.constexpr,
    TILES: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    """A program keeps C features' weights in registers and takes TILES tiles of R rows through them.

    The transposed product is computed, so that sums over rows stay within four threads. A tile is stored while the
    next one is multiplied. x [networks * rows, K] in tiles [R, K]; w [networks * N, K] in tiles [C, K]; y
    [networks * rows, N] in tiles [R, C]; part [networks, rows / (R * TILES), 2, N], means and centred squares.
    """
    groups: gl.constexpr = rows // R // TILES
    slabs: gl.constexpr = N // C
    program = gl.program_id(0)
    network = program // (groups * slabs)
    group = program // slabs % groups
    column = program % slabs * C
    begin = network * rows + group * TILES * R
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, R, 16])
    weights = gl.allocate_shared_memory(gl.bfloat16, [C, K], w.layout)
    tiles = gl.allocate_shared_memory(gl.bfloat16, [2, R, K], x.layout)
    staging = gl.allocate_shared_memory(gl.bfloat16, [R, C], y.layout)
    ready = gl.allocate_shared_memory(gl.int64, [3, 1], mbarrier.MBarrierLayout())
    for s in gl.static_range(3):
        mbarrier.init(ready.index(s), count=1)
    fence_async_shared()
    mbarrier.expect(ready.index(2), w.block_type.nbytes)
    tma.async_copy_global_to_shared(w, [network * N + column, 0], ready.index(2), weights)
    for s in gl.static_range(2):
        _load_rows(x, tiles, ready, begin + s * R, s)
    mean = gl.zeros([C], gl.float32, gl.SliceLayout(1, layout))
    squares = gl.zeros([C], gl.float32, gl.SliceLayout(1, layout))
    zero = gl.zeros([C, R], gl.float32, layout)
    mbarrier.wait(ready.index(2), 0)
    left = weights.load(gl.DotOperandLayout(operand_index=0, parent=layout, k_width=2))
    mbarrier.wait(ready.index(0), 0)
    acc = warpgroup_mma(left, tiles.index(0).permute((1, 0)), zero, use_acc=False, is_async=True)
    acc = warpgroup_mma_wait(0, deps=[acc])
    for i in gl.static_range(1, TILES):
        if i + 1 < TILES:
            barrier()  # All warps' products have read the slot.
            _load_rows(x, tiles, ready, begin + (i + 1) * R, (i + 1) % 2)
        mbarrier.wait(ready.index(i % 2), (i // 2) % 2)
        following = warpgroup_mma(left, tiles.index(i % 2).permute((1, 0)), zero, use_acc=False, is_async=True)
        mean, squares = _store_tile(acc, y, staging, begin + (i - 1) * R, column, mean, squares, i - 1, R)
        acc = warpgroup_mma_wait(0, deps=[following])
    mean, squares = _store_tile(acc, y, staging, begin + (TILES - 1) * R, column, mean, squares, TILES - 1, R)
    place = part + (network * groups + group) * 2 * N + column + gl.arange(0, C, gl.SliceLayout(1, layout))
    gl.store(place, mean)
    gl.store(place + N, squares)
    tma.store_wait(0)
    staging._keep_alive()
    for s in gl.static_range(3):
        mbarrier.invalidate(ready.index(s))


@gluon.jit
def _join(
    part, scale, bias, mean, inverse_std, moments, eps, network, first, rows: gl.constexpr, K: gl.constexpr,
    PARTS: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    """Returns slope and offset [K] of a network's norm by Chan's rule; its first program stores the moments."""
    layout: gl.constexpr = gl.BlockedLayout([4], [32], [WARPS], [0])
    feature = gl.arange(0, K, layout)
    own = part + network * PARTS * 2 * K + feature
    average = gl.zeros([K], gl.float32, layout)
    for p in gl.static_range(PARTS):
        average += gl.load(own + p * 2 * K)
    average = average / PARTS
    squares = gl.zeros([K], gl.float32, layout)
    for p in gl.static_range(PARTS):
        gap = gl.load(own + p * 2 * K) - average
        squares += gl.load(own + (p * 2 + 1) * K) + gap * gap * (rows // PARTS)
    inverse = 1.0 / gl.sqrt(squares / rows + eps)
    if first:
        gl.store(mean + network * moments + feature, average)
        gl.store(inverse_std + network * moments + feature, inverse)
    slope = gl.load(scale + network * K + feature) * inverse
    return slope, gl.load(bias + network * K + feature) - average * slope


@gluon.jit
def _load_step(x, w, row, feature, i, slot, ready, xs, ws, D: gl.constexpr):
    mbarrier.expect(ready.index(slot), x.block_type.nbytes + w.block_type.nbytes)
    tma.async_copy_global_to_shared(x, [row, i * D], ready.index(slot), xs.index(slot))
    tma.async_copy_global_to_shared(w, [feature, i * D], ready.index(slot), ws.index(slot))


@gluon.jit
def _step(
    i, acc, x, w, normal, row, feature, kept, factors, shifts, xs, ws, lefts, ready, D: gl.constexpr,
    STAGES: gl.constexpr, STEPS: gl.constexpr, left: gl.constexpr,
):  # fmt: skip
    """Normalises D features of the rows while the product of the step before runs, then starts that of this step."""
    along: gl.constexpr = gl.SliceLayout(0, left)
    slot = i % STAGES
    factor = factors.index(i).load(along)
    shift = shifts.index(i).load(along)
    mbarrier.wait(ready.index(slot), (i // STAGES) & 1)
    value = xs.index(slot).load(left).to(gl.float32) * factor[None, :] + shift[None, :]
    # NaN stays NaN: the gate must see it.
    lefts.index(i % 2).store(gl.where(value < 0.0, 0.0, value).to(gl.bfloat16))
    acc = warpgroup_mma_wait(0, deps=[acc])
    fence_async_shared()
    tma.store_wait(0)
    barrier()  # All warps: the step before has read its slots, and what this one normalised is there.
    acc = warpgroup_mma(lefts.index(i % 2), ws.index(slot).permute((1, 0)), acc, is_async=True)
    if kept:
        tma.async_copy_shared_to_global(normal, [row, i * D], lefts.index(i % 2))
    after = i + STAGES - 1
    if after < STEPS:
        _load_step(x, w, row, feature, after, after % STAGES, ready, xs, ws, D)
    return acc


@gluon.jit
def _store_rows(out, y, part, row, N: gl.constexpr, R: gl.constexpr, WARPS: gl.constexpr):
    """Stores [R, N] and its moments, which are taken in a layout where few threads share a column."""
    whole = gl.allocate_shared_memory(gl.bfloat16, [R, N], y.layout)
    whole.store(out)
    fence_async_shared()
    barrier()
    tma.async_copy_shared_to_global(y, [row, 0], whole)
    by_row: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [WARPS, 1], [1, 0])
    value = whole.load(by_row).to(gl.float32)
    average = gl.sum(value, 0) / R
    value = value - average[None, :]
    squares = gl.sum(value * value, 0)
    place = part + row // R * 2 * N + gl.arange(0, N, gl.SliceLayout(0, by_row))
    gl.store(place, average)
    gl.store(place + N, squares)
    tma.store_wait(0)
    whole._keep_alive()  # Or what the sums exchange would take its place while the copy still reads it.


@gluon.jit
def narrow_product(
    x, w, y, normal, part, before, scale, bias, mean, inverse_std, moments, eps,
    rows: gl.constexpr, N: gl.constexpr, K: gl.constexpr, R: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr,
    TRAINED: gl.constexpr, PARTS: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    """A program has R rows and all N features: it normalises x, takes the ReLU, and multiplies, D of K at a step.

    x [networks * rows, K] in tiles [R, D]; w [networks * N, K] in tiles [N, D]; y [networks * rows, N] in tiles [R, N];
    normal [TRAINED * rows, K] takes the first networks' normalised x in tiles [R, D]; part [networks, rows / R, 2, N]
    takes the moments of y, and before [networks, PARTS, 2, K] has those of x.
    """
    row = gl.program_id(0) * R
    network = row // rows
    STEPS: gl.constexpr = K // D
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, N, 16])
    left: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=layout, k_width=2)
    xs = gl.allocate_shared_memory(gl.bfloat16, [STAGES, R, D], x.layout)
    ws = gl.allocate_shared_memory(gl.bfloat16, [STAGES, N, D], w.layout)
    lefts = gl.allocate_shared_memory(gl.bfloat16, [2, R, D], x.layout)
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for s in gl.static_range(STAGES):
        mbarrier.init(ready.index(s), count=1)
    fence_async_shared()
    for s in gl.static_range(STAGES - 1):
        _load_step(x, w, row, network * N, s, s, ready, xs, ws, D)
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    factors = gl.allocate_shared_memory(gl.float32, [K], plain)
    shifts = gl.allocate_shared_memory(gl.float32, [K], plain)
    factor, shift = _join(
        before, scale, bias, mean, inverse_std, moments, eps, network, row % rows == 0, rows, K, PARTS, WARPS
    )
    factors.store(factor)
    shifts.store(shift)
    barrier()
    factors = factors._reinterpret(gl.float32, [STEPS, D], plain)
    shifts = shifts._reinterpret(gl.float32, [STEPS, D], plain)
    acc = warpgroup_mma_init(gl.zeros([R, N], gl.float32, layout))
    for i in range(STEPS):
        acc = _step(
            i, acc, x, w, normal, row, network * N, network < TRAINED, factors, shifts, xs, ws, lefts, ready, D,
            STAGES, STEPS, left,
        )  # fmt: skip
    out = warpgroup_mma_wait(0, deps=[acc]).to(gl.bfloat16)
    tma.store_wait(0)
    barrier()
    for s in gl.static_range(STAGES):
        mbarrier.invalidate(ready.index(s))
    xs._keep_alive()
    ws._keep_alive()
    lefts._keep_alive()
    _store_rows(out, y, part, row, N, R, WARPS)
