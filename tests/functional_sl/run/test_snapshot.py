"""Snapshots give back every bit, by name, and refuse what differs or is damaged."""

from __future__ import annotations

import collections
import json
import os
import subprocess
import sys
from typing import NamedTuple

import numpy as np
import pytest
import safetensors.torch
import torch

from functional_sl import tree
from functional_sl.run import identity, snapshot
from functional_sl.run.snapshot import SnapshotError

ABOUT = {"run_id": "run-a", "config": {"lr": 0.1, "sizes": [64, 64]}}


class State(NamedTuple):
    params: dict
    count: torch.Tensor


class Other(NamedTuple):
    params: dict
    count: torch.Tensor


def state(fill: float = 1.0) -> State:
    return State({"w": torch.full((2, 3), fill), "b": torch.arange(3.0)}, torch.tensor(7))


def save(root, step=1, values=None, **more):
    return snapshot.save(root, step, {"state": state() if values is None else values}, **ABOUT | more)


shared = torch.arange(12.0)
STRANGE = {
    "transposed": torch.arange(6.0).reshape(2, 3).T,
    "strided": torch.arange(10)[::3],
    "expanded": torch.tensor([[1.5], [2.5]]).expand(2, 4),
    "views of one storage": (shared[:6], shared[6:]),
    "overlapping views": (shared[:8], shared[4:], shared),
    "0-d": torch.tensor(3),
    "empty": torch.empty(0, 4),
    "bool": torch.tensor([True, False, True]),
    "bf16": torch.tensor([1.0, -0.0, float("nan")], dtype=torch.bfloat16),
    "f16": torch.tensor([65504.0, -0.0], dtype=torch.float16),
    "nan payload": torch.tensor([0x7FC00001, -0x80000000], dtype=torch.int32).view(torch.float32),
    "float64": torch.tensor([1e-300, float("inf")], dtype=torch.float64),
    "int64": torch.tensor([-(2**63), 2**63 - 1]),
    "int8": torch.tensor([-128, 127], dtype=torch.int8),
    "uint8": torch.arange(256, dtype=torch.uint8),
    "uint64": torch.from_numpy(np.array([2**64 - 1], dtype=np.uint64)),
    "gradient": torch.ones(2, requires_grad=True),
    "none and empty containers": {"a": None, "b": (), "c": [{}], "d": torch.ones(1)},
    "keys": {
        k: torch.full((2,), float(i)) for i, k in enumerate(["a/b", "a", "a.b", "~1", "~2__metadata__", "ü", "名"])
    },
    "reserved": {"__metadata__": torch.ones(2), "": torch.zeros(1), "l10": torch.ones(1), "l2": torch.zeros(1)},
    "ordered": collections.OrderedDict(z=torch.ones(1), a=torch.zeros(1)),
}


@pytest.mark.parametrize("values", [*STRANGE.values(), STRANGE, torch.ones(2)], ids=[*STRANGE, "all", "bare"])
def test_every_leaf_comes_back_bit_for_bit(tmp_path, values):
    path = save(tmp_path, values=values)
    like = tree.map(torch.zeros_like, values)
    before = tree.clone(like)
    found, _ = snapshot.restore(path, {"state": like})
    assert tree.bits_equal(found["state"], values)
    assert tree.bits_equal(like, before)
    assert tree.overlapping(found["state"]) is None
    assert all(leaf.is_contiguous() and not leaf.requires_grad for leaf in tree.leaves(found["state"]))


def test_the_file_is_safetensors_to_its_own_library(tmp_path):
    (file,) = save(tmp_path, values={"c": torch.tensor(True), "a": torch.eye(3), "d": torch.ones(3).double()}).glob(
        "*.safe*"
    )
    found = safetensors.torch.load_file(file)
    assert tree.bits_equal(found, {"c": torch.tensor(True), "a": torch.eye(3), "d": torch.ones(3).double()})


def test_values_follow_names_not_order(tmp_path):
    path = save(tmp_path, values={"b": torch.tensor(2.0), "a": torch.tensor(1.0)})
    found, _ = snapshot.restore(path, {"state": {"a": torch.tensor(0.0), "b": torch.tensor(0.0)}})
    assert (found["state"]["a"].item(), found["state"]["b"].item()) == (1.0, 2.0)


def test_the_manifest_tells_what_the_snapshot_is(tmp_path):
    path = save(tmp_path, step=1000, score=np.float32(2.5), extra={"cursor": [1, 2], "layout": "v2"})
    found = snapshot.read_manifest(path)
    assert path.name == "step_000000001000"
    assert found["format"] == 1
    assert (found["run_id"], found["step"], found["score"]) == ("run-a", 1000, 2.5)
    assert found["config"] == ABOUT["config"]
    assert found["config_digest"] == identity.digest({"sizes": (64, 64), "lr": 0.1})
    assert found["extra"] == {"cursor": [1, 2], "layout": "v2"}
    assert found["versions"]["torch"] == torch.__version__
    assert found["parts"]["state"]["leaves"] == {
        "params/b": ["float32", [3]],
        "params/w": ["float32", [2, 3]],
        "count": ["int64", []],
    }


def test_ranks_write_parts_and_read_their_own(tmp_path):
    parts = [snapshot.write_part(tmp_path, 5, f"replay.rank{r}", [torch.full((2,), r)]) for r in range(3)]
    assert snapshot.latest(tmp_path) is None
    parts = [snapshot.Part(*json.loads(json.dumps(part))) for part in parts]
    with pytest.raises(SnapshotError, match="one name"):
        snapshot.commit(tmp_path, 5, [*parts, parts[0]], **ABOUT)
    path = snapshot.commit(tmp_path, 5, parts, **ABOUT)
    found, _ = snapshot.restore(path, {"replay.rank2": [torch.zeros(2, dtype=torch.int64)]})
    assert found["replay.rank2"][0].tolist() == [2, 2]
    (path / parts[1].file).unlink()
    with pytest.raises(SnapshotError, match=r"replay\.rank1.*not there"):
        snapshot.commit(tmp_path, 5, parts, **ABOUT)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_leaves_of_a_cuda_device_come_back_to_it(tmp_path):
    values = tree.map(lambda x: x.detach().cuda(), STRANGE)
    found, _ = snapshot.restore(save(tmp_path, values=values), {"state": values})
    assert tree.bits_equal(found["state"], values)
    assert {leaf.device.type for leaf in tree.leaves(found["state"])} == {"cuda"}


def test_meta_templates_and_the_device_argument(tmp_path):
    like = tree.map(lambda x: x.to("meta"), state())
    for device in (None, "cpu", torch.device("cpu")):
        found, _ = snapshot.restore(save(tmp_path), {"state": like}, device)
        assert tree.bits_equal(found["state"], state())


MISMATCHES = {
    "missing": (State({"w": torch.ones(2, 3)}, torch.tensor(7)), r"has the unexpected leaf 'params/b'"),
    "extra": (State({**state().params, "v": torch.ones(1)}, torch.tensor(7)), r"lacks leaf 'params/v'"),
    "shape": (state()._replace(count=torch.ones(2).long()), r"'count' is int64\[\], expected int64\[2\]"),
    "dtype": (state()._replace(count=torch.tensor(7.0)), r"'count' is int64\[\], expected float32\[\]"),
    "class": (Other(*state()), r"structure is \.\.\.State\(.*expected \.\.\.Other\("),
    "none": (State({**state().params, "n": None}, torch.tensor(7)), r"structure is .*expected .*n=None"),
    "no tensor": (state()._replace(count=7), r"'count' is a int, expected a tensor"),
}  # fmt: skip


@pytest.mark.parametrize(("like", "message"), MISMATCHES.values(), ids=MISMATCHES)
def test_a_template_that_differs_is_refused_by_name(tmp_path, like, message):
    with pytest.raises(SnapshotError, match=message):
        snapshot.restore(save(tmp_path), {"state": like})


def test_a_part_that_was_not_saved_is_refused(tmp_path):
    with pytest.raises(SnapshotError, match="holds state, expected also replay"):
        snapshot.restore(save(tmp_path), {"replay": state()})


BAD_TREES = {
    "text": ({"a": "x"}, "'a' is a str, expected a tensor"),
    "sparse": ({"a": torch.eye(2).to_sparse()}, "'a' is sparse_coo float32"),
    "complex": ({"a": torch.ones(1, dtype=torch.complex64)}, "'a' is strided complex64"),
    "one name": ({1: torch.ones(1), "1": torch.ones(1)}, "two leaves have the name '1'"),
    "surrogate": ({"\ud800": torch.ones(1)}, "no valid Unicode"),
}


@pytest.mark.parametrize(("values", "message"), BAD_TREES.values(), ids=BAD_TREES)
def test_a_tree_that_cannot_be_stored_is_refused_by_leaf(tmp_path, values, message):
    with pytest.raises(SnapshotError, match=message):
        save(tmp_path, values=values)
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("more", [{"config": {"a": {"b": float("nan")}}}, {"extra": {"a": {"b": torch.ones(1)}}}])
def test_values_that_json_cannot_hold_are_refused_before_writing(tmp_path, more):
    with pytest.raises(ValueError, match=r"(config|extra)\.a\.b"):
        save(tmp_path, **more)
    assert os.listdir(tmp_path) == []


def flip(path, position):
    data = bytearray(path.read_bytes())
    data[position] ^= 1
    path.write_bytes(data)


def replace(path, old, new):
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))


DAMAGES = {
    "a bit of the data": (lambda part, _: flip(part, -1), "damaged: SHA-256"),
    "a bit of the header": (lambda part, _: flip(part, 12), "damaged: SHA-256"),
    "cut": (lambda part, _: os.truncate(part, part.stat().st_size - 20), r"\d+ bytes, expected \d+"),
    "part deleted": (lambda part, _: part.unlink(), "not there, expected"),
    "manifest deleted": (lambda _, manifest: manifest.unlink(), "no finished snapshot"),
    "manifest cut": (lambda _, manifest: os.truncate(manifest, 100), "cannot be read"),
    "manifest empty": (lambda _, manifest: os.truncate(manifest, 0), "cannot be read"),
    "manifest binary": (lambda _, manifest: manifest.write_bytes(b"\xff\xfe\x00"), "cannot be read"),
    "score edited": (lambda _, manifest: replace(manifest, '"score": 4.0', '"score": 5.0'), "damaged: its digest"),
    "format": (lambda _, manifest: replace(manifest, '"format": 1', '"format": 2'), "format 2, expected 1"),
    "no object": (lambda _, manifest: manifest.write_text("[]"), "format None, expected 1"),
}


@pytest.mark.parametrize(("damage", "message"), DAMAGES.values(), ids=DAMAGES)
def test_damage_is_named_and_the_one_before_is_chosen(tmp_path, caplog, damage, message):
    older = save(tmp_path, 9900, values=state(1.0))
    newer = save(tmp_path, 10000, values=state(2.0), score=4.0)
    damage(next(newer.glob("*.safetensors")), newer / "manifest.json")
    with pytest.raises(SnapshotError, match=message):
        snapshot.restore(newer, {"state": state()})
    assert snapshot.latest(tmp_path) == older
    assert message.split(",")[0].split(":")[0].removeprefix(r"\d+ ") in caplog.text
    assert newer.name in caplog.text
    found, manifest = snapshot.restore(tmp_path, {"state": state()})
    assert manifest["step"] == 9900
    assert tree.bits_equal(found["state"], state(1.0))


def test_a_damaged_snapshot_names_the_valid_one_beside_it(tmp_path):
    older, newer = save(tmp_path, 1), save(tmp_path, 2)
    flip(next(newer.glob("*.safetensors")), -1)
    with pytest.raises(SnapshotError, match=rf"the latest valid one is .*{older.name}"):
        snapshot.restore(newer, {"state": state()})


def test_all_spellings_of_a_path_lead_to_the_snapshot(tmp_path, monkeypatch):
    run = tmp_path / "ein Lauf ü"
    folder = save(run / "snapshots", 3)
    (tmp_path / "link").symlink_to(run)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(run)
    spellings = [folder, folder / "manifest.json", run, run / "snapshots", f"{run}/", "../link", "snapshots", "."]
    spellings += ["~/ein Lauf ü", "snapshots/step_000000000003/", "snapshots/step_000000000003/manifest.json"]
    for path in spellings:
        assert snapshot.restore(path, {"state": state()})[1]["step"] == 3, path
    os.rename(run, tmp_path / "moved")
    assert snapshot.restore(tmp_path / "moved", {"state": state()})[1]["step"] == 3


@pytest.mark.parametrize("path", ["absent", "empty", "step_000000000009"])
def test_a_path_without_a_snapshot_is_an_error(tmp_path, path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "step_000000000009").mkdir()
    with pytest.raises(SnapshotError, match=path):
        snapshot.restore(tmp_path / path, {"state": state()})
    assert snapshot.latest(tmp_path / path) is None


def test_nothing_depends_on_the_locale(tmp_path):
    script = (
        "import sys, torch\nfrom functional_sl.run import snapshot\n"
        "p = snapshot.save(sys.argv[1], 1, {'state': {'\\xfc': torch.ones(2)}}, run_id='r', config={'a': '\\xfc'})\n"
        "t, m = snapshot.restore(p, {'state': {'\\xfc': torch.zeros(2)}})\n"
        "assert t['state']['\\xfc'].tolist() == [1, 1] and m['config'] == {'a': '\\xfc'}\n"
    )
    plain = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "OMP_NUM_THREADS": "1"}
    subprocess.run([sys.executable, "-c", script, tmp_path / "ü x"], env=os.environ | plain, check=True)
    found, _ = snapshot.restore(tmp_path / "ü x", {"state": {"ü": torch.zeros(2)}})
    assert found["state"]["ü"].tolist() == [1, 1]
