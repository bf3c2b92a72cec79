"""The README's Python, run as it stands."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest
import torch

from functional_sac import train
from functional_sac.config import TrainConfig
from functional_sac.presets import SMALL
from functional_sl.run import loading

README = Path(__file__).parents[1] / "README.md"
BLOCKS = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL) if README.exists() else []


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.skipif(not BLOCKS, reason="no README beside the tests")
@pytest.mark.parametrize("block", BLOCKS, ids=lambda block: block.split("\n", 1)[0])
def test_a_block_runs_twice(block: str) -> None:
    for _ in range(2):
        exec(compile(block, "README.md", "exec"), {})


@pytest.mark.skipif(not BLOCKS, reason="no README beside the tests")
def test_the_environment_of_the_readme_trains(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "my_tasks.py").write_text(next(block for block in BLOCKS if "def park" in block))
    small = {**SMALL, "task": "my_tasks:park", "env_steps": 1200, "eval_episodes": 2, "device": "cpu"}
    summary = train.run(TrainConfig(**small, run_dir=str(tmp_path / "run")))
    assert summary["updates"] == 51
    assert (tmp_path / "run" / "learning_curve.png").stat().st_size


@pytest.mark.skipif(not BLOCKS, reason="no README beside the tests")
def test_pictures_and_console_scripts_are_there() -> None:
    for page in (README, *README.parent.glob("*/README.md")):
        for picture in re.findall(r"!\[[^]]*\]\(([^)]+)\)", page.read_text()):
            assert (page.parent / picture).stat().st_size, f"{page} shows {picture}"
    scripts = tomllib.loads((README.parent / "pyproject.toml").read_text())["project"]["scripts"]
    for target in scripts.values():
        assert callable(loading.load(target))
