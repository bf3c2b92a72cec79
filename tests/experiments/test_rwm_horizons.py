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
from functional_sl.recipes import rwm
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
    return rwm_horizons.Forecasts(task, true + gap, torch.zeros_like(true), true)


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


def test_pictures_and_film_are_written(tmp_path: Path) -> None:
    found = {"near": made_up(0.01), "far": made_up(0.1)}
    errors = rwm_horizons.curves(found)
    assert list(errors) == ["near", "far", "hold last"]
    figures = {label: rwm.figures_of(x, (STEPS,))[f"nrmse_{STEPS}"] for label, x in errors.items()}
    assert figures["near"] == pytest.approx(0.01, rel=1e-3)
    assert figures["far"] == pytest.approx(0.1, rel=1e-3)
    rwm_horizons.draw(tmp_path, errors, 0.02)
    rwm_horizons.film(tmp_path / "forecast.gif", found, 1)
    assert {path.name for path in tmp_path.iterdir()} == {"nrmse.png", "l1.png", "forecast.gif"}
    assert (tmp_path / "forecast.gif").read_bytes().startswith(b"GIF89a")
