"""RigidFormer's evaluation: the truth is known, baselines are what they say, and scenes that end early end there."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_rigid import TINY, made, started

from functional_sl import tree
from functional_sl.recipe import Recipe
from functional_sl.recipes import rigid_evaluation, rigidformer
from functional_sl.recipes.rigid_evaluation import Course, Run
from functional_sl.sources.rigid_bodies import FRAME_DT

COURSE = Course(rigidformer.architecture(TINY), TINY.steps, TINY.horizons)
FAR = torch.tensor([0.0, 0.0, 5.0])


@pytest.fixture
def task() -> Recipe:
    return rigidformer.assemble(TINY, made(6), made(3, 1), "none")


def test_evaluation_knows_the_truth_and_both_baselines(task: Recipe, monkeypatch: pytest.MonkeyPatch) -> None:
    """The scenes move almost evenly, far from the ground: what falls is n (n + 1) / 2 times 9.81 dt^2 too low."""
    high = made(3, 1)
    task = rigidformer.assemble(TINY, made(6), high._replace(positions=high.positions + FAR), "none")
    found = task.evaluate(started(task), ())
    kinds = {f"{unit}_{h}" for unit in ("position_m", "orientation_deg") for h in (5, 10)}
    expected = {f"{own}_{x}" for own in ("hold", "land") for x in kinds} | {"gain_5", "gain_10"}
    assert set(found) == expected | {f"{x}_step{step}" for x in kinds for step in (1, 3)}
    assert all(math.isfinite(x) for x in found.values())
    assert found["land_position_m_5"] == pytest.approx(9.81 * 15 * FRAME_DT**2, rel=0.01)
    gain = min(found["hold_position_m_5"], found["land_position_m_5"])
    gain = gain / max(found["position_m_5_step1"], found["position_m_5_step3"])
    assert found["gain_5"] == pytest.approx(gain)
    assert task.score({**found, "loss": 1.0}) == found["gain_5"]

    def perfect(*arguments: Any) -> Run:
        run = real(*arguments)
        return run._replace(predicted=run.true)

    real = rigid_evaluation.free_run
    monkeypatch.setattr(rigid_evaluation, "free_run", perfect)
    found = task.evaluate(started(task), ())
    assert found["position_m_10_step3"] == 0
    assert found["orientation_deg_10_step3"] < 0.1


def test_a_step_that_does_not_divide_a_horizon_is_judged_behind_it(task: Recipe) -> None:
    run = rigid_evaluation.free_run(COURSE, made(3), started(task), 3)
    assert run.frames == [3, 6, 9, 12]
    assert [x.position.shape for x in (run.predicted, run.true)] == [(3, 4, 3, 3)] * 2
    assert torch.equal(run.true.position[:, 1][made(3).objects], made(3).positions[:, 3 + 6][made(3).objects])


def test_the_order_of_the_steps_changes_no_figure(task: Recipe) -> None:
    params = started(task)
    found, other = (
        rigid_evaluation.evaluate(COURSE._replace(steps=steps), made(3), params, ()) for steps in ((1, 3), (3, 1))
    )
    assert found == other
    assert (
        found["hold_position_m_10"]
        == rigid_evaluation.evaluate(COURSE._replace(steps=(3,)), made(3), params, ())["hold_position_m_10"]
    )


def test_what_stands_behind_the_end_of_a_scene_counts_nowhere(task: Recipe) -> None:
    """The start is frame 3, so that of lengths 8 and 14 the horizons 5 and 10 are just not reached."""
    params, scenes = started(task), made(3)._replace(lengths=torch.tensor([24, 14, 8]))
    late = torch.arange(24) >= scenes.lengths[:, None]
    lost = scenes._replace(positions=torch.where(late[..., None, None], math.nan, scenes.positions))
    found = rigid_evaluation.evaluate(COURSE, lost, params, ())
    assert all(math.isfinite(x) for x in found.values())
    for horizon, kept in ((5, 2), (10, 2), (12, 1)):
        some = tree.map(lambda x, kept=kept: x[:kept], scenes)._replace(lengths=torch.full((kept,), 24))
        course = COURSE._replace(horizons=(horizon,))
        cut, whole = (rigid_evaluation.evaluate(course, x, params, ()) for x in (lost, some))
        name = f"position_m_{horizon}_step1"
        assert cut[name] == pytest.approx(whole[name], rel=1e-5)  # products of other batches round otherwise
    curves = rigid_evaluation.curves(COURSE, lost, params)
    assert all(math.isfinite(y) for series in curves["position"] for y in series.mean)


def test_pictures_are_drawn(task: Recipe, tmp_path: Path) -> None:
    task.draw(started(task), (), str(tmp_path))
    drawn_ = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    assert sorted(drawn_) == ["error_orientation.png", "error_position.png"]
    assert all(data.startswith(b"\x89PNG") for data in drawn_.values())
