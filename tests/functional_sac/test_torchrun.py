"""Real command lines of torchrun: two ranks, two nodes, and a process that is lost."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import tiny_runs
import torch
from equal import assert_bits_equal

ROOT = Path(__file__).parents[2]
# 30 vector steps of 2 ranks with 2 environments each: 23 cycles. 16 units make groups that BF16 narrows.
SIZES = {"env_steps": 120, "actor_width": 16, "critic_width": 16, "log_every": 20, "eval_every": 40}
SIZES |= {"snapshot_every": 40, "tensorboard": False, "timeout_s": 30}


def equal_runs(first: Path, second: Path) -> None:
    assert_bits_equal(tiny_runs.state(first), tiny_runs.state(second))
    assert tiny_runs.records(first) == tiny_runs.records(second)


def torchrun(cwd: Path, *more: str, nodes: tuple[str, ...] = (), argv: list[str] = ()) -> subprocess.Popen:
    launch = [sys.executable, "-m", "torch.distributed.run", *(nodes or ("--standalone",)), *more]
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    env = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    command = [*launch, "-m", "functional_sac.train", *argv]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen(command, cwd=cwd, env=env, start_new_session=True, **pipes)


def ended(process: subprocess.Popen, timeout: float = 240) -> tuple[int, str, str]:
    try:
        out, err = process.communicate(timeout=timeout)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    return process.returncode, out, err


@pytest.mark.slow
def test_a_command_line_of_two_ranks_learns_end_to_end(tmp_path):
    argv = ["--run_dir=run", "--env_steps=8000", "--num_envs=2", "--learning_starts=400", "--eval_episodes=10"]
    code, out, err = ended(torchrun(tmp_path, "--nproc-per-node=2", argv=argv))
    assert code == 0, err
    (line,) = out.splitlines()
    summary = json.loads(line)
    # 2000 vector steps of 4; each rank has 400 rows after 200 of them.
    assert (summary["env_steps"], summary["updates"]) == (8000, 1801)
    assert (tmp_path / "run" / "policy.gif").exists()
    first, *_, last = (r["eval_return_mean"] for r in tiny_runs.records(tmp_path / "run") if "eval_return_mean" in r)
    assert last > first + 500


@pytest.mark.slow
def test_two_nodes_equal_two_ranks_of_one(tmp_path):
    with dist_port() as port:
        nodes = [("--nnodes=2", f"--node-rank={n}", "--master-addr=127.0.0.1", f"--master-port={port}") for n in (0, 1)]
    argv = [*tiny_runs.flags(**SIZES), "--run_dir=run"]
    ranks = [torchrun(tmp_path, "--nproc-per-node=1", nodes=node, argv=argv) for node in nodes]
    (code, out, err), (other, silent, _) = [ended(process) for process in ranks]
    assert (code, other, silent) == (0, 0, ""), err
    assert json.loads(out)["env_steps"] == 120
    one = torchrun(tmp_path, "--nproc-per-node=2", argv=[*argv[:-1], "--run_dir=one"])
    assert ended(one)[0] == 0
    equal_runs(tmp_path / "run", tmp_path / "one")


@contextlib.contextmanager
def dist_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    yield port


two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=two_gpus)])
def test_a_lost_process_ends_the_job_and_a_resume_finishes_it(tmp_path, number, device):
    """A stopped process is torchrun's to kill, 30 s after the watchdog of rank 0 has ended it.

    On two GPUs the rank is lost inside a replayed graph.
    """
    lengths = {"env_steps": 200_000, "snapshot_every": 400, "eval_every": 200_000, "log_every": 100, "timeout_s": 5}
    # Compiling may take ten times the timeout.
    lengths |= {"device": device, "compile": "true", "timeout_s": 20} if device == "cuda" else {"compile": "false"}
    argv = [*tiny_runs.flags(**SIZES | lengths), "--run_dir=run"]
    process = torchrun(tmp_path, "--nproc-per-node=2", argv=argv)
    metrics = tmp_path / "run" / "metrics.jsonl"
    while not (metrics.exists() and metrics.read_bytes().count(b"\n") > 10):
        if process.poll() is not None:
            pytest.fail(ended(process)[2])
    os.kill(rank_process(process.pid, 1), number)
    code, out, err = ended(process, timeout=120)
    assert code != 0
    assert out == ""
    assert re.search(r"rank 1 no longer answers; its last completed iteration is \d+", err)
    (step,) = {tiny_runs.steps(tmp_path / "run")[-1]}
    again = torchrun(tmp_path, "--nproc-per-node=2", argv=["--resume=run", f"--env_steps={step + 400}"])
    code, out, err = ended(again)
    assert (code, json.loads(out)["env_steps"]) == (0, step + 400), err


def rank_process(agent: int, rank: int) -> int:
    """Returns the process of a rank that the agent has started."""
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            parent = int((path / "stat").read_text().rpartition(")")[2].split()[1])
            if parent == agent and f"\0RANK={rank}\0" in f"\0{(path / 'environ').read_text()}":
                return int(path.name)
    raise AssertionError(f"no rank {rank} under {agent}")
