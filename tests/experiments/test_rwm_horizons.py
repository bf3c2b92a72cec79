"""Curves, attitudes and the film of two forecasts that are made up."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

pytest.importorskip("mujoco")

from experiments import rwm_horizons
from functional_sl import keys
from functional_sl.models.normalizer import Normalizer
from functional_sl.models.rwm import Architecture, Scales
from functional_sl.recipes import rwm, rwm_forecasts
from functional_sl.recipes.rwm_forecasts import HOLD, MEAN, MODEL, Judged, Run
from functional_sl.sim import rotation
from functional_sl.sources import quadruped

STEPS = 9


def made_up(gap: float) -> rwm_horizons.Forecasts:
    sim = quadruped.make_simulator(1)
    schema = quadruped.schema_of(sim.model, "test", {})
    standing = torch.cat([torch.zeros(8), -torch.ones(1), sim.model.default_joint_pos, torch.zeros(24)])
    scales = Scales(Normalizer(standing, torch.ones(45)), Normalizer(torch.zeros(12), torch.ones(12)))
    task = rwm.Task(rwm.RWM(horizons=(1, STEPS)), Architecture(45, 12, 8), scales, schema)
    true = 0.01 * keys.normal(keys.key(0), (2, STEPS, 45))
    run = Run(true + gap, torch.ones_like(true), torch.zeros(2, STEPS), torch.zeros(2, 1, 45), true)
    own = {MODEL: run.mean, HOLD: run.last.expand_as(true), MEAN: torch.zeros_like(true)}
    flags = torch.zeros(2, STEPS, dtype=torch.bool)
    errors = {name: rwm_forecasts.errors(x, true) for name, x in own.items()}
    return rwm_horizons.Forecasts(
        task, Judged(errors, torch.ones(2, STEPS), run.fall, flags, ~flags, torch.arange(2)), run
    )


def test_attitude_and_joints_come_back_from_a_state() -> None:
    """Gravity in the frame of a turned base, for any heading."""
    roll, pitch = torch.tensor([0.3, -1.2, 3.0]), torch.tensor([-0.4, 1.0, 0.2])
    turn = rotation.from_euler(roll, pitch, torch.tensor([2.0, -1.0, 0.5]))
    state = torch.zeros(3, 45)
    state[:, 6:9] = rotation.rotate_inverse(turn, torch.tensor([0.0, 0.0, -1.0]).expand(3, 3))
    state[:, 9:21] = torch.arange(12.0)
    qpos = rwm_horizons.poses(state, torch.tensor([0.0, 0.0, 0.3]))
    expected = rotation.from_euler(roll, pitch, torch.zeros(3))
    torch.testing.assert_close(rotation.matrix(qpos[:, 3:7]), rotation.matrix(expected), rtol=0, atol=1e-5)
    assert torch.equal(qpos[:, 7:], state[:, 9:21])


def test_pictures_film_and_intervals_are_written(tmp_path: Path) -> None:
    """Every episode has the same two errors, so every resample gives their difference."""
    found = {"near": made_up(0.01), "far": made_up(0.1)}
    table = rwm_horizons.compare(found)
    assert list(table) == ["far", "training mean"]
    assert table["far"][STEPS] == pytest.approx([0.09, 0.09], abs=1e-4)
    rwm_horizons.draw(tmp_path, found)
    rwm_horizons.film(tmp_path / "forecast.gif", found, 1)
    assert {path.name for path in tmp_path.iterdir()} == {"nrmse.png", "l1.png", "forecast.gif"}
    assert (tmp_path / "forecast.gif").read_bytes().startswith(b"GIF89a")
    other = found["far"].run
    with pytest.raises(ValueError, match="the runs held out other episodes"):
        rwm_horizons.compare({**found, "far": found["far"]._replace(run=other._replace(true=other.true + 1))})
