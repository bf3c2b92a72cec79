"""The tiles in which `frozen_block_kernels` compute products, and whether there is one; this needs no Triton."""

from __future__ import annotations

from typing import NamedTuple

FEATURES = (128, 64, 32)  # of a program, the most that leave four programs side by side
PROGRAMS = 256  # about two for each multiprocessor of a large GPU


class Tile(NamedTuple):
    """What a program computes, and how."""

    rows: int
    features: int
    depth: int  # of a step
    warps: int
    stages: int  # steps whose loads are under way


def tile(networks: int, rows: int, features: int, depth: int) -> Tile | None:
    """Returns the tile for products [N, B, K] times [N, K, F], or None where no tile divides them.

    Measured on an H200 in BF16 for 2048 rows, widths 128 and 256, and 512 and 1024 features in between: of tiles for
    which forward and backward products were timed, the ones with the least sum.
    """
    across = next((size for size in FEATURES if features % size == 0 and 4 * size <= features), 0)
    step = 64 if across == FEATURES[0] else 128
    if not across or rows % 64 or depth % step:
        return None
    down = 128 if rows % 128 == 0 and networks * (rows // 128) * (features // across) >= PROGRAMS else 64
    return Tile(down, across, step, 4, min(3, depth // step))
