"""What a supervised run needs to go on exactly, how it reaches rank 0, and how it comes back.

A snapshot has the parts

    params      the parameters                                             once
    optimizer   optimizer, gate, loss scale, counts                        once
    buffers     the recipe's buffers                                       of every rank
    control     key, cursor, sums since the last record, host generators   of every rank

One process without torchrun writes layout 1, whose parts have these names; torchrun writes layout 2, where the
parts of rank r are called `buffers.rank<r>` and `control.rank<r>`. Both are read.

The ranks meet once, in `commit`: each brings its buffers and control state to rank 0 as bytes, O(ranks * largest
rank state), without parameters, optimizer or data. From then on rank 0 alone can save the boundary, as often as it
likes, while the others wait.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch

from functional_sl import tree
from functional_sl.loss_scale import LossScaleState
from functional_sl.parallel.buffers import gather_bytes
from functional_sl.parallel.world import World
from functional_sl.run import identity, manifest, runlog, snapshot
from functional_sl.run.cli import UsageError
from functional_sl.step import StepState
from functional_sl.training import generators
from functional_sl.training.generators import Generators
from functional_sl.training.update import Own, TrainState
from functional_sl.tree import Tree

_METRICS = "metrics.jsonl"
_SHARED, _PER_RANK = ("params", "optimizer"), ("buffers", "control")


class Control(NamedTuple):
    """What a rank needs beside its buffers to go on with its streams."""

    own: Own
    host: Generators


class Optimizer(NamedTuple):
    """What all ranks share beside the parameters."""

    step: StepState  # its optimizer and gate
    scale: LossScaleState | tuple[()]
    updates: torch.Tensor
    valid: torch.Tensor
    empty_at: torch.Tensor


@dataclasses.dataclass(frozen=True)
class Identity:
    """What must be the same for a snapshot to fit."""

    layout: int  # 1: one process, 2: torchrun
    ranks: int
    schema: str  # digest of the recipe's schema
    data: tuple[str, ...]  # digest of every rank's data


class Boundary(NamedTuple):
    """A moment of the run at which all ranks have brought together what is theirs."""

    updates: int
    state: TrainState  # of this rank
    ranks: tuple[bytes, ...]  # of every rank, on rank 0; empty elsewhere


def commit(world: World, state: TrainState, updates: int) -> Boundary:
    """Brings every rank's buffers and control state to rank 0; all ranks call it at the same update.

    Raises:
      RankError: if a rank cannot be reached.
    """
    return Boundary(updates, state, gather_bytes(world, _bytes(_own_parts(state, world.device))))


def save(
    run_dir: Path,
    boundary: Boundary,
    fitting: Identity,
    *,
    run_id: str,
    config: Mapping[str, Any],
    score: float | None,
    keep: int,
    protect: frozenset[int],
    counts: Mapping[str, int],
) -> Path:
    """Writes the snapshot of a boundary, on rank 0 alone and without the others.

    Args:
      run_dir: the run's folder; its metrics are durable and their present end belongs to the snapshot.
      boundary: committed, and no update has been taken since.
      fitting: of the run.
      run_id: as `functional_sl.run.snapshot.save`.
      config: likewise.
      score: likewise.
      keep: likewise.
      protect: likewise.
      counts: updates, samples and valid items so far, for readers of the manifest.

    Raises:
      SnapshotError: if it cannot be written; the snapshots that were there are still there.
    """
    parts: dict[str, Tree] = dict(zip(_SHARED, _shared_parts(boundary.state), strict=True))
    like = _own_parts(boundary.state, torch.device("cpu"))
    for rank, content in enumerate(boundary.ranks):
        parts |= {_name(part, rank, fitting.layout): x for part, x in _trees(content, like).items()}
    extra = {**dataclasses.asdict(fitting), "counts": dict(counts), "metrics": _position(run_dir)}
    about = {"run_id": run_id, "config": config, "score": score, "extra": extra, "keep": keep, "protect": protect}
    return snapshot.save(run_dir / "snapshots", boundary.updates, parts, **about)


def check(source: Path, run_dir: Path, fitting: Identity, rank: int) -> manifest.Manifest:
    """Checks that a run can go on from a snapshot with these ranks, this schema, this data and this history.

    Raises:
      UsageError: names what does not fit and the remedy.
    """
    content = manifest.read(source)
    about = content["extra"]
    elsewhere = f"or start a new run with --init_from={source}"
    if about.get("layout") not in (1, 2):
        raise UsageError(f"--resume={source}: is no snapshot of a supervised run; give another one")
    if about["ranks"] != fitting.ranks:
        raise UsageError(
            f"--resume={source}: is of {about['ranks']} ranks, but {fitting.ranks} have started; start "
            f"{about['ranks']} processes, {elsewhere}"
        )
    if about["schema"] != fitting.schema:
        raise UsageError(f"--resume={source}: the recipe's schema is another one than then; set it back, {elsewhere}")
    if about["data"][rank] != fitting.data[rank]:
        raise UsageError(f"--resume={source}: the data differ from those of the run; set them back, {elsewhere}")
    _check_history(run_dir, about["metrics"])
    return content


def restore(source: Path, state: TrainState, rank: int, device: torch.device) -> tuple[TrainState, Generators]:
    """Returns the state of a rank and its host generators from a snapshot of either layout.

    Args:
      source: the snapshot's folder.
      state: a template.
      rank: whose part is read.
      device: where the state lives.

    Raises:
      SnapshotError: as `functional_sl.run.snapshot.restore`.
    """
    layout = manifest.read(source)["extra"]["layout"]
    names = {part: _name(part, rank, layout) for part in _PER_RANK}
    own = _own_parts(state, torch.device("cpu"))
    like = dict(zip(_SHARED, _shared_parts(state), strict=True)) | {names[part]: own[part] for part in _PER_RANK}
    loaded, _ = snapshot.restore(source, like)
    shared, control = loaded["optimizer"], tree.to(loaded[names["control"]].own, device)
    step = shared.step._replace(params=loaded["params"], stats=tree.to(loaded[names["buffers"]], device))
    rest = {name: getattr(shared, name) for name in Optimizer._fields if name != "step"}
    return tree.clone(TrainState(step=step, own=control, **rest)), loaded[names["control"]].host


def model(source: Path, params: Tree, buffers: Tree) -> tuple[Tree, Tree]:
    """Returns the parameters and rank 0's buffers of a snapshot of either layout.

    Args:
      source: the snapshot's folder.
      params: a template.
      buffers: a template.

    Raises:
      SnapshotError: as `functional_sl.run.snapshot.restore`, also for a snapshot that holds no such parts.
    """
    layout = manifest.read(source)["extra"].get("layout", 1)
    name = _name("buffers", 0, layout)
    loaded, _ = snapshot.restore(source, {"params": params, name: buffers})
    return loaded["params"], loaded[name]


def _name(part: str, rank: int, layout: int) -> str:
    return part if layout == 1 else f"{part}.rank{rank}"


def _shared_parts(state: TrainState) -> tuple[Tree, Optimizer]:
    step = state.step._replace(params=(), stats=())
    return state.step.params, Optimizer(step, state.scale, state.updates, state.valid, state.empty_at)


def _own_parts(state: TrainState, device: torch.device) -> dict[str, Tree]:
    """Returns a rank's parts on the CPU, with the present states of the host's generators."""
    own, buffers = tree.to((state.own, state.step.stats), "cpu")
    return {"buffers": buffers, "control": Control(own, generators.read(device))}


def _bytes(parts: Tree) -> bytes:
    return b"".join(leaf.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() for leaf in tree.leaves(parts))


def _trees(content: bytes, like: Tree) -> Tree:
    leaves, structure = tree.flatten(like)
    flat = torch.frombuffer(bytearray(content), dtype=torch.uint8)
    parts = flat.split([leaf.numel() * leaf.element_size() for leaf in leaves])
    return tree.unflatten(
        structure, [p.clone().view(leaf.dtype).view(leaf.shape) for p, leaf in zip(parts, leaves, strict=True)]
    )


def _position(run_dir: Path) -> dict[str, Any]:
    """Returns where the metrics end: their length in bytes, and the digest of all of them."""
    content = _metrics(run_dir)
    return {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}


def _metrics(run_dir: Path) -> bytes:
    path = run_dir / _METRICS
    return path.read_bytes() if path.exists() else b""


def _check_history(run_dir: Path, position: Mapping[str, Any]) -> None:
    """Refuses metrics that are not those with which the snapshot was written and what may have followed them.

    What followed is superseded by the resume, and a last line that a killed process left torn is moved away.
    """
    path, end, content = run_dir / _METRICS, position["bytes"], _metrics(run_dir)
    if len(content) < end:
        raise UsageError(
            f"{path}: {len(content)} bytes, but the snapshot was written after {end}; restore it from a copy"
        )
    for number, line in enumerate(content[:end].split(b"\n")[:-1], 1):
        try:
            identity.parse(line)
        except ValueError as error:
            raise UsageError(f"{path} line {number}: invalid ({error}); restore it from a copy") from error
    if hashlib.sha256(content[:end]).hexdigest() != position["sha256"]:
        raise UsageError(f"{path}: its first {end} bytes are not those when the snapshot was written; restore it")
    attempts = len(runlog.describe(run_dir)["attempts"])
    ahead = [record["host"]["attempt"] for record in runlog.read(run_dir) if record["host"]["attempt"] >= attempts]
    if ahead:
        raise UsageError(f"{path}: ahead of its run, which knows no attempt {ahead[0]}; restore run.json from a copy")
    steps = [record["step"] for record in runlog.effective(run_dir)]
    repeated = [step for step, following in itertools.pairwise(steps) if following <= step]
    if repeated:
        raise UsageError(
            f"{path}: invalid after the record of update {repeated[0]}, steps rise; restore it from a copy"
        )
