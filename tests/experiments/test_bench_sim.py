"""The simulators' benchmark runs and reports."""

from __future__ import annotations

import json

import pytest

pytest.importorskip("mujoco")

from experiments import bench_sim


@pytest.mark.parametrize("reset", [True, False])
def test_a_small_measurement_can_be_written_as_json(reset: bool) -> None:
    settings = bench_sim.Settings(robot="go2", num_envs=2, threads=1, steps=2, repeats=2, reset=reset)
    found = json.loads(json.dumps(bench_sim.measure(settings)))
    assert found["control_steps_per_s"]["best"] >= found["control_steps_per_s"]["median"] > 0
    assert found["overflowed"] == {"contacts": 0, "constraints": 0}
