"""Bundles as torch.export programs and ONNX: any batch, checked after writing, nothing else needed."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from equal import assert_bits_equal

from functional_sl import bundle as bundles
from functional_sl import programs
from functional_sl.bundle import Bundle, BundleError

CODE = """
def shifted(tensors, inputs, gain):
    y = (inputs["x"] - tensors["layer.0/mean"]) @ tensors["layer.1/w"].T
    return {"y": gain * y, "a/z": y.sum(-1, keepdim=True)}

def of_one_batch(tensors, inputs, gain):
    return {"y": inputs["x"] if len(inputs["x"]) == 3 else 2 * inputs["x"]}
"""


@pytest.fixture(scope="module", autouse=True)
def module(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A module in which the functions of the bundles lie."""
    folder = tmp_path_factory.mktemp("code")
    (folder / "portable_shift.py").write_text(CODE)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(folder))
        yield


def shifted(**changes: object) -> Bundle:
    generator = torch.Generator().manual_seed(1)
    tensors = {"layer.0/mean": torch.full((3,), 5.0), "layer.1/w": torch.randn(3, 1, generator=generator).T}
    inputs = {"x": torch.randn(1, 3, generator=generator)}
    return Bundle("portable_shift:shifted", {"gain": 2.0}, tensors, {"unit": "m"}, inputs)._replace(**changes)


def test_a_program_runs_any_batch_and_carries_the_metadata(tmp_path: Path) -> None:
    path = tmp_path / "model.pt2"
    assert programs.save_program(shifted(), path).difference <= 1e-6
    extra = {programs.METADATA: ""}
    with programs._quiet():
        program = torch.export.load(path, extra_files=extra).module()
    for rows in (1, 2, 17, 1000):
        x = torch.randn(rows, 3)
        torch.testing.assert_close(program({"x": x}), bundles.predict(shifted(), {"x": x}), rtol=1e-6, atol=1e-6)
    with pytest.raises(AssertionError, match="Guard failed"):
        program({"x": torch.randn(2, 4)})
    assert '"inputs":{"x":["float32",["B",3]]}' in extra[programs.METADATA]
    assert '"about":{"unit":"m"}' in extra[programs.METADATA]


def test_several_formats_share_a_name(tmp_path: Path) -> None:
    found = programs.write(shifted(), tmp_path / "a" / "policy.safetensors")
    assert [path.name for path in found] == ["policy.safetensors", "policy.pt2"]
    assert sorted(path.name for path in (tmp_path / "a").iterdir()) == ["policy.pt2", "policy.safetensors"]
    x = {"x": torch.randn(5, 3)}
    loaded = bundles.load(tmp_path / "a" / "policy.safetensors")
    assert_bits_equal(loaded.predict(x), bundles.predict(shifted(), x))
    with pytest.raises(BundleError, match=r"policy.pt2: is there already"):
        programs.write(shifted(), tmp_path / "a" / "policy", ["pt2"])
    with pytest.raises(BundleError, match=r"formats \['pth'\]: expected some of safetensors, pt2, onnx"):
        programs.write(shifted(), tmp_path / "b", ["pth"])


def test_what_differs_or_takes_one_batch_only_leaves_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(BundleError, match="cannot be traced for any batch"):
        programs.save_program(shifted(predict="portable_shift:of_one_batch"), tmp_path / "model.pt2")
    # What is read back is another program: that of another gain.
    trace = programs._trace
    monkeypatch.setattr(programs, "_trace", lambda bundle: trace(bundle._replace(arguments={"gain": 2.01})))
    with pytest.raises(BundleError, match=r"not written: its outputs differ .* by 0.00"):
        programs.save_program(shifted(), tmp_path / "model.pt2")
    assert [*tmp_path.iterdir()] == []


def test_onnx_is_an_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "onnx", None)
    with pytest.raises(BundleError, match=r"needs the package onnx: pip install '\.\[onnx\]'"):
        programs.save_onnx(shifted(), tmp_path / "model.onnx")
    assert [*tmp_path.iterdir()] == []


@pytest.mark.skipif(importlib.util.find_spec("onnxruntime") is None, reason="needs the extra onnx")
def test_onnx_names_and_batches(tmp_path: Path) -> None:
    import onnxruntime

    path = tmp_path / "model.onnx"
    assert programs.save_onnx(shifted(), path).difference <= 1e-5
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    assert [x.name for x in session.get_inputs()] == ["x"]
    assert [x.name for x in session.get_outputs()] == ["a/z", "y"]
    assert '"unit":"m"' in session.get_modelmeta().custom_metadata_map[programs.METADATA]
    for rows in (1, 17):
        x = torch.randn(rows, 3)
        (y,) = session.run(["y"], {"x": x.numpy()})
        torch.testing.assert_close(torch.from_numpy(y), bundles.predict(shifted(), {"x": x})["y"])
