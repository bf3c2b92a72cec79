"""What a run says of itself, with numbers that a reader can redo."""

from __future__ import annotations

import errno
import itertools
import math
import os

import numpy as np
import pytest
import torch
from PIL import Image

from functional_sac import reporting
from functional_sac.envs import classic
from functional_sac.evaluation import Result
from functional_sac.iteration import Episodes
from functional_sac.reporting import Mark
from functional_sl.run import figures, runlog
from functional_sl.run.runlog import RunError


def result(returns, lengths):
    return Result(torch.tensor(returns), torch.tensor(lengths), torch.zeros(len(returns), dtype=torch.bool))


def totals(count, returns, lengths):
    return Episodes(torch.tensor(count), torch.tensor(returns, dtype=torch.float64), torch.tensor(lengths))


def test_finished_episodes():
    assert reporting.episodes(totals(4, -10.0, 30)) == {
        "train_episodes": 4, "train_return_mean": -2.5, "train_length_mean": 7.5,
    }  # fmt: skip
    # Two seeds: 1 + 3 episodes.
    assert reporting.episodes(totals([1, 3], [2.0, 6.0], [10, 20]))["train_return_mean"] == 2.0


def test_none_finished_is_no_zero():
    assert reporting.episodes(totals(0, 0.0, 0)) == {
        "train_episodes": 0, "train_return_mean": None, "train_length_mean": None,
    }  # fmt: skip


def test_evaluation_of_one_and_of_several_seeds():
    one = reporting.evaluated([result([1.0, 3.0], [4, 6])])
    assert one == {"eval_return_mean": 2.0, "eval_return_std": 1.0, "eval_length_mean": 5.0}
    two = reporting.evaluated([result([1.0, 3.0], [4, 6]), result([5.0, 7.0], [5, 5])])
    # Around the mean 4: 9, 1, 1, 9.
    assert two == {
        "eval_return_mean": 4.0, "eval_return_std": math.sqrt(5), "eval_length_mean": 5.0,
        "eval_return_seeds": [2.0, 6.0],
    }  # fmt: skip


def test_an_episode_without_an_end_takes_no_part():
    assert reporting.evaluated([result([8.0, 0.0], [4, 0])]) == {
        "eval_return_mean": 8.0, "eval_return_std": 0.0, "eval_length_mean": 4.0,
    }  # fmt: skip
    nothing = reporting.evaluated([result([0.0], [0]), result([2.0], [3])])
    assert (nothing["eval_return_mean"], nothing["eval_return_seeds"]) == (2.0, [None, 2.0])
    assert set(reporting.evaluated([result([0.0], [0])]).values()) == {None}


def test_opposite_infinities_are_no_error():
    values = reporting.evaluated([result([math.inf], [1]), result([-math.inf], [1])])
    assert math.isnan(values["eval_return_mean"])


def test_rates_are_over_all_seeds():
    begin, end = Mark(10.0, 100, 7), Mark(14.0, 300, 8)
    assert reporting.rates(begin, end, 1) == {"env_steps_per_s": 50.0, "updates_per_s": 0.25}
    assert reporting.rates(begin, end, 3) == {"env_steps_per_s": 150.0, "updates_per_s": 0.75}
    assert reporting.rates(begin, begin, 1) == {"env_steps_per_s": 0.0, "updates_per_s": 0.0}


@pytest.fixture
def run_dir(tmp_path):
    return tmp_path / "run"


def write(run_dir, *records):
    with runlog.create({}, ["x"], run_dir=run_dir) as log:
        for step, record in enumerate(records, start=1):
            log.write(step, record)


def drawn(monkeypatch, run_dir):
    """Returns the one series that the curve shows."""
    seen = []
    monkeypatch.setattr(figures, "learning_curve", lambda path, series, **_: seen.extend(series))
    reporting.draw_curve(run_dir, classic.make("pendulum").spec)
    (series,) = seen
    return [np.asarray(values, float).tolist() for values in series[1:]]


def test_the_curve_shows_mean_and_deviation_of_the_evaluations(monkeypatch, run_dir):
    point = {"eval_return_mean": 2.0, "eval_return_std": 0.5}
    bad = {"eval_return_mean": math.nan, "eval_return_std": math.nan}
    write(run_dir, {"loss": 1.0}, point, bad, {"eval_return_mean": None}, {**point, "eval_return_mean": 4.0})
    assert drawn(monkeypatch, run_dir) == [[2, 5], [2, 4], [1.5, 3.5], [2.5, 4.5]]


def test_the_curve_of_seeds_is_a_band(monkeypatch, run_dir):
    def point(*seeds):
        return {"eval_return_mean": 0.0, "eval_return_std": 0.0, "eval_return_seeds": list(seeds)}

    write(run_dir, point(1.0, 2.0, 6.0), point(3.0, math.inf, 5.0))
    # A seed without a finite value leaves the mean to the others.
    assert drawn(monkeypatch, run_dir) == [[1, 2], [3, 4], [1, 3], [6, 5]]


@pytest.mark.parametrize("records", [[], [{"eval_return_mean": 1.0, "eval_return_std": 0.0}]])
def test_an_empty_curve_and_one_point_are_pictures(run_dir, records):
    write(run_dir, *records)
    reporting.draw_curve(run_dir, classic.make("reacher").spec)
    with Image.open(run_dir / "learning_curve.png") as picture:
        assert picture.format == "PNG"


def test_the_film_plays_an_episode_in_real_time(tmp_path, monkeypatch):
    shade = itertools.count()
    env = classic.make("pendulum")._replace(render=lambda state, i: np.full((2, 2, 3), next(shade), np.uint8))
    monkeypatch.setattr(reporting.acting, "deterministic", lambda params, stats, x, dtype: torch.zeros(len(x), 1))
    reporting.film(tmp_path / "film.gif", env, (None, None), torch.tensor([0, 0]), torch.float32)
    with Image.open(tmp_path / "film.gif") as film:
        # 200 steps of 50 ms.
        assert (film.n_frames, film.info["duration"]) == (200, 50)


def test_a_full_disk_is_named(monkeypatch, run_dir):
    write(run_dir)

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "write", full)
    with pytest.raises(RunError, match=r"learning_curve.png: cannot write .*No space left on device; free space there"):
        reporting.draw_curve(run_dir, classic.make("pendulum").spec)
    assert sorted(path.name for path in run_dir.iterdir()) == [".lock", "metrics.jsonl", "run.json"]


def test_ranks_are_averaged_where_they_differ():
    ranks = [{"loss": 1.0, "skipped": 3}, {"loss": 2.0, "skipped": 3}, {"loss": 6.0, "skipped": 3}]
    assert reporting.over_ranks(ranks) == {"loss": 3.0, "skipped": 3}
    assert math.isnan(reporting.over_ranks([{"loss": 1.0}, {"loss": math.nan}])["loss"])
