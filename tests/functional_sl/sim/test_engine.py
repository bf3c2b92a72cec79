"""Where MuJoCo does not start, every way in says so in one line."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("mujoco")
ROOT = Path(__file__).parents[3]
UNFIT = "which does not start with MUJOCO_GL='no such' (RuntimeError: "
ROBOT = "from functional_sl.sim.robots import g1"
DATA = "from functional_sl.sources import mujoco_worlds; mujoco_worlds.require()"
TASK = """
from functional_sac import environment
from functional_sac.config import TrainConfig
environment.make(TrainConfig(task="g1_motion_tracking", sim="mujoco"))
"""


@pytest.mark.parametrize(
    ("program", "error"),
    [
        (ROBOT, "ImportError: robots need MuJoCo, "),
        (DATA, "ImportError: this robot's data come from MuJoCo, "),
        (TASK, "UsageError: --task=g1_motion_tracking --sim=mujoco: robots need MuJoCo, "),
    ],
)
def test_an_unfit_choice_of_opengl_is_one_line_with_the_remedy(program: str, error: str) -> None:
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    variables = {**os.environ, "MUJOCO_GL": "no such", "PYTHONPATH": path}
    done = subprocess.run([sys.executable, "-c", program], env=variables, capture_output=True, text=True, check=False)
    last = done.stderr.splitlines()[-1]
    assert done.returncode == 1
    assert error in last
    assert UNFIT in last
    assert last.endswith(": unset MUJOCO_GL, or install the OpenGL library that it names")
