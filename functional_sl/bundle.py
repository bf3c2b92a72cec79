"""Portable models: one safetensors file that predicts without the code that trained it.

    load(path).predict({"observation": x})            checked in full, on any device
    functional_sl.programs                            the same model for torch alone, or as ONNX

The file holds weights and normalisation (`tensors/<name>`), a few inputs and what the model made of them
(`inputs/<name>`, `outputs/<name>`), and one JSON text in its header: everything else that a `Bundle` has, the shapes
and the library versions, under a digest of it all. Nothing is ever unpickled; the function that `predict` names is
imported by `load`, not by `describe`.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save as serialize
from torch import Tensor

from functional_sl import tree
from functional_sl.run import files, identity, loading, tensors

FORMAT = "functional_sl.bundle"
VERSION = 1
TOLERANCES = {torch.float64: 1e-9, torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 1e-1}

Function = Callable[..., dict[str, Tensor]]
Tensors = Mapping[str, Tensor]


class Bundle(NamedTuple):
    """What a third party needs to run a trained model.

    Attributes:
      predict: `package.module:function`, `(tensors, inputs, **arguments) -> outputs`, all flat dicts of tensors; the
        function imports no training code. Every input and output has a leading axis [B] of any length.
      arguments: JSON keyword arguments of `predict`: the architecture, conventions that change numbers. `dtype`, where
        it is there, is the type in which the function computes, such as `bfloat16`.
      tensors: weights and normalisation by name.
      about: JSON: ordered input and output features with width, unit and frame, time step, conventions, provenance.
      inputs: a few inputs, with which a loader checks itself; their outputs are stored beside them.
    """

    predict: str
    arguments: Mapping[str, Any]
    tensors: Tensors
    about: Mapping[str, Any]
    inputs: Tensors


class BundleError(ValueError):
    """A bundle cannot be written, read or used; names the file or tensor, what was found, what is expected."""


class Agreement(NamedTuple):
    """How closely outputs repeat those of the bundle.

    Attributes:
      difference: the largest over all outputs, relative to the greatest magnitude of an output.
      tolerance: what is allowed, by the coarsest type that takes part.
      bit_equal: every bit agrees, as it does in one environment and with one number of threads.
    """

    difference: float
    tolerance: float
    bit_equal: bool


@dataclasses.dataclass(frozen=True)
class Loaded:
    """A bundle that was read and has repeated its stored outputs."""

    bundle: Bundle
    versions: Mapping[str, str]  # of the libraries that wrote it
    self_test: Agreement
    function: Function

    @property
    def about(self) -> Mapping[str, Any]:
        """Features, units, conventions and provenance, as they were saved."""
        return self.bundle.about

    def predict(self, inputs: Tensors) -> dict[str, Tensor]:
        """Returns the outputs by name.

        Args:
          inputs: by name, each [B, ...] of the shape and type of the stored ones, on the device of the bundle.

        Raises:
          BundleError: for a missing or unknown input, or another shape or type.
        """
        return _apply(self.function, self.bundle, inputs)


def predict(bundle: Bundle, inputs: Tensors) -> dict[str, Tensor]:
    """Returns what a bundle in memory makes of `inputs`; as `Loaded.predict`."""
    return _apply(function_of(bundle), bundle, inputs)


def save(bundle: Bundle, path: str | os.PathLike[str]) -> Path:
    """Writes a bundle, with the outputs for its own inputs as a CPU computes them.

    Args:
      bundle: on any device.
      path: a new file; the folders above it are made.

    Returns:
      The path.

    Raises:
      BundleError: for a file that is there already, a tensor that cannot be stored, values that JSON cannot hold, or
        a function that is not there or makes no finite outputs [B, ...]. Nothing is written.
      OSError: if the file cannot be written.
    """
    path = vacant(path)
    bundle = on_device(bundle, "cpu")
    outputs = predict(bundle, bundle.inputs)
    _check_outputs(bundle, outputs)
    stored = {"tensors": bundle.tensors, "inputs": bundle.inputs, "outputs": outputs}
    flat = {f"{part}/{name}": leaf for part, values in stored.items() for name, leaf in values.items()}
    content = metadata(bundle, outputs)
    content["digest"] = _digest(content, flat)
    data = serialize(tree.clone(flat), {FORMAT: identity.canonical(content, "bundle")})
    files.write_whole(path, data)
    return path


def load(path: str | os.PathLike[str], device: torch.device | str | None = None) -> Loaded:
    """Reads a bundle, checks all of it, and lets it repeat its stored outputs.

    Args:
      path: the file.
      device: where its tensors go; the CPU by default.

    Raises:
      BundleError: for a file that is no bundle, damaged or of another version; a function that cannot be imported; or
        outputs that differ from the stored ones by more than the tolerance.
    """
    content, flat = _read(Path(path).expanduser())
    parts = {part: _part(flat, part, device) for part in ("tensors", "inputs", "outputs")}
    bundle = Bundle(content["predict"], content["arguments"], parts["tensors"], content["about"], parts["inputs"])
    function = function_of(bundle)
    agreement = compare(bundle, _apply(function, bundle, bundle.inputs), parts["outputs"])
    if not agreement.difference <= agreement.tolerance:
        raise BundleError(
            f"{path}: its outputs differ from the stored ones by {agreement.difference:.3g}, allowed are "
            f"{agreement.tolerance:.3g} of the greatest; {bundle.predict} is another function than that which wrote it "
            f"(versions then: {content['versions']})"
        )
    return Loaded(bundle, content["versions"], agreement, function)


def describe(path: str | os.PathLike[str]) -> list[str]:
    """Returns what a bundle holds, line by line; its function is neither imported nor run.

    Raises:
      BundleError: for a file that is no bundle, damaged or of another version.
    """
    content, flat = _read(Path(path).expanduser())
    weights = _part(flat, "tensors", None)
    lines = [f"bundle of {content['predict']}, format {content['version']}, digest {content['digest'][:16]}"]
    for part in ("inputs", "outputs"):
        kinds = content[part].items()
        lines.append(f"  {part}: " + ", ".join(f"{name} {dtype} {shape}" for name, (dtype, shape) in kinds))
    lines.append(f"  tensors: {len(weights)}, {tree.size(weights)} values")
    for field in ("arguments", "about", "versions"):
        lines += [f"  {field}.{name}: {value}" for name, value in content[field].items()]
    return lines


def metadata(bundle: Bundle, outputs: Tensors) -> dict[str, Any]:
    """Returns everything of a bundle but its numbers, as JSON: what an exported program carries too."""
    return {
        "format": FORMAT,
        "version": VERSION,
        "predict": bundle.predict,
        "arguments": dict(bundle.arguments),
        "about": dict(bundle.about),
        "versions": identity.versions(),
        **{part: _kinds(values, batch="B") for part, values in (("inputs", bundle.inputs), ("outputs", outputs))},
    }


def function_of(bundle: Bundle) -> Function:
    """Returns the function that a bundle names.

    Raises:
      BundleError: if it cannot be imported.
    """
    try:
        return loading.load(bundle.predict)
    except ValueError as error:
        raise BundleError(f"the bundle's function cannot be imported: {error}") from error


def on_device(bundle: Bundle, device: torch.device | str) -> Bundle:
    """Returns a bundle on `device` whose tensors are contiguous and its own.

    Raises:
      BundleError: names a tensor that no file can hold, or inputs without a common leading axis.
    """
    for part in ("tensors", "inputs"):
        try:
            tensors.named(dict(getattr(bundle, part)))
        except ValueError as error:
            raise BundleError(f"{part}: {error}") from None
    if len(batches := {x.shape[:1] for x in bundle.inputs.values()}) != 1 or batches <= {(), (0,)}:
        raise BundleError(f"inputs: {_kinds(bundle.inputs)}; expected one leading axis of the same length everywhere")
    moved = (tree.clone(tree.to(dict(values), device)) for values in (bundle.tensors, bundle.inputs))
    weights, inputs = (tree.map(torch.detach, values) for values in moved)
    return bundle._replace(tensors=weights, inputs=inputs)


def vacant(path: str | os.PathLike[str]) -> Path:
    """Returns the path of a new file, whose folder is there.

    Raises:
      BundleError: if something has this name already.
    """
    path = Path(path).expanduser()
    if files.there(path):
        raise BundleError(f"{path}: is there already, and an export replaces nothing; choose another name or remove it")
    path.parent.mkdir(parents=True, exist_ok=True)
    return path


def compare(bundle: Bundle, outputs: Tensors, expected: Tensors) -> Agreement:
    """Returns how closely `outputs` repeat `expected`; a differing name, shape or type is infinitely far."""
    computed = [getattr(torch, str(bundle.arguments.get("dtype", "float64")), torch.float64)]
    taking_part = [*computed, *(x.dtype for x in (*bundle.tensors.values(), *expected.values()))]
    tolerance = max(TOLERANCES.get(dtype, 0.0) for dtype in taking_part)
    if _kinds(outputs) != _kinds(expected):
        return Agreement(float("inf"), tolerance, False)
    difference = max(_difference(outputs[name], expected[name]) for name in expected)
    return Agreement(difference, tolerance, tree.bits_equal(dict(outputs), dict(expected)))


def _difference(found: Tensor, expected: Tensor) -> float:
    a, b = found.double().cpu(), expected.double().cpu()
    scale = max(float(b.abs().max()), torch.finfo(torch.float32).tiny)
    return float((a - b).abs().max()) / scale


def _apply(function: Function, bundle: Bundle, inputs: Tensors) -> dict[str, Tensor]:
    _check_inputs(bundle, inputs)
    with torch.no_grad():
        return function(dict(bundle.tensors), dict(inputs), **bundle.arguments)


def _check_inputs(bundle: Bundle, inputs: Tensors) -> None:
    expected, found = _kinds(bundle.inputs, batch="B"), _kinds(inputs, batch="B")
    for what, names in (("lacks", expected.keys() - found), ("has the unknown", found.keys() - expected)):
        if names:
            raise BundleError(f"the call {what} input {', '.join(map(repr, sorted(names)))}; it takes {expected}")
    for name, kind in expected.items():
        if found[name] != kind:
            shown, wanted = (f"{dtype} {shape}" for dtype, shape in (found[name], kind))
            raise BundleError(f"input {name!r} is {shown}, expected {wanted} with any batch B")
    if len({len(x) for x in inputs.values()}) > 1:
        raise BundleError(f"the inputs have different batches: { {name: len(x) for name, x in inputs.items()} }")


def _check_outputs(bundle: Bundle, outputs: Any) -> None:
    batch = len(next(iter(bundle.inputs.values())))
    if not isinstance(outputs, dict) or not outputs or not all(isinstance(x, Tensor) for x in outputs.values()):
        raise BundleError(f"{bundle.predict} returned {type(outputs).__name__}; expected a dict of tensors by name")
    for name, x in outputs.items():
        if x.ndim == 0 or len(x) != batch:
            raise BundleError(
                f"{bundle.predict}: output {name!r} is {list(x.shape)}; expected a leading axis of {batch}"
            )
        if not bool(torch.isfinite(x).all()):
            raise BundleError(f"{bundle.predict}: output {name!r} is not finite for the bundle's own inputs")


def _kinds(values: Tensors, batch: str | None = None) -> dict[str, list[Any]]:
    """Returns type and shape by name, the leading axis as `batch` where that is given."""
    shapes = {name: [*x.shape] if batch is None or not x.ndim else [batch, *x.shape[1:]] for name, x in values.items()}
    return {name: [tensors.dtype_name(values[name]), shape] for name, shape in sorted(shapes.items())}


def _digest(content: Mapping[str, Any], flat: Tensors) -> str:
    return identity.digest({**content, "tensors": tree.digest(dict(flat))}, "bundle")


def _read(path: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Returns metadata and tensors of a file, after its format, version and digest have been checked."""
    try:
        with safe_open(path, framework="pt", device="cpu") as file:
            text = (file.metadata() or {}).get(FORMAT)
            # The reader's tensors are views of the mapped file.
            flat = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118
        content = identity.parse(text or "{}")
    except (OSError, SafetensorError, ValueError) as error:
        raise BundleError(f"{path}: cannot be read as a bundle ({error})") from error
    kind = (content.get("format"), content.get("version"))
    if kind != (FORMAT, VERSION):
        raise BundleError(f"{path}: is {kind[0]!r} version {kind[1]!r}, expected {FORMAT!r} version {VERSION}")
    recorded = content.pop("digest", None)
    if recorded != (actual := _digest(content, flat)):
        raise BundleError(f"{path}: damaged: its digest is {actual}, expected {recorded}; export it again")
    return content | {"digest": recorded}, flat


def _part(flat: Tensors, part: str, device: torch.device | str | None) -> dict[str, Tensor]:
    own = {name.removeprefix(f"{part}/"): x for name, x in flat.items() if name.startswith(f"{part}/")}
    return tree.to(own, device or "cpu")
