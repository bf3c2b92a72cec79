"""A tree of tensors as one safetensors file: a JSON header of names, dtypes, shapes and offsets, then the bytes.

Written here leaf by leaf, so that a device's leaves never stand on the host all at once and the digest needs
no second reading; read by the safetensors library. Nothing is ever unpickled.
Format: https://github.com/huggingface/safetensors (README, "Format").
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path

import optree
import torch
from safetensors import safe_open
from torch import Tensor

from functional_sl import tree
from functional_sl.tree import Tree

_CHUNK = 1 << 24
_DTYPES = {
    torch.bool: "BOOL",
    torch.uint8: "U8",
    torch.uint16: "U16",
    torch.uint32: "U32",
    torch.uint64: "U64",
    torch.int8: "I8",
    torch.int16: "I16",
    torch.int32: "I32",
    torch.int64: "I64",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float32: "F32",
    torch.float64: "F64",
}


def named(values: Tree) -> dict[str, Tensor]:
    """Returns the leaves by name, after the check that a file can hold them.

    Raises:
      ValueError: names the leaf that is no dense tensor of a storable dtype, or whose name is not unique text.
    """
    found: dict[str, Tensor] = {}
    for name, leaf in zip(tree.names(values), tree.leaves(values), strict=True):
        if name in found:
            raise ValueError(f"two leaves are called {name!r}; give dict keys that differ as text")
        if not isinstance(leaf, Tensor):
            raise ValueError(f"leaf {name!r} is a {type(leaf).__name__}, expected a tensor; wrap it in torch.tensor")
        if leaf.layout != torch.strided or leaf.dtype not in _DTYPES:
            kind = f"{str(leaf.layout).removeprefix('torch.')} {dtype_name(leaf)}"
            raise ValueError(f"leaf {name!r} is {kind}, expected a dense bool, integer or float tensor; convert it")
        if name.encode(errors="replace").decode() != name:
            raise ValueError(f"the leaf name {name!r} is no valid Unicode text; rename the key")
        found[name] = leaf
    return found


def dtype_name(leaf: Tensor) -> str:
    """Returns the dtype without its module, such as `float32`."""
    return str(leaf.dtype).removeprefix("torch.")


def structure(values: Tree) -> str:
    """Returns the containers and keys of a tree as text, dict keys sorted and leaves as `*`."""
    return _structure(optree.tree_structure(values))


def _structure(spec: optree.PyTreeSpec) -> str:
    if spec.type is None:
        return "*"
    if spec.type is type(None):
        return "None"
    items = [f"{entry}={_structure(child)}" for entry, child in zip(spec.entries(), spec.children(), strict=True)]
    return f"{spec.type.__name__}({', '.join(sorted(items) if issubclass(spec.type, Mapping) else items)})"


def size(leaves: Mapping[str, Tensor]) -> int:
    """Returns the length of the file in bytes."""
    return len(_header(leaves)) + sum(x.numel() * x.element_size() for x in leaves.values())


def chunks(leaves: Mapping[str, Tensor]) -> Iterator[bytes | memoryview]:
    """Yields the file piece by piece; one leaf at a time is on the host and contiguous."""
    yield _header(leaves)
    for name in _order(leaves):
        data = memoryview(leaves[name].detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy())
        for start in range(0, len(data), _CHUNK):
            yield data[start : start + _CHUNK]


def _header(leaves: Mapping[str, Tensor]) -> bytes:
    entries, end = {}, 0
    for name in _order(leaves):
        leaf = leaves[name]
        start, end = end, end + leaf.numel() * leaf.element_size()
        entries[_stored(name)] = {"dtype": _DTYPES[leaf.dtype], "shape": list(leaf.shape), "data_offsets": [start, end]}
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text


def _order(leaves: Mapping[str, Tensor]) -> list[str]:
    # Wide elements first: every leaf then starts at a multiple of its element size, as readers that map the file need.
    return sorted(leaves, key=lambda name: (-leaves[name].element_size(), name))


def _stored(name: str) -> str:
    """Returns the name in the file: the format reserves `__metadata__`, and no leaf's own name holds `~2`."""
    return "~2__metadata__" if name == "__metadata__" else name


def load(path: Path, like: Mapping[str, Tensor], device: torch.device | str | None = None) -> dict[str, Tensor]:
    """Returns fresh tensors by the names of `like`, each on `device` or else on its template's device.

    Raises:
      OSError, safetensors.SafetensorError: if the file cannot be read.
    """
    with safe_open(path, framework="pt", device="cpu") as file:
        return {
            # The reader's tensors are views of the mapped file.
            name: file.get_tensor(_stored(name)).to(device or _real(leaf.device), copy=True)
            for name, leaf in like.items()
        }


def _real(device: torch.device) -> torch.device:
    return torch.device("cpu") if device.type == "meta" else device
