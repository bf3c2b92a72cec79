"""What tells one run from another: canonical JSON, its digest and the versions of the libraries."""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import json
import platform
import sys
from collections.abc import Iterator, Mapping
from typing import Any, NoReturn

_LIBRARIES = ("torch", "triton", "numpy", "optree", "safetensors", "functional-sac")


def canonical(value: Any, what: str) -> str:
    """Returns the one compact, sorted, ASCII and strict JSON text of `value`.

    Args:
      value: nested dicts, lists and tuples of finite numbers, texts, bools and None.
      what: the name of `value` in an error.

    Raises:
      ValueError: names the first field that JSON cannot hold.
    """
    try:
        # The keys are sorted as the texts that they become, so a value that was read back has the same text.
        plain = json.loads(json.dumps(value, allow_nan=False))
        return json.dumps(plain, sort_keys=True, separators=(",", ":"))
    except (TypeError, ValueError) as error:
        if isinstance(value, dict):
            for name, item in value.items():
                canonical(item, f"{what}.{name}")
        raise ValueError(f"{what}: {value!r:.200} is no JSON value ({error}); use finite numbers and texts") from None


def digest(value: Any, what: str = "config") -> str:
    """Returns the SHA-256 of the canonical JSON of `value`, in hexadecimal.

    Raises:
      ValueError: as `canonical`.
    """
    return hashlib.sha256(canonical(value, what).encode()).hexdigest()


def differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, tuple[str, str]]:
    """Returns the JSON text before and after of each field that differs, by dotted name."""
    before, after = dict(_fields(old)), dict(_fields(new))
    pairs = {name: (before.get(name, "absent"), after.get(name, "absent")) for name in sorted(before | after)}
    return {name: (left, right) for name, (left, right) in pairs.items() if left != right}


def _fields(config: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    for name, value in config.items():
        if isinstance(value, Mapping):
            yield from _fields(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", canonical(value, name)


def parse(text: bytes | str) -> Any:
    """Returns the value of a strict JSON text.

    Raises:
      ValueError: for anything else, also for NaN, Infinity and text that is not UTF-8.
    """
    return json.loads(text, parse_constant=_refuse)


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not JSON")


@functools.cache
def versions() -> dict[str, str]:
    """Returns the versions of Python, of the installed libraries that results depend on, and of this project."""
    found = {"python": platform.python_version()}
    for library in _LIBRARIES:
        try:
            found[library] = importlib.metadata.version(library)
        except importlib.metadata.PackageNotFoundError:
            continue
    if "torch" in sys.modules:  # its own version names the build too, such as 2.11.0+cu130
        found["torch"] = str(sys.modules["torch"].__version__)
    return found
