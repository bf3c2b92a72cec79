"""What gymnasium's spaces come to: observations as rows of float32, actions as affine images of [-1, 1].

Observations: a Box (any shape, float, integer or bool) is flattened in C order; a MultiBinary is taken as it is; a
Dict of these is their concatenation in the order of its sorted keys. Numbers are rounded to float32, which has 24
bits: differences finer than that, such as 1e-3 beside 1e6, are lost and want an offset taken off in the task.

Actions: a bounded floating Box with low < high everywhere. The others are refused with the reason and the remedy.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
from gymnasium import Space, spaces

Path = tuple[str, ...]  # keys of nested Dicts


class Observations(NamedTuple):
    """How observations of a space become rows."""

    paths: tuple[Path, ...]
    shapes: tuple[tuple[int, ...], ...]
    width: int

    def encode(self, value: Any, rows: np.ndarray) -> None:
        """Writes an observation into `rows` [O] float32, or N of them, batched by leaves, into [N, O].

        Raises:
          ValueError: for a value of another shape than the space's, or one that is not of real numbers.
        """
        lead, start = rows.shape[:-1], 0
        # What overflows float32 becomes infinite, which is seen like any other such number.
        with np.errstate(over="ignore", invalid="ignore"):
            for path, shape in zip(self.paths, self.shapes, strict=True):
                part = np.asarray(_follow(value, path))
                fault = ""
                if part.shape != lead + shape:
                    fault = f"has shape {part.shape}; its space says {lead + shape}"
                elif part.dtype.kind not in "biuf":
                    fault = f"holds {part.dtype}; its space says real numbers"
                if fault:
                    where = f" at {'/'.join(path)!r}" if path else ""
                    raise ValueError(f"an observation{where} {fault}")
                size = int(np.prod(shape))
                rows[..., start : start + size] = part.reshape(*lead, size)
                start += size


class Actions(NamedTuple):
    """The affine map from [-1, 1] to a Box."""

    low: np.ndarray  # of the Box's shape and dtype
    high: np.ndarray

    @property
    def width(self) -> int:
        """The number of components."""
        return int(np.prod(self.low.shape))

    def decode(self, action: np.ndarray) -> np.ndarray:
        """Returns the commands [N, *shape] of actions [N, A]: `low + (a + 1) / 2 (high - low)`, a clamped to [-1, 1].

        The result is a new array in the Box's dtype and within its bounds.
        """
        low, high = self.low.astype(np.float64), self.high.astype(np.float64)
        unit = np.clip(action.astype(np.float64), -1.0, 1.0).reshape(len(action), *low.shape)
        return np.clip((low + 0.5 * (unit + 1.0) * (high - low)).astype(self.low.dtype), self.low, self.high)


def observations(space: Space, task: str) -> Observations:
    """Returns how to encode observations of a space.

    Raises:
      ValueError: for a space that is not a Box, a MultiBinary or a Dict of these.
    """
    parts = [*_leaves(space, (), task)]
    sizes = [int(np.prod(shape)) for _, shape in parts]
    if not sum(sizes):
        raise ValueError(f"{task}: its observation space {space} holds no number; give the task one")
    return Observations(tuple(path for path, _ in parts), tuple(shape for _, shape in parts), sum(sizes))


def actions(space: Space, task: str) -> Actions:
    """Returns the map onto an action space.

    Raises:
      ValueError: for anything but a bounded floating Box with low < high everywhere.
    """
    remedy, reason = "choose a task with a bounded Box of float actions, or wrap this one so that it has", ""
    if not isinstance(space, spaces.Box):
        reason = f"a {type(space).__name__} has no continuous actions, which a squashed Gaussian policy needs"
    elif not np.issubdtype(space.dtype, np.floating):
        reason = "its integers are no continuous actions"
    elif not space.shape or not np.prod(space.shape):
        reason = "it holds no axis of actions"
    elif not _spans(space):
        reason = "[-1, 1] has no affine image without bounds"
        remedy = "wrap the task with gymnasium.wrappers.TransformAction and a bounded Box"
    elif not (space.low < space.high).all():
        flat = int(np.argmin((space.low < space.high).reshape(-1)))
        reason = f"low is not below high in component {flat}, so it does nothing"
        remedy = "leave that component out by gymnasium.wrappers.TransformAction"
    if reason:
        raise ValueError(f"{task}: unsupported action space {space}: {reason}; {remedy}")
    return Actions(space.low.copy(), space.high.copy())


def _spans(box: spaces.Box) -> bool:
    """Tells whether the bounds and their distance are finite, in float32 too, in which policies are exported."""
    return bool((np.abs(np.stack([box.low, box.high]).astype(np.float64)) <= np.finfo(np.float32).max / 2).all())


def _leaves(space: Space, path: Path, task: str) -> Iterator[tuple[Path, tuple[int, ...]]]:
    if isinstance(space, spaces.Dict):
        for name in sorted(space.spaces):
            yield from _leaves(space.spaces[name], (*path, name), task)
    elif isinstance(space, (spaces.Box, spaces.MultiBinary)):
        yield path, tuple(space.shape)
    else:
        where = f" at {'/'.join(path)!r}" if path else ""
        raise ValueError(
            f"{task}: unsupported observation space {space}{where}: a {type(space).__name__} is no array of numbers; "
            "wrap the task with gymnasium.wrappers.FlattenObservation (categories become one-hot) or "
            "TransformObservation, so that it is a Box"
        )


def _follow(value: Any, path: Path) -> Any:
    for name in path:
        value = value[name]
    return value
