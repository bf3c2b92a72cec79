"""Learning starts at the first count that the warm-up names, or the run is refused; no silent third way."""

from __future__ import annotations

import pytest
import tiny_runs

from functional_sac import envs

pytestmark = pytest.mark.usefixtures("tiny")
tiny = tiny_runs.tiny


def updates(run_dir) -> dict[int, int]:
    return {record["step"]: record["updates"] for record in tiny_runs.records(run_dir)}


def test_eight_environments_and_a_warm_up_of_a_thousand(tmp_path):
    """125 vector steps hold 1000 transitions: the first update comes with that step, and none before."""
    sizes = {"num_envs": 8, "learning_starts": 1000, "replay_capacity": 2000, "env_steps": 1016}
    tiny_runs.run(tmp_path, **sizes, log_every=8, eval_episodes=0, snapshot_every=2000)
    counts = updates(tmp_path)
    assert [count for step, count in counts.items() if step < 1000] == [0] * 124
    assert (counts[1000], counts[1008], counts[1016]) == (1, 2, 3)


@pytest.mark.parametrize("learning_starts", [0, 1])
def test_no_warm_up_learns_from_the_first_step_on(tmp_path, learning_starts):
    tiny_runs.run(tmp_path, learning_starts=learning_starts, env_steps=10, log_every=1)
    assert updates(tmp_path) == {2: 1, 4: 2, 6: 3, 8: 4, 10: 5}


def test_n_step_rows_count_when_they_are_whole(tmp_path):
    """With n = 4 the first rows are written at vector step 4, so 16 transitions are there at step 8 + 3."""
    tiny_runs.run(tmp_path, n_step=4, log_every=2, env_steps=24)
    counts = updates(tmp_path)
    assert (counts[20], counts[22], counts[24]) == (0, 1, 2)


@pytest.mark.parametrize(
    ("sizes", "words"),
    [
        ({"replay_capacity": 500, "learning_starts": 1000}, "learning_starts=1000, replay_capacity=500"),
        ({"batch_size": 4096, "replay_capacity": 1024}, "batch_size=4096, replay_capacity=1024"),
        ({"num_envs": 101}, "num_envs=101, replay_capacity=100"),
        ({"n_step": 24}, "learning_starts=16, n_step=24"),
        ({"batch_size": 1}, "batch_size=1"),
    ],
)
def test_a_start_that_never_comes_is_refused_before_there_is_an_environment(tmp_path, monkeypatch, sizes, words):
    monkeypatch.setattr(envs, "make", lambda *args: pytest.fail("an environment was built"))
    with pytest.raises(ValueError, match=words):
        tiny_runs.run(tmp_path / "run", **sizes)
    assert not (tmp_path / "run").exists()
