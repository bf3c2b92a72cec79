"""Points of the scaling benchmark: what they change, what is written and drawn."""

from __future__ import annotations

import csv
import sys

import pytest

from experiments import bench_learner, bench_scaling
from functional_sl.run import cli


@pytest.mark.parametrize(
    ("points", "expected"),
    [
        ("", []),
        ("batch=64,seeds=2", [("batch", 64), ("seeds", 2)]),
        ("width", [("width", w) for w in (128, 256, 512, 1024)]),
    ],
)
def test_points_are_families_or_single_values(points, expected):
    assert bench_scaling.Settings(points=points).chosen == expected


@pytest.mark.parametrize("points", ["depth", "batch=many", "batch=-1"])
def test_an_unknown_point_is_refused(points):
    with pytest.raises(cli.UsageError, match=points):
        bench_scaling.Settings(points=points).chosen


def test_a_point_changes_one_number(monkeypatch):
    monkeypatch.setattr(bench_learner, "ROWS", 2048)
    settings = bench_scaling.Settings()
    base = bench_scaling.case(settings, "updates", 6, "float32").config
    assert (base.batch_size, base.critic_width, base.actor_width, base.updates_per_step) == (2048, 256, 128, 6)
    wide = bench_scaling.case(settings, "width", 512, "float32").config
    assert (wide.critic_width, wide.actor_width, wide.batch_size) == (512, 256, 2048)
    assert bench_scaling.case(settings, "batch", 512, "float32").config.batch_size == 512
    seeds = bench_scaling.case(settings, "seeds", 16, "float32")
    assert (seeds.num_seeds, seeds.config.batch_size, seeds.config.updates_per_step) == (16, 128, 2)


def test_points_are_measured_appended_and_drawn(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(bench_learner.SIZES, "small", (8, 8, 8, 1, 3, 0, 1))
    monkeypatch.setattr(bench_learner, "ROWS", 32)
    table, picture = tmp_path / "scaling.csv", tmp_path / "scaling.png"
    flags = ["--size=small", "--compute_dtype=float32", "--cycles=1", f"--csv={table}", f"--plot={picture}"]
    for points in ("batch=4,seeds=1", "seeds=2"):
        monkeypatch.setattr(sys, "argv", ["bench_scaling", *flags, f"--points={points}"])
        bench_scaling.main()
    with table.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [(row["family"], row["value"]) for row in rows] == [("batch", "4"), ("seeds", "1"), ("seeds", "2")]
    for row, updates in zip(rows, (6, 2, 4), strict=True):
        # Rounded to 0.1 updates a second and 0.0001 ms.
        assert float(row["updates_per_s"]) == pytest.approx(updates / float(row["ms_per_cycle"]) * 1e3, rel=0.01)
    assert picture.read_bytes()[1:4] == b"PNG"
    assert "seeds      2" in capsys.readouterr().out


def test_rates_of_processes_add_up(tmp_path):
    settings = bench_scaling.Settings(cycles=2, csv=str(tmp_path / "scaling.csv"))
    row = bench_scaling.measure(settings, "processes", 2, "float32")
    assert row["updates_per_s"] == pytest.approx(2 * 2 / row["ms_per_cycle"] * 1e3, rel=0.01)
