"""Data parallel: what two processes do equals one process, bit for bit, and one rank's fault is an error of all."""

from __future__ import annotations

import errno
import json
import os
import re
import signal
from pathlib import Path

import pytest
import tiny_runs
import torch
from equal import assert_bits_equal
from ranks import RanksFailed, run_ranks

from functional_sac import opening
from functional_sl import keys, tree
from functional_sl.run import snapshot
from functional_sl.run.cli import UsageError

# 30 vector steps of 2 ranks with 2 environments each: 23 cycles. 16 units make groups that BF16 narrows.
SIZES = {"env_steps": 120, "actor_width": 16, "critic_width": 16, "log_every": 20, "eval_every": 40}
SIZES |= {"snapshot_every": 40, "tensorboard": False, "timeout_s": 30}


def train(folder: str, **changes):
    """Trains one rank, or all simulated ones, and returns the summary."""
    with tiny_runs.prepared():
        return tiny_runs.run(folder, **SIZES | changes)


def one_rank(folder: str, changes: dict, fault: str = "", resume: bool = False):
    """Trains this rank, whose `fault` (of rank 1) strikes in its 20th step; returns its summary or error."""
    with tiny_runs.prepared(), pytest.MonkeyPatch.context() as patch:
        if os.environ["RANK"] == "1" and fault:
            FAULTS[fault](patch)
        try:
            if resume:
                return tiny_runs.resume(folder, **changes)
            return tiny_runs.run(folder, **SIZES | changes)
        except Exception as error:
            return f"{type(error).__name__}: {error}"


def in_step_20(act):
    """Lets `act()` happen in the 20th step of the environments."""

    def plant(patch):
        make, steps = tiny_runs.short_pendulum, [0]

        def step(state, action):
            steps[0] += action.shape[0] == 2  # an evaluation has as many, but comes every tenth step
            if steps[0] == 20:
                act()
            return env.step(state, action)

        env = make()
        patch.setattr(tiny_runs.envs, "make", lambda task, sim="auto": env._replace(step=step))

    return plant


def fail():
    raise ValueError("the motor is on fire")


def full_disk(patch):
    def write_part(root, step, name, values):
        raise OSError(errno.ENOSPC, f"No space left for {name}")

    patch.setattr(snapshot, "write_part", write_part)


FAULTS = {
    "raise": in_step_20(fail),
    "SIGTERM": in_step_20(lambda: os.kill(os.getpid(), signal.SIGTERM)),
    "SIGKILL": in_step_20(lambda: os.kill(os.getpid(), signal.SIGKILL)),
    "disk": full_disk,
    "config": lambda patch: patch.setitem(SIZES, "gamma", 0.5),
    "wire": lambda patch: patch.setitem(SIZES, "dp_gradient_wire_dtype", "bfloat16"),
}


def equal_runs(first: Path, second: Path) -> None:
    assert_bits_equal(tiny_runs.state(first), tiny_runs.state(second))
    assert tiny_runs.records(first) == tiny_runs.records(second)


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    """A finished run of two processes."""
    folder = tmp_path_factory.mktemp("straight") / "run"
    first, second = run_ranks(2, one_rank, str(folder), {})
    assert first == second
    assert (first["env_steps"], first["updates"]) == (120, 23)
    return folder


def test_two_processes_equal_two_simulated_ranks(straight, tmp_path):
    train(tmp_path / "run", simulated_ranks=2)
    equal_runs(straight, tmp_path / "run")
    state = tiny_runs.state(straight)
    assert {name.partition("/")[0] for name in state} == {
        "learner", "run.rank0", "run.rank1", "replay.rank0", "replay.rank1",
    }  # fmt: skip
    assert [state[f"run.rank{rank}/env_steps"] for rank in (0, 1)] == [120, 120]


@pytest.mark.parametrize(("wire", "compute"), [("bfloat16", "float32"), ("float32", "bfloat16"), ("bfloat16",) * 2])
def test_so_they_do_with_other_types(straight, tmp_path, wire, compute):
    changes = {"dp_gradient_wire_dtype": wire, "compute_dtype": compute}
    run_ranks(2, one_rank, str(tmp_path / "real"), changes)
    train(tmp_path / "simulated", simulated_ranks=2, **changes)
    equal_runs(tmp_path / "real", tmp_path / "simulated")
    assert not tree.bits_equal(tiny_runs.state(straight), tiny_runs.state(tmp_path / "real"))


def test_three_processes_equal_three_simulated_ranks_but_for_the_order_of_sums(tmp_path):
    """Gloo adds three summands in another order: 6e-8 an update, which Adam's first steps enlarge."""
    run_ranks(3, one_rank, str(tmp_path / "real"), {"env_steps": 90})
    train(tmp_path / "simulated", simulated_ranks=3, env_steps=90)
    simulated = tiny_runs.state(tmp_path / "simulated")
    for name, leaf in tiny_runs.state(tmp_path / "real").items():
        torch.testing.assert_close(leaf, simulated[name], rtol=1e-3, atol=1e-4, msg=name)


def test_no_rank_but_0_writes_more_than_its_log_and_its_parts(straight):
    # The full names carry digests.
    found = {re.sub("-[0-9a-f]{16}", "", str(path.relative_to(straight))) for path in straight.rglob("*")}
    step = "snapshots/step_000000000120"
    expected = {f"{step}/{part}.safetensors" for part in ("run.rank1", "replay.rank1")} | {"ranks/rank1.log"}
    assert {path for path in found if "rank1" in path and not path.startswith("snapshots/")} == {"ranks/rank1.log"}
    assert expected <= found
    assert (straight / "ranks" / "rank1.log").read_text() == ""
    assert len(json.loads((straight / "run.json").read_text())["attempts"]) == 1


def test_going_on_repeats_every_bit(straight, tmp_path):
    run_ranks(2, one_rank, str(tmp_path / "run"), {"env_steps": 40})
    run_ranks(2, one_rank, str(tmp_path / "run"), {"env_steps": 120}, "", True)
    equal_runs(straight, tmp_path / "run")


def test_another_number_of_ranks_is_refused(straight, tmp_path):
    before = tiny_runs.files(straight)
    words = r"step_000000000120: is of 2 ranks, but {} have started; start torchrun with 2 .* --init_from="
    with tiny_runs.prepared(), pytest.raises(UsageError, match=words.format(1)):
        tiny_runs.resume(straight, env_steps=160)
    errors = run_ranks(3, one_rank, str(straight), {"env_steps": 160}, "", True)
    assert len(set(errors)) == 1
    assert re.search(words.format(3), errors[0])
    assert tiny_runs.files(straight) == before
    # The networks alone go anywhere.
    assert train(tmp_path / "run", init_from=str(straight))["updates"] == 53


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("config", r"gamma \(rank 0: 0.99, rank 1: 0.5\)"),
        ("wire", r"dp_gradient_wire_dtype \(rank 0: float32, rank 1: bfloat16\), the layout of the actor's gradients"),
    ],
)
def test_unlike_ranks_are_refused_before_the_first_reduction(tmp_path, fault, words):
    first, second = run_ranks(2, one_rank, str(tmp_path / "run"), {}, fault)
    assert first == second
    assert re.match(rf"UsageError: the ranks were started unlike: {words}", first)
    assert list(tmp_path.iterdir()) == []


def test_an_environment_that_fails_on_one_rank_ends_all(tmp_path):
    first, second = run_ranks(2, one_rank, str(tmp_path / "run"), {}, "raise")
    assert second == "ValueError: the motor is on fire"
    cause = "rank 1 failed (ValueError: the motor is on fire); its last completed iteration is 19"
    assert first == f"LostRank: {cause}"
    assert tiny_runs.steps(tmp_path / "run") == [40]


def test_a_full_disk_of_one_rank_ends_all_and_leaves_no_snapshot(tmp_path):
    first, second = run_ranks(2, one_rank, str(tmp_path / "run"), {}, "disk")
    assert first == second
    assert re.match(
        r"RankError: the snapshot of step 40 failed on 1 of 2 ranks: rank 1: .*No space left for run", first
    )
    assert tiny_runs.files(tmp_path / "run" / "snapshots") == {}


def test_a_signal_to_one_rank_stops_all_after_a_snapshot(straight, tmp_path):
    first, second = run_ranks(2, one_rank, str(tmp_path / "run"), {}, "SIGTERM")
    assert first == second
    assert (first["stopped"], first["env_steps"]) == ("SIGTERM", 80)
    run_ranks(2, one_rank, str(tmp_path / "run"), {}, "", True)
    equal_runs(straight, tmp_path / "run")


def test_a_killed_rank_is_named_and_the_last_snapshot_goes_on(straight, tmp_path):
    """The beats of a timeout of 4 s come every 0.4 s; four of them are missing before a rank counts as gone."""
    with pytest.raises(RanksFailed, match="rank 1: died without a word"):
        run_ranks(2, one_rank_or_log, str(tmp_path))
    assert (tmp_path / "error").read_text() == (
        "LostRank: rank 1 no longer answers; its last completed iteration is 19"
    )
    run_ranks(2, one_rank, str(tmp_path / "run"), {}, "", True)
    equal_runs(straight, tmp_path / "run")


def one_rank_or_log(folder: str) -> None:
    Path(folder, "error").write_text(one_rank(f"{folder}/run", {"timeout_s": 4}, "SIGKILL"))


def test_ranks_and_seeds_draw_streams_of_their_own(tmp_path):
    """2 ranks of 4 environments with 3 episodes of 10 steps, under seeds 0 and 1: 48 starts, none twice."""
    starts, noises, indices = [], [], []
    for seed in (0, 1):
        changes = {"simulated_ranks": 2, "num_envs": 4, "seed": seed, "replay_capacity": 120}
        with tiny_runs.prepared(), opening.open_run(tiny_runs.config(tmp_path / str(seed), **changes)) as run:
            states = run.states
            assert_bits_equal(states[0].sac._replace(key=()), states[1].sac._replace(key=()))
            for _ in range(30):
                states = run.ranks.each(lambda state: run.iterate(state, random=False, phase=None)[0], states)
                noises += [state.noise.noise for state in states]
            for state in states:
                starts += state.replay.rows.unflatten(0, (30, 4))[::10, :, :3].reshape(-1, 3).tolist()
                indices.append(keys.randint(state.sac.key, (8,), 0, 120))
    assert len({tuple(start) for start in starts}) == 48
    # Held for some steps, but never the same for two ranks or two seeds.
    assert len({tuple(noise.reshape(-1).tolist()) for noise in (*noises[:2], *noises[60:62])}) == 4
    assert len({tuple(drawn.tolist()) for drawn in indices}) == 4


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"simulated_ranks": 2, "num_seeds": 2}, "several seeds or several ranks, not both"),
        ({"simulated_ranks": 2, "compile": "true"}, "simulated ranks run eagerly"),
        ({"simulated_ranks": 0}, "must be positive"),
        ({"simulated_ranks": 5, "env_steps": 60}, "the run ends before learning starts on 5 ranks; ask for more"),
    ],
)
def test_what_ranks_cannot_do_is_refused(tmp_path, changes, words):
    with tiny_runs.prepared(), pytest.raises(ValueError, match=words):
        tiny_runs.run(tmp_path / "run", **changes)
    assert list(tmp_path.iterdir()) == []


def test_simulated_ranks_under_torchrun_are_refused(tmp_path):
    for changes in ({"simulated_ranks": 2}, {"num_seeds": 2}):
        (error,) = run_ranks(1, one_rank_of_one, str(tmp_path / "run"), changes)
        assert re.match(r"UsageError: (simulated_ranks|num_seeds)=2: not under torchrun", error)


def one_rank_of_one(folder: str, changes: dict):
    return one_rank(folder, changes)
