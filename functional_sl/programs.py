"""A bundle for those who have torch alone, or none: a `torch.export` program, or ONNX.

    program = torch.export.load("policy.pt2").module()
    program({"observation": x})["action"]                 x [B, ...], any B

The tensors are buffers of the program, and the bundle's metadata lie beside it (`bundle.json` in a .pt2, a property
of an .onnx). What was written is read back and compared with the bundle's own function before it gets its name.
Inputs and outputs of an .onnx have the bundle's names.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import logging
import os
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from functional_sl import bundle as bundles
from functional_sl.bundle import Agreement, Bundle, BundleError
from functional_sl.run import files, identity

METADATA = "bundle.json"
FORMATS = ("safetensors", "pt2", "onnx")
BATCHES = (1, 2, 17)

_Program = Callable[[dict[str, Tensor]], Mapping[str, Tensor]]


def write(bundle: Bundle, out: str | os.PathLike[str], formats: Sequence[str] = FORMATS[:2]) -> dict[Path, Agreement]:
    """Writes a bundle in several formats, all of them checked, and returns how closely each file repeats it.

    Args:
      bundle: on any device.
      out: the files' common name; a suffix that is a format's own is left out.
      formats: of `FORMATS`.

    Raises:
      BundleError: for an unknown format, a file that is there already, and what the writers refuse.
      OSError: if a file cannot be written.
    """
    path = Path(out).expanduser()
    path = path.with_suffix("") if path.suffix[1:] in FORMATS else path
    if unknown := [name for name in formats if name not in FORMATS] or not formats:
        raise BundleError(f"formats {unknown or 'none'}: expected some of {', '.join(FORMATS)}")
    targets = {name: bundles.vacant(path.with_name(f"{path.name}.{name}")) for name in formats}
    return {target: _WRITERS[name](bundle, target) for name, target in targets.items()}


def save_program(bundle: Bundle, path: str | os.PathLike[str]) -> Agreement:
    """Writes a program that `torch.export.load` reads where there is nothing but torch.

    Args:
      bundle: on any device; the program is written for the CPU.
      path: a new file, .pt2 by custom.

    Returns:
      How closely what was read back repeats the bundle, over batches of 1, 2 and 17.

    Raises:
      BundleError: as `bundle.save`, and if the program differs by more than the tolerance.
      OSError: if the file cannot be written.
    """
    path, bundle = bundles.vacant(path), bundles.on_device(bundle, "cpu")
    written = io.BytesIO()
    with _quiet():
        torch.export.save(_trace(bundle), written, extra_files={METADATA: _metadata(bundle)})
    return _publish(bundle, path, written.getvalue(), lambda data: torch.export.load(io.BytesIO(data)).module())


def save_onnx(bundle: Bundle, path: str | os.PathLike[str]) -> Agreement:
    """Writes an ONNX model with the weights inside and a free batch axis; otherwise as `save_program`.

    Raises:
      BundleError: as `save_program`, and where the extra `onnx` is not installed.
      OSError: if the file cannot be written.
    """
    onnx, runtime, _ = (_extra(name) for name in ("onnx", "onnxruntime", "onnxscript"))
    path, bundle = bundles.vacant(path), bundles.on_device(bundle, "cpu")
    inputs, outputs = sorted(bundle.inputs), sorted(bundles.predict(bundle, bundle.inputs))
    with _quiet():
        exported = torch.onnx.export(
            _trace(bundle), dynamo=True, verbose=False, input_names=inputs, output_names=outputs
        )
    model = exported.model_proto
    onnx.helper.set_model_props(model, {METADATA: _metadata(bundle)})

    def read(data: bytes) -> _Program:
        session = runtime.InferenceSession(data, providers=["CPUExecutionProvider"])

        def program(values: dict[str, Tensor]) -> dict[str, Tensor]:
            found = session.run(outputs, {name: x.numpy() for name, x in values.items()})
            return {name: torch.from_numpy(x) for name, x in zip(outputs, found, strict=True)}

        return program

    return _publish(bundle, path, model.SerializeToString(), read)


def _save_bundle(bundle: Bundle, path: Path) -> Agreement:
    return bundles.load(bundles.save(bundle, path)).self_test


_WRITERS: dict[str, Callable[[Bundle, Path], Agreement]] = {
    "safetensors": _save_bundle,
    "pt2": save_program,
    "onnx": save_onnx,
}


class _Module(nn.Module):
    """The bundle's function with its tensors closed over as buffers."""

    def __init__(self, bundle: Bundle) -> None:
        super().__init__()
        self._bundle, self._function = bundle, bundles.function_of(bundle)
        # A buffer's name may hold no dot, and two names may differ in nothing else.
        self._buffer_of = {name: f"{i}_{name.replace('.', '_')}" for i, name in enumerate(sorted(bundle.tensors))}
        for name, buffer in self._buffer_of.items():
            self.register_buffer(buffer, bundle.tensors[name])

    def forward(self, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
        values = {name: getattr(self, buffer) for name, buffer in self._buffer_of.items()}
        return dict(sorted(self._function(values, dict(inputs), **self._bundle.arguments).items()))


def _trace(bundle: Bundle) -> Any:
    # A batch of one would be taken for a constant.
    inputs = _batch(bundle, 3)
    rows = torch.export.Dim("batch", min=1)
    shapes = ({name: {0: rows} for name in inputs},)
    try:
        with torch.no_grad():
            return torch.export.export(_Module(bundle), (inputs,), dynamic_shapes=shapes, strict=False)
    except Exception as error:
        raise BundleError(f"{bundle.predict} cannot be traced for any batch: {error}") from error


def _batch(bundle: Bundle, size: int) -> dict[str, Tensor]:
    """Returns the bundle's inputs, repeated or cut to `size` rows."""
    return {name: x[torch.arange(size) % len(x)] for name, x in sorted(bundle.inputs.items())}


def _metadata(bundle: Bundle) -> str:
    return identity.canonical(bundles.metadata(bundle, bundles.predict(bundle, bundle.inputs)), "bundle")


def _publish(bundle: Bundle, path: Path, data: bytes, read: Callable[[bytes], _Program]) -> Agreement:
    """Writes `data`, compares what it reads back, and gives it its name if it is the same function."""
    staged = files.stage(path.parent, [data]).path
    try:
        with _quiet():
            program = read(staged.read_bytes())
        found = [_compare(bundle, program, _batch(bundle, size)) for size in BATCHES]
        worst = max(found, key=lambda agreement: agreement.difference)
        if not worst.difference <= worst.tolerance:
            raise BundleError(
                f"{path}: not written: its outputs differ from those of {bundle.predict} by {worst.difference:.3g}, "
                f"allowed are {worst.tolerance:.3g} of the greatest"
            )
        files.publish(staged, path)
    finally:
        staged.unlink(missing_ok=True)
    return worst._replace(bit_equal=all(agreement.bit_equal for agreement in found))


def _compare(bundle: Bundle, program: _Program, inputs: dict[str, Tensor]) -> Agreement:
    with torch.no_grad():
        outputs = program(inputs)
    return bundles.compare(bundle, dict(outputs), bundles.predict(bundle, inputs))


def _extra(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError:
        raise BundleError(f"ONNX needs the package {name}: pip install '.[onnx]' in the checkout") from None


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keeps to itself what torch's exporters say of their own insides."""
    loggers = [logging.getLogger(name) for name in ("torch.onnx", "onnxscript", "onnx_ir")]
    levels = [logger.level for logger in loggers]
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The given buffer is not writable", UserWarning)
        warnings.filterwarnings("ignore", ".*LeafSpec.* is deprecated", FutureWarning)
        for logger in loggers:
            logger.setLevel(logging.ERROR)
        try:
            yield
        finally:
            for logger, level in zip(loggers, levels, strict=True):
                logger.setLevel(level)
