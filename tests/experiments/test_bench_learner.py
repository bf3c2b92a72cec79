"""The benchmark compares like with like, loses no side to another's fault, and counts its floors right."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import threading
import time

import pytest
import torch

from experiments import bench_learner, learner_agreement, learner_floors, learner_sides, unilab_learner
from experiments.learner_floors import Network, Peaks
from experiments.module_learner import ModuleLearner
from functional_sac.config import SACConfig
from functional_sac.envs.env import EnvSpec
from functional_sl.run import cli

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
@pytest.mark.parametrize("fused", [False, True])
def test_both_learners_agree_to_the_rounding_of_float64(spec, changes, fused):
    gaps = learner_agreement.disagreement(config(**changes), spec, fused=fused)
    # 2**-52 is 2.2e-16; Adam divides by sqrt(nu) + 1e-8, so a first step may enlarge rounding 1e4-fold (lr / eps).
    assert max(gaps.values()) < 1e-12, gaps


def test_in_float32_the_metrics_agree_to_its_rounding():
    gaps = learner_agreement.disagreement(config(), SPECS["symmetric"], dtype=torch.float32)
    assert 0 < gaps["metric"] < 1e-5, gaps


def test_a_difference_in_the_update_shows(monkeypatch):
    monkeypatch.setattr(learner_agreement.BatchNorm, "momentum", 0.02)
    assert learner_agreement.disagreement(config(), SPECS["symmetric"])["critic"] > 1e-4


@pytest.fixture
def tiny(monkeypatch):
    monkeypatch.setitem(bench_learner.SIZES, "small", (8, 8, 8, 1, 3, 0, 1))
    monkeypatch.setattr(bench_learner, "ROWS", 64)
    return bench_learner.Settings(repeats=2, seconds=0.001)


def test_a_measurement_is_complete_and_json(tiny, capsys):
    found = json.loads(json.dumps(bench_learner.measure(tiny)))
    assert [row["side"] for row in found["ms_per_cycle"]] == ["ours", "modules"]
    for row in found["ms_per_cycle"]:
        assert 0 < row["min"] <= row["median"] <= row["max"]
    assert found["ms_per_cycle"][0]["ratio"] == 1.0
    assert found["floors"]["float32"]["flop"] > 0
    bench_learner.report(found)
    assert "modules" in capsys.readouterr().out


def test_a_side_that_is_missing_or_fails_is_named_and_the_others_go_on(tiny, monkeypatch, capsys):
    def fail(case):
        raise RuntimeError("out of luck")

    monkeypatch.setitem(learner_sides.SIDES, "jax", fail)
    monkeypatch.setattr(unilab_learner, "installed", lambda: False)
    settings = dataclasses.replace(tiny, against="jax,unilab,modules")
    assert settings.names == ["ours", "jax", "unilab-default", "modules", "unilab-max-autotune"]
    assert [row["side"] for row in bench_learner.measure(settings)["ms_per_cycle"]] == ["ours", "modules"]
    said = capsys.readouterr().out
    assert "jax float32: failed, RuntimeError: out of luck" in said
    assert "unilab-default float32: left out, not installed: pip install unilab-rl" in said


def test_what_is_not_ready_in_time_is_left_out(tiny, monkeypatch, capsys):
    def stuck(case):
        while True:
            with contextlib.suppress(Exception):  # as compilers do
                threading.Event().wait()

    monkeypatch.setitem(learner_sides.SIDES, "jax", stuck)
    sizes, spec = bench_learner.configure(tiny)
    case = learner_sides.Case(sizes, spec, learner_agreement.transitions(spec, 64), "float32", False)
    settings = dataclasses.replace(tiny, limit_s=0.1)
    assert bench_learner.attempt("jax", case, settings, time.monotonic() + 0.1) == []
    assert bench_learner.attempt("modules", case, settings, time.monotonic()) == []
    said = capsys.readouterr().out
    assert "jax float32: left out, not ready within limit_s=0.1" in said
    assert "modules float32: left out" in said
    assert len(bench_learner.attempt("ours", case, settings)) == 1


@pytest.mark.parametrize("wrong", [{"against": "torch"}, {"compute_dtype": "float8"}])
def test_an_unknown_side_or_type_is_refused(wrong):
    settings = bench_learner.Settings(**wrong)
    with pytest.raises(cli.UsageError, match=next(iter(wrong.values()))):
        settings.names, settings.precisions


def jax_side(precision: str) -> learner_sides.Side:
    sizes, spec = bench_learner.configure(bench_learner.Settings(updates=1))
    case = learner_sides.Case(sizes, spec, learner_agreement.transitions(spec, 64), precision, False)
    return learner_sides.build("jax", case)


def test_the_jax_side_hands_its_state_from_cycle_to_cycle(tiny, monkeypatch):
    from experiments.jax_learner import JaxLearner

    def updates(self, state, rows, noise, divisor):
        shapes.append((rows.shape, noise.shape, rows.dtype.name))
        part = state.temperature
        return state._replace(temperature=part._replace(params=part.params + rows.sum() / divisor)), {}

    # The updates themselves, which take a while to compile, are compared in test_jax_learner.py.
    shapes: list[tuple] = []
    monkeypatch.setattr(JaxLearner, "updates", updates)
    side = jax_side("float32")
    side.cycle()
    side.wait()
    assert shapes == [((1, 8, 10), (1, 24, 1), "float32")]  # traced once
    assert "on cpu" in side.how


@pytest.mark.slow
@pytest.mark.parametrize("precision", learner_sides.PRECISIONS)
def test_the_jax_side_makes_whole_cycles(tiny, precision):
    """The side's first cycle compiles it, this one is its second; each updates everything once."""
    side = jax_side(precision)
    state, metrics = side.cycle()
    side.wait()
    parts = (state.actor, state.critic, state.temperature)
    assert [(int(part.count), int(part.skipped)) for part in parts] == [(2, 0)] * 3
    assert {"actor_loss", "critic_loss", "temperature_loss"} <= metrics.keys()
    assert all(math.isfinite(value) for value in metrics.values())


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_unilabs_learner_has_our_sizes_and_learns(spec):
    pytest.importorskip("uni_rl.algos.flash_sac.learner", reason=unilab_learner.INSTALL)
    data, sizes = learner_agreement.transitions(spec, 64), config(updates_per_step=2)
    theirs = unilab_learner.UniLabLearner(sizes, spec, data)
    module = ModuleLearner(sizes, spec, data, torch.ones(()), torch.ones(()))
    for name in ("actor", "critic"):
        counts = [sum(p.numel() for p in getattr(x, name).parameters()) for x in (theirs.learner, module)]
        assert counts[0] == counts[1], name
    # The columns that it takes hold what their names say.
    before = theirs.learner.critic.predictor.logit_w.weight.detach().clone()
    theirs.cycle()
    rows = (theirs._batch["critic"][:, None] == data.observation).all(-1).float().argmax(1)
    assert torch.equal(theirs._batch["obs"], data.observation[rows, : spec.actor_dim])
    assert torch.equal(theirs._batch["actions"], data.action[rows])
    assert torch.equal(theirs._batch["rewards"], data.reward[rows])
    assert not torch.equal(theirs.learner.critic.predictor.logit_w.weight, before)


def test_a_network_counts_its_own_parameters_and_products():
    spec, sizes = SPECS["asymmetric"], config(num_blocks=2, bins=11)
    module = ModuleLearner(sizes, spec, learner_agreement.transitions(spec, 4), torch.ones(()), torch.ones(()))
    critic = Network(7 + 2, 16, 2, 11, members=2)
    assert critic.parameters() == sum(p.numel() for p in module.critic.parameters())
    assert Network(4, 8, 2, 4).parameters() == sum(p.numel() for p in module.actor.parameters())
    # A row of one critic: 9 x 16 in, two blocks of 16 x 64 and back, 16 x 11 out.
    assert (critic.trunk(3), critic.head(3)) == (2 * 3 * (9 * 16 + 2 * 2 * 16 * 64), 2 * 3 * 16 * 11)


def test_the_g1_cycle_has_the_known_floors():
    sizes, spec = bench_learner.configure(bench_learner.Settings(size="g1"))
    floors = learner_floors.floors(sizes, spec)
    assert floors.flop == pytest.approx(533e9, rel=0.01)
    halved = learner_floors.floors(dataclasses.replace(sizes, compute_dtype="bfloat16"), spec)
    assert halved.flop == floors.flop
    assert 0.5 < halved.bytes / floors.bytes < 0.6  # activations halve, parameters and moments do not
    times = floors.milliseconds(Peaks(4.8e12, 989e12, 67e12, 494e12), "float32")
    assert times["flop"] == pytest.approx(7.95, rel=0.01)
    assert times["bytes"] == pytest.approx(floors.bytes / 4.8e9)
