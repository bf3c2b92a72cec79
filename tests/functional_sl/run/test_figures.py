from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
from PIL import Image

from functional_sl.run import figures
from functional_sl.run.figures import Series, band

BLUE = (0, 114, 178)  # the first colour of figures.COLORS
LABELS = {"title": "T", "xlabel": "steps", "ylabel": "return"}


def pixels(path) -> np.ndarray:
    with Image.open(path) as image:
        assert image.format == "PNG"
        return np.array(image.convert("RGB")).astype(int)


def near(image: np.ndarray, color) -> np.ndarray:
    return np.abs(image - np.array(color)).max(axis=-1) < 12


def test_band_of_equal_steps():
    curves = [([0, 1, 2], [0.0, 2.0, 4.0]), ([0, 1, 2], [2.0, 2.0, 10.0])]
    series = band("a", curves)
    assert series.label == "a"
    np.testing.assert_array_equal(series.x, [0, 1, 2])
    np.testing.assert_array_equal(series.mean, [1, 2, 7])
    np.testing.assert_array_equal(series.low, [0, 2, 4])
    np.testing.assert_array_equal(series.high, [2, 2, 10])


def test_band_of_uneven_seeds():
    # The second seed logs at 0 and 4 only, the third ends at 1, the fourth never logged a number.
    curves = [([0, 1, 2, 4], [0, 1, np.nan, 4]), ([0, 4], [0, 8]), ([1], [6]), ([], []), ([3], [np.inf])]
    series = band("a", curves)
    np.testing.assert_array_equal(series.x, [0, 1, 4])
    np.testing.assert_array_equal(series.mean, [0, (1 + 2 + 6) / 3, 6])
    np.testing.assert_array_equal(series.low, [0, 1, 4])
    np.testing.assert_array_equal(series.high, [0, 6, 8])
    assert np.asarray(band("a", []).mean).shape == (0,)


def test_learning_curve_rises_where_the_data_rises(tmp_path):
    path = tmp_path / "ü curve.png"
    x = np.linspace(0, 1e6, 50)
    figures.learning_curve(path, [Series("a", x, x, x - 1e5, x + 1e5)], target=5e5, **LABELS)
    image = pixels(path)
    assert image.shape == (640, 1024, 3)  # 6.4 x 4 inches at 160 dots
    rows, columns = np.nonzero(near(image, BLUE))
    order = np.argsort(columns)
    assert columns.max() - columns.min() > 600
    assert rows[order[:20]].mean() > rows[order[-20:]].mean() + 300  # row 0 is at the top
    assert near(image, [209, 228, 241]).sum() > 5000  # the band: 18 % blue on white
    assert [p.name for p in tmp_path.iterdir()] == [path.name]


def test_legend_only_for_several_curves(tmp_path):
    x = np.arange(30)
    figures.learning_curve(tmp_path / "1.png", [Series("name", x, x)], **LABELS)
    figures.learning_curve(tmp_path / "2.png", [Series("name", x, x), Series("other", x, x)], **LABELS)
    one, two = pixels(tmp_path / "1.png"), pixels(tmp_path / "2.png")
    # The legend lies in the upper left, where a rising curve leaves room.
    assert near(one, (0, 0, 0))[60:160, 140:400].sum() == 0
    assert near(two, (0, 0, 0))[60:160, 140:400].sum() > 50


@pytest.mark.parametrize(
    "series",
    [
        [],
        [Series("a", [], [])],
        [Series("a", [5], [1.0]), Series("b", [5], [2.0], [1.0], [3.0])],
        [Series("a", [0, 1, 2], [np.nan] * 3, [np.nan] * 3, [np.nan] * 3), Series("b", [0, 1], [1, 2])],
        [Series("a", [0, 1, 2, 3], [1, np.inf, np.nan, -1e30])],
        [Series("$5 and _x", [0, 1], [2, 2]), Series("走", [0, 1], [2, 2])],
    ],
)
def test_sparse_data_draws_without_warnings(series, tmp_path, recwarn):
    figures.learning_curve(tmp_path / "a.png", series, title="$ and $ " * 20, xlabel="", ylabel="y", target=-3.0)
    assert len(recwarn) == 0
    assert near(pixels(tmp_path / "a.png"), (255, 255, 255)).mean() > 0.5


def test_metrics_grid(tmp_path, recwarn):
    records = [{"step": i, "loss": 1 / (i + 1), "return": None if i % 2 else i, "bad": float("nan")} for i in range(30)]
    path = tmp_path / "grid.png"
    figures.metrics_grid(path, [*records, {"note": "no step"}], ["loss", "return", "bad", "absent"])
    image = pixels(path)
    assert image.shape == (736, 1056, 3)  # two rows of 2.3, two columns of 3.3 inches
    # Wide axis labels shift the borders of the panels by some dots.
    panels = [image[row : row + 368, column + 40 : column + 488] for row in (0, 368) for column in (0, 528)]
    assert [bool(near(p, BLUE).any()) for p in panels] == [True, True, False, False]
    assert len(recwarn) == 0
    with pytest.raises(ValueError, match="at least one metric"):
        figures.metrics_grid(path, records, [])


def test_a_label_has_one_colour_in_all_panels(tmp_path, recwarn):
    x, orange = np.arange(30), (213, 94, 0)
    a, b = Series("a", x, x), Series("b", x, x[::-1])
    figures.panels(tmp_path / "two.png", {"first": [a, b], "second": [b], "third": []}, xlabel="steps")
    image = pixels(tmp_path / "two.png")
    assert image.shape == (408, 1584, 3)  # one row of 2.3 inches, one of 0.25 for the legend
    for color, seen in ((BLUE, [True, False, False]), (orange, [True, True, False])):
        assert [bool(near(image[:340, i * 528 + 40 : i * 528 + 488], color).any()) for i in range(3)] == seen
        assert near(image[365:], color).any()  # the legend
    figures.panels(tmp_path / "one.png", {"first": [a], "second": [b]}, xlabel="steps")
    alone = pixels(tmp_path / "one.png")
    assert alone.shape == (368, 1056, 3)
    assert not near(alone, orange).any()
    assert len(recwarn) == 0


def test_a_power_is_a_straight_line_on_logarithmic_axes(tmp_path, recwarn):
    x = np.arange(1, 65)
    figures.panels(tmp_path / "cubes.png", {"cubes": [Series("cubes", x, x**3)]}, xlabel="x", logarithmic=True)
    rows, columns = np.nonzero(near(pixels(tmp_path / "cubes.png"), BLUE))
    ends = [rows[columns == columns[pick]].mean() for pick in (columns.argmin(), columns.argmax())]
    centre = np.abs(columns - (columns.min() + columns.max()) / 2) < 2
    assert rows[centre].mean() == pytest.approx(sum(ends) / 2, abs=3)
    assert len(recwarn) == 0


@pytest.mark.parametrize(
    ("top", "value", "text"),
    [
        (1e6, 5e5, "0.5M"),
        (2e5, 5e3, "5k"),
        (9000, 5000, "5,000"),
        (1, 0.25, "0.25"),
        (9000, -1250, "−1,250"),
        (1e6, 0, "0"),
    ],
)
def test_ticks_of_one_axis_share_a_unit(top, value, text):
    axis = figures._figure(1, 1).add_subplot().yaxis
    axis.set_view_interval(0, top, ignore=True)
    figures._format_ticks(axis)
    assert axis.get_major_formatter()(value, 0) == text


def test_a_failure_leaves_the_old_file_alone(tmp_path):
    path = tmp_path / "a.png"
    path.write_bytes(b"old")
    with pytest.raises(ValueError, match="shape"):
        figures.learning_curve(path, [Series("a", [0, 1, 2], [0, 1])], **LABELS)
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def test_drawing_changes_no_global_state(tmp_path):
    code = (
        "import sys, functional_sl.run.figures as f; assert 'matplotlib' not in sys.modules;"
        "import matplotlib; names = set(matplotlib.rcParams) - {'backend'};"  # reading this one imports pyplot
        "before = {n: matplotlib.rcParams[n] for n in names}; labels = dict(title='t', xlabel='x', ylabel='y');"
        f"f.learning_curve({str(tmp_path / 'a.png')!r}, [f.Series('a', [0, 1], [0, 1])], **labels);"
        "assert {n: matplotlib.rcParams[n] for n in names} == before; assert 'matplotlib.pyplot' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], stderr=subprocess.PIPE, text=True)
    assert (done.returncode, done.stderr) == (0, "")
