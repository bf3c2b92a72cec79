"""A run comes back bit by bit from its start and from every snapshot; what does not is named, at its first update."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import struct
from pathlib import Path

import pytest
import ranks
import tiny_runs
import torch
from torch import Tensor

from experiments import record_replay
from functional_sac.replaying import repeat, trace, verify
from functional_sac.replaying.verify import Difference, Gap
from functional_sl import tree
from functional_sl.run import identity, manifest
from functional_sl.run.cli import UsageError
from functional_sl.run.runlog import RunError

WEIGHT = "learner/critic/params/trunk/w"
# 20 iterations of 2 environments; the eighth is the first that learns. Snapshots after 5, 10, 15 and 20.
SHORT = {"env_steps": 40, "snapshot_every": 10, "keep_snapshots": 9, "tensorboard": False, "eval_episodes": 1}


pytestmark = pytest.mark.usefixtures("tiny")
tiny, run_dir = tiny_runs.tiny, tiny_runs.run_dir


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A short run with its trace; tests copy it."""
    folder = tmp_path_factory.mktemp("recorded") / "run"
    with tiny_runs.prepared():
        tiny_runs.run(folder, **SHORT)
        verify.record(folder)
    return folder


VARIANTS = {
    "eager": {},
    "two simulated ranks": {"simulated_ranks": 2, "env_steps": 80, "snapshot_every": 20},
    "float16": {"compute_dtype": "float16"},
    "two seeds": {"num_seeds": 2},
    "overlap, a full replay": {"overlap": True, "replay_capacity": 17},
    "a full replay, 3 updates of 3 steps": {"replay_capacity": 17, "updates_per_step": 3, "n_step": 3},
}


@pytest.mark.parametrize("changes", VARIANTS.values(), ids=VARIANTS)
def test_every_bit_comes_back(tmp_path, changes):
    tiny_runs.run(tmp_path, **{**SHORT, **changes})
    before, steps = tiny_runs.files(tmp_path), tiny_runs.steps(tmp_path)
    first = verify.record(tmp_path, every=2)
    assert (first.first, first.environment, first.snapshots) == (None, {}, 4)
    kept = {name: data for name, data in tiny_runs.files(tmp_path).items() if name != trace.NAME}
    # Recorded: the start, every second iteration and the snapshots after 5 and 15.
    for begin, records in zip([0, *steps[:-1]], [13, 10, 7, 4], strict=False):
        report = verify.verify(tmp_path, begin)
        assert (report.first, report.gap, report.environment) == (None, None, {})
        assert (report.begin, report.end, report.iterations) == (begin, steps[-1], records)
    assert kept == before
    assert {name: data for name, data in tiny_runs.files(tmp_path).items() if name != trace.NAME} == before


@pytest.mark.parametrize("with_replay", [True, False], ids=["with replay", "without replay"])
def test_a_resume_with_other_settings_is_repeated_as_it_was(tmp_path, with_replay):
    tiny_runs.run(tmp_path, **SHORT, snapshot_replay=with_replay)
    tiny_runs.resume(tmp_path, env_steps=80, log_every=6)
    tiny_runs.resume(tmp_path / "snapshots" / f"step_{60:012d}", log_every=10)
    found = [
        (leg.begin, leg.end, leg.settings["env_steps"], leg.settings["log_every"]) for leg in repeat.legs(tmp_path)
    ]
    assert found == [(0, 40, 40, 10), (40, 60, 80, 6), (60, float("inf"), 80, 10)]
    assert verify.record(tmp_path).first is None
    for begin in (0, 40, 60):
        report = verify.verify(tmp_path, begin)
        assert (report.first, report.end, report.iterations) == (None, 80, (80 - begin) // 2 + 1)
    if not with_replay:
        with pytest.raises(UsageError, match=r"--begin=20: that snapshot holds no replay.*--begin=0"):
            verify.verify(tmp_path, 20)


def flip(run_dir: Path, step: int, leaf: str) -> float:
    """Flips the last bit of a leaf's first number in a snapshot, signs it anew, and returns by how much it moved."""
    folder = manifest.folder_of(run_dir / "snapshots", step)
    content = manifest.read(folder)
    part, _, name = leaf.partition("/")
    path = folder / content["parts"][part]["file"]
    data = bytearray(path.read_bytes())
    (length,) = struct.unpack("<Q", data[:8])
    start = 8 + length + json.loads(data[8 : 8 + length])[name]["data_offsets"][0]
    (old,) = struct.unpack("<f", data[start : start + 4])
    data[start] ^= 1
    (new,) = struct.unpack("<f", data[start : start + 4])
    path.write_bytes(data)
    content["parts"][part]["sha256"] = hashlib.sha256(data).hexdigest()
    manifest.write(folder, content)
    return abs(new - old)


def test_one_bit_of_a_snapshot_is_found(run_dir):
    """From the run's start: at that snapshot, as large as it is. From the snapshot itself: before any update."""
    moved = flip(run_dir, 30, WEIGHT)
    report = verify.verify(run_dir)
    # The 15th iteration makes the 8th update; the trace, which was recorded before, still agrees.
    assert report.first == Difference(30, 8, 8, WEIGHT, 1, "snapshot")
    assert report.gap == Gap(30, WEIGHT, moved)
    assert 0 < moved < 1e-6
    report = verify.verify(run_dir, begin=30)
    assert report.first == Difference(30, 9, 8, WEIGHT, 1, "trace")
    assert report.gap.env_steps == 40
    (run_dir / trace.NAME).unlink()
    report = verify.verify(run_dir, begin=30)
    # Five updates lie between the two snapshots, 9 to 13.
    assert report.first[:3] == (40, 9, 13)
    assert report.first.leaf.startswith("learner/")
    assert 0 < report.gap.largest < 1e-3
    assert verify.verify(run_dir, begin=10, end=20).first is None


PLANTED = {
    "a weight": ({}, 0, lambda s: s._replace(sac=s.sac._replace(target=bit(s.sac.target))), "learner/target/trunk/"),
    "rank 1's observation": ({"simulated_ranks": 2}, 1, lambda s: s._replace(observation=bit(s.observation)),
                             "run.rank1/observation/actor"),
    "a seed's noise": ({"num_seeds": 2}, 0, lambda s: s._replace(noise=bit(s.noise)), "run.rank0/noise/noise"),
    "the loss scale": ({"compute_dtype": "float16"}, 0,
                       lambda s: s._replace(sac=s.sac._replace(scale=bit(s.sac.scale))), "learner/scale/scale"),
    "a stored reward": ({}, 0, lambda s: s._replace(replay=s.replay._replace(rows=tail(s.replay))),
                        "replay.rank0/rows"),
}  # fmt: skip


def bit(values: tree.Tree) -> tree.Tree:
    """Returns the tree with the last bit of its first floating-point number flipped."""
    leaves, structure = tree.flatten(tree.clone(values))
    first = next(leaf for leaf in leaves if leaf.is_floating_point())
    first.reshape(-1)[:1].view(torch.int32).bitwise_xor_(1)
    return tree.unflatten(structure, leaves)


def tail(replay: tree.Tree) -> Tensor:
    """Returns the rows with the last bit of the newest reward flipped, in place as `insert` writes."""
    replay.rows[int(replay.cursor) - 1, -3:-2].view(torch.int32).bitwise_xor_(1)
    return replay.rows


@pytest.mark.parametrize(("changes", "rank", "plant", "leaf"), PLANTED.values(), ids=PLANTED)
def test_the_first_update_and_leaf_that_differ(tmp_path, monkeypatch, changes, rank, plant, leaf):
    tiny_runs.run(tmp_path, **{**SHORT, **changes})
    verify.record(tmp_path)
    advance = repeat._advance

    def planted(run, states, random, phase):
        states, idle = advance(run, states, random, phase)
        if int(states[0].replay.steps.reshape(-1)[0]) == 10:
            states = tuple(plant(state) if i == rank else state for i, state in enumerate(states))
        return states, idle

    monkeypatch.setattr(repeat, "_advance", planted)
    report = verify.verify(tmp_path)
    # Two ranks take 4 steps an iteration and begin to learn with the 8th as well: the 10th makes the 3rd update.
    step = 40 if "simulated_ranks" in changes else 20
    assert report.first[:3] == (step, 3, 3)
    assert report.first.leaf.startswith(leaf)
    assert report.first.seen_in == "trace"
    assert report.gap.env_steps == step
    assert report.gap.largest > 0


def test_another_seed_differs_from_the_start(run_dir):
    path = run_dir / "run.json"
    info = json.loads(path.read_text())
    info["config"]["seed"] = 1
    path.write_text(json.dumps(info | {"config_digest": identity.digest(info["config"])}))
    report = verify.verify(run_dir)
    assert report.environment == {"settings.0.seed": ("0", "1")}
    assert report.first[:4] == (0, 1, 0, "run.rank0/key")
    assert report.gap.env_steps == 10


def test_another_environment_is_named_though_the_bits_come_back(run_dir):
    found = trace.read(run_dir)
    there = found.about["environment"] | {"torch": "1.0", "warp": "2"}
    trace.write(run_dir, found._replace(about=found.about | {"environment": there}))
    report = verify.verify(run_dir, begin=30)
    now = json.dumps(torch.__version__)
    assert report.environment == {"torch": ('"1.0"', now), "warp": ('"2"', "absent")}
    assert report.first is None
    assert 'not as it was: torch: "1.0" -> ' + now in record_replay.told(report)


def test_what_a_later_resume_took_back_was_not_recorded(run_dir):
    """The run goes on from step 20 with records at other steps: the trace holds to step 20, the snapshots after it."""
    tiny_runs.resume(run_dir / "snapshots" / f"step_{20:012d}", log_every=14)
    report = verify.verify(run_dir)
    assert (report.first, report.iterations, report.snapshots, report.end) == (None, 11, 4, 40)


def test_live_environments_are_repeated_from_the_starts_of_attempts(tmp_path):
    pytest.importorskip("gymnasium")
    from functional_sac.envs import gym

    with tiny_runs.prepared(gym.make("Pendulum-v1")):
        tiny_runs.run(tmp_path, **SHORT)
        tiny_runs.resume(tmp_path, env_steps=60)
        assert verify.record(tmp_path).first is None
        for begin in (0, 40):
            report = verify.verify(tmp_path, begin)
            assert (report.first, report.end, report.iterations) == (None, 60, (60 - begin) // 2 + 1)
        with pytest.raises(UsageError, match=r"--begin=20: this task's environments are in no snapshot"):
            verify.verify(tmp_path, 20)


def train_as_rank(run_dir: str) -> None:
    with tiny_runs.prepared():
        tiny_runs.run(run_dir, **{**SHORT, "env_steps": 80, "snapshot_every": 40})


def test_threads_repeat_what_two_processes_did(tmp_path):
    ranks.run_ranks(2, train_as_rank, str(tmp_path / "run"))
    report = verify.verify(tmp_path / "run")
    assert (report.first, report.snapshots) == (None, 2)
    assert report.environment == {"ranks": ('"2 processes"', '"2 threads of one"')}


REFUSED = {
    "no run": (["--run=nowhere"], r"nowhere/run.json: not there"),
    "no flag": ([], r"--run: which run\?"),
    "no such snapshot": (["--begin=7"], r"--begin=7: .* no snapshot of that step \(it has 10, 20, 30, 40\)"),
    "nothing to do": (["--begin=40"], r"--begin=40 --end=40: .* can be compared up to step 40"),
    "too far": (["--end=50"], r"up to step 40"),
    "half a recording": (["--record", "--begin=10"], r"--record: repeats the whole run"),
    "every 0": (["--record", "--every=0"], r"--every=0: expected 1 or more"),
}


@pytest.mark.parametrize(("flags", "message"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_meant_is_refused(whole, capsys, monkeypatch, flags, message):
    known = [] if not flags or "--run=nowhere" in flags else [f"--run={whole}"]
    monkeypatch.setattr("sys.argv", ["record_replay", *known, *flags])
    with pytest.raises(SystemExit) as stop:
        record_replay.main()
    assert stop.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()

    assert re.search(message, line), line


def test_a_run_without_anything_to_compare_is_refused(run_dir, monkeypatch):
    shutil.rmtree(run_dir / "snapshots")
    assert verify.verify(run_dir).snapshots == 0
    path = run_dir / trace.NAME
    path.write_bytes(path.read_bytes()[:-8])
    with pytest.raises(RunError, match=r"trace.safetensors: cannot be read"):
        verify.verify(run_dir)
    path.unlink()
    with pytest.raises(UsageError, match="neither a snapshot nor a trace"):
        verify.verify(run_dir)


def test_torchrun_is_refused(whole, monkeypatch):
    monkeypatch.setitem(os.environ, "RANK", "0")
    with pytest.raises(UsageError, match="start it without torchrun"):
        verify.verify(whole)


@pytest.mark.parametrize("planted", [False, True], ids=["the same", "another"])
def test_the_command_tells_and_exits(run_dir, capsys, monkeypatch, planted):
    if planted:
        flip(run_dir, 20, WEIGHT)
    monkeypatch.setattr("sys.argv", ["record_replay", f"--run={run_dir}", "--begin=10", "--end=30"])
    with pytest.raises(SystemExit) as stop:
        record_replay.main()
    assert stop.value.code == planted
    *lines, last = capsys.readouterr().out.splitlines()
    first = json.loads(last)["first"]
    if planted:
        assert lines[-2] == f"first at step 20 (update 3), by the snapshot: {WEIGHT}"
        assert first["leaf"] == WEIGHT
    else:
        assert lines == ["bit-identical from step 10 to 30: 2 snapshots and 11 recorded iterations"]
        assert first is None


def test_ranks_whose_gradients_went_by_peer_are_repeated_by_threads():
    """Which add in the same order, and between which nothing travels."""
    leg = repeat.Leg(0, float("inf"), {"dp_transport": "peer", "env_steps": 1_000_000}, {})
    config = repeat._config(leg, {"simulated_ranks": 2, "device": "cpu"})
    assert (config.simulated_ranks, config.dp_transport, config.env_steps) == (2, "nccl", 1_000_000)
    assert repeat._config(leg, {"device": "cpu"}).dp_transport == "peer"
