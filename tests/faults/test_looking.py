"""K6: looking is done on time, changes nothing, and shows the policy that trains."""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import tiny_runs
import tiny_training
import torch
from equal import assert_bits_equal
from PIL import Image

import functional_sac
from functional_sac import acting, evaluation, loop, networks, plan, reporting, train
from functional_sac.envs import classic
from functional_sl import keys

ROOT = Path(functional_sac.__file__).parent.parent


def kept_time(**changes) -> tuple[list[int], list[int], int]:
    """Returns at which environment steps a run evaluates and saves, and where it ends."""
    sizes = {"num_envs": 7, "learning_starts": 16, "env_steps": 4500}
    config = plan.settle(tiny_runs.config(**sizes | changes))
    steps = [config.num_envs * i for i in range(plan.vector_steps(config) + 1)]
    due = {now: plan.due(config, before, now, now == steps[-1]) for before, now in itertools.pairwise(steps)}
    evaluates, saves = ([now for now, what in due.items() if getattr(what, name)] for name in ("evaluate", "snapshot"))
    return evaluates, saves, steps[-1]


def test_intervals_are_environment_steps_and_the_end_counts_once():
    """7 environments: the first multiples of 7 from 1000, 2000, 3000 and 4000 on, and the end."""
    thousand = {"eval_every": 1000, "snapshot_every": 1000}
    assert kept_time(**thousand) == ([1001, 2002, 3003, 4004, 4501],) * 2 + (4501,)
    assert kept_time(**thousand, env_steps=7000) == ([1001, 2002, 3003, 4004, 5005, 6006, 7000],) * 2 + (7000,)
    assert kept_time(eval_every=5000, snapshot_every=9000) == ([4501], [4501], 4501)
    every, saves, _ = kept_time(eval_every=1, snapshot_every=7)
    assert every == saves == [*range(7, 4502, 7)]


def test_every_interval_names_its_unit(capsys):
    with pytest.raises(SystemExit):
        train.main(["--help"])
    text = " ".join(capsys.readouterr().out.split())
    for name in ("eval_every", "log_every", "snapshot_every"):
        assert "Environment steps between" in text.split(f"--{name}")[1].split("--")[0]


def test_a_supervised_run_saves_on_time_and_at_its_end(tmp_path):
    """13 updates, a snapshot every 5."""
    tiny_training.run(tmp_path / "run", updates=13, snapshot_every=5, validate_every=13)
    assert tiny_training.steps(tmp_path / "run") == [5, 10, 13]
    tiny_training.run(tmp_path / "even", updates=10, snapshot_every=5, validate_every=10)
    assert tiny_training.steps(tmp_path / "even") == [5, 10]


SHIFTED = """
import dataclasses
from functional_sac.envs import pendulum
from functional_sac.envs.env import Task, autoreset
from functional_sac.transition import symmetric


def task():
    spec = dataclasses.replace(pendulum.pendulum().spec, max_episode_steps=20)
    seen = lambda physics: symmetric(1000 + 50 * pendulum.observe(physics).actor)
    return autoreset(Task(spec, pendulum.reset, pendulum.step, seen))
"""

PLAY = """
import json, sys, torch
from functional_sac import acting, play, trained
found = play.run(play.Settings(snapshot=sys.argv[1], episodes=10, device="cpu"))
policy = trained.read(sys.argv[1])
x = 1000 + 50 * torch.linspace(-1, 1, 30).reshape(10, 3)
action = acting.deterministic(policy.params, policy.stats, x)
print(json.dumps({"returns": found["returns"], "action": action.view(torch.int32).tolist()}))
"""


def test_another_process_plays_the_policy_that_trained(tmp_path, monkeypatch):
    """Observations around 1000 with a spread of 50, a snapshot by itself in another folder: the same bits."""
    (tmp_path / "my_shifted.py").write_text(SHIFTED)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    for name in ("draw_curve", "film"):
        monkeypatch.setattr(reporting, name, lambda *args: None)
    results, original = [], evaluation.evaluate
    monkeypatch.setattr(evaluation, "evaluate", lambda *a: results.append((a, original(*a))) or results[-1][1])
    tiny_runs.run(tmp_path / "run", task="my_shifted:task", eval_episodes=10, eval_every=60)
    torch.use_deterministic_algorithms(False)
    (_, params, stats, *_), result = results[-1]
    assert stats.mean[0] > 100
    alone = tmp_path / "elsewhere" / "step_000000000060"
    shutil.copytree(tmp_path / "run" / "snapshots" / alone.name, alone)
    env = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, (str(ROOT), str(tmp_path), os.environ.get("PYTHONPATH")))),
        "OMP_NUM_THREADS": "1",
    }
    command = [sys.executable, "-W", "error", "-c", PLAY, str(alone)]
    done = subprocess.run(command, cwd="/", env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["returns"] == result.returns.tolist()
    x = 1000 + 50 * torch.linspace(-1, 1, 30).reshape(10, 3)
    expected = acting.deterministic(params, stats, x)
    assert found["action"] == expected.view(torch.int32).tolist()


@pytest.mark.parametrize(("task", "rate"), [("pendulum", 20), ("cartpole_swingup", 50)])
def test_the_second_film_of_a_process_shows_as_much_as_the_first(tmp_path, task, rate):
    """Thirty steps: a picture before each at the control rate, or before every second one at half of it; none black."""
    env = classic.make(task)
    assert env.spec.control_dt == pytest.approx(1 / rate)
    env = env._replace(spec=dataclasses.replace(env.spec, max_episode_steps=30))
    policy = networks.init_actor(keys.key(1), env.spec.actor_dim, env.spec.action_dim, 8, 1)
    films = []
    for name in ("first.gif", "second.gif"):
        reporting.film(tmp_path / name, env, policy, keys.key(0), torch.float32)
        pictures, durations = [], []
        with Image.open(tmp_path / name) as film:
            for i in range(film.n_frames):
                film.seek(i)
                pictures.append(np.asarray(film.convert("RGB")))
                durations.append(film.info["duration"])
        films.append(pictures)
        # Equal pictures are one that stays longer: the times add up to the thirty steps.
        assert sum(durations) == pytest.approx(1000 * 30 / rate, abs=1)
    first, second = films
    assert np.array_equal(first, second)
    assert min(picture.mean() for picture in second) > 0
    assert len(second) > 1
    assert (second[0] != second[-1]).any()


def test_films_and_evaluations_leave_training_alone(tmp_path, monkeypatch):
    """Filmed after every evaluation: the final bits are those of a run that nobody looked at."""
    draw, film = loop._Loop._draw, reporting.film
    with tiny_runs.prepared():
        tiny_runs.run(tmp_path / "blind", eval_episodes=0)

        def drawing(self, due, progress):
            path = tmp_path / f"{self._clock.env_steps}.gif"
            film(path, self._run.env, self._policies()[0], self._evaluation_keys()[0], torch.float32)
            draw(self, due, progress)

        monkeypatch.setattr(loop._Loop, "_draw", drawing)
        tiny_runs.run(tmp_path / "filmed")
    assert [int(path.stem) for path in sorted(tmp_path.glob("*.gif"))] == [20, 40, 60]
    assert_bits_equal(tiny_runs.state(tmp_path / "filmed"), tiny_runs.state(tmp_path / "blind"))
