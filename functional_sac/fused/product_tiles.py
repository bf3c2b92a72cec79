"""Tiles of the Triton kernels that compute a product of stacked matrices: one place for all sizes."""

from __future__ import annotations

from typing import NamedTuple

FEATURES = (256, 128, 64, 32)  # of a program, the most that leave four programs side by side


class Tile(NamedTuple):
    """What a program computes, and how."""

    rows: int
    features: int
    depth: int  # of a step
    warps: int
    stages: int  # steps whose loads are under way


def tile(networks: int, rows: int, features: int, depth: int) -> Tile | None:
    """Returns the tile for products [N, B, K] times [N, K, F], or None where no tile divides them.

    Features go to four programs and rows to 32 where they can, which is about one program for each multiprocessor of
    a large GPU. Measured on an H200 in BF16 for 2048 rows, widths 128 and 256, and 512 and 1024 features in between.
    """
    across = next((size for size in FEATURES if features % size == 0 and 4 * size <= features), 0)
    down = 128 if networks * rows >= 32 * 128 else 64
    step = 64 if across >= 64 else 128
    if not across or rows % down or depth % step:
        return None
    return Tile(down, across, step, 8 if across * down >= 2**14 else 4, min(4 if step == 64 else 3, depth // step))
