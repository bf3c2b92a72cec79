"""Two ranks as torchrun starts them: on two GPUs whose order is turned round where there are two, else by Gloo.

Twelve updates straight equal six, a rank that dies by force, and a resume; and either layout of a snapshot gives the
same bundle.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import tiny_training
import torch
from equal import assert_bits_equal

from functional_sl import bundle, export

ROOT = Path(__file__).parents[3]
GPUS = torch.cuda.device_count()
# Three or more GPUs: entries that are not neighbours. Two: the second one first.
DEVICES = ",".join(str(i) for i in ((2, 0) if GPUS > 2 else (1, 0)))
ON = [
    "cpu",
    pytest.param("cuda", marks=pytest.mark.skipif(GPUS < 2, reason="needs two GPUs")),
]
NERD = {
    "recipe": "functional_sl.recipes.nerd:build", "trajectories": 4, "validation_trajectories": 2, "width": 8,
    "layers": 1, "heads": 2, "history": 3, "evaluation_trajectories": 2, "horizons": "5", "batch_size": 4,
    "learning_rate": 1e-3,
}  # fmt: skip


def command(device: str, ranks: int, *argv: str, **flags: object) -> list[str]:
    """Returns a training command of one process or of torchrun's."""
    launch = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"] if ranks > 1 else []
    values = [f"--{name}={value}" for name, value in {"device": device, **flags}.items()]
    return [sys.executable, *launch, "-m", "functional_sl.train", *values, *argv]


def environment(device: str) -> dict[str, str]:
    """Returns the variables of a child: one thread, this checkout, the GPUs in their order."""
    found = {**os.environ, "OMP_NUM_THREADS": "1"}
    found["PYTHONPATH"] = os.pathsep.join(filter(None, (str(ROOT), str(ROOT / "tests"), found.get("PYTHONPATH"))))
    return found | ({"CUDA_VISIBLE_DEVICES": DEVICES} if device == "cuda" else {})


def run(device: str, ranks: int, *argv: str, **flags: object) -> dict:
    """Runs a training to its end and returns its last line."""
    line = command(device, ranks, *argv, **flags)
    done = subprocess.run(line, env=environment(device), capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def kill_a_rank(device: str, folder: Path, **flags: object) -> None:
    """Starts two ranks and kills rank 1 by force once a snapshot of six updates is there."""
    line = command(device, 2, **flags, run_dir=folder)
    with subprocess.Popen(
        line, env=environment(device), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as parent:
        try:
            while not (folder / "snapshots" / "step_000000000006" / "manifest.json").exists():
                assert parent.poll() is None, parent.stderr.read()[-3000:]
            victim = next(
                pid for pid in children(parent.pid) if b"RANK=1\0" in Path(f"/proc/{pid}/environ").read_bytes()
            )
            os.kill(victim, signal.SIGKILL)
            parent.communicate(timeout=60)
        finally:
            parent.kill()
    assert parent.returncode != 0


def children(pid: int) -> list[int]:
    """Returns the processes that a process has started."""
    listed = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [int(child) for child in listed]


@pytest.mark.slow
@pytest.mark.parametrize("device", ON)
def test_a_rank_killed_by_force_changes_nothing(tmp_path: Path, device: str) -> None:
    flags = {
        **NERD,
        "snapshot_every": 2,
        "validate_every": 2,
        "compile": "false",
        "timeout_s": 30,
        "lr_schedule": "constant",
    }
    run(device, 2, **flags, updates=12, run_dir=tmp_path / "straight")
    # Long enough to be killed in; a constant rate does not know the length.
    kill_a_rank(device, tmp_path / "broken", **flags, updates=100_000)
    kept = max(tiny_training.steps(tmp_path / "broken"))
    run(device, 2, f"--resume={tmp_path / 'broken' / 'snapshots' / 'step_000000000006'}", updates=12)
    assert kept >= 6
    straight, broken = tmp_path / "straight", tmp_path / "broken"
    assert_bits_equal(tiny_training.state(straight, 12), tiny_training.state(broken, 12))
    assert tiny_training.records(straight) == tiny_training.records(broken)


@pytest.mark.slow
@pytest.mark.parametrize("device", ON)
def test_either_layout_exports_the_same_bundle(tmp_path: Path, device: str) -> None:
    flags = {**NERD, "compile": "false", "snapshot_every": 2, "validate_every": 2}
    run(device, 2, **flags, updates=4, run_dir=tmp_path / "two")
    source = tiny_training.snapshot(tmp_path / "two")
    run(device, 1, f"--init_from={source}", **flags | {"learning_rate": 1e-30}, updates=1, run_dir=tmp_path / "one")
    assert [tiny_training.manifest(tmp_path / name)["extra"]["layout"] for name in ("two", "one")] == [2, 1]
    found = []
    for name in ("two", "one"):
        export.export(tiny_training.snapshot(tmp_path / name), tmp_path / f"{name}_model")
        found.append(bundle.load(tmp_path / f"{name}_model.safetensors").bundle)
    assert_bits_equal(found[0].tensors, found[1].tensors)
    assert {**found[0].about, "trained": None} == {**found[1].about, "trained": None}
