"""Episodes of named features in one file, safetensors or HDF5, with a schema and a digest of the content.

The frames of all episodes stand one after another along the leading axis of every feature. A file is complete or it
is refused: format, schema, shapes, dtypes, lengths and digest are checked, and nothing is ever unpickled.
"""

from __future__ import annotations

import io
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import safetensors
import safetensors.torch
import torch
from torch import Tensor

from functional_sl import keys, tree
from functional_sl.run import files, identity

FORMAT, VERSION = "functional_sl.episodes", "1"
_KINDS = (torch.float32, torch.float64, torch.int64, torch.uint8, torch.bool)
_DTYPES = {str(x).removeprefix("torch."): x for x in _KINDS}
_HDF5 = (".h5", ".hdf5")
_SUFFIXES = (".safetensors", *_HDF5)


class Feature(NamedTuple):
    """What one frame holds under a name."""

    name: str
    shape: tuple[int, ...]  # of one frame
    dtype: str  # float32, float64, int64, uint8 or bool
    channels: tuple[tuple[str, str], ...]  # name and unit along `channel_axis`; of the value itself for shape ()

    @property
    def channel_axis(self) -> int:
        """The axis of one frame that the channels name: the first of a picture, uint8 [C, H, W], else the last."""
        return 0 if self.dtype == "uint8" and len(self.shape) == 3 else -1


class Schema(NamedTuple):
    """What every file of one kind has in common."""

    features: tuple[Feature, ...]  # in order
    step_dt: float  # seconds from one frame to the next
    mask: str  # the bool feature of shape () that says which frames count; empty where all do
    about: Mapping[str, Any]  # JSON: where the data comes from and what its numbers mean


class Episodes(NamedTuple):
    """E episodes of T frames in all."""

    schema: Schema
    values: Mapping[str, Tensor]  # by feature: [T, *shape]
    lengths: Tensor  # [E] int64, positive
    terminated: Tensor  # [E] bool: the task ended there; else the recording stopped


def unnamed_channels(width: int, prefix: str) -> tuple[tuple[str, str], ...]:
    """Returns names for channels that nobody named: `prefix_0` and so on, of unknown unit."""
    return tuple((f"{prefix}_{i}", "") for i in range(width))


def as_json(schema: Schema) -> dict[str, Any]:
    """Returns the schema as plain JSON values, which `from_json` takes."""
    plain = {**schema._asdict(), "features": [feature._asdict() for feature in schema.features]}
    return identity.parse(identity.canonical(plain, "schema"))


def from_json(value: Mapping[str, Any]) -> Schema:
    """Returns the schema of `as_json`."""
    features = tuple(
        Feature(f["name"], tuple(f["shape"]), f["dtype"], tuple((name, unit) for name, unit in f["channels"]))
        for f in value["features"]
    )
    return Schema(features, float(value["step_dt"]), value["mask"], value["about"])


def digest(episodes: Episodes) -> str:
    """Returns the SHA-256 of schema and content, in hexadecimal."""
    return identity.digest([as_json(episodes.schema), tree.digest(_tensors(episodes))], "episodes")


def starts(episodes: Episodes) -> Tensor:
    """Returns the first frame of every episode, [E] int64."""
    return torch.cumsum(episodes.lengths, 0) - episodes.lengths


def select(episodes: Episodes, chosen: Sequence[int] | Tensor) -> Episodes:
    """Returns the chosen episodes in the given order; windows over them end where their own episodes end."""
    chosen = torch.as_tensor(chosen, dtype=torch.int64)
    first, lengths = starts(episodes)[chosen], episodes.lengths[chosen]
    spans = zip(first.tolist(), lengths.tolist(), strict=True)
    frames = torch.cat([torch.arange(start, start + length) for start, length in spans])
    values = {name: value[frames] for name, value in episodes.values.items()}
    return Episodes(episodes.schema, values, lengths, episodes.terminated[chosen])


def shorten(episodes: Episodes, longest: int) -> Episodes:
    """Returns the first `longest` frames of every episode; a task that ended later did not end there."""
    place = torch.arange(int(episodes.lengths.sum())) - starts(episodes).repeat_interleave(episodes.lengths)
    values = {name: value[place < longest] for name, value in episodes.values.items()}
    terminated = episodes.terminated & (episodes.lengths <= longest)
    return Episodes(episodes.schema, values, episodes.lengths.clamp(max=longest), terminated)


def split(episodes: Episodes, share: float, key: Tensor) -> tuple[Episodes, Episodes]:
    """Returns the episodes without and with a random share of them, held out whole; each part has at least one.

    Args:
      episodes: at least two.
      share: of the second part, in (0, 1).
      key: [2].

    Raises:
      ValueError: for a single episode.
    """
    total = len(episodes.lengths)
    if total < 2:
        raise ValueError("there is one episode, and a held-out part needs a whole one too: record more")
    count = min(max(1, round(share * total)), total - 1)
    order = keys.permutation(key, total)
    return select(episodes, order[count:].sort().values), select(episodes, order[:count].sort().values)


def valid(episodes: Episodes) -> Tensor:
    """Returns which frames count, [T] bool."""
    total = int(episodes.lengths.sum())
    name = episodes.schema.mask
    return episodes.values[name] if name else torch.ones(total, dtype=torch.bool)


def check(episodes: Episodes, where: str) -> Episodes:
    """Returns the episodes if they are what their schema says.

    Raises:
      ValueError: names `where`, the feature and what is wrong: absent (a mask that the schema names included), unknown
        to the schema, of another shape or dtype, of frames that do not add up, or not finite in a frame that counts.
    """
    schema, values = episodes.schema, episodes.values
    lengths, terminated = episodes.lengths, episodes.terminated
    declared = {feature.name: feature for feature in schema.features}
    if absent := [name for name in (*declared, schema.mask) if name and name not in values]:
        raise ValueError(f"{where}: the feature {absent[0]!r} is missing; its schema asks for it")
    if foreign := sorted(values.keys() - declared.keys()):
        raise ValueError(f"{where}: its schema does not know the feature {foreign[0]!r}; add it there or leave it out")
    if lengths.dtype != torch.int64 or lengths.ndim != 1 or not len(lengths) or bool((lengths < 1).any()):
        raise ValueError(f"{where}: lengths are {lengths.dtype} {tuple(lengths.shape)}; expected positive int64 [E]")
    if terminated.dtype != torch.bool or terminated.shape != lengths.shape:
        raise ValueError(f"{where}: terminated is {terminated.dtype} {tuple(terminated.shape)}; expected bool [E]")
    for feature in schema.features:
        _check_feature(feature, values[feature.name], int(lengths.sum()), where)
    if schema.mask and (declared[schema.mask].dtype, declared[schema.mask].shape) != ("bool", ()):
        raise ValueError(f"{where}: the mask {schema.mask!r} must be a bool a frame")
    counts = valid(episodes)
    for name, value in values.items():
        if value.is_floating_point() and not bool(torch.isfinite(value[counts]).all()):
            bad = (~torch.isfinite(value.flatten(1) if value.ndim > 1 else value[:, None])).any(1) & counts
            raise ValueError(f"{where}: {name!r} is not finite in frame {int(bad.nonzero()[0])}; mask it or repair it")
    return episodes


def _check_feature(feature: Feature, value: Tensor, frames: int, where: str) -> None:
    if feature.dtype not in _DTYPES:
        raise ValueError(f"{where}: {feature.name!r} has dtype {feature.dtype}; use one of {', '.join(_DTYPES)}")
    expected = (frames, *feature.shape)
    if tuple(value.shape) != expected or value.dtype != _DTYPES[feature.dtype]:
        found = f"{str(value.dtype).removeprefix('torch.')} {tuple(value.shape)}"
        raise ValueError(f"{where}: {feature.name!r} is {found}; its schema says {feature.dtype} {expected}")
    width = feature.shape[feature.channel_axis] if feature.shape else 1
    if len(feature.channels) != width:
        raise ValueError(f"{where}: {feature.name!r} names {len(feature.channels)} channels and has {width}")


def write(path: str | os.PathLike[str], episodes: Episodes) -> None:
    """Writes a file as a whole or not at all; its suffix says how: .safetensors, or .h5 and .hdf5 (extra `hdf5`).

    Raises:
      ValueError: for episodes that do not pass `check`, or another suffix.
    """
    path = Path(path).expanduser()
    check(episodes, str(path))
    header = {
        "format": FORMAT,
        "version": VERSION,
        "schema": identity.canonical(as_json(episodes.schema), "schema"),
        "digest": digest(episodes),
        "versions": identity.canonical(identity.versions(), "versions"),
    }
    tensors = _tensors(episodes)
    encode = _encode_hdf5 if _suffix(path) in _HDF5 else safetensors.torch.save
    files.write_whole(path, encode(tensors, header))


def read(path: str | os.PathLike[str]) -> Episodes:
    """Returns the episodes of a file that `write` made, after all checks.

    Raises:
      ValueError: names the file and what is wrong: absent, cut short, damaged, of another format or version, or not
        what its schema says.
    """
    path = Path(path).expanduser()
    decode = _decode_hdf5 if _suffix(path) in _HDF5 else _decode_safetensors
    if not path.is_file():
        raise ValueError(f"{path}: there is no such file of episodes")
    try:
        tensors, header = decode(path)
        if (header.get("format"), header.get("version")) != (FORMAT, VERSION):
            kind = f"{header.get('format')!r} version {header.get('version')!r}"
            raise ValueError(f"its format is {kind}, expected {FORMAT!r} version {VERSION!r}")
        schema = from_json(identity.parse(header["schema"]))
        values = {name.removeprefix("feature/"): x for name, x in tensors.items() if name.startswith("feature/")}
        episodes = Episodes(schema, values, tensors["lengths"], tensors["terminated"])
        intact = digest(episodes) == header["digest"]
    except (OSError, safetensors.SafetensorError, ValueError, KeyError, TypeError, json.JSONDecodeError) as error:
        raise ValueError(f"{path} is no complete file of episodes: {error}; write it again") from None
    check(episodes, str(path))
    if not intact:
        raise ValueError(f"{path} is damaged: its content has another digest than when it was written; write it again")
    return episodes


def _suffix(path: Path) -> str:
    if path.suffix not in _SUFFIXES:
        raise ValueError(f"{path}: episodes are stored in files that end in {', '.join(_SUFFIXES)}")
    return path.suffix


def _tensors(episodes: Episodes) -> dict[str, Tensor]:
    values = {f"feature/{name}": value.contiguous() for name, value in episodes.values.items()}
    return {**values, "lengths": episodes.lengths, "terminated": episodes.terminated}


def _decode_safetensors(path: Path) -> tuple[dict[str, Tensor], Mapping[str, str]]:
    with safetensors.safe_open(path, framework="pt", device="cpu") as file:
        return {name: file.get_tensor(name).clone() for name in file.keys()}, file.metadata() or {}  # noqa: SIM118


def _encode_hdf5(tensors: Mapping[str, Tensor], header: Mapping[str, str]) -> bytes:
    buffer = io.BytesIO()
    with _h5py().File(buffer, "w") as file:
        file.attrs.update(header)
        for name, value in tensors.items():
            file.create_dataset(name, data=value.numpy())
    return buffer.getvalue()


def _decode_hdf5(path: Path) -> tuple[dict[str, Tensor], Mapping[str, str]]:
    h5py = _h5py()
    tensors: dict[str, Tensor] = {}

    def take(name: str, item: Any) -> None:
        if isinstance(item, h5py.Dataset):
            tensors[name] = torch.from_numpy(item[()])

    with h5py.File(path, "r") as file:
        file.visititems(take)
        return tensors, dict(file.attrs)


def _h5py() -> Any:
    try:
        import h5py
    except ModuleNotFoundError:
        raise ValueError("HDF5 files need h5py: pip install '.[hdf5]' in the checkout, or use .safetensors") from None
    return h5py
