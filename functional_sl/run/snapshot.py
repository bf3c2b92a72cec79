"""Snapshots: a folder of named tensors whose manifest is written last.

    <run>/snapshots/step_000000001000/
      state-3f1c9a0b7d5e2468.safetensors          one file a part; the suffix starts its SHA-256
      replay.rank0-90ab12cd34ef5678.safetensors
      manifest.json                               format, run id, step, files, leaves, config, versions, score

A folder without a valid manifest is no snapshot. Part files are named by their content, so a snapshot that is
written again replaces the old one at one instant, the rename of the manifest. One process calls `save`. Several
call `write_part` each, meet at a barrier, and then rank 0 alone calls `commit` and `prune`.
"""

from __future__ import annotations

import contextlib
import math
import operator
import os
import re
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError

from functional_sl import tree
from functional_sl.run import files, identity, manifest, tensors
from functional_sl.run.manifest import Manifest, Part, SnapshotError, folder_of
from functional_sl.run.manifest import read as read_manifest
from functional_sl.run.retention import best as best
from functional_sl.run.retention import find_latest, prune, sweep
from functional_sl.run.retention import latest as latest
from functional_sl.run.retention import set_aside as set_aside
from functional_sl.tree import Tree

_PART = re.compile(r"\w[\w.]*", re.ASCII)


def write_part(root: str | os.PathLike[str], step: int, name: str, values: Tree) -> Part:
    """Writes one part of the snapshot of `step`, durably; it counts once `commit` has named it.

    Args:
      root: the folder of all snapshots of a run; made if it is not there.
      step: environment steps or updates.
      name: ASCII letters, digits, `_` and `.`, such as `replay.rank0`.
      values: a tree of dense tensors on any device, also views that overlap; it is not changed.

    Raises:
      SnapshotError: for a bad name or leaf, or if the file cannot be written; nothing of it is left then.
    """
    if not _PART.fullmatch(name):
        raise SnapshotError(f"part {name!r}: expected a name of ASCII letters, digits, '_' and '.', such as 'state'")
    folder = folder_of(root, step)
    leaves = _named(values, f"{folder}, part {name}")
    with manifest.writing(folder, tensors.size(leaves)):
        folder.mkdir(parents=True, exist_ok=True)
        staged = files.stage(folder, tensors.chunks(leaves))
        file = f"{name}-{staged.sha256[:16]}.safetensors"
        files.publish(staged.path, folder / file)
    kinds = {leaf: [tensors.dtype_name(x), list(x.shape)] for leaf, x in leaves.items()}
    return Part(name, file, staged.bytes, staged.sha256, tensors.structure(values), kinds)


def commit(
    root: str | os.PathLike[str],
    step: int,
    parts: Iterable[Part],
    *,
    run_id: str,
    config: Mapping[str, Any],
    score: float | None = None,
    extra: Mapping[str, Any] | None = None,
) -> Path:
    """Makes the parts the snapshot of `step` by writing its manifest, then removes what it replaced.

    Args:
      root: as in `write_part`.
      step: as in `write_part`.
      parts: what `write_part` returned, of all ranks; all of them have returned.
      run_id: whose snapshot it is.
      config: JSON values.
      score: the greater the better; None, NaN and infinities are stored as null and are never best.
      extra: JSON values of the caller, given back by `restore` in the manifest.

    Returns:
      The snapshot's folder.

    Raises:
      SnapshotError: if a part's file is not there whole or the manifest cannot be written.
      ValueError: names the field of `config` or `extra` that JSON cannot hold.
    """
    folder, parts = folder_of(root, step), list(parts)
    content = _about(step, run_id, config, score, extra) | {"parts": {part.name: part._asdict() for part in parts}}
    if len(content["parts"]) != len(parts):
        raise SnapshotError(f"{folder}: two parts of {[p.name for p in parts]} have one name; give each rank its own")
    manifest.check_sizes(folder, content, content["parts"])
    manifest.write(folder, content)
    sweep(folder)
    return folder


def _about(
    step: int, run_id: str, config: Mapping[str, Any], score: float | None, extra: Mapping[str, Any] | None
) -> Manifest:
    identity.canonical(dict(extra or {}), "extra")
    return {
        "format": manifest.FORMAT,
        "run_id": run_id,
        "step": operator.index(step),
        "score": float(score) if score is not None and math.isfinite(score) else None,
        "config": dict(config),
        "config_digest": identity.digest(dict(config)),
        "versions": identity.versions(),
        "extra": dict(extra or {}),
    }


def save(
    root: str | os.PathLike[str],
    step: int,
    parts: Mapping[str, Tree],
    *,
    run_id: str,
    config: Mapping[str, Any],
    score: float | None = None,
    extra: Mapping[str, Any] | None = None,
    keep: int = 3,
    protect: Collection[int] = (),
) -> Path:
    """Writes a whole snapshot from one process and prunes the older ones.

    A failure at any point leaves the snapshots that were there and nothing of an unfinished one.

    Args:
      root: as in `write_part`.
      step: as in `write_part`.
      parts: trees by part name.
      run_id: as in `commit`.
      config: as in `commit`.
      score: as in `commit`.
      extra: as in `commit`.
      keep: as in `prune`.
      protect: as in `prune`; the new snapshot is always protected.

    Returns:
      The snapshot's folder.

    Raises:
      SnapshotError: as `write_part`, `commit` and `prune`.
      ValueError: as `commit`, before anything is written.
    """
    _about(step, run_id, config, score, extra)
    folder = folder_of(root, step)
    try:
        written = [write_part(root, step, name, values) for name, values in parts.items()]
        commit(root, step, written, run_id=run_id, config=config, score=score, extra=extra)
    except BaseException:
        with contextlib.suppress(OSError, SnapshotError):
            sweep(folder)
        raise
    prune(root, keep, (*protect, step), run_id=run_id)
    return folder


def restore(
    path: str | os.PathLike[str],
    like: Mapping[str, Tree],
    device: torch.device | str | None = None,
    run_id: str | None = None,
) -> tuple[dict[str, Tree], Manifest]:
    """Reads parts of a snapshot into the structure of templates, after checking everything that can differ.

    Args:
      path: a snapshot folder or its manifest, or a run's folder or its `snapshots` folder: then the latest valid
        snapshot. Several ranks agree on one folder first (`latest` on rank 0).
      like: templates by part name, which are not changed; other parts of the snapshot are not read.
      device: where the tensors go; None for each template leaf's own device (the CPU for `meta`).
      run_id: as in `latest`.

    Returns:
      Fresh trees by part name, and the manifest.

    Raises:
      SnapshotError: for a missing, cut or damaged file, or a structure, name, shape or dtype that differs.
    """
    folder, intact = _locate(Path(path).expanduser(), run_id)
    content = read_manifest(folder)
    templates = {name: _named(values, f"template of part {name}") for name, values in like.items()}
    for name, template in templates.items():
        if name not in content["parts"]:
            parts = ", ".join(content["parts"])
            raise SnapshotError(f"{folder}: holds {parts}, expected also {name}; resume without it or from another one")
        _check_leaves(folder, content["parts"][name], like[name], template)
    try:
        manifest.check_sizes(folder, content, like)
        if not intact:
            manifest.check_digests(folder, content, like)
    except SnapshotError as error:
        older = find_latest(folder.absolute().parent)[0]
        raise SnapshotError(f"{error} (the latest valid one is {older})" if older else str(error)) from None
    loaded = {name: _load(folder / content["parts"][name]["file"], templates[name], device) for name in like}
    return {name: tree.unflatten(tree.flatten(like[name])[1], found) for name, found in loaded.items()}, content


def _locate(path: Path, run_id: str | None) -> tuple[Path, bool]:
    """Returns the snapshot's folder, and whether its files have just been read through."""
    if path.name == manifest.NAME:
        return path.parent, False
    try:
        found = files.there(path)
    except ValueError as error:
        raise SnapshotError(str(error)) from None
    if not found or not path.is_dir():
        raise SnapshotError(f"{path}: no such folder; give the folder of a run or of a snapshot")
    if (path / manifest.NAME).exists() or manifest.STEP.fullmatch(path.name):
        return path, False
    if not (folder := latest(path, run_id)):
        problems = find_latest(path, run_id)[1] or ["it has no step_... folder"]
        raise SnapshotError(f"{path}: no valid snapshot: {'; '.join(problems)}; give another folder or start anew")
    return folder, True


def _load(path: Path, template: dict[str, torch.Tensor], device: torch.device | str | None) -> list[torch.Tensor]:
    try:
        return list(tensors.load(path, template, device).values())
    except (OSError, SafetensorError) as error:
        raise SnapshotError(f"{path}: changed while it was read ({error}); try again") from error


def _check_leaves(folder: Path, part: Manifest, like: Tree, template: dict[str, torch.Tensor]) -> None:
    stored, where = part["leaves"], f"{folder / part['file']}"
    remedy = "resume with the configuration in its manifest, or start a new run"
    for what, names in (("lacks", template.keys() - stored), ("has the unexpected", stored.keys() - template)):
        if names:
            shown = ", ".join(map(repr, sorted(names)[:5])) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
            raise SnapshotError(f"{where} {what} leaf {shown}; {remedy}")
    for name, leaf in template.items():
        expected = [tensors.dtype_name(leaf), list(leaf.shape)]
        if stored[name] != expected:
            found, wanted = (f"{dtype}{shape}" for dtype, shape in (stored[name], expected))
            raise SnapshotError(f"{where}: leaf {name!r} is {found}, expected {wanted}; {remedy}")
    found, wanted = part["structure"], tensors.structure(like)
    if found != wanted:
        same = next((i for i, (a, b) in enumerate(zip(found, wanted, strict=False)) if a != b), len(wanted))
        start = max(0, same - 40)
        near = f"...{found[start : start + 120]}..., expected ...{wanted[start : start + 120]}..."
        raise SnapshotError(f"{where}: the structure is {near}; {remedy}")


def _named(values: Tree, where: str) -> dict[str, torch.Tensor]:
    try:
        return tensors.named(values)
    except ValueError as error:
        raise SnapshotError(f"{where}: {error}") from None
