"""The benchmark compares like with like: both learners compute the same updates."""

from __future__ import annotations

import json

import pytest
import torch

from experiments import bench_learner, learner_agreement
from functional_sac.config import SACConfig
from functional_sac.envs.env import EnvSpec

SPECS = {"symmetric": EnvSpec("symmetric", 3, 0, 1, 100, 0.1), "asymmetric": EnvSpec("asymmetric", 4, 7, 2, 100, 0.1)}


@pytest.fixture(autouse=True)
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def config(**changes: object) -> SACConfig:
    return SACConfig(**{"batch_size": 32, "actor_width": 8, "critic_width": 16, "lr_decay_updates": 50} | changes)


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
@pytest.mark.parametrize("changes", [{}, {"num_blocks": 1, "n_step": 3, "lr_init": 1e-5, "lr_warmup_updates": 2}])
def test_both_learners_agree_to_the_rounding_of_float64(spec, changes):
    gaps = learner_agreement.disagreement(config(**changes), spec)
    # 2**-52 is 2.2e-16; Adam divides by sqrt(nu) + 1e-8, so a first step may enlarge rounding 1e4-fold (lr / eps).
    assert max(gaps.values()) < 1e-12, gaps


def test_in_float32_the_metrics_agree_to_its_rounding():
    gaps = learner_agreement.disagreement(config(), SPECS["symmetric"], dtype=torch.float32)
    assert 0 < gaps["metric"] < 1e-5, gaps


def test_a_difference_in_the_update_shows(monkeypatch):
    monkeypatch.setattr(learner_agreement.BatchNorm, "momentum", 0.02)
    assert learner_agreement.disagreement(config(), SPECS["symmetric"])["critic"] > 1e-4


def test_a_measurement_is_complete_and_json(monkeypatch):
    monkeypatch.setitem(bench_learner.SIZES, "small", (8, 8, 8, 1, 3, 0, 1))
    monkeypatch.setattr(bench_learner, "ROWS", 64)
    found = json.loads(json.dumps(bench_learner.measure(bench_learner.Settings(repeats=2, seconds=0.001))))
    assert set(found["ms_per_update"]) == {"functional", "modules"}
    for t in found["ms_per_update"].values():
        assert 0 < t["min"] <= t["median"] <= t["max"]
    assert found["ratio"] > 0
