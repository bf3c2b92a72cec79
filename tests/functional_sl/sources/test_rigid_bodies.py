"""Rigid bodies in MuJoCo: free fall, bounces, masses and clouds against what physics says, and their files."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import safetensors
import safetensors.torch
import torch

from functional_sl import keys, tree
from functional_sl.models import kabsch
from functional_sl.sources import rigid_bodies, rigid_shapes
from functional_sl.sources.rigid_bodies import FRAME_DT, Ranges, Scenes
from functional_sl.sources.rigid_shapes import KINDS

pytest.importorskip("mujoco")
RANGES = Ranges(objects=(1, 4), points=(24, 33), frames=60)


@pytest.fixture(scope="module")
def scenes() -> Scenes:
    return rigid_bodies.generate(keys.key(3), 12, RANGES)


def world(scenes: Scenes) -> torch.Tensor:
    """All points of all frames [N, F, O, P, 3]."""
    return scenes.points[:, None] @ kabsch.from_quaternion(scenes.quaternions).mT + scenes.positions[..., None, :]


def test_scenes_are_uneven_finite_and_the_key_s_alone(scenes: Scenes) -> None:
    numbers, points = scenes.objects.sum(1), scenes.point_mask.sum(-1)[scenes.objects]
    assert set(numbers.tolist()) <= {1, 2, 3, 4}
    assert len(set(numbers.tolist())) > 1
    assert len(set(points.tolist())) > 3
    assert (int(points.min()) >= 24, int(points.max()) <= 33) == (True, True)
    assert set(scenes.kinds[scenes.objects].tolist()) == set(range(4))
    assert all(torch.isfinite(x).all() for x in tree.leaves(scenes))
    assert not scenes.points[~scenes.point_mask].any()
    assert not scenes.properties[~scenes.objects].any()
    assert (scenes.lengths == 60).all()
    low, high = torch.tensor([0.2, 0.1, 0.25]), torch.tensor([3.0, 0.9, 0.75])
    found = scenes.properties[scenes.objects]
    assert ((found >= low) & (found <= high)).all()
    again = rigid_bodies.generate(keys.key(3), 2, RANGES)
    other = rigid_bodies.generate(keys.key(4), 2, RANGES)
    assert tree.bits_equal(again, rigid_bodies.generate(keys.key(3), 2, RANGES))
    assert not torch.equal(again.positions, other.positions)


def test_objects_begin_above_the_ground_and_hardly_enter_it(scenes: Scenes) -> None:
    height = torch.where(scenes.point_mask[:, None], world(scenes)[..., 2], 1.0)
    assert float(height[:, 0].min()) > 0
    assert -0.02 < float(height.min()) < 0


def test_what_has_not_touched_anything_falls_freely(scenes: Scenes) -> None:
    """x_2 - 2 x_1 + x_0 = -9.81 dt^2 in the first frames, but for float32: 4 x 1e-7 m; and the spin is constant."""
    gap = scenes.positions[:, 2] - 2 * scenes.positions[:, 1] + scenes.positions[:, 0]
    expected = torch.tensor([0.0, 0.0, -9.81 * FRAME_DT**2]).expand_as(gap)
    free = scenes.objects & ((gap - expected).abs().amax(-1) < 1e-6)
    assert int(free.sum()) > 0.7 * int(scenes.objects.sum())


def test_clouds_lie_on_their_shapes_about_the_centre_of_mass(scenes: Scenes) -> None:
    kinds = {name: scenes.kinds == i for i, name in enumerate(KINDS)}
    for o in (kinds["sphere"] & scenes.objects).nonzero().tolist():
        radius = scenes.points[*o][scenes.point_mask[*o]].norm(dim=-1)
        torch.testing.assert_close(radius, radius[:1].expand_as(radius), rtol=1e-5, atol=0)
    for o in (kinds["box"] & scenes.objects).nonzero().tolist():
        cloud = scenes.points[*o][scenes.point_mask[*o]]
        half = cloud.abs().amax(0)
        assert ((cloud.abs() - half).abs().amin(-1) < 1e-6).all()  # on a face
        assert int(((cloud.abs() - half).abs() < 1e-6).all(-1).sum()) == 8  # the corners
    for o in (kinds["cylinder"] & scenes.objects).nonzero().tolist():
        cloud = scenes.points[*o][scenes.point_mask[*o]]
        ring, height = cloud[:, :2].norm(dim=-1), cloud[:, 2].abs()
        assert (((ring - ring.max()).abs() < 1e-5) | ((height - height.max()).abs() < 1e-6)).all()
    for o in (kinds["convex"] & scenes.objects).nonzero().tolist():
        cloud = scenes.points[*o][scenes.point_mask[*o]]
        directions = torch.nn.functional.normalize(keys.normal(keys.key(0), (64, 3)), dim=-1)
        assert ((cloud @ directions.T).amax(0) > 0).all()  # the centre of mass lies within


def test_a_convex_cloud_is_that_of_the_simulated_hull() -> None:
    """Every point lies on the hull's triangles, and MuJoCo's inertial frame stands in their centre."""
    drawn = keys.uniform(keys.key(8), (64,), dtype=torch.float64).numpy()
    drawn[2] = 0.9  # convex
    normal = keys.normal(keys.key(9), (40, 3), dtype=torch.float64).numpy()
    shape = rigid_shapes.draw(drawn, normal)
    model, centres, faces = rigid_bodies._model([shape], np.array([[1.5, 0.5, 0.5]]))
    assert model.body_mass[1] == pytest.approx(1.5)
    a, b, c = faces[0].transpose(1, 0, 2)
    volumes = np.einsum("ij,ij->i", a, np.cross(b, c)) / 6
    centre = (volumes[:, None] * (a + b + c) / 4).sum(0) / volumes.sum()
    np.testing.assert_allclose(centres[0], centre, atol=1e-6)
    spread = keys.uniform(keys.key(10), (40, 4), dtype=torch.float64).numpy()
    cloud = rigid_shapes.cloud(shape, faces[0], 40, spread)
    outward = np.cross(b - a, c - a)
    outward /= np.linalg.norm(outward, axis=-1, keepdims=True)
    depth = np.einsum("tj,ptj->pt", outward, cloud[:, None] - a)
    assert np.abs(depth.max(1)).max() < 1e-6


@pytest.mark.parametrize("restitution", [0.25, 0.5, 0.75])
def test_a_ball_bounces_with_its_restitution(restitution: float) -> None:
    """Dropped from 0.5 m it hits with sqrt(2 g h) = 3.13 m/s; the speed after is that times the restitution, +-0.04."""
    shape = rigid_shapes.Shape("sphere", np.full(3, 0.1), np.zeros((0, 3)))
    model, *_ = rigid_bodies._model([shape], np.array([[1.0, 0.5, restitution]]))
    start = np.array([[0, 0, 0.6, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0.0]])
    positions, _, length = rigid_bodies._simulate(model, start, 120)
    speed = np.diff(positions[:, 0, 2]) / FRAME_DT
    hit = int(speed.argmin())
    after = speed[hit + 1 : hit + 6].max()
    assert length == 120
    assert after / math.sqrt(2 * 9.81 * 0.5) == pytest.approx(restitution, abs=0.05)


@pytest.mark.parametrize("friction", [0.2, 0.6])
def test_a_box_slides_to_rest_by_its_friction(friction: float) -> None:
    """From 1.5 m/s over v^2 / (2 mu g), but for the last centimetres of creep in a soft contact."""
    shape = rigid_shapes.Shape("box", np.full(3, 0.1), np.array([[0.1, 0.1, 0.1]]))
    model, *_ = rigid_bodies._model([shape], np.array([[1.0, friction, 0.3]]))
    start = np.array([[0, 0, 0.1, 1, 0, 0, 0, 1.5, 0, 0, 0, 0, 0.0]])
    positions, *_ = rigid_bodies._simulate(model, start, 150)
    assert positions[-1, 0, 0] == pytest.approx(1.5**2 / (2 * friction * 9.81), rel=0.1)


def test_a_trajectory_ends_where_an_object_leaves() -> None:
    shape = rigid_shapes.Shape("sphere", np.full(3, 0.1), np.zeros((0, 3)))
    model, *_ = rigid_bodies._model([shape], np.array([[1.0, 0.5, 0.5]]))
    start = np.array([[19.0, 0, 0.6, 1, 0, 0, 0, 24.0, 0, 0, 0, 0, 0]])
    positions, _, length = rigid_bodies._simulate(model, start, 20)
    assert length == 5  # 19.2, 19.4, 19.6 and 19.8 m, then 20
    assert (positions[5:] == positions[4]).all()


def test_without_a_frame_that_counts_all_stay_at_the_origin() -> None:
    shape = rigid_shapes.Shape("sphere", np.full(3, 0.1), np.zeros((0, 3)))
    model, *_ = rigid_bodies._model([shape], np.array([[1.0, 0.5, 0.5]]))
    start = np.array([[21.0, 0, 0.6, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0.0]])  # m, behind the end of the world
    positions, quaternions, length = rigid_bodies._simulate(model, start, 7)
    assert length == 0
    assert not positions.any()
    assert (quaternions == [1.0, 0.0, 0.0, 0.0]).all()


def test_a_file_gives_back_every_bit_and_says_what_it_holds(scenes: Scenes, tmp_path: Path) -> None:
    path, drawn = tmp_path / "scenes.safetensors", {"seed": 3, "count": 12, **RANGES._asdict()}
    rigid_bodies.write(path, scenes, drawn)
    found, told = rigid_bodies.read(path, drawn)
    assert tree.bits_equal(found, scenes)
    assert told["simulator"].startswith("mujoco 3.")
    assert told["drawn"]["count"] == 12
    with safetensors.safe_open(path, "pt") as file:
        about = file.metadata()["about"]
    assert '"quaternion":"wxyz, body axes to world axes"' in about
    assert '"frame_dt":0.00833' in about


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda tensors, header: tensors["positions"].add_(1), "is damaged"),
        (lambda tensors, header: header.update(digest="0"), "is damaged"),
        (lambda tensors, header: header.update(version="0"), "its format is .* version '0'"),
        (lambda tensors, header: tensors.pop("points"), "no complete file of rigid bodies"),
        (lambda tensors, header: header.pop("about"), "no complete file of rigid bodies"),
    ],
)
def test_a_file_that_is_not_whole_is_refused(change: object, message: str, scenes: Scenes, tmp_path: Path) -> None:
    path = tmp_path / "scenes.safetensors"
    rigid_bodies.write(path, scenes, {})
    with safetensors.safe_open(path, "pt") as file:
        tensors, header = {name: file.get_tensor(name).clone() for name in file.keys()}, dict(file.metadata())  # noqa: SIM118
    change(tensors, header)
    safetensors.torch.save_file(tensors, path, header)
    with pytest.raises(ValueError, match=message):
        rigid_bodies.read(path, {})


def test_a_file_of_another_draw_or_none_is_named(scenes: Scenes, tmp_path: Path) -> None:
    path = tmp_path / "scenes.safetensors"
    with pytest.raises(ValueError, match="no complete file"):
        rigid_bodies.read(path)
    rigid_bodies.write(path, scenes, {"seed": 1})
    with pytest.raises(ValueError, match=r"'drawn' is \{'seed': 1\}, expected \{'seed': 2\}"):
        rigid_bodies.read(path, {"seed": 2})


@pytest.mark.parametrize(
    ("ranges", "message"),
    [
        (Ranges(objects=(3, 2)), r"objects=\(3, 2\): must be the fewest and the most, from 1 to 8"),
        (Ranges(objects=(1, 9)), r"objects=\(1, 9\): must be the fewest and the most, from 1 to 8"),
        (Ranges(points=(20, 30)), r"points=\(20, 30\): must be the fewest and the most, at least 24"),
        (Ranges(frames=2), "frames=2: must be at least 3"),
        (Ranges(height=-0.1), "height=-0.1: must be finite and not negative"),
        (Ranges(throw=math.inf), "throw=inf: must be finite and not negative"),
    ],
)
def test_ranges_that_hold_nothing(ranges: Ranges, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        rigid_bodies.generate(keys.key(0), 1, ranges)
