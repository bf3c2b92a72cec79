"""Portable models: what is saved predicts the same elsewhere, and what differs is refused by name."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from equal import assert_bits_equal
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from functional_sl import bundle as bundles
from functional_sl.bundle import Bundle, BundleError

CODE = """
def affine(tensors, inputs, gain):
    y = (inputs["x"] - tensors["mean"]) / tensors["std"]
    return {"y": gain * (y @ tensors["w.0"].T) + inputs["offset"], "norm": (y * y).sum(-1)}

def broken(tensors, inputs, gain):
    return {"y": inputs["x"] / 0.0}

def scalar(tensors, inputs, gain):
    return {"y": inputs["x"].sum()}
"""


@pytest.fixture(scope="module", autouse=True)
def module(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A package of somebody else, in which the functions of the bundles lie."""
    folder = tmp_path_factory.mktemp("code")
    (folder / "portable_affine.py").write_text(CODE)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(folder))
        yield folder


def affine(dtype: torch.dtype = torch.float32, **changes: object) -> Bundle:
    """x [B, 3] and offset [B, 2] to y [B, 2] and norm [B]; the mean matters, the weight is a transposed view."""
    generator = torch.Generator().manual_seed(0)
    tensors = {
        "mean": torch.tensor([10.0, -20.0, 0.5], dtype=dtype),
        "std": torch.tensor([2.0, 4.0, 1.0], dtype=dtype),
        "w.0": torch.randn(3, 2, generator=generator, dtype=dtype).T,
    }
    inputs = {
        "x": torch.randn(4, 3, generator=generator, dtype=dtype),
        "offset": torch.ones(4, 2, dtype=dtype),
    }
    about = {"inputs": {"x": [{"name": "position", "width": 3, "unit": "m"}]}, "control_dt": 0.05}
    return Bundle("portable_affine:affine", {"gain": 2.0}, tensors, about, inputs)._replace(**changes)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_what_is_loaded_predicts_the_same_bits(tmp_path: Path, dtype: torch.dtype) -> None:
    """One row by hand: x = mean + std gives y = 1, hence 2 * (sum of a weight's row) + 1 and a norm of 3."""
    bundle = affine(dtype)
    loaded = bundles.load(bundles.save(bundle, tmp_path / "new" / "model.safetensors"))
    assert loaded.self_test == (0.0, bundles.TOLERANCES[dtype], True)
    assert loaded.about == bundle.about
    assert_bits_equal(dict(loaded.bundle.tensors), dict(bundle.tensors))
    contiguous = bundles.on_device(bundle, "cpu")  # a product with a transposed view may round otherwise
    for rows in (1, 17):
        inputs = {"x": torch.randn(rows, 3).to(dtype), "offset": torch.randn(rows, 2).to(dtype)}
        assert_bits_equal(loaded.predict(inputs), bundles.predict(contiguous, inputs))
    row = {"x": (bundle.tensors["mean"] + bundle.tensors["std"])[None], "offset": torch.ones(1, 2, dtype=dtype)}
    by_hand = {"y": (2 * bundle.tensors["w.0"].sum(1) + 1)[None], "norm": torch.full((1,), 3.0, dtype=dtype)}
    torch.testing.assert_close(loaded.predict(row), by_hand)


def test_inputs_are_checked_by_name(tmp_path: Path) -> None:
    loaded = bundles.load(bundles.save(affine(), tmp_path / "model.safetensors"))
    x, offset = torch.zeros(2, 3), torch.zeros(2, 2)
    for inputs, message in (
        ({"x": x}, "lacks input 'offset'"),
        ({"x": x, "offset": offset, "z": x}, "has the unknown input 'z'"),
        ({"x": torch.zeros(2, 4), "offset": offset}, r"input 'x' is float32 \['B', 4\], expected float32 \['B', 3\]"),
        ({"x": torch.zeros(3), "offset": offset}, r"input 'x' is float32 \['B'\]"),
        ({"x": x.double(), "offset": offset}, "input 'x' is float64"),
        ({"x": torch.zeros(3, 3), "offset": offset}, "different batches"),
    ):
        with pytest.raises(BundleError, match=message):
            loaded.predict(inputs)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"predict": "portable_affine:of_no_name"}, "has no 'of_no_name'"),
        ({"predict": "no_such_package:f"}, "No module named 'no_such_package'"),
        ({"predict": "portable_affine:broken"}, "output 'y' is not finite"),
        ({"predict": "portable_affine:scalar"}, "output 'y' is \\[\\]; expected a leading axis of 4"),
        ({"inputs": {"x": torch.zeros(4, 3), "offset": torch.zeros(3, 2)}}, "one leading axis"),
        ({"inputs": {}}, "one leading axis"),
        ({"tensors": {"w": torch.zeros(2).to_sparse()}}, "tensors: leaf 'w' is sparse_coo"),
        ({"about": {"unit": float("nan")}}, "bundle.about.unit"),
    ],
)
def test_what_cannot_be_a_bundle_leaves_no_file(tmp_path: Path, changes: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        bundles.save(affine(**changes), tmp_path / "model.safetensors")
    assert [*tmp_path.iterdir()] == []


def test_nothing_is_overwritten(tmp_path: Path) -> None:
    path = bundles.save(affine(), tmp_path / "model.safetensors")
    before = path.read_bytes()
    with pytest.raises(BundleError, match="is there already"):
        bundles.save(affine(), path)
    assert [*tmp_path.iterdir()] == [path]
    assert path.read_bytes() == before == bundles.save(affine(), tmp_path / "again").read_bytes()


def rewrite(path: Path, **changes: object) -> None:
    """Writes the file anew with other metadata, `tensors` among them, and the old digest."""
    with safe_open(path, framework="pt") as file:
        content = json.loads(file.metadata()[bundles.FORMAT])
    tensors = load_file(path) | changes.pop("tensors", {})
    save_file(tensors, path, {bundles.FORMAT: json.dumps(content | changes)})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"version": 2}, "version 2, expected 'functional_sl.bundle' version 1"),
        ({"format": "other"}, "is 'other'"),
        ({"arguments": {"gain": 3.0}}, "damaged"),
        ({"about": {"control_dt": 0.1}}, "damaged"),
        ({"tensors": {"tensors/mean": torch.zeros(3)}}, "damaged"),
        ({"tensors": {"outputs/norm": torch.zeros(4)}}, "damaged"),
    ],
)
def test_another_format_and_damage_are_refused(tmp_path: Path, changes: dict, message: str) -> None:
    path = bundles.save(affine(), tmp_path / "model.safetensors")
    rewrite(path, **changes)
    for read in (bundles.load, bundles.describe):
        with pytest.raises(BundleError, match=message):
            read(path)


def test_files_of_other_origin_are_refused(tmp_path: Path) -> None:
    save_file({"w": torch.zeros(2)}, tmp_path / "weights")
    torch.save({"w": torch.zeros(2)}, tmp_path / "pickled")
    for name, message in (("weights", "is None"), ("pickled", "cannot be read"), ("absent", "cannot be read")):
        with pytest.raises(BundleError, match=message):
            bundles.load(tmp_path / name)


def test_a_function_that_has_changed_fails_the_self_test(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import portable_affine

    path = bundles.save(affine(), tmp_path / "model.safetensors")
    original = portable_affine.affine
    for factor, passes in ((1 + 1e-6, True), (1.01, False)):

        def changed(*args: dict, factor: float = factor, **arguments: float) -> dict[str, torch.Tensor]:
            return {name: factor * x for name, x in original(*args, **arguments).items()}

        monkeypatch.setattr(portable_affine, "affine", changed)
        if passes:
            assert 0 < bundles.load(path).self_test.difference < 1e-5
        else:
            with pytest.raises(BundleError, match=r"differ from the stored ones by 0\.01"):
                bundles.load(path)


def test_described_without_the_function(tmp_path: Path) -> None:
    path = bundles.save(affine(), tmp_path / "model.safetensors")
    code = f"import sys; from functional_sl import bundle; print(*bundle.describe({str(path)!r}), sep='\\n')"
    code += "; assert 'portable_affine' not in sys.modules"
    root = Path(bundles.__file__).parent.parent
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=root)
    assert "bundle of portable_affine:affine" in run.stdout
    assert "x float32 ['B', 3]" in run.stdout
    assert "about.control_dt: 0.05" in run.stdout
