"""Learning curves and metrics as PNG files, drawn off screen with no global matplotlib state."""

from __future__ import annotations

import io
import math
import os
import textwrap
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from functional_sl.run import files

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure

# Okabe and Ito's colours, which colour-blind readers tell apart; the darkest pairs come first.
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")


class Series(NamedTuple):
    """One curve, with a band around it when `low` and `high` are there."""

    label: str
    x: ArrayLike  # [N]
    mean: ArrayLike  # [N]; a value that is not finite leaves a gap
    low: ArrayLike | None = None  # [N]
    high: ArrayLike | None = None  # [N]


def band(label: str, curves: Sequence[tuple[ArrayLike, ArrayLike]]) -> Series:
    """Joins the curves of several seeds into their mean, with a band from the smallest to the largest.

    Each curve is interpolated linearly between its own points and counts only over its own range, so at the
    end of the longest curve fewer seeds may take part.

    Args:
      label: the name in the legend.
      curves: one (x [N], y [N]) a seed, x increasing; points that are not finite are left out.
    """
    clean = [_finite(x, y) for x, y in curves]
    clean = [(x, y) for x, y in clean if x.size]
    if not clean:
        return Series(label, np.zeros(0), np.zeros(0), np.zeros(0), np.zeros(0))
    grid = np.unique(np.concatenate([x for x, _ in clean]))
    values = np.ma.masked_invalid([np.interp(grid, x, y, left=np.nan, right=np.nan) for x, y in clean])
    found = (values.mean(axis=0), values.min(axis=0), values.max(axis=0))
    return Series(label, grid, *(np.ma.filled(a.astype(float), np.nan) for a in found))


def learning_curve(
    path: str | os.PathLike[str],
    series: Sequence[Series],
    *,
    title: str,
    xlabel: str,
    ylabel: str,
    target: float | None = None,
) -> None:
    """Draws curves with their bands over one pair of axes into a PNG file.

    Args:
      path: the file; it is replaced as a whole or not at all.
      series: the curves; an empty one, a single point and gaps are fine.
      title: the heading.
      xlabel: the quantity on the horizontal axis.
      ylabel: the quantity on the vertical axis.
      target: a value to reach, drawn as a dashed line.
    """
    figure = _figure(6.4, 4.0)
    axes = figure.add_subplot()
    drawn = [_draw(axes, s, COLORS[i % len(COLORS)]) for i, s in enumerate(series)]
    if target is not None:
        axes.axhline(target, color="0.35", linewidth=1.1, linestyle=(0, (5, 3)), zorder=1)
        beside = {"xycoords": ("axes fraction", "data"), "textcoords": "offset points", "va": "center"}
        axes.annotate(f"target\n{_minus(f'{target:,g}')}", (1, target), (5, 0), color="0.35", fontsize=8.5, **beside)
    _dress(axes, any(drawn))
    _write(axes.set_title, title, 60, fontsize=11.5, loc="left", pad=10, fontweight="bold")
    _write(axes.set_xlabel, xlabel, 60)
    _write(axes.set_ylabel, ylabel, 40)
    shown = [(line, s.label) for line, s in zip(drawn, series, strict=True) if line]
    if len(series) > 1 and shown:
        _explain(axes, shown, fontsize=9, loc="best")
    _save(figure, path)


def metrics_grid(
    path: str | os.PathLike[str], records: Sequence[Mapping[str, Any]], names: Sequence[str], *, x: str = "step"
) -> None:
    """Draws chosen metrics as small multiples against the step into a PNG file.

    Args:
      path: the file; it is replaced as a whole or not at all.
      records: one mapping a logged step; a metric that is absent, None or not finite is left out there.
      names: the metrics, one panel each, in reading order.
      x: the key of the horizontal axis.

    Raises:
      ValueError: if there are no names.
    """
    if not names:
        raise ValueError("names: expected at least one metric to draw; got none")
    found = {}
    for name in names:
        points = [(r[x], r[name]) for r in records if r.get(x) is not None and r.get(name) is not None]
        found[name] = [Series(name, *(zip(*points, strict=True) if points else ((), ())))]
    panels(path, found, xlabel=x)


def panels(
    path: str | os.PathLike[str], titled: Mapping[str, Sequence[Series]], *, xlabel: str, logarithmic: bool = False
) -> None:
    """Draws small multiples into a PNG file; curves of one label have one colour, which a common legend explains.

    Args:
      path: the file; it is replaced as a whole or not at all.
      titled: the curves of each panel by its title, in reading order.
      xlabel: the quantity on all horizontal axes.
      logarithmic: whether both axes are, the horizontal ones in powers of two.
    """
    columns = 2 if len(titled) == 4 else min(3, len(titled))
    rows = math.ceil(len(titled) / columns)
    compared = any(len(series) > 1 for series in titled.values())
    labels = list(dict.fromkeys(s.label for series in titled.values() for s in series)) if compared else []
    figure, lines = _figure(3.3 * columns, 2.3 * rows + 0.25 * math.ceil(len(labels) / columns)), {}
    for i, (title, series) in enumerate(titled.items()):
        axes = figure.add_subplot(rows, columns, i + 1)
        drawn = [_draw(axes, s, COLORS[labels.index(s.label) % len(COLORS)] if labels else COLORS[0]) for s in series]
        lines.update({s.label: line for s, line in zip(series, drawn, strict=True) if line})
        _dress(axes, any(drawn))
        if logarithmic:
            _scale(axes)
        _write(axes.set_title, title, 38, fontsize=9.5, loc="left")
        axes.tick_params(labelsize=8)
        if i + columns >= len(titled):
            _write(axes.set_xlabel, xlabel, 38, fontsize=8.5)
    if labels and lines:
        shown = [(lines[x], x) for x in labels if x in lines]
        _explain(figure, shown, fontsize=8.5, loc="outside lower left", ncols=columns)
    _save(figure, path)


def _finite(x: ArrayLike, y: ArrayLike) -> tuple[np.ndarray, np.ndarray]:
    x, y = np.asarray(x, float), np.asarray(y, float)
    keep = np.isfinite(x) & np.isfinite(y)
    return x[keep], y[keep]


def _gaps(values: ArrayLike) -> np.ndarray:
    values = np.asarray(values, float)
    return np.where(np.isfinite(values), values, np.nan)


def _figure(width: float, height: float) -> Figure:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), dpi=160, layout="constrained", facecolor="white")
    figure.get_layout_engine().set(w_pad=0.1, h_pad=0.09)  # inches
    FigureCanvasAgg(figure)
    return figure


def _draw(axes: Axes, series: Series, color: str) -> Any:
    """Draws one curve and returns its line, or None if it has no finite point."""
    x, mean = _gaps(series.x), _gaps(series.mean)
    points = int(np.isfinite(x + mean).sum())
    if not points:
        return None
    if series.low is not None and series.high is not None:
        axes.fill_between(x, _gaps(series.low), _gaps(series.high), color=color, alpha=0.18, linewidth=0)
    # A line needs two neighbours; a dot shows what a few points would leave invisible.
    marker = {"marker": "o", "markersize": 4} if points <= 20 else {}
    return axes.plot(x, mean, color=color, linewidth=1.7, solid_joinstyle="round", **marker)[0]


def _dress(axes: Axes, has_data: bool) -> None:
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color("0.6")
    axes.grid(color="0.92", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(color="0.6", labelcolor="0.2", labelsize=9)
    axes.margins(x=0.02)
    axes.locator_params(nbins=6)
    for axis in (axes.xaxis, axes.yaxis):
        _format_ticks(axis)
    if not has_data:
        axes.set(xticks=[], yticks=[])
        axes.text(0.5, 0.3, "no data", color="0.5", ha="center", va="center", transform=axes.transAxes)


def _scale(axes: Axes) -> None:
    from matplotlib.ticker import LogLocator, NullFormatter

    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter("{x:,g}")
        axis.set_minor_formatter(NullFormatter())


def _format_ticks(axis: Axis) -> None:
    """Writes thousands as 5,000, 50k or 1.5M, one way for the whole axis."""

    def text(value: float, _: int | None = None) -> str:
        top = max(abs(end) for end in axis.get_view_interval())
        scale, unit = next(((s, u) for s, u in ((1e9, "G"), (1e6, "M"), (1e4, "k")) if top >= s), (1.0, ""))
        scale = 1e3 if unit == "k" else scale
        return _minus(f"{value / scale:,.6g}{unit}") if value else "0"

    axis.set_major_formatter(text)


def _minus(number: str) -> str:
    return number.replace("-", "\N{MINUS SIGN}")


def _explain(owner: Axes | Figure, shown: Sequence[tuple[Any, str]], **style: Any) -> None:
    """Adds a legend of lines and their labels."""
    legend = owner.legend(*zip(*shown, strict=True), frameon=False, **style)
    for text in legend.get_texts():
        text.set_parse_math(False)


def _write(setter: Any, text: str, width: int, **style: Any) -> None:
    setter("\n".join(textwrap.wrap(text, width)), color="0.15", **style).set_parse_math(False)


def _save(figure: Figure, path: str | os.PathLike[str]) -> None:
    png = io.BytesIO()
    with warnings.catch_warnings():
        # A letter that the font lacks is drawn as a box; no reason to stop a run.
        warnings.filterwarnings("ignore", "Glyph .* missing from font", UserWarning)
        figure.savefig(png, format="png")
    files.write_whole(Path(path), png.getvalue())
