"""Learners over seeds and simulated ranks, their evaluations, and what is said of them beside published curves."""

from __future__ import annotations

import csv
import dataclasses
import sys
import time

import pytest
import torch

pytest.importorskip("mujoco")
pytest.importorskip("gymnasium")

from experiments import curves, fleet, reproduce_mujoco, trial
from experiments.curves import Official, Point
from experiments.reproduce_mujoco import Settings
from functional_sac.config import TrainConfig
from functional_sl import tree
from functional_sl.run import cli

CONFIG = TrainConfig(
    task="Hopper-v4", sim="gym", num_envs=1, num_seeds=2, batch_size=8, actor_width=8, critic_width=8, num_blocks=1,
    bins=11, updates_per_step=1, replay_capacity=60, learning_starts=12, env_steps=30, lr_decay_updates=1000,
    device="cpu", compile="false", eval_every=20, eval_episodes=2,
)  # fmt: skip
CPU = torch.device("cpu")
on_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def after(steps: int, ranks: int = 1, device: torch.device = CPU, **changes: object) -> fleet.Fleet:
    with fleet.opened(dataclasses.replace(CONFIG, **changes), device, ranks) as learners:
        for _ in range(steps):
            learners.step()
        return learners


def test_the_published_settings() -> None:
    jobs = reproduce_mujoco.jobs(Settings())
    assert [job.config.task for job in jobs] == list(reproduce_mujoco.TASKS)
    config = jobs[0].config
    assert (config.batch_size, config.updates_per_step, config.gamma, config.n_step, config.num_envs) == (
        512,
        1,
        0.99,
        1,
        1,
    )
    assert (config.learning_starts, config.lr_decay_updates, config.num_seeds) == (10_000, 1_000_000, 5)
    assert (config.actor_width, config.critic_width, config.num_blocks, config.tau) == (128, 256, 2, 0.01)
    assert config.replay_capacity >= config.env_steps == 100_000


def test_seeds_over_processes() -> None:
    whole, parts = (reproduce_mujoco.jobs(Settings(tasks="Ant-v4", seeds_per_process=n)) for n in (0, 2))
    assert [(job.config.seed, job.config.num_seeds, job.path.name) for job in parts] == [
        (0, 2, "Ant-v4-float32-0.csv"),
        (2, 2, "Ant-v4-float32-2.csv"),
        (4, 1, "Ant-v4-float32-4.csv"),
    ]
    assert [dataclasses.replace(job.config, seed=0, num_seeds=5) for job in parts] == [whole[0].config] * 3


@pytest.mark.parametrize("name", ["seeds", "seeds_per_process", "env_steps", "workers", "evaluators"])
def test_negative_numbers(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name}=-1: must not be negative"):
        Settings(**{name: -1})


def test_wires_differ_in_nothing_else() -> None:
    one, other = reproduce_mujoco.jobs(Settings(wire=True))
    assert one.ranks == other.ranks == 2
    changed = dataclasses.replace(one.config, dp_gradient_wire_dtype="bfloat16")
    assert (other.config, other.variant) == (changed, "bfloat16 wire")
    # Two ranks take a step each and then make two updates: one an environment step, as without ranks.
    assert one.config.updates_per_step == 2
    assert one.config.env_steps == 50_000


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=on_cuda)])
def test_a_seed_learns_the_same_alone(device: str) -> None:
    how = {"device": torch.device(device), "compile": "true" if device == "cuda" else "false"}
    both, alone = after(16, **how), after(16, **how, num_seeds=1, seed=1)
    assert (both.env_steps, both.updates, list(both.seeds)) == (16, 5, [0, 1])
    first, second, single = (tree.map(torch.from_numpy, x) for x in (*both.policies(), *alone.policies()))
    assert tree.bits_equal(second, single)
    assert not tree.bits_equal(first, second)


def test_simulated_ranks_stay_equal_but_in_what_is_their_own() -> None:
    learners = after(
        10, ranks=2, updates_per_step=2, dp_gradient_wire_dtype="bfloat16", actor_width=16, critic_width=32
    )
    assert (learners.env_steps, learners.updates) == (20, 0)
    with fleet.opened(dataclasses.replace(CONFIG, updates_per_step=2, learning_starts=8), CPU, 2) as learners:
        for _ in range(12):
            learners.step()
        state = learners._state
    assert (learners.env_steps, learners.updates, learners.skipped()) == (24, 10, 0)
    for part in (state.sac.actor.params, state.sac.critic, state.sac.target, state.scale.var):
        for leaf in tree.leaves(part):
            assert leaf.shape[:2] == (2, 2)
            assert torch.equal(leaf[:, 0], leaf[:, 1])
    assert not torch.equal(state.observation.actor[:, 0], state.observation.actor[:, 1])


def test_a_run_writes_every_evaluation(tmp_path, capsys) -> None:
    path = tmp_path / "hopper.csv"
    said = trial.train(trial.Job(CONFIG, path, variant="small", evaluators=0))
    assert "Hopper-v4 small: 30 steps and 19 updates of each seed" in said
    points = curves.read([path])
    assert [(p.seed, p.env_step) for p in points] == [(s, t) for s in (0, 1) for t in (0, 20, 30)]
    assert all(point.episodes == 2 for point in points)
    assert "Hopper-v4 small: 20 steps after" in capsys.readouterr().out
    late = trial.Job(CONFIG, tmp_path / "late.csv", evaluators=0, deadline=time.time())
    assert "0 steps and 0 updates" in trial.train(late)
    assert [point.env_step for point in curves.read([late.path])] == [0, 0]


def points(**returns: tuple[float, ...]) -> list[Point]:
    return [
        Point("Ant-v4", variant, seed, step, value * (1 + step), 3)
        for variant, values in returns.items()
        for seed, value in enumerate(values)
        for step in (0, 10)
    ]


def test_returns_come_back_from_their_file(tmp_path) -> None:
    path, found = tmp_path / "a.csv", points(a=(1.0, 2.0))
    curves.append(path, found[:2])
    curves.append(path, found[1:])
    assert curves.read([path, path]) == sorted(found)


@pytest.mark.parametrize(
    ("mean", "said"), [(121, "above"), (120, "within"), (80, "within"), (79, "below the"), (59, "below every")]
)
def test_verdicts(mean: float, said: str) -> None:
    """Five values of mean 100 and deviation 20 lie within 100 - 2 * 20 and 100 + 2 * 20."""
    assert curves.verdict(mean, Official(10, 100.0, 20.0)).startswith(said)
    assert curves.reach(Official(10, 100.0, 20.0)) == (60.0, 140.0)


def test_the_table_takes_the_last_step_of_all_seeds() -> None:
    found = [*points(a=(10.0, 8.0)), Point("Ant-v4", "a", 0, 20, 1e6, 3)]
    line = curves.table(found, {"Ant-v4": [Official(10, 100.0, 20.0)]}).splitlines()[-1]
    assert line == "| Ant-v4 | a | 10 | 99 ± 11 (2 seeds) | 88 to 110 | 100 ± 20 | 60 to 140 | within the band |"
    assert "no figure at this step" in curves.table(found, {})


def test_official_figures_hold_five_tasks() -> None:
    published = curves.official(reproduce_mujoco.OFFICIAL)
    assert set(published) == set(reproduce_mujoco.TASKS)
    assert all([x.env_step for x in curve] == list(range(0, 1_000_001, 100_000)) for curve in published.values())
    assert published["HalfCheetah-v4"][1] == Official(100_000, 9815.071, 155.162)


def test_pictures_and_table_of_a_folder(tmp_path) -> None:
    with pytest.raises(cli.UsageError, match="holds no evaluation"):
        reproduce_mujoco.report(tmp_path, reproduce_mujoco.OFFICIAL)
    curves.append(tmp_path / "x.csv", points(a=(1.0, 2.0), b=(3.0,)))
    said = reproduce_mujoco.report(tmp_path, reproduce_mujoco.OFFICIAL)
    assert (tmp_path / "table.md").read_text() == said + "\n"
    assert all((tmp_path / f"{name}.png").stat().st_size > 1000 for name in ("Ant-v4", "overview"))
    with (tmp_path / "bad.csv").open("w", newline="") as file:
        csv.writer(file).writerow(["task", "mean"])
    with pytest.raises(ValueError, match="env_step, std"):
        curves.official(tmp_path / "bad.csv")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--draw="], "--draw= names no folder"),
        (["--draw={}"], "bench.csv line 2: expected task, variant, seed, env_step, mean_return, episodes; move it"),
        (["--draw=nowhere"], "nowhere holds no evaluation"),
        (["--official=nowhere.csv"], "No such file or directory: 'nowhere.csv'"),
        (["--official={}/bench.csv"], "bench.csv has no column env_step"),
        (["--official={}/odd"], "is no number of steps, mean and std"),
    ],
)
def test_a_foreign_folder_is_one_line(flags, message, tmp_path, monkeypatch, capsys) -> None:
    """Curves are looked at before anything is trained."""
    (tmp_path / "bench.csv").write_text("task,mean,std\nAnt-v4,1.0,2.0\n")
    (tmp_path / "odd").write_text("task,env_step,mean,std\nAnt-v4,many,1.0,2.0\n")
    monkeypatch.setattr(sys, "argv", ["reproduce_mujoco", *(flag.format(tmp_path) for flag in flags)])
    monkeypatch.setattr(reproduce_mujoco, "run", lambda settings: pytest.fail("trains"))
    with pytest.raises(SystemExit) as ended:
        reproduce_mujoco.main()
    assert ended.value.code == 2
    told = capsys.readouterr().err
    assert message in told
    assert told.count("\n") == 1


def test_seeds_without_a_common_step_are_named() -> None:
    found = [Point("Ant-v4", "a", 0, 10, 1.0, 3), Point("Ant-v4", "a", 1, 20, 1.0, 3)]
    with pytest.raises(ValueError, match="the seeds 0, 1 were evaluated at no step in common"):
        curves.table(found, {})


def test_results_are_not_overwritten(tmp_path) -> None:
    curves.append(tmp_path / "Ant-v4-float32.csv", points(a=(1.0,)))
    with pytest.raises(cli.UsageError, match="already"):
        reproduce_mujoco.run(Settings(tasks="Ant-v4", out=str(tmp_path)))
