"""What a file of episodes holds, channel by channel: spread, dead channels, coverage, share of frames that count."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from functional_sl.run import figures
from functional_sl.sources import episodes
from functional_sl.sources.episodes import Episodes

BINS = 20


class Channel(NamedTuple):
    """One channel of one feature over the frames that count."""

    name: str  # feature and channel
    unit: str
    mean: float
    std: float  # of the population
    low: float
    high: float
    counts: tuple[int, ...]  # [BINS], evenly from low to high

    @property
    def dead(self) -> bool:
        """Whether it never changes."""
        return self.low == self.high

    @property
    def coverage(self) -> float:
        """Share of the bins that hold a frame."""
        return sum(count > 0 for count in self.counts) / BINS


def channels(recorded: Episodes) -> list[Channel]:
    """Returns every channel in the schema's order; the mask itself is none. At least one frame counts."""
    valid, found = episodes.valid(recorded), []
    for feature in recorded.schema.features:
        if feature.name == recorded.schema.mask:
            continue
        values = recorded.values[feature.name][valid]
        # Whole pictures in float64 would take eight times their place; one channel at a time is enough.
        axis = 1 if feature.channel_axis == 0 else -1
        columns = values.movedim(axis, 0) if feature.shape else values[None]
        for pair, column in zip(feature.channels, columns, strict=True):
            found.append(_channel(feature.name, *pair, column.flatten().to(torch.float64)))
    return found


def _channel(feature: str, name: str, unit: str, values: Tensor) -> Channel:
    low, high = float(values.min()), float(values.max())
    counts = (
        torch.histc(values, BINS, low, high).long() if low < high else torch.tensor([len(values)] + [0] * (BINS - 1))
    )
    std = float(values.std(correction=0))
    return Channel(f"{feature}/{name}", unit, float(values.mean()), std, low, high, tuple(counts.tolist()))


def lines(path: str | os.PathLike[str]) -> Iterator[str]:
    """Yields the report of a file of episodes, line by line.

    Raises:
      ValueError: for a file that is none, or damaged.
    """
    recorded = episodes.read(path)
    valid, found = episodes.valid(recorded), channels(recorded)
    lengths = recorded.lengths
    yield (
        f"data: {len(lengths)} episodes of {int(lengths.min())} to {int(lengths.max())} frames, {len(valid)} in all, "
        f"step {recorded.schema.step_dt:g} s, digest {episodes.digest(recorded)[:16]}"
    )
    yield f"  valid: {100 * float(valid.double().mean()):.1f} % of frames; terminated: {int(recorded.terminated.sum())}"
    yield f"  dead channels: {', '.join(c.name for c in found if c.dead) or 'none'}"
    for c in found:
        spread = f"mean {c.mean:.4g}, std {c.std:.4g}, {c.low:.4g} to {c.high:.4g} {c.unit}".rstrip()
        yield f"  {c.name}: {spread}; coverage {100 * c.coverage:.0f} %" + (" (dead)" if c.dead else "")
    yield from (f"  about.{name}: {value}" for name, value in recorded.schema.about.items())


def draw(path: str | os.PathLike[str], picture: str | os.PathLike[str]) -> None:
    """Draws a histogram of every channel of a file of episodes into a PNG file.

    Raises:
      ValueError: as `lines`.
      OSError: if the picture cannot be written.
    """
    found, records = channels(episodes.read(path)), []
    for c in found:
        width = (c.high - c.low) / BINS
        records += [{"value": c.low + (i + 0.5) * width, c.name: count} for i, count in enumerate(c.counts)]
    figures.metrics_grid(Path(picture), records, [c.name for c in found], x="value")
