"""Whole runs on gymnasium environments: they train, evaluate, film, go on, and count what they should."""

from __future__ import annotations

import contextlib
import functools
import json

import pytest
import torch

gymnasium = pytest.importorskip("gymnasium")

import gym_probes  # noqa: E402
import tiny_runs  # noqa: E402
from equal import assert_bits_equal  # noqa: E402
from gym_probes import F64, Bad, Count, in_turn  # noqa: E402

from functional_sac import reporting, train  # noqa: E402
from functional_sac.envs import gym  # noqa: E402
from functional_sl.run.cli import UsageError  # noqa: E402
from functional_sl.run.runlog import RunError  # noqa: E402

COUNTING = {"task": "gym_probes:Count-v0", "sim": "gym"}
PROBE = {"task": "gym_probes:task", "sim": "gym"}


@pytest.fixture(autouse=True)
def _quiet(monkeypatch):
    monkeypatch.setattr(reporting, "draw_curve", lambda *args: None)
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    yield
    torch.use_deterministic_algorithms(False)


@contextlib.contextmanager
def no_film():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reporting, "film", lambda *args: None)
        yield


@pytest.fixture
def unfilmed():
    with no_film():
        yield


def column(run_dir, name):
    return {record["step"]: record[name] for record in tiny_runs.records(run_dir) if name in record}


@pytest.mark.parametrize("task", ["HalfCheetah-v4", "Hopper-v4", "Ant-v5"])
@pytest.mark.usefixtures("unfilmed")
def test_mujoco_trains_and_goes_on(tmp_path, task, capsys):
    """60 steps and 40 more: counts continue, the replay is there, no second warm-up, and new episodes begin."""
    pytest.importorskip("mujoco")
    sizes = {"task": task, "sim": "gym", "eval_episodes": 0, "log_every": 20}
    summary = tiny_runs.run(tmp_path, **sizes)
    assert (summary["env_steps"], summary["updates"]) == (60, 23)
    before = tiny_runs.state(tmp_path)
    capsys.readouterr()
    summary = tiny_runs.resume(tmp_path, env_steps=100)
    assert (summary["env_steps"], summary["updates"]) == (100, 43)
    assert "all episodes begin anew" in capsys.readouterr().err
    after = tiny_runs.state(tmp_path)
    assert (after["replay.rank0/size"], after["run.rank0/env_steps"]) == (100, 100)
    assert_bits_equal(after["replay.rank0/rows"][:60], before["replay.rank0/rows"][:60])
    assert not torch.equal(after["learner/actor/params/mean_w"], before["learner/actor/params/mean_w"])
    assert list(column(tmp_path, "updates")) == [20, 40, 60, 80, 100]


@pytest.mark.usefixtures("unfilmed")
def test_looking_changes_nothing_and_runs_repeat(tmp_path):
    """No evaluation, or one after every other step: the same final bits, from simulations apart."""
    tiny_runs.run(tmp_path / "blind", **COUNTING, eval_episodes=0)
    tiny_runs.run(tmp_path / "looking", **COUNTING, eval_every=4, eval_episodes=3, snapshot_every=8)
    assert_bits_equal(tiny_runs.state(tmp_path / "looking"), tiny_runs.state(tmp_path / "blind"))
    # Episodes of 4 steps with rewards 1, 2, 3, 4.
    assert {*column(tmp_path / "looking", "eval_return_mean").values()} == {10.0}


VARIANTS = {
    "one environment": {"num_envs": 1, "learning_starts": 8},
    "n 3, UniLab's noise": {"n_step": 3, "noise_per_env": True},
    "two seeds": {"num_seeds": 2},
    "two simulated ranks": {"simulated_ranks": 2, "env_steps": 120},
}


@pytest.mark.parametrize("changes", VARIANTS.values(), ids=VARIANTS)
@pytest.mark.usefixtures("unfilmed")
def test_variants_train_and_go_on(tmp_path, changes):
    tiny_runs.run(tmp_path, **COUNTING, **changes)
    assert {*column(tmp_path, "train_return_mean").values()} - {None} == {10.0}
    steps = tiny_runs.steps(tmp_path)[-1]
    assert tiny_runs.resume(tmp_path, env_steps=steps + 20)["env_steps"] == steps + 20
    rows = tiny_runs.state(tmp_path)["replay.rank0/rows"].reshape(-1, 6)
    rows = rows[rows[:, 0] != rows[:, 2]]
    ahead, left = rows[:, 2] - rows[:, 0], 4 - rows[:, 0] % 100
    # The resumed run's simulations count from 0 again, so no window may join both.
    assert (ahead <= left).all()
    assert (ahead >= 1).all()


@pytest.mark.usefixtures("unfilmed")
def test_one_environment_is_environment_0_of_a_wider_run(tmp_path):
    """Noise and actions are drawn for all, but starts are an environment's own."""
    task = {"task": "gym_probes:RandomStart-v0", "sim": "gym", "eval_episodes": 0, "learning_starts": 8}
    starts = {}
    for n in (1, 3):
        tiny_runs.run(tmp_path / str(n), **task, num_envs=n, env_steps=16 * n, batch_size=8)
        rows = tiny_runs.state(tmp_path / str(n))["replay.rank0/rows"][: 16 * n]
        starts[n] = rows.reshape(16, n, -1)[:, 0, 0]
    assert_bits_equal(starts[1], starts[3])


@pytest.mark.usefixtures("unfilmed")
def test_a_run_counts_and_reports_what_is_not_finite(tmp_path, monkeypatch, capsys):
    """Environment 1 fails at its step 2 of 7: of 30 vector steps 5 are refused; the critics never skip."""
    monkeypatch.setattr(gym_probes, "task", in_turn(functools.partial(Count, T=5), functools.partial(Bad, T=5)))
    tiny_runs.run(tmp_path, **PROBE, eval_episodes=0)
    last = tiny_runs.records(tmp_path)[-1]
    assert (last["refused_steps"], last["skipped_critic"]) == (5, 0)
    assert last["train_length_mean"] == 5.0
    assert "5 environment steps so far had a NaN or infinite" in capsys.readouterr().err
    state = tiny_runs.state(tmp_path)
    assert (state["replay.rank0/size"], state["run.rank0/env_steps"]) == (55, 60)
    assert all(torch.isfinite(x).all() for name, x in state.items() if "replay" in name and "window" not in name)


class Hopeless(Count):
    """`Count` without a finite reward."""

    def step(self, action):
        observation, _, *flags = super().step(action)
        return observation, float("nan"), *flags


@pytest.mark.usefixtures("unfilmed")
def test_a_run_without_one_finite_step_ends_with_an_error(tmp_path, monkeypatch):
    """Learning starts at step 16 of 60; the record after it says what was wrong, and the run tells of it."""
    monkeypatch.setattr(gym_probes, "task", Hopeless)
    with pytest.raises(RunError, match=r"all \d\d environment steps had a NaN .* what task=gym_probes:task returns"):
        tiny_runs.run(tmp_path, **PROBE, eval_episodes=0)
    last = tiny_runs.records(tmp_path)[-1]
    assert last["refused_steps"] == last["step"] < 60


@pytest.mark.parametrize(("mode", "vector_steps"), [("same_step", 30), ("disabled", 30), ("next_step", 39)])
@pytest.mark.usefixtures("unfilmed")
def test_steps_and_episodes_of_vector_environments(tmp_path, mode, vector_steps):
    """Two environments, episodes of 3: 60 steps hold 20 of them; where a reset takes a step, 39 vector steps hold 60.

    Learning starts with 16 transitions: at vector step 8, or at 10, since the fourth and eighth hold none.
    """
    sizes = {"task": f"gym_probes:threes_{mode}", "sim": "gym", "eval_episodes": 2, "log_every": 60, "eval_every": 60}
    summary = tiny_runs.run(tmp_path, **sizes)
    (record,) = tiny_runs.records(tmp_path)
    assert (record["train_episodes"], record["train_return_mean"], record["train_length_mean"]) == (20, 3.0, 3.0)
    assert (record["eval_return_mean"], record["eval_length_mean"]) == (3.0, 3.0)
    state = tiny_runs.state(tmp_path)
    assert (summary["env_steps"], state["run.rank0/env_steps"], state["replay.rank0/size"]) == (60, 60, 60)
    assert state["replay.rank0/steps"] == vector_steps
    assert summary["updates"] == vector_steps - (9 if mode == "next_step" else 7)


@pytest.mark.usefixtures("unfilmed")
def test_idle_steps_and_several_ranks_are_refused(tmp_path):
    with pytest.raises(UsageError, match=r"gym_probes:threes_next_step: .*SAME_STEP or DISABLED"):
        tiny_runs.run(tmp_path / "run", task="gym_probes:threes_next_step", sim="gym", simulated_ranks=2, env_steps=120)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("dtype", gym_probes.DTYPES)
@pytest.mark.usefixtures("unfilmed")
def test_other_types_train(tmp_path, monkeypatch, dtype):
    monkeypatch.setattr(gym_probes, "task", in_turn(functools.partial(F64, dtype=dtype)))
    tiny_runs.run(tmp_path, **PROBE, env_steps=30)
    state = tiny_runs.state(tmp_path)
    assert state["replay.rank0/rows"].dtype == torch.float32
    double = {name for name, x in state.items() if x.dtype == torch.float64}
    assert double == {"run.rank0/scale/count", "run.rank0/episodes/returns"}


@pytest.mark.usefixtures("unfilmed")
def test_an_episode_without_end_has_no_return(tmp_path, monkeypatch):
    monkeypatch.setattr(gym, "UNLIMITED", 30)
    summary = tiny_runs.run(tmp_path, task="gym_probes:Never-v0", sim="gym")
    assert summary["eval_return_mean"] is None
    assert {*column(tmp_path, "train_return_mean").values()} == {None}


@pytest.mark.parametrize("task", ["CartPole-v1", "FrozenLake-v1"])
def test_the_command_refuses_a_space_in_one_line(tmp_path, task, capsys):
    with pytest.raises(SystemExit) as stopped:
        train.main(tiny_runs.flags(task=task, sim="gym", run_dir=tmp_path / "run"))
    assert stopped.value.code == 2
    assert f"{task}: unsupported" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_a_run_leaves_a_film_and_goes_without_where_none_can_be_drawn(tmp_path, monkeypatch, capsys):
    tiny_runs.run(tmp_path / "drawn", **COUNTING)
    assert (tmp_path / "drawn" / "policy.gif").stat().st_size > 0
    monkeypatch.setattr(Count, "render", lambda self: (_ for _ in ()).throw(OSError("no screen")))
    summary = tiny_runs.run(tmp_path / "blank", **COUNTING)
    assert summary["env_steps"] == 60
    assert "no film of the policy: OSError: no screen" in capsys.readouterr().err
    assert not (tmp_path / "blank" / "policy.gif").exists()


def test_records_are_strict_json(tmp_path):
    with no_film():
        tiny_runs.run(tmp_path, **COUNTING)
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert all(json.loads(line, parse_constant=pytest.fail) for line in lines)


def test_environments_are_closed(tmp_path, monkeypatch):
    made, closed = [], []
    monkeypatch.setattr(Count, "close", lambda self: closed.append(self))
    monkeypatch.setattr(gym_probes, "task", lambda: made.append(Count()) or made[-1])
    with no_film():
        tiny_runs.run(tmp_path, **PROBE)
    # One to look at, two that train, two of each of three evaluations.
    assert len(made) == 1 + 2 + 3 * 2
    assert {*map(id, made)} == {*map(id, closed)}


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.usefixtures("unfilmed")
def test_a_captured_run_goes_through_two_graphs(tmp_path):
    """Both halves are captured; what is stored and how often it learns is what the eager run does.

    Compiled kernels round differently, so numbers that depend on the policy are not compared.
    """
    sizes = COUNTING | {"device": "cuda", "eval_episodes": 2}
    for compiles in ("true", "false"):
        summary = tiny_runs.run(tmp_path / compiles, **sizes, compile=compiles)
        assert (summary["updates"], summary["eval_return_mean"]) == (23, 10.0)
    rows = [tiny_runs.state(tmp_path / compiles)["replay.rank0/rows"][:60] for compiles in ("true", "false")]
    numbers = [0, 2, 3, 4, 5]  # all but the action
    assert_bits_equal(rows[0][:, numbers], rows[1][:, numbers])
    assert tiny_runs.resume(tmp_path / "true", env_steps=80)["updates"] == 33
