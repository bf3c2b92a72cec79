"""K11: what imports, commands and missing packages do before anything runs."""

from __future__ import annotations

import json
import os
import pkgutil
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import functional_sac
import functional_sl

ROOT = Path(functional_sac.__file__).parent.parent
COMMANDS = [
    "functional_sac.train", "functional_sac.play", "functional_sac.export", "functional_sac.cuda_mps",
    "functional_sl.train", "functional_sl.export", "functional_sl.report",
]  # fmt: skip
MODULES = sorted(
    module.name
    for package in (functional_sl, functional_sac)
    for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}.")
)


def python(code: str, cwd: Path, path: Path = ROOT, check: bool = True) -> subprocess.CompletedProcess:
    env = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, (str(path), os.environ.get("PYTHONPATH")))),
        "OMP_NUM_THREADS": "1",
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    done = subprocess.run([sys.executable, "-c", code], cwd=cwd, env=env, capture_output=True, text=True)
    assert not check or done.returncode == 0, done.stderr
    return done


def test_help_and_a_misspelt_flag_of_every_command_wait_for_nothing(tmp_path):
    """Neither loads torch or writes a file; the answer to a wrong name is one line with the near one."""
    code = f"""
import contextlib, importlib, io, json, sys
found = {{}}
for name in {COMMANDS}:
    module, answers = importlib.import_module(name), []
    for flag in ("--help", "--hepl"):
        out, err = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            try:
                sys.argv = [name, flag]
                module.main()
                code = 0
            except SystemExit as end:
                code = end.code
        answers.append([code, out.getvalue(), err.getvalue()])
    found[name] = answers
heavy = sorted({{"torch", "jax", "chex", "numpy", "matplotlib", "tensorboard", "gymnasium"}} & sys.modules.keys())
print(json.dumps([found, heavy]))
"""
    found, heavy = json.loads(python(code, tmp_path).stdout)
    assert heavy == []
    assert [*tmp_path.iterdir()] == []
    for name, (shown, wrong) in found.items():
        assert (shown[0], shown[2]) == (0, ""), name
        assert "--help" in shown[1]
        assert (wrong[0], wrong[1], wrong[2].count("\n")) == (2, "", 1), (name, wrong)
        assert "--hepl" in wrong[2]
        assert "did you mean --help" in wrong[2], (name, wrong)


LOADED = f"""
import importlib, json, os, random, signal, sys, threading, warnings
import chex, matplotlib, numpy, torch
from absl import flags

def seen():
    return {{
        "flags": sorted(flags.FLAGS), "threads": threading.active_count(), "files": sorted(os.listdir()),
        "tasks": len(os.listdir("/proc/self/task")), "environment": dict(os.environ),
        "cuda": torch.cuda.is_initialized(), "dtype": str(torch.get_default_dtype()),
        "deterministic": torch.are_deterministic_algorithms_enabled(), "grad": torch.is_grad_enabled(),
        "generators": [torch.initial_seed(), str(random.getstate())[:99], str(numpy.random.get_state())[:99]],
        "handlers": [str(signal.getsignal(s)) for s in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)],
        "children": open(f"/proc/self/task/{{os.getpid()}}/children").read(), "dpi": matplotlib.rcParams["figure.dpi"],
        "float32": torch.get_float32_matmul_precision(), "torch threads": torch.get_num_threads(),
    }}

def load():
    for name in {MODULES}:
        try:
            importlib.import_module(name)
        except ModuleNotFoundError as error:
            assert error.name.split(".")[0] not in ("functional_sl", "functional_sac"), (name, error)
        except ValueError as error:
            assert "pip install" in str(error), (name, error)
"""

AGAIN = """
before = seen()
load()
after = seen()
mine = [name for name in sys.modules if name.split(".")[0] in ("functional_sl", "functional_sac")]
for name in mine:
    importlib.reload(sys.modules[name])
for name in mine:
    del sys.modules[name]
load()
print(json.dumps([before, after, seen()]))
"""


def test_imports_have_no_effect_and_may_be_repeated(tmp_path):
    """As a notebook does: all modules, then all of them reloaded, then all of them imported anew."""
    before, after, again = json.loads(python(LOADED + AGAIN, tmp_path).stdout)
    # What packages of others set for themselves is there after the first import.
    assert after == again
    for name in set(before) - {"environment", "tasks"}:
        assert before[name] == after[name], name


MISSING = {
    "gymnasium": ("from functional_sac import envs; envs.make('Hopper-v5')", ".[mujoco]"),
    "mujoco": ("from functional_sac import envs; envs.make('Hopper-v5')", ".[mujoco]"),
}


@pytest.mark.parametrize("package", MISSING)
def test_a_missing_extra_is_one_sentence_with_its_remedy(tmp_path, package):
    if package != "gymnasium":
        pytest.importorskip("gymnasium")
    call, remedy = MISSING[package]
    caught = "except (ValueError, ModuleNotFoundError) as error:\n    print(error)"
    code = f"import sys; sys.modules[{package!r}] = None\ntry:\n    {call}\n{caught}"
    (line,) = python(code, tmp_path).stdout.splitlines()
    assert f"pip install '{remedy}' in the checkout" in line


@pytest.mark.slow
def test_the_wheel_trains_plays_and_exports_without_extras(tmp_path):
    """Built and installed elsewhere, run from `/`; every optional package fails to import."""
    source = shutil.copytree(ROOT, tmp_path / "source", ignore=shutil.ignore_patterns(".*", "runs", "build", "tests"))
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "-q"]
    subprocess.run([*pip, "wheel", "--no-deps", "--no-build-isolation", "-w", tmp_path, source], check=True)
    (wheel,) = tmp_path.glob("*.whl")
    site = tmp_path / "site"
    subprocess.run([*pip, "install", "--no-deps", "--target", site, wheel], check=True)
    shutil.rmtree(source)
    for name in ("mujoco", "gymnasium", "warp", "h5py", "onnx", "onnxscript", "pytest"):
        (site / f"{name}.py").write_text(f"raise ImportError('no {name} here')\n")
    env = {**os.environ, "PYTHONPATH": str(site), "OMP_NUM_THREADS": "1"}

    def command(module: str, *argv: str) -> dict:
        line = [sys.executable, "-m", module, *argv]
        done = subprocess.run(line, cwd="/", env=env, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout.splitlines()[-1])

    trained = command("functional_sac.train", f"--run_dir={tmp_path}/run", "--env_steps=1200", "--device=cpu")
    assert trained["updates"] == 51
    assert len(command("functional_sac.play", f"{tmp_path}/run", "--episodes=2")["returns"]) == 2
    assert len(command("functional_sac.export", f"{tmp_path}/run", f"{tmp_path}/policy")["files"]) == 2
