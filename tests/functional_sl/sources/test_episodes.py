"""Stored episodes come back bit by bit, or are refused in one line that names file and fault."""

from __future__ import annotations

import pathlib
from typing import Any

import pytest
import torch
from equal import assert_bits_equal

from functional_sl import keys
from functional_sl.sources import episodes
from functional_sl.sources.episodes import Episodes, Feature, Schema

LENGTHS = (3, 4, 9)
SCHEMA = Schema(
    features=(
        Feature("observation", (2,), "float32", (("angle", "rad"), ("speed", "rad/s"))),
        Feature("action", (1,), "float32", (("torque", "N m"),)),
        Feature("real", (), "bool", (("real", ""),)),
    ),
    step_dt=0.05,
    mask="real",
    about={"robot": "Käfer", "seed": 3},
)


def made(**changes: Any) -> Episodes:
    frames = sum(LENGTHS)
    values = {
        "observation": keys.normal(keys.key(0), (frames, 2)),
        "action": keys.normal(keys.key(1), (frames, 1)),
        "real": torch.ones(frames, dtype=torch.bool),
    }
    values |= changes.pop("values", {})
    return Episodes(SCHEMA, values, torch.tensor(LENGTHS), torch.tensor([True, False, False]))._replace(**changes)


@pytest.mark.parametrize("suffix", [".safetensors", ".h5", ".hdf5"])
def test_a_file_gives_back_what_was_written(tmp_path: pathlib.Path, suffix: str) -> None:
    if suffix != ".safetensors":
        pytest.importorskip("h5py")
    path = tmp_path / f"demonstrations{suffix}"
    episodes.write(path, made())
    found = episodes.read(path)
    assert_bits_equal(found[1:], made()[1:])
    assert found.schema == SCHEMA
    assert episodes.digest(found) == episodes.digest(made())


@pytest.mark.parametrize("suffix", [".safetensors", ".h5"])
@pytest.mark.parametrize("place", ["cut", "header", "content", "empty"])
def test_a_damaged_file_is_refused(tmp_path: pathlib.Path, suffix: str, place: str) -> None:
    if suffix != ".safetensors":
        pytest.importorskip("h5py")
    path = tmp_path / f"d{suffix}"
    episodes.write(path, made())
    data = bytearray(path.read_bytes())
    value = made().values["observation"].numpy().tobytes()
    at = bytes(data).index(value) if place == "content" else 3
    data[at] ^= 0x10
    path.write_bytes({"cut": data[: len(data) // 2], "empty": b""}.get(place, bytes(data)))
    with pytest.raises(ValueError, match=rf"d\{suffix}.*write it again") as error:
        episodes.read(path)
    assert "\n" not in str(error.value)


def test_files_of_another_kind_are_refused(tmp_path: pathlib.Path) -> None:
    from safetensors.torch import save_file

    save_file({"x": torch.ones(2)}, tmp_path / "x.safetensors", {"format": "other", "version": "1"})
    with pytest.raises(ValueError, match="its format is 'other'"):
        episodes.read(tmp_path / "x.safetensors")
    with pytest.raises(ValueError, match="there is no such file"):
        episodes.read(tmp_path / "absent.safetensors")
    with pytest.raises(ValueError, match=r"end in \.safetensors"):
        episodes.write(tmp_path / "x.npz", made())


NAN = torch.full((sum(LENGTHS), 1), torch.nan)
TOO_MANY = (SCHEMA.features[0], SCHEMA.features[1]._replace(channels=(("", ""),) * 2), SCHEMA.features[2])
WRONG = {
    "the feature 'real' is missing": lambda e: e._replace(values={k: v for k, v in e.values.items() if k != "real"}),
    "does not know the feature 'extra'": lambda e: e._replace(values={**e.values, "extra": NAN}),
    r"says float32 \(16, 2\)": lambda e: e._replace(values={**e.values, "observation": NAN}),
    r"'action' is float64 \(16, 1\)": lambda e: e._replace(values={**e.values, "action": NAN.double()}),
    "'action' is not finite in frame 0": lambda e: e._replace(values={**e.values, "action": NAN}),
    "positive int64": lambda e: e._replace(lengths=torch.tensor([16, 0, 0])),
    r"says float32 \(15, 2\)": lambda e: e._replace(lengths=torch.tensor([3, 4, 8])),
    "terminated is": lambda e: e._replace(terminated=torch.tensor([True])),
    "the feature 'loss_mask' is missing": lambda e: e._replace(schema=SCHEMA._replace(mask="loss_mask")),
    "must be a bool a frame": lambda e: e._replace(schema=SCHEMA._replace(mask="action")),
    "'action' names 2 channels and has 1": lambda e: e._replace(schema=SCHEMA._replace(features=TOO_MANY)),
}


@pytest.mark.parametrize("message", WRONG)
def test_what_the_schema_does_not_say_is_refused(tmp_path: pathlib.Path, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        episodes.write(tmp_path / "d.safetensors", WRONG[message](made()))
    assert not any(tmp_path.iterdir())


def test_frames_that_do_not_count_may_hold_anything(tmp_path: pathlib.Path) -> None:
    real = torch.arange(sum(LENGTHS)) != 5
    action = made().values["action"].clone()
    action[5] = torch.nan
    episodes.write(tmp_path / "d.safetensors", made(values={"action": action, "real": real}))
    assert episodes.valid(episodes.read(tmp_path / "d.safetensors")).tolist() == real.tolist()


def test_selected_episodes_keep_their_frames() -> None:
    found = episodes.select(made(), [2, 0])
    action = made().values["action"]
    assert found.lengths.tolist() == [9, 3]
    assert found.terminated.tolist() == [False, True]
    assert torch.equal(found.values["action"], torch.cat((action[7:], action[:3])))
    assert episodes.starts(found).tolist() == [0, 9]


def test_a_shortened_episode_ends_open() -> None:
    """Of 3, 4 and 9 frames the first 4 are left; the first episode's end is still its task's."""
    ended = made(terminated=torch.tensor([True, True, True]))
    found = episodes.shorten(ended, 4)
    action = ended.values["action"]
    assert found.lengths.tolist() == [3, 4, 4]
    assert found.terminated.tolist() == [True, True, False]
    assert torch.equal(found.values["action"], action[:11])
    assert episodes.shorten(ended, 2).terminated.tolist() == [False, False, False]


def test_a_split_holds_whole_episodes_out() -> None:
    many = episodes.select(made(), [0, 1, 2, 0, 1, 2, 0, 1, 2, 0])
    rest, held_out = episodes.split(many, 0.2, keys.key(1))
    assert (len(rest.lengths), len(held_out.lengths)) == (8, 2)
    assert sorted([*rest.lengths.tolist(), *held_out.lengths.tolist()]) == sorted(many.lengths.tolist())
    assert int(rest.lengths.sum()) == len(rest.values["action"])
    for share in (0.001, 0.999):
        assert min(len(part.lengths) for part in episodes.split(many, share, keys.key(1))) == 1
    with pytest.raises(ValueError, match="record more"):
        episodes.split(episodes.select(made(), [0]), 0.1, keys.key(0))
