"""K3: what an environment hands over arrives as it was, from training to the exported policy; one is a size."""

from __future__ import annotations

import contextlib
import functools
from pathlib import Path

import pytest
import tiny_runs
import torch
from counting import Count, count

from experiments import record_replay
from functional_sac import evaluation, export, networks, play, reporting
from functional_sac.envs.env import Env, EnvSpec, Task, autoreset
from functional_sac.transition import symmetric
from functional_sl import bundle as bundles
from functional_sl import keys

gymnasium = pytest.importorskip("gymnasium")

import gym_probes  # noqa: E402
import numpy as np  # noqa: E402
from gymnasium import spaces  # noqa: E402

from functional_sac import envs  # noqa: E402
from functional_sac.envs import spaces as mapping  # noqa: E402

PROBE = {"task": "gym_probes:task", "sim": "gym"}


@pytest.fixture
def task(monkeypatch):
    """Lets `gym_probes:task` make one environment of a kind after the other."""
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    for name in ("draw_curve", "film"):
        monkeypatch.setattr(reporting, name, lambda *args: None)
    yield lambda maker: monkeypatch.setattr(gym_probes, "task", gym_probes.in_turn(maker))
    torch.use_deterministic_algorithms(False)


KINDS = {name: functools.partial(gym_probes.F64, T=5, dtype=name) for name in gym_probes.DTYPES}
KINDS |= {"Dict": functools.partial(gym_probes.Both, T=5), "Box2": functools.partial(gym_probes.Box2, T=5)}


@pytest.mark.parametrize("kind", KINDS)
def test_a_snapshot_plays_and_exports_whatever_its_task_hands_over(tmp_path, task, monkeypatch, kind):
    """From training to play to the bundle: the same returns, and no network sees anything but float32."""
    seen, original = set(), networks.actor

    def actor(params, stats, observation, **how):
        seen.add(observation.dtype)
        return original(params, stats, observation, **how)

    monkeypatch.setattr(networks, "actor", actor)
    task(KINDS[kind])
    tiny_runs.run(tmp_path / "run", **PROBE, env_steps=30, eval_every=30)
    task(KINDS[kind])
    found = play.run(play.Settings(snapshot=str(tmp_path / "run"), episodes=2, device="cpu"))
    record = tiny_runs.records(tmp_path / "run")[-1]
    assert (found["return_mean"], found["length_mean"]) == (record["eval_return_mean"], 5.0)
    assert seen == {torch.float32}
    task(KINDS[kind])
    export.run(export.Settings(str(tmp_path / "run"), str(tmp_path / "policy"), formats="safetensors"))
    loaded = bundles.load(tmp_path / "policy.safetensors")
    width = loaded.about["inputs"]["observation"]["width"]
    action = loaded.predict({"observation": torch.full((3, width), 100.0)})["action"]
    low, high = ([0.0, -3.0], [10.0, 1.0]) if kind == "Box2" else ([-1.0], [1.0])
    assert (loaded.about["outputs"]["action"]["low"], loaded.about["outputs"]["action"]["high"]) == (low, high)
    assert ((action >= torch.tensor(low)) & (action <= torch.tensor(high))).all()


def test_evaluation_maps_actions_as_training_does(task, monkeypatch):
    """A policy of mean 0, 20 and -20: the middle of the box, its upper and its lower corner."""
    received = []
    step = gym_probes.Box2.step
    monkeypatch.setattr(gym_probes.Box2, "step", lambda self, a: received.append(a.tolist()) or step(self, a))
    task(functools.partial(gym_probes.Box2, T=1))
    with contextlib.closing(envs.make(PROBE["task"], "gym")) as env:
        params, stats = networks.init_actor(keys.key(0), 2, 2, 8, 1)
        for mean in (0.0, 20.0, -20.0):
            still = params._replace(mean_w=torch.zeros(2, 8), mean_b=torch.full((2,), mean))
            evaluation.evaluate(env, still, stats, keys.key(0), 1)
    assert received == [[5.0, -1.0], [10.0, 1.0], [0.0, -3.0]]


WIDE = {
    "float32": spaces.Box(-3e38, 3e38, (1,), np.float32),
    "float64": spaces.Box(-1.7e308, 1.7e308, (1,), np.float64),
}


@pytest.mark.parametrize("box", WIDE.values(), ids=WIDE)
def test_bounds_so_wide_that_their_distance_is_infinite_are_no_bounds(box):
    with pytest.raises(ValueError, match=r"far: unsupported action space Box\(.*without bounds"):
        mapping.actions(box, "far")


def single() -> Env:
    """Returns an environment with one number to see and one to set."""
    inner = count(4)

    def step(physics: Count, action: torch.Tensor) -> tuple[Count, torch.Tensor, torch.Tensor]:
        t = physics.t + 1
        return physics._replace(t=t), t, torch.zeros_like(t, dtype=torch.bool)

    def reset(key: torch.Tensor) -> Count:
        return Count(*torch.zeros(2, len(key), device=key.device))

    spec = EnvSpec("one", actor_dim=1, critic_dim=0, action_dim=1, max_episode_steps=4, control_dt=0.1)
    assert inner.spec.action_dim == spec.action_dim
    return autoreset(Task(spec, reset, step, lambda physics: symmetric(physics.t.unsqueeze(-1))))


ONES = {
    "num_envs": 1, "batch_size": 2, "updates_per_step": 1, "actor_update_period": 1, "num_blocks": 1, "actor_width": 1,
    "critic_width": 1, "bins": 2, "eval_episodes": 1, "noise_max_repeat": 1, "learning_starts": 1, "keep_snapshots": 1,
    "replay_capacity": 2, "env_steps": 12, "log_every": 1, "eval_every": 6, "snapshot_every": 1,
}  # fmt: skip


@pytest.mark.parametrize("host", [False, True], ids=["torch", "gymnasium"])
def test_every_size_may_be_one(tmp_path, task, host):
    """Train, evaluate, resume, record and repeat, play, export: one environment, number, action, unit, block, episode.

    A batch of one has no variance, so batch norm's smallest batch is two.
    """
    task(gym_probes.Count)
    with contextlib.nullcontext() if host else tiny_runs.prepared(single()):
        sizes = {**ONES, **(PROBE if host else {})}
        assert tiny_runs.run(tmp_path / "run", **sizes)["updates"] == 12
        task(gym_probes.Count)
        summary = tiny_runs.resume(tmp_path / "run", env_steps=16)
        assert (summary["updates"], summary["eval_return_mean"], summary["eval_return_std"]) == (16, 10.0, 0.0)
        assert [record["step"] for record in tiny_runs.records(tmp_path / "run")] == [*range(1, 17)]
        for record in (True, False):
            task(gym_probes.Count)
            report = record_replay.repeat(record_replay.Settings(run=str(tmp_path / "run"), record=record))
            assert report.first is None
        task(gym_probes.Count)
        assert play.run(play.Settings(snapshot=str(tmp_path / "run"), episodes=1))["returns"] == [10.0]
        task(gym_probes.Count)
        export.run(export.Settings(str(tmp_path / "run"), str(tmp_path / "policy")))
    assert Path(tmp_path / "policy.pt2").stat().st_size
    state = tiny_runs.state(tmp_path / "run")
    assert all(torch.isfinite(x).all() for name, x in state.items() if "/params/" in name or "/stats/" in name)
