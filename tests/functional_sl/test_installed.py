"""The wheel, installed elsewhere: two ranks train, are killed and recover, where MuJoCo cannot be imported."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import tiny_training
from equal import assert_bits_equal

ROOT = Path(__file__).parents[2]
ARGUMENTS = ["--recipe=my_tasks:line", "--device=cpu", "--updates=400", "--snapshot_every=20", "--validate_every=100"]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the installed wheel, a third party's task, and a `mujoco` that fails."""
    home = tmp_path_factory.mktemp("site")
    source = shutil.copytree(ROOT, home / "source", ignore=shutil.ignore_patterns(".*", "runs", "build", "tests"))
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "-q"]
    subprocess.run([*pip, "wheel", "--no-deps", "--no-build-isolation", "-w", home, source], check=True)
    (wheel,) = home.glob("*.whl")
    subprocess.run([*pip, "install", "--no-deps", "--target", home / "packages", wheel], check=True)
    shutil.rmtree(source)
    shutil.copy(ROOT / "tests" / "tiny_recipes.py", home / "packages" / "my_tasks.py")
    (home / "packages" / "mujoco.py").write_text("raise ImportError('no MuJoCo here')\n")
    return home / "packages"


def start(site: Path, cwd: Path, *argv: str) -> subprocess.Popen:
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    env = {**os.environ, "PYTHONPATH": str(site), "OMP_NUM_THREADS": "1"}
    command = [*launch, "-m", "functional_sl.train", *argv]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen(command, cwd=cwd, env=env, start_new_session=True, **pipes)


def ended(process: subprocess.Popen) -> tuple[int, str, str]:
    out, err = process.communicate(timeout=240)
    return process.returncode, out, err


@pytest.mark.slow
def test_two_ranks_of_the_wheel_recover(site, tmp_path):
    code, out, err = ended(start(site, tmp_path, *ARGUMENTS, "--run_dir=straight"))
    assert code == 0, err
    assert json.loads(out)["updates"] == 400
    process = start(site, tmp_path, *ARGUMENTS, "--run_dir=broken")
    while not list((tmp_path / "broken" / "snapshots").glob("step_*/manifest.json")):
        assert process.poll() is None
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()
    code, out, err = ended(start(site, tmp_path, "--resume=broken"))
    assert code == 0, err
    assert json.loads(out)["updates"] == 400
    assert_bits_equal(tiny_training.state(tmp_path / "broken"), tiny_training.state(tmp_path / "straight"))
    assert tiny_training.records(tmp_path / "broken") == tiny_training.records(tmp_path / "straight")
