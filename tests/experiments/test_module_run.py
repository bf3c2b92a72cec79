"""A loop around the learner made of modules: an independent check of noise and reward scaling, and runs that repeat."""

from __future__ import annotations

import contextlib
import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch

pytest.importorskip("gymnasium")

from experiments import curves, module_loop, module_run, reproduce_mujoco
from experiments.learner_agreement import transitions
from experiments.module_captured import Graph, Learner
from experiments.module_learner import Batch, ModuleLearner, UnitLinear
from functional_sac import noise, reward_scale
from functional_sac.config import TrainConfig
from functional_sac.envs.env import EnvSpec
from functional_sl.run import cli

CONFIG = TrainConfig(
    task="Pendulum-v1", sim="gym", num_envs=1, batch_size=8, actor_width=8, critic_width=8, num_blocks=1, bins=11,
    updates_per_step=1, replay_capacity=60, learning_starts=12, env_steps=30, lr_decay_updates=20, device="cpu",
    eval_every=20, eval_episodes=1,
)  # fmt: skip
SPEC = EnvSpec("symmetric", 3, 0, 1, 100, 0.1)
DEVICES = [
    "cpu",
    pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")),
]


@pytest.fixture(autouse=True)
def as_before():
    threads, precision = torch.get_num_threads(), torch.get_float32_matmul_precision()
    yield
    torch.set_num_threads(threads)
    torch.set_float32_matmul_precision(precision)


class Told:
    """A generator that says what it is given for every step, whether it is asked or not."""

    def __init__(self, candidates: np.ndarray, uniforms: np.ndarray) -> None:
        self.step, self._candidates, self._uniforms = 0, candidates, uniforms

    def standard_normal(self, width: int) -> np.ndarray:
        return self._candidates[self.step]

    def random(self) -> float:
        return float(self._uniforms[self.step])


def test_noise_is_held_as_the_functional_loop_holds_it() -> None:
    generator = np.random.default_rng(0)
    candidates = generator.standard_normal((300, 2)).astype(np.float32)
    # Cubed, long repeats are not rare.
    uniforms = 1 - generator.random(300, dtype=np.float32) ** 3
    told = Told(candidates, uniforms)
    ours, cdf, theirs = module_loop.ZetaNoise(told, 2, 2.0, 16), noise.zeta_cdf(2.0, 16), noise.init(1, 2)
    lengths = set()
    for step in range(300):
        told.step = step
        drawn = torch.from_numpy(candidates[step])[None], torch.tensor(uniforms[step])
        theirs = noise.redraw(theirs, *drawn, cdf)
        lengths.add(int(theirs.length))
        np.testing.assert_array_equal(ours(), theirs.noise[0].numpy())
    assert {1, 2, 3, 16} <= lengths


def test_returns_run_as_in_the_functional_loop() -> None:
    generator = np.random.default_rng(0)
    rewards, dones = generator.normal(1.0, 2.0, 400).astype(np.float32), generator.random(400) < 0.05
    ours, theirs = module_loop.RunningReturn(0.99), reward_scale.init(1)
    for reward, done in zip(rewards, dones, strict=True):
        ours.add(float(reward), bool(done))
        theirs = reward_scale.update(theirs, torch.tensor([reward]), torch.tensor([done]), 0.99)
        # Theirs keeps the moments in float32, whose rounding, 6e-8 a step, adds up.
        assert (ours.var, ours.largest) == pytest.approx((theirs.var.item(), theirs.max_abs.item()), rel=1e-5)


def test_two_returns_by_hand() -> None:
    """Returns 2 and 3 + 2/2 = 4; the first variance is 1 * 1e-4 / 1, the second (1e-4 * (1 + 1e-4) + 2^2 / 2) / 2."""
    found = module_loop.RunningReturn(0.5)
    found.add(2.0, False)
    assert found.var == pytest.approx(1e-4)
    found.add(3.0, False)
    assert (found.var, found.largest) == (pytest.approx(1.000050005), 4.0)


def test_rates_in_tensors_make_the_same_updates() -> None:
    data, device = transitions(SPEC, 40), torch.device("cpu")
    ours = Learner(CONFIG, SPEC, device)
    theirs = ModuleLearner(CONFIG, SPEC, data, torch.ones(()), torch.ones(()))
    theirs.load_state_dict(ours.state_dict())
    for u in range(4):
        batch, drawn = Batch(*(x[8 * u : 8 * u + 8] for x in data)), torch.randn(24, 1)
        arguments = batch, drawn[:16] if u % 2 == 0 else None, drawn[16:]
        ours.update(*arguments)
        theirs.update(*arguments)
    # After 4 and 2 of 20 updates.
    assert ours.critic_optimizer.param_groups[0]["lr"].item() == pytest.approx(1.5e-4 * (1 + (1 + 0.8090170) / 2))
    assert ours.actor_optimizer.param_groups[0]["lr"].item() == pytest.approx(1.5e-4 * (1 + (1 + 0.9510565) / 2))
    for x, y in zip(ours.parameters(), theirs.parameters(), strict=True):
        # Rates are rounded to float32, hence by 6e-8, of a movement of 1e-3.
        torch.testing.assert_close(x, y, rtol=1e-6, atol=1e-7)


def test_a_fresh_learner_is_orthogonal_and_draws_filled_rows() -> None:
    learner = Learner(CONFIG, SPEC, torch.device("cpu"))
    for layer in learner.critic.modules():
        if isinstance(layer, UnitLinear):
            for weight in layer.weight.detach():
                # Rows of a wide matrix, or columns of a tall one whose rows have then been normalised.
                torch.testing.assert_close(torch.linalg.vector_norm(weight, dim=1), torch.ones(len(weight)))
                if weight.shape[0] <= weight.shape[1]:
                    torch.testing.assert_close(weight @ weight.mT, torch.eye(len(weight)), rtol=0, atol=1e-5)
    assert all(torch.equal(x, y) for x, y in zip(learner.critic.parameters(), learner.target.parameters(), strict=True))
    learner.size.fill_(3)
    assert set(torch.cat([learner.rows() for _ in range(20)]).tolist()) == {0, 1, 2}


@pytest.mark.parametrize("device", DEVICES)
def test_a_graph_counts_its_calls_and_no_others(device: str) -> None:
    total = torch.zeros((), device=device)
    graph = Graph(lambda: total.add_(1) * 10, torch.device(device), [total])
    assert [graph().item() for _ in range(3)] == [10.0, 20.0, 30.0]


def state_after(steps: int) -> tuple[module_loop.Run, list[torch.Tensor]]:
    with contextlib.closing(module_loop.make(CONFIG.task)) as env:
        run = module_loop.Run(CONFIG, env)
        for _ in range(steps):
            run.step()
    return run, run.learner.changed()


def test_the_replay_holds_what_happened() -> None:
    run, _ = state_after(30)
    batch, learner = Batch(*(x[:30] for x in run.learner.replay)), run.learner
    assert (run.env_steps, learner.updates, int(learner.size)) == (30, 19, 30)
    assert torch.equal(batch.observation[1:], batch.next_observation[:-1])
    assert batch.action.abs().max() <= 1
    # A pendulum's reward in gymnasium, -(angle^2 + 0.1 * speed^2 + 0.001 * torque^2), torques up to 2.
    cos, sin, speed = batch.observation.T
    reward = -(torch.atan2(sin, cos) ** 2 + 0.1 * speed**2 + 0.001 * (2 * batch.action[:, 0]) ** 2)
    torch.testing.assert_close(batch.reward, reward, rtol=1e-4, atol=1e-4)
    assert not learner.table[30:].any()
    assert learner.return_var.item() == pytest.approx(run._returns.var)


def test_a_run_writes_every_evaluation_and_repeats_bit_by_bit(tmp_path: Path, capsys) -> None:
    first, second = (module_run.Job(CONFIG, tmp_path / f"{i}.csv") for i in range(2))
    assert "Pendulum-v1 modules, seed 0: 30 steps and 19 updates" in module_run.train(first)
    module_run.train(second)
    assert first.path.read_text() == second.path.read_text()
    points = curves.read([first.path])
    assert [(p.variant, p.seed, p.env_step, p.episodes) for p in points] == [("modules", 0, t, 1) for t in (0, 20, 30)]
    assert len({point.mean_return for point in points}) == 3
    assert capsys.readouterr().out.count("temperature") == 6
    (_, one), (_, other) = state_after(16), state_after(16)
    assert all(torch.equal(x, y) for x, y in zip(one, other, strict=True))


def test_a_run_without_time_says_so(tmp_path: Path) -> None:
    late = module_run.Job(dataclasses.replace(CONFIG, seed=3), tmp_path / "late.csv", deadline=0.0)
    assert "seed 3: 0 steps and 0 updates" in module_run.train(late)
    assert [(point.seed, point.env_step) for point in curves.read([late.path])] == [(3, 0)]


def test_jobs_are_the_published_runs() -> None:
    found = module_run.jobs(module_run.Settings(seeds=2, out="x"))
    assert [job.config.seed for job in found] == [0, 1]
    assert [job.path.name for job in found] == ["HalfCheetah-v4-modules-0.csv", "HalfCheetah-v4-modules-1.csv"]
    theirs = dataclasses.replace(reproduce_mujoco.jobs(reproduce_mujoco.Settings())[0].config, num_seeds=1)
    assert dataclasses.replace(found[0].config, compile="true") == theirs


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"task": "Nothing-v0"}, "--task=Nothing-v0: Environment `Nothing` doesn't exist"),
        ({"task": "CartPole-v1"}, "--task=CartPole-v1: observations and actions must be vectors, not Discrete"),
        ({"out": "{taken}"}, "already; choose another folder"),
        ({"out": "{taken}/Pendulum-v1-modules-0.csv"}, "File exists"),
    ],
)
def test_a_wrong_task_or_folder_is_one_clear_error(tmp_path: Path, wrong: dict[str, str], said: str) -> None:
    curves.append(tmp_path / "Pendulum-v1-modules-0.csv", [])
    flags = {"task": "Pendulum-v1"} | {name: text.format(taken=tmp_path) for name, text in wrong.items()}
    with pytest.raises(cli.UsageError, match=said):
        module_run.run(module_run.Settings(**flags))


def test_a_number_that_cannot_be_meant_is_one_clear_error() -> None:
    with pytest.raises(cli.UsageError, match="eval_every=0: must be at least 1"):
        cli.parse(module_run.Settings, ["--eval_every=0"], program="module_run")
