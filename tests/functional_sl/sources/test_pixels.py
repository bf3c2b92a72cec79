"""Pictures whose pixels a reader can count, of things where the worlds' equations put them, alike in any batch."""

from __future__ import annotations

import math
import pathlib

import pytest
import torch
from equal import assert_bits_equal
from torch import Tensor

from functional_sac.envs import reacher as arm
from functional_sac.envs.classic import make
from functional_sl import inspection, keys
from functional_sl.sources import demonstrations, episodes, pixels
from functional_sl.sources.pixels import Camera, Capsule

WORLDS = {"pendulum": "pendulum", "reacher": "reacher", "cartpole": "cartpole_swingup"}
RECORDED = ("functional_sac.envs.reacher:reacher", "functional_sac.envs.experts:reacher")


def observed(name: str, n: int = 5) -> Tensor:
    return make(WORLDS[name]).init(keys.key(3), n)[1].actor


def at(image: Tensor, extent: float, x: float, y: float) -> Tensor:
    """Returns the colour [3] of one picture at a place in metres."""
    size = image.shape[-1]
    column, row = (int((v / extent + 1.0) / 2.0 * size) for v in (x, -y))
    return image[:, row, column]


def test_a_bar_covers_the_rows_that_it_covers() -> None:
    """Eight pixels of 0.5 m: the centres of the rows are 1.75, 1.25, 0.75, 0.25 m above the middle, then below it."""
    ends = torch.tensor([[-9.0, 0.0]]), torch.tensor([[9.0, 0.0]])
    for radius, rows in ((0.5, (250, 250, 250, 0)), (0.75, (250, 250, 125, 0)), (0.875, (250, 250, 62, 0))):
        camera = Camera(1, lambda _, r=radius: (Capsule(*ends, r, (0.0, 0.0, 0.0)),), 2.0, ())
        image = pixels.render(camera, torch.zeros(1, 1), 8)
        expected = torch.tensor([*rows, *reversed(rows)], dtype=torch.uint8)[:, None].expand(8, 8)
        assert torch.equal(image[0], expected.expand(3, 8, 8))


def test_what_is_behind_is_hidden_and_a_line_has_round_ends() -> None:
    place = torch.zeros(1, 2)
    scene = Capsule(place, place, 1.0, (255.0, 0.0, 0.0)), Capsule(place, place, 0.5, (0.0, 0.0, 255.0))
    image = pixels.render(Camera(1, lambda _: scene, 2.0, ()), torch.zeros(1, 1), 64)[0]
    assert at(image, 2.0, 0.0, 0.0).tolist() == [0, 0, 255]
    assert at(image, 2.0, 0.0, 0.8).tolist() == at(image, 2.0, -0.55, 0.55).tolist() == [255, 0, 0]
    assert at(image, 2.0, 0.8, 0.8).tolist() == [250, 250, 250]
    painted = float((image != 250).any(0).sum()) * (4.0 / 64) ** 2
    assert math.isclose(painted, math.pi, rel_tol=0.1)  # the edge's pixels count whole


@pytest.mark.parametrize("name", WORLDS)
def test_a_picture_is_the_same_in_any_batch(name: str) -> None:
    camera, observation = pixels.load(f"functional_sl.sources.pixels:{name}"), observed(name)
    whole = pixels.render(camera, observation, 52)
    assert whole.shape == (5, 3, 52, 52)
    assert_bits_equal(torch.cat([pixels.render(camera, x[None], 52) for x in observation]), whole)
    assert len({bytes(x.flatten().tolist()) for x in whole}) == 5
    edge = torch.cat((whole[..., 0, :], whole[..., -1, :], whole[..., 0], whole[..., -1]), -1)
    assert bool((edge == 250).all())


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("name", WORLDS)
@pytest.mark.parametrize("size", [20, 52, 84])
def test_a_picture_is_the_same_on_a_gpu(name: str, size: int) -> None:
    camera, observation = pixels.load(f"functional_sl.sources.pixels:{name}"), observed(name, 200)
    assert_bits_equal(pixels.render(camera, observation.cuda(), size).cpu(), pixels.render(camera, observation, size))


def test_the_reacher_stands_where_its_equations_put_it() -> None:
    state, seen = make("reacher").init(keys.key(7), 20)
    angle, target = state.physics.angle, state.physics.target
    image, tip = pixels.render(pixels.reacher, seen.actor, 200), arm.tip(angle)
    elbow = 0.5 * torch.stack((torch.cos(angle[:, 0]), torch.sin(angle[:, 0])), -1)
    for i in range(20):
        assert at(image[i], 1.25, *target[i].tolist()).tolist() == list(map(int, pixels.GREEN))
        for place, colour in (((elbow[i] + tip[i]) / 2.0, pixels.ORANGE), (elbow[i] / 2.0, pixels.BLUE)):
            if (place - target[i]).norm() > 0.1 and (colour != pixels.BLUE or tip[i].norm() > 0.3):
                assert at(image[i], 1.25, *place.tolist()).tolist() == list(map(int, colour))


@pytest.mark.parametrize(("angle", "place"), [(0.0, (0.0, 0.9)), (0.5 * math.pi, (0.9, 0.0)), (math.pi, (0.0, -0.9))])
def test_rods_stand_at_their_angle_from_upright(angle: float, place: tuple[float, float]) -> None:
    cosine, sine = math.cos(angle), math.sin(angle)
    for camera, observation in (
        (pixels.pendulum, [cosine, sine, 3.0]),
        (pixels.cartpole, [1.5, cosine, sine, 0.0, 3.0]),
    ):
        image = pixels.render(camera, torch.tensor([observation]), 100)[0]
        assert at(image, camera.extent, *place).tolist() == list(map(int, pixels.ORANGE))
        assert at(image, camera.extent, -place[0], -place[1]).tolist() != list(map(int, pixels.ORANGE))


def test_the_target_is_seen_and_not_sensed() -> None:
    observation = observed("reacher", 1).expand(2, 10).clone()
    observation[1, 6:10] += 0.3
    seen = pixels.see(pixels.reacher, observation[:, None], 52)
    assert torch.equal(seen.proprioception[0], seen.proprioception[1])
    assert not torch.equal(seen.image[0], seen.image[1])
    assert pixels.see(pixels.pendulum, torch.zeros(2, 3, 3), 52).proprioception.shape == (2, 3, 0)


@pytest.mark.parametrize("suffix", [".safetensors", ".h5"])
def test_a_recording_is_stored_bit_by_bit(tmp_path: pathlib.Path, suffix: str) -> None:
    if suffix == ".h5":
        pytest.importorskip("h5py")
    told = demonstrations.generate(*RECORDED, keys.key(0), 2, 0.1)
    recorded = pixels.record(told, "functional_sl.sources.pixels:reacher", 20)
    path = tmp_path / f"pictures{suffix}"
    episodes.write(path, recorded)
    found = episodes.read(path)
    assert_bits_equal(found[1:], recorded[1:])
    assert found.schema == recorded.schema
    assert [(f.name, f.shape, f.dtype) for f in found.schema.features] == [
        ("image", (3, 20, 20), "uint8"),
        ("proprioception", (6,), "float32"),
        ("action", (2,), "float32"),
    ]
    assert found.schema.features[1].channels == told.schema.features[0].channels[:6]
    assert found.schema.about["camera"] == "functional_sl.sources.pixels:reacher"
    assert torch.equal(found.values["image"][7], pixels.render(pixels.reacher, told.values["observation"][7:8], 20)[0])
    if suffix == ".safetensors":
        channel = inspection.channels(found)[1]
        green = found.values["image"][:, 1].double()
        assert (channel.name, channel.low, channel.high) == ("image/green", float(green.min()), float(green.max()))
        assert math.isclose(channel.mean, float(green.mean()))


def test_pictures_name_their_colours(tmp_path: pathlib.Path) -> None:
    recorded = pixels.record(
        demonstrations.generate(*RECORDED, keys.key(0), 2, 0.1), "functional_sl.sources.pixels:reacher", 20
    )
    image = recorded.schema.features[0]._replace(channels=pixels.COLOURS[:2])
    schema = recorded.schema._replace(features=(image, *recorded.schema.features[1:]))
    with pytest.raises(ValueError, match="'image' names 2 channels and has 3"):
        episodes.write(tmp_path / "x.safetensors", recorded._replace(schema=schema))


def test_a_camera_of_another_world_is_refused() -> None:
    told = demonstrations.generate(*RECORDED, keys.key(0), 2, 0.1)
    with pytest.raises(ValueError, match=r"'functional_sl\.sources\.pixels:pendulum' looks at worlds of 3 .* has 10"):
        pixels.record(told, "functional_sl.sources.pixels:pendulum", 20)
    with pytest.raises(ValueError, match="is function; expected a functional_sl"):
        pixels.load("functional_sl.sources.pixels:render")
