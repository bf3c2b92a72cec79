"""Who may import whom: the floor never imports upward, edges go by a table, and reading settings stays cheap."""

from __future__ import annotations

import ast
import graphlib
import importlib
import pathlib
import subprocess
import sys

import pytest

import functional_sl

# Where the packages lie: a checkout, or an environment in which they are installed.
ROOT = pathlib.Path(functional_sl.__file__).parent.parent
PACKAGES = ("functional_sl", "functional_sac")

# A room is a module or a folder of a package; each may import the rooms that stand behind it, and itself.
SL = {
    "tree": "",
    "kernels": "tree",
    "threefry_kernels": "",
    "threefry": "kernels threefry_kernels",
    "keys": "threefry",
    "schedules": "",
    "gate": "",
    "wire": "tree",
    "loss_scale": "",
    "streams": "",
    "capture": "streams tree",
    "sim": "",
    "motions": "run sim tree",
    "optim": "tree schedules",
    "parallel": "capture kernels tree wire",
    "packing_kernels": "kernels",
    "packing": "kernels packing_kernels tree wire",
    "step": "tree wire gate optim packing parallel",
    "run": "parallel tree",
    "report": "bundle inspection run",
    "bundle": "run tree",
    "programs": "bundle run",
    "recipe": "bundle run step tree",
    "models": "keys tree",
    "sources": "keys models run sim tree",
    "recipes": "bundle data keys models recipe run sources step tree",
    "inspection": "run sources",
    "data": "keys tree",
    "training": "capture gate keys loss_scale optim parallel recipe run schedules step tree wire",
    "train": "parallel run training",
    "export": "keys programs run training",
}
# What stands before the bar is of functional_sac, behind it of functional_sl.
SAC = {
    "presets": "config",
    "transition": "",
    "distributions": "",
    "value": "",
    "reward_scale": "| parallel",
    "config": "tasks | run",
    "environment": "config envs tasks | run",
    "plan": "config",
    "padding": "",
    "networks": "padding | keys tree",
    "noise": "| keys",
    "tasks": "transition | motions sim",
    "envs": "tasks transition | keys run sim sources tree wire",
    "replay": "envs transition | keys",
    "acting": "networks | keys",
    "losses": "config distributions networks transition value | step tree",
    "fused": "distributions losses networks padding replay transition value | kernels optim step streams tree wire",
    "updates": "config distributions envs fused losses networks transition | "
    "gate keys loss_scale optim parallel schedules step tree",
    "foresight": "fused updates | step streams",
    "cycle": "config distributions envs foresight fused losses networks replay reward_scale transition updates | "
    "capture kernels keys parallel schedules step tree",
    "iteration": "acting config cycle envs losses noise replay reward_scale transition updates | keys parallel streams",
    "hosted": "envs iteration | capture tree",
    "replicas": "config iteration updates | parallel tree",
    "evaluation": "acting envs networks transition | capture tree",
    "reporting": "acting envs evaluation iteration reward_scale | run schedules",
    "request": "config | run",
    "restoring": "config envs iteration plan replicas updates | capture run tree",
    "compiling": "config envs hosted iteration plan replicas | capture parallel tree",
    "opening": "compiling config cycle environment envs iteration plan replicas request restoring | "
    "keys parallel run tree wire",
    "replaying": "config envs opening plan replicas request | run tree",
    "loop": "config environment envs evaluation iteration opening plan reporting request | keys parallel run tree",
    "mps": "| run",
    "cuda_mps": "mps | run",
    "launch": "mps",
    "train": "config launch loop mps presets | parallel run",
    "policy": "acting networks | tree",
    "trained": "acting config environment envs networks policy tasks | bundle keys run tree",
    "playing": "environment envs evaluation reporting trained transition | keys run tree",
    "play": "playing | run",
    "export": "trained | programs run",
}


def sources() -> dict[str, pathlib.Path]:
    found = {}
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            name = ".".join(path.relative_to(ROOT).with_suffix("").parts)
            found[name.removesuffix(".__init__")] = path
    return found


MODULES = sources()


def imported(path: pathlib.Path) -> set[str]:
    """Returns the dotted names that a file imports anywhere, down to the submodule where it names one."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: imports are absolute"
            for alias in node.names:
                full = f"{node.module}.{alias.name}"
                names.add(full if full in MODULES else node.module)
    return names


def room(module: str) -> str:
    return ".".join(module.split(".")[:2])


def allowed() -> dict[str, set[str]]:
    table = {f"functional_sl.{name}": {f"functional_sl.{x}" for x in rest.split()} for name, rest in SL.items()}
    for name, rest in SAC.items():
        own, _, floor = rest.partition("|")
        table[f"functional_sac.{name}"] = {
            *(f"functional_sac.{x}" for x in own.split()),
            *(f"functional_sl.{x}" for x in floor.split()),
        }
    return table


def test_no_package_imports_upward() -> None:
    for module, path in MODULES.items():
        roots = {name.split(".")[0] for name in imported(path)}
        above = {"experiments", "tests"} | ({"functional_sac"} if module.startswith("functional_sl") else set())
        assert not roots & above, f"{module} imports {roots & above}"


def test_every_edge_is_in_the_table() -> None:
    table = allowed()
    for module, path in MODULES.items():
        if module in PACKAGES:
            assert not {x for x in imported(path) if x.split(".")[0] in PACKAGES}, f"{module} is no longer lazy"
            continue
        assert room(module) in table, f"{module}: enter its room and what it may import into tests/test_imports.py"
        edges = {room(x) for x in imported(path) if x.split(".")[0] in PACKAGES} - {room(module)}
        extra = edges - table[room(module)]
        assert not extra, f"{module} imports {', '.join(sorted(extra))}, which its room may not"


def test_the_table_has_no_cycle_and_no_empty_room() -> None:
    order = [*graphlib.TopologicalSorter(allowed()).static_order()]
    missing = {name for name in order if name not in {room(module) for module in MODULES}}
    assert not missing, f"the table names rooms that do not exist: {missing}"


def test_modules_have_no_cycle() -> None:
    """Imports inside functions count too."""
    graph = {module: {x for x in imported(path) if x in MODULES} - {module} for module, path in MODULES.items()}
    graphlib.TopologicalSorter(graph).prepare()


@pytest.mark.parametrize("package", PACKAGES)
def test_a_package_lists_all_of_its_rooms(package: str) -> None:
    """But for the kernels of a room, which need Triton."""
    rooms = {room(module).split(".")[1] for module in MODULES if module.startswith(f"{package}.")}
    listed = dir(importlib.import_module(package))
    assert listed == sorted(name for name in rooms if not name.endswith("_kernels"))


def python(code: str) -> str:
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT, timeout=120
    ).stdout


@pytest.mark.parametrize(
    "module", ["functional_sac.train", "functional_sac.config", "functional_sac.presets", "functional_sl.train"]
)
def test_settings_are_read_without_torch(module: str) -> None:
    """`--help` waits for neither torch nor jax."""
    heavy = ["torch", "jax", "jaxlib", "chex", "optree", "numpy", "matplotlib", "safetensors", "tensorboard"]
    found = python(f"import sys, {module}; print([x for x in {heavy} if x in sys.modules])")
    assert found.strip() == "[]"


def test_importing_everything_defines_no_flag_and_no_default() -> None:
    """A module whose optional dependency is not installed is passed over."""
    code = f"""
import importlib, sys
from absl import flags
for name in {sorted(MODULES)}:
    try:
        importlib.import_module(name)
    except ModuleNotFoundError as error:
        assert error.name.split(".")[0] not in {PACKAGES}, error
import torch
owners = [m for m in flags.FLAGS.flags_by_module_dict() if m.startswith({PACKAGES})]
print(owners, torch.get_default_dtype(), torch.are_deterministic_algorithms_enabled(), torch.cuda.is_initialized())
"""
    assert python(code).split() == ["[]", "torch.float32", "False", "False"]
