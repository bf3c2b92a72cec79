"""Which GPUs this host has and which of them a process may see. Nothing here starts CUDA."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Mapping, Sequence
from typing import NamedTuple

VISIBLE = "CUDA_VISIBLE_DEVICES"
_LISTING = ("nvidia-smi", "--query-gpu=index,uuid,compute_mode", "--format=csv,noheader")
_UUID = re.compile(r"(?:GPU-)?([0-9A-F]{8})-?([0-9A-F]{4})-?([0-9A-F]{4})-?([0-9A-F]{4})-?([0-9A-F]{12})")
_QUERY_S = 30.0


class MpsError(ValueError):
    """What keeps a GPU or a service from being used, in one line."""


class NoListing(MpsError):
    """`nvidia-smi` is not there or does not answer."""


class Gpu(NamedTuple):
    """A GPU as `nvidia-smi` lists it."""

    index: int  # in the order of the PCI bus
    uuid: str  # GPU-xxxxxxxx-xxxx-xxxx-xxxx-xxxxxxxxxxxx
    compute_mode: str  # Default, Exclusive_Process or Prohibited


def uuid(text: str) -> str:
    """Returns a GPU's UUID in the form of `nvidia-smi`; torch's, without prefix, and other cases are read too.

    Raises:
      MpsError: for anything else, a MIG device among it.
    """
    stripped = text.strip()
    if stripped.upper().startswith("MIG-"):
        raise MpsError(f"{stripped!r} is a MIG device, which cannot be used here; give the UUID of a whole GPU")
    found = _UUID.fullmatch(stripped.upper())
    if not found:
        raise MpsError(f"{stripped!r} is neither a GPU's index nor its whole UUID; nvidia-smi -L lists them")
    return f"GPU-{'-'.join(found.groups()).lower()}"


def gpus() -> tuple[Gpu, ...]:
    """Returns the GPUs of this host.

    Raises:
      NoListing: if there is no `nvidia-smi`, or if it fails.
    """
    try:
        done = subprocess.run(_LISTING, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=_QUERY_S)
    except FileNotFoundError:
        raise NoListing("there is no nvidia-smi on the PATH, so no GPU can be found; install the driver") from None
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NoListing(f"nvidia-smi cannot list the GPUs: {error}") from None
    if done.returncode:
        raise NoListing(f"nvidia-smi cannot list the GPUs: {' '.join((done.stderr or done.stdout).split())}")
    return tuple(_gpu(line) for line in done.stdout.splitlines() if line.strip())


def _gpu(line: str) -> Gpu:
    fields = [field.strip() for field in line.split(",")]
    try:
        index, name, mode = fields
        return Gpu(int(index), uuid(name), mode)
    except ValueError:
        raise MpsError(f"nvidia-smi lists {line!r}; expected an index, a UUID and a compute mode") from None


def entries(value: str) -> tuple[str, ...]:
    """Returns the entries of CUDA_VISIBLE_DEVICES: indices and UUIDs; none for the values that hide all GPUs.

    Raises:
      MpsError: for an entry that is neither, and for one that stands twice.
    """
    if value.strip() in ("", "-1"):
        return ()
    found = [entry.strip() for entry in value.split(",")]
    names = [_name(entry, value) for entry in found]
    for entry, name in zip(found, names, strict=True):
        if names.count(name) > 1:
            raise MpsError(f"{VISIBLE}={value}: {entry} stands there twice; name each GPU once")
    return tuple(found)


def _name(entry: str, value: str) -> str:
    """Returns the one spelling of an entry."""
    if entry.isdecimal():
        return str(int(entry))
    if entry.upper().startswith("MIG-") and "," not in value:
        return entry  # a single process may well run on one
    try:
        if not entry.upper().startswith("GPU-"):  # CUDA itself would see no GPU
            raise MpsError(f"{entry!r} is neither a GPU's index nor its UUID; nvidia-smi -L lists them")
        return uuid(entry)
    except MpsError as error:
        raise MpsError(f"{VISIBLE}={value}: {error}") from None


def resolve(named: Sequence[str], listed: Sequence[Gpu], value: str) -> tuple[Gpu, ...]:
    """Returns the GPUs that entries of CUDA_VISIBLE_DEVICES name.

    Args:
      named: the entries.
      listed: the host's GPUs.
      value: the whole variable, for errors.

    Raises:
      MpsError: for an entry that names no GPU of the host, and for two that name one.
    """
    found: dict[Gpu, str] = {}
    for entry in named:
        gpu = _find(entry, listed)
        if gpu is None:
            raise MpsError(f"{VISIBLE}={value}: there is no GPU {entry} here; {_told(listed)}")
        if gpu in found:
            raise MpsError(f"{VISIBLE}={value}: {found[gpu]} and {entry} are one GPU; name each GPU once")
        found[gpu] = entry
    return tuple(found)


def visible(environment: Mapping[str, str] = os.environ) -> tuple[Gpu, ...]:
    """Returns the GPUs of this host that CUDA_VISIBLE_DEVICES shows, in its order; unset, empty or `all` shows all.

    Raises:
      MpsError: for entries that name no GPU, and for a host without any.
    """
    listed, value = gpus(), environment.get(VISIBLE, "").strip()
    found = listed if value in ("", "all") else resolve(entries(value), listed, value)
    if not found:
        raise MpsError(f"{VISIBLE}={value} shows no GPU" if listed else "nvidia-smi lists no GPU")
    return found


def select(selector: str | None, among: Sequence[Gpu]) -> Gpu:
    """Returns the GPU of `--gpus`: of an index or a UUID; None means the only visible one.

    Raises:
      MpsError: if that is not one GPU.
    """
    if selector is None:
        if len(among) > 1:
            raise MpsError(f"{len(among)} GPUs are visible; specify --gpus, one of {_indices(among)}")
        return among[0]
    if selector == "all" or "," in selector:
        raise MpsError(f"--gpus={selector}: one service has one GPU; start one for each")
    if not selector.strip().isdecimal():
        uuid(selector)  # tells what is no UUID at all
    if (gpu := _find(selector.strip(), among)) is None:
        raise MpsError(f"--gpus={selector}: there is no such GPU; visible are {_indices(among)}")
    return gpu


def _find(entry: str, listed: Sequence[Gpu]) -> Gpu | None:
    if entry.isdecimal():
        return next((gpu for gpu in listed if gpu.index == int(entry)), None)
    wanted = uuid(entry)
    return next((gpu for gpu in listed if gpu.uuid == wanted), None)


def _told(listed: Sequence[Gpu]) -> str:
    return f"nvidia-smi lists {_indices(listed)}" if listed else "nvidia-smi lists none"


def _indices(listed: Sequence[Gpu]) -> str:
    return ", ".join(f"{gpu.index} ({gpu.uuid})" for gpu in listed)
