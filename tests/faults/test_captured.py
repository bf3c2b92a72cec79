"""K2 and K9 on a GPU: a captured cycle draws anew at every replay, and its graphs end with their run."""

from __future__ import annotations

import gc
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import tiny_runs
import torch
from equal import assert_bits_equal
from torch import Tensor

import functional_sac
from functional_sac import cycle, replay, reward_scale
from functional_sac.config import SACConfig
from functional_sac.envs.env import EnvSpec
from functional_sl import capture, keys, tree
from functional_sl.run import snapshot
from functional_sl.run.manifest import SnapshotError

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
ROOT = Path(functional_sac.__file__).parent.parent
SPEC = EnvSpec("planted", actor_dim=3, critic_dim=0, action_dim=2, max_episode_steps=10, control_dt=0.1)
CONFIG = SACConfig(
    batch_size=16, updates_per_step=6, actor_width=8, critic_width=8, num_blocks=1, bins=11, replay_capacity=64,
    learning_starts=64, lr_decay_updates=100,
)  # fmt: skip


def test_three_replays_of_six_updates_draw_eighteen_batches(monkeypatch):
    """The rows are written down inside the graph; an eager run from the same key draws the same."""
    drawn, original = torch.zeros(96, dtype=torch.int64, device="cuda"), replay.indices

    def record(buffer: replay.ReplayState, key: Tensor, shape: tuple[int, ...]) -> Tensor:
        rows = original(buffer, key, shape)
        drawn.copy_(rows)
        return rows

    monkeypatch.setattr(replay, "indices", record)
    learner = cycle.make_learner(CONFIG, SPEC)
    buffer = replay.init(replay.fields(SPEC), 64, 1, device="cuda")
    rows = keys.normal(keys.key(1, "cuda"), tuple(buffer.rows.shape))
    buffer = buffer._replace(rows=rows, size=torch.full_like(buffer.size, 64))
    state = (learner.init(keys.key(0, "cuda")), buffer, reward_scale.init(1, device="cuda"))

    def learn(state: tuple) -> tuple[tuple, dict]:
        sac, metrics = learner.cycle(*state, 0)
        return (sac, *state[1:]), metrics

    runs = []
    with torch.no_grad():
        for run in (capture.Captured(learn), capture.Eager(learn)):
            batches, walked = [], tree.clone(state)
            for _ in range(3):
                walked, _ = run(walked)
                batches += [tuple(sorted(batch)) for batch in drawn.reshape(6, 16).tolist()]
            runs.append((batches, tree.clone(walked)))
            run.close()
    (captured, after), (eager, expected) = runs
    assert captured == eager
    assert len(set(captured)) == 18
    assert_bits_equal(after, expected)


def test_runs_in_one_process_leave_no_memory_behind(tmp_path, monkeypatch):
    """A whole run, one that fails between two replays, and a whole one again: within 1 % of the memory of the first."""

    def train(name: str) -> int:
        tiny_runs.run(tmp_path / name, device="cuda", compile="true", tensorboard=False)
        return settled()

    def settled() -> int:
        gc.collect()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        return torch.cuda.memory_reserved()

    def fail(*args: object) -> None:
        raise SnapshotError("the disk is off")

    with tiny_runs.prepared():
        first = train("first")
        with monkeypatch.context() as patch:
            patch.setattr(snapshot, "write_part", fail)
            with pytest.raises(SnapshotError, match="the disk is off"):
                train("failed")
        assert settled() <= 1.01 * first
        assert train("second") <= 1.01 * first
    assert_bits_equal(tiny_runs.state(tmp_path / "second"), tiny_runs.state(tmp_path / "first"))


def command(cwd: Path, *, rank: bool, **changes: int) -> subprocess.Popen:
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=1"] if rank else []
    env = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH")))),
        "OMP_NUM_THREADS": "1",
    }
    sizes = tiny_runs.flags(device="cuda", compile="true", tensorboard=False, run_dir="run", **changes)
    line = [sys.executable, *launch, "-m", "functional_sac.train", *sizes]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen(line, cwd=cwd, env=env, **pipes)


@pytest.mark.parametrize("rank", [False, True], ids=["one process", "torchrun, NCCL"])
def test_a_process_ends_with_its_last_line(tmp_path, rank):
    """20 s from the summary to the exit, with a graph that holds collectives or none."""
    with command(tmp_path, rank=rank) as process:
        line = process.stdout.readline()
        try:
            out, err = process.communicate(timeout=20)
        finally:
            process.kill()
    assert (process.returncode, out) == (0, ""), err
    assert json.loads(line)["updates"] == 23


def test_an_interrupt_among_replays_ends_the_process_in_good_order(tmp_path):
    metrics = tmp_path / "run" / "metrics.jsonl"
    lengths = {"env_steps": 2_000_000, "eval_every": 2_000_000, "snapshot_every": 1_000_000, "log_every": 100}
    with command(tmp_path, rank=False, **lengths) as process:
        try:
            while not (metrics.exists() and metrics.read_bytes().count(b"\n") > 10):
                assert process.poll() is None, process.stderr.read()
            process.send_signal(signal.SIGINT)
            out, err = process.communicate(timeout=20)
        finally:
            process.kill()
    assert process.returncode == 130, err
    assert json.loads(out)["stopped"] == "SIGINT"
    assert len(tiny_runs.steps(tmp_path / "run")) == 1
