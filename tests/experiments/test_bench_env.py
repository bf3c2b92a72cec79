"""The environments' benchmark runs and reports."""

from __future__ import annotations

import json

import pytest

pytest.importorskip("mujoco")

from experiments import bench_env


def test_a_small_measurement_can_be_written_as_json() -> None:
    options = bench_env.Options(task="go2_joystick_flat", num_envs=2, threads=1, steps=2, repeats=2)
    found = json.loads(json.dumps(bench_env.measure(options)))
    assert found["env_steps_per_s"]["best"] >= found["env_steps_per_s"]["median"] > 0
    assert found["metrics"]["diverged"] == 0.0
