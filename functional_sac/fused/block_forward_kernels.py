"""The launchers of `block_forward` for a Hopper GPU, and the kernel that ends a block.

Each product leaves the moments of what it stores in parts of the rows, and who reads it next joins them, in their
order: no norm reads the rows a second time, and the same input gives the same bits.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from functional_sac.fused.block_forward_product_kernels import narrow_product, wide_product
from functional_sl.kernels import launch

WIDTH, INNER = 256, 1024  # of the blocks for which the sizes below are
WIDE_ROWS, WIDE_COLUMNS, WIDE_WARPS = 64, 64, 4  # of a tile of the wide product
WIDE_TILES, PROGRAMS = (16, 8, 4, 2), 256  # tiles of a program: the most that leave two programs a multiprocessor
NARROW_ROWS, NARROW_DEPTH, NARROW_STAGES, NARROW_WARPS = 128, 64, 3, 8  # of a program, a step, the ring of steps
END_ROWS, END_COLUMNS = 256, 32  # of a program of the last norm
WIDE_PARTS, NARROW_PARTS = 32, 64  # the most of each product's, which are joined without a loop


@triton.jit
def _end(
    x, part, scale, bias, residual, y, mean, inverse_std, moments, eps,
    rows: tl.constexpr, N: tl.constexpr, PARTS: tl.constexpr, P: tl.constexpr, R: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """A program joins the PARTS of its C features, then normalises R rows, takes the ReLU and adds the residual."""
    network = tl.program_id(1)
    feature = tl.program_id(0) * C + tl.arange(0, C)
    piece = tl.arange(0, P)[:, None]
    there = piece < PARTS
    place = part + (network * PARTS + piece) * 2 * N + feature[None, :]
    means = tl.load(place, mask=there, other=0.0)
    squares = tl.load(place + N, mask=there, other=0.0)
    average = tl.sum(means, 0) / PARTS
    gap = tl.where(there, means - average[None, :], 0.0)
    inverse = 1.0 / tl.sqrt((tl.sum(squares, 0) + tl.sum(gap * gap, 0) * (rows // PARTS)) / rows + eps)
    if tl.program_id(2) == 0:
        tl.store(mean + network * moments + feature, average)
        tl.store(inverse_std + network * moments + feature, inverse)
    slope = tl.load(scale + network * N + feature) * inverse
    offset = tl.load(bias + network * N + feature) - average * slope
    row = network * rows + tl.program_id(2) * R + tl.arange(0, R)
    place = row[:, None] * N + feature[None, :]
    value = tl.load(x + place).to(tl.float32) * slope[None, :] + offset[None, :]
    # NaN stays NaN: the gate must see it.
    value = tl.where(value < 0.0, 0.0, value).to(y.dtype.element_ty).to(tl.float32)
    tl.store(y + place, (value + tl.load(residual + place).to(tl.float32)).to(y.dtype.element_ty))


def tiles(networks: int, rows: int) -> int:
    """Returns how many tiles a program of the wide product takes: the more the fewer parts there are to join."""
    fitting = [n for n in WIDE_TILES if rows % (WIDE_ROWS * n) == 0]
    programs = networks * (rows // WIDE_ROWS) * (INNER // WIDE_COLUMNS)
    return next((n for n in fitting if programs // n >= PROGRAMS), fitting[-1])


def divide(networks: int, rows: int) -> bool:
    """Tells whether tiles divide the rows into parts that are few enough."""
    parts, beyond = divmod(rows, NARROW_ROWS)
    few = 0 < parts <= NARROW_PARTS
    return beyond == 0 and few and rows // (WIDE_ROWS * tiles(networks, rows)) <= WIDE_PARTS


def forward(
    h: Tensor,
    leaves: list[Tensor],
    first_norm: tuple[Tensor, Tensor],
    second_norm: tuple[Tensor, Tensor],
    eps: float,
    trained: int,
) -> list[Tensor]:
    """Launches `block_forward.forward`."""
    w1, scale1, bias1, w2, scale2, bias2 = leaves
    networks, rows, _ = h.shape
    taken = tiles(networks, rows)
    parts1, parts2 = rows // (WIDE_ROWS * taken), rows // NARROW_ROWS
    first, second, new = h.new_empty(networks, rows, INNER), torch.empty_like(h), torch.empty_like(h)
    inner = h.new_empty(trained, rows, INNER)
    part1, part2 = scale1.new_empty(networks, parts1, 2, INNER), scale1.new_empty(networks, parts2, 2, WIDTH)
    launch(
        wide_product, (networks * parts1 * (INNER // WIDE_COLUMNS),), _tiled(h, WIDE_ROWS, WIDTH),
        _tiled(w1, WIDE_COLUMNS, WIDTH), _tiled(first, WIDE_ROWS, WIDE_COLUMNS), part1, rows=rows, N=INNER, K=WIDTH,
        R=WIDE_ROWS, C=WIDE_COLUMNS, TILES=taken, WARPS=WIDE_WARPS, num_warps=WIDE_WARPS,
    )  # fmt: skip
    launch(
        narrow_product, (networks * parts2,), _tiled(first, NARROW_ROWS, NARROW_DEPTH),
        _tiled(w2, WIDTH, NARROW_DEPTH), _tiled(second, NARROW_ROWS, WIDTH), _tiled(inner, NARROW_ROWS, NARROW_DEPTH),
        part2, part1, scale1.contiguous(), bias1.contiguous(), *first_norm, first_norm[0].stride(0), eps, rows=rows,
        N=WIDTH, K=INNER, R=NARROW_ROWS, D=NARROW_DEPTH, STAGES=NARROW_STAGES, TRAINED=trained, PARTS=parts1,
        WARPS=NARROW_WARPS, num_warps=NARROW_WARPS,
    )  # fmt: skip
    down = END_ROWS if rows % END_ROWS == 0 else NARROW_ROWS
    launch(
        _end, (WIDTH // END_COLUMNS, networks, rows // down), second, part2, scale2.contiguous(), bias2.contiguous(),
        h, new, *second_norm, second_norm[0].stride(0), eps, rows=rows, N=WIDTH, PARTS=parts2,
        P=triton.next_power_of_2(parts2), R=down, C=END_COLUMNS, num_warps=4,
    )  # fmt: skip
    return [first, inner, second, new]


def _tiled(x: Tensor, rows: int, columns: int) -> TensorDescriptor:
    """Returns what the copying unit has to know to move tiles of x [N, R, F], whose networks it sees as more rows."""
    block = [rows, columns]
    layout = gl.NVMMASharedLayout.get_default_for(block, gl.bfloat16)
    return TensorDescriptor.from_tensor(x.view(-1, x.shape[-1]), block, layout)
