"""What a run was, iteration by iteration: eight bytes of every leaf's digest, and where they were computed.

    runs/pendulum-seed0-.../trace.safetensors
      digests    int64 [T, L], the first eight bytes of the SHA-256 of leaf l after recorded iteration t
      env_steps  int64 [T]
      updates    int64 [T]
      metadata   the leaves' names, the settings, the environment

Leaves have the names that they have in a snapshot, in the order in which an iteration computes them: what differs
first there is the cause of the rest.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import json
import os
import platform
from pathlib import Path
from typing import Any, NamedTuple

import safetensors.torch
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from functional_sac import replicas
from functional_sac.replicas import States
from functional_sl import tree
from functional_sl.run import files, identity, runlog

NAME = "trace.safetensors"
_FORMAT = 1
# A leaf's stage is the first part of its name that stands here, behind `run.rank0/` and the like.
_STAGES = (
    "key", "noise", "env", "observation", "done", "env_steps", "refused", "episodes", "replay", "scale", "sac",
    "actor", "temperature", "critic", "target", "updates", "metrics",
)  # fmt: skip
_EXTRAS = ("gymnasium", "mujoco", "mujoco-warp", "warp-lang")
# Numbers depend on these variables through the libraries that read them.
_VARIABLES = (
    "CUBLAS_WORKSPACE_CONFIG", "MKL_CBWR", "MKL_ENABLE_INSTRUCTIONS", "NVIDIA_TF32_OVERRIDE", "ONEDNN_MAX_CPU_ISA",
)  # fmt: skip


class Trace(NamedTuple):
    """Digests of a run's states.

    Attributes:
      about: JSON values: `run_id`, `every`, `whole` (the steps at which the replay was hashed whole), `settings` (the
        config by the step from which it held) and `environment`.
      names: of the L leaves.
      env_steps: [T] int64, rising.
      updates: [T] int64.
      digests: [T, L] int64.
    """

    about: dict[str, Any]
    names: tuple[str, ...]
    env_steps: Tensor
    updates: Tensor
    digests: Tensor


def leaves(values: dict[str, tree.Tree]) -> dict[str, Tensor]:
    """Returns the leaves of a snapshot's parts as `part/name`, in the order of their computation.

    The number under which live environments stand in one process is left out.
    """
    found = {f"{part}/{name}": leaf for part, value in values.items() for name, leaf in tree.named(value).items()}
    found = {name: leaf for name, leaf in found.items() if not name.endswith("/env/session")}
    return dict(sorted(found.items(), key=lambda item: _stage(item[0])))


def _stage(name: str) -> tuple[int, str]:
    part, _, rest = name.partition("/")
    head = "replay" if part.startswith("replay.") else rest.partition("/")[0]
    if part == "learner" and head in ("key", "scale"):
        head = "target"  # the loss scale moves with the updates; the name is that of the reward scale
    stage = _STAGES.index(head) if head in _STAGES else len(_STAGES)
    return stage, "" if part == "learner" else part


def digests(states: States, iterations: int | None) -> tuple[tuple[str, ...], list[int]]:
    """Returns the names of all leaves and the first eight bytes of their digests, as signed integers.

    Args:
      states: of all ranks.
      iterations: of the replay's rows, those of so many last iterations are hashed: all rows may be gigabytes.
        None hashes them whole.
    """
    if iterations is not None:
        states = tuple(state._replace(replay=_newest(state.replay, iterations)) for state in states)
    named = leaves(replicas.parts(states, range(len(states)), with_replay=True))
    found = [bytes.fromhex(tree.digest(leaf)[:16]) for leaf in named.values()]
    return tuple(named), [int.from_bytes(word, "big", signed=True) for word in found]


def _newest(replay: tree.Tree, iterations: int) -> tree.Tree:
    """Returns the replay with the rows of the last iterations alone; every seed of a run has a cursor of its own."""
    capacity, count = replay.rows.shape[-2], iterations * replay.window.shape[-2]
    back = torch.arange(-min(count, capacity), 0, device=replay.rows.device)
    slots = (replay.cursor.unsqueeze(-1) + back) % capacity
    return replay._replace(rows=torch.take_along_dim(replay.rows, slots.unsqueeze(-1), -2))


def write(run_dir: Path, trace: Trace) -> Path:
    """Writes the trace into the run's folder, whole or not at all, in place of an older one.

    Raises:
      RunError: if it cannot be written.
    """
    tensors = {"digests": trace.digests, "env_steps": trace.env_steps, "updates": trace.updates}
    about = json.dumps({"format": _FORMAT, "names": trace.names, **trace.about}, allow_nan=False)
    data, path = safetensors.torch.save(tensors, {"trace": about}), run_dir / NAME
    try:
        files.write_whole(path, data)
    except OSError as error:
        raise runlog.RunError(files.explain(error, path, len(data))) from error
    return path


def read(run_dir: Path) -> Trace | None:
    """Returns the trace of a run, or None where there is none.

    Raises:
      RunError: if it is damaged, of another format version, or of another run.
    """
    path = run_dir / NAME
    if not path.exists():
        return None
    try:
        with safe_open(path, framework="pt") as file:
            about = identity.parse((file.metadata() or {}).get("trace", "{}"))
            tensors = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118
    except (OSError, ValueError, SafetensorError) as error:
        raise runlog.RunError(f"{path}: cannot be read ({error}); record the run anew") from error
    if about.pop("format", None) != _FORMAT:
        raise runlog.RunError(f"{path}: is of another version; record the run anew")
    if about["run_id"] != (run_id := runlog.describe(run_dir)["run_id"]):
        raise runlog.RunError(f"{path}: is of run {about['run_id']}, but lies in run {run_id}; remove it")
    return Trace(names=tuple(about.pop("names")), about=about, **tensors)


def environment(device: torch.device) -> dict[str, str]:
    """Returns what decides over bits beside a run's settings: versions, code, processor, threads, variables."""
    found = {**identity.versions(), **_extras(), "code": _code(), "machine": platform.machine(), "cpu": processor()}
    found |= {"cpu capability": torch.backends.cpu.get_cpu_capability(), "threads": str(torch.get_num_threads())}
    if device.type == "cuda":
        found["device"] = torch.cuda.get_device_name(device)
        found |= {"cuda": str(torch.version.cuda), "cudnn": str(torch.backends.cudnn.version())}
    else:
        found["device"] = device.type
    return found | {name: os.environ[name] for name in _VARIABLES if name in os.environ}


@functools.cache
def processor() -> str:
    """Returns the CPU's name: libraries choose their kernels by it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "unknown")


def _extras() -> dict[str, str]:
    found = {}
    for library in _EXTRAS:
        try:
            found[library] = importlib.metadata.version(library)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


@functools.cache
def _code() -> str:
    """Returns a digest of this project's source: two states of one version may compute other bits."""
    root, sha = Path(__file__).parents[2], hashlib.sha256()
    for package in ("functional_sl", "functional_sac"):
        for path in sorted((root / package).rglob("*.py")):
            sha.update(f"{path.relative_to(root).as_posix()}\n".encode() + path.read_bytes())
    return sha.hexdigest()[:16]
