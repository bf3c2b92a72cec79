"""A few anti-aliased shapes in numpy, enough to film a task without a display."""

from __future__ import annotations

import numpy as np

SIZE = 200  # pixels a side

BLUE = (52, 101, 164)
ORANGE = (230, 126, 34)
GREEN = (46, 160, 67)
GREY = (150, 154, 160)
DARK = (60, 64, 72)

Point = tuple[float, float]
Colour = tuple[int, int, int]


def blank() -> np.ndarray:
    """Returns an empty picture, uint8 [SIZE, SIZE, 3]."""
    return np.full((SIZE, SIZE, 3), 250, np.uint8)


def capsule(image: np.ndarray, start: Point, end: Point, radius: float, colour: Colour, extent: float) -> np.ndarray:
    """Returns `image` with a thick round-ended line; a disc where both ends agree.

    Args:
      image: uint8 [SIZE, SIZE, 3].
      start, end: metres from the centre of the picture, x to the right and y up.
      radius: half the thickness in metres.
      colour: red, green, blue in 0 .. 255.
      extent: metres from the centre to an edge of the picture.
    """
    x, y = _grid(extent)
    along = np.subtract(end, start)
    length_squared = max(float(along @ along), 1e-12)
    t = np.clip(((x - start[0]) * along[0] + (y - start[1]) * along[1]) / length_squared, 0.0, 1.0)
    distance = np.hypot(x - start[0] - t * along[0], y - start[1] - t * along[1])
    return _paint(image, distance - radius, colour, extent)


def box(image: np.ndarray, centre: Point, half_size: Point, colour: Colour, extent: float) -> np.ndarray:
    """Returns `image` with an upright rectangle; arguments as for `capsule`."""
    x, y = _grid(extent)
    distance = np.maximum(np.abs(x - centre[0]) - half_size[0], np.abs(y - centre[1]) - half_size[1])
    return _paint(image, distance, colour, extent)


def _grid(extent: float) -> tuple[np.ndarray, np.ndarray]:
    ticks = (np.arange(SIZE) + 0.5) / SIZE * 2.0 - 1.0
    return extent * ticks[None, :], -extent * ticks[:, None]


def _paint(image: np.ndarray, distance: np.ndarray, colour: Colour, extent: float) -> np.ndarray:
    """Blends the colour in where the signed distance (metres) is negative, over one pixel at the edge."""
    coverage = np.clip(0.5 - distance * SIZE / (2.0 * extent), 0.0, 1.0)[..., None]
    return np.rint(image + coverage * (np.array(colour) - image.astype(np.float64))).astype(np.uint8)
