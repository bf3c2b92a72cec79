"""The RigidFormer recipe: loss and counts against plain loops, uneven scenes, clips by key, the bundle's answer."""

from __future__ import annotations

import dataclasses
import json
import math
import shutil
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from tiny_rigid import TINY, made, started

from functional_sl import bundle as bundles
from functional_sl import keys, optim, recipe, tree
from functional_sl.models import rigidformer as model
from functional_sl.models.kabsch import from_quaternion
from functional_sl.recipe import Recipe
from functional_sl.recipes import rigidformer
from functional_sl.recipes.rigidformer import RigidFormer
from functional_sl.sources import rigid_bodies, rigid_clips
from functional_sl.sources.rigid_bodies import FRAME_DT, Scenes
from functional_sl.sources.rigid_clips import Clips
from functional_sl.step import make_step
from functional_sl.training.config import TrainConfig

NAME = "functional_sl.recipes.rigidformer:build"


@pytest.fixture
def task() -> Recipe:
    return rigidformer.assemble(TINY, made(6), made(3, 1), "none")


def drawn(task: Recipe, number: int = 4, key: int = 5) -> Clips:
    return task.sample(task.data, keys.key(key), number)


def gradient(task: Recipe, params: dict, batch: Clips) -> tuple[dict, torch.Tensor]:
    return torch.func.grad_and_value(lambda p: task.loss(p, (), batch, keys.key(0))[0])(params)


def doubled(x: tree.Tree) -> tree.Tree:
    return tree.map(lambda leaf: leaf.double() if leaf.is_floating_point() else leaf, x)


def test_it_is_a_recipe(task: Recipe) -> None:
    assert recipe.load(NAME).settings is RigidFormer
    assert json.loads(json.dumps(task.schema)) == task.schema
    assert sum(entry["width"] for entry in task.schema["point_features"]) == 21
    for size in rigidformer.SIZES.values():
        TrainConfig(**size["train"])
        config = RigidFormer(**size["recipe"])
        assert rigidformer.architecture(config).depths == config.depths


def test_clips_are_slices_at_their_step_turned_and_reordered(task: Recipe) -> None:
    """Heights, distances between objects and masses of 120 clips are found again at some start of some scene."""
    batch, data = drawn(task, 120), task.data
    assert set(batch.step.tolist()) == {1.0, 3.0}
    turned = shuffled = cut = 0
    for i in range(120):
        step, heights = int(batch.step[i]), batch.positions[i, :, :, 2].sort(-1).values
        found = []
        for scene in range(6):
            length = int(data.lengths[scene])
            for start in range(length - 2 * step):
                at = start + step * torch.arange(5)
                inside = at.clamp(max=length - 1)
                same = torch.allclose(data.positions[scene, inside, :, 2].sort(-1).values, heights, atol=1e-6)
                found += [(scene, inside)] if same and torch.equal(at < length, batch.frames[i]) else []
        assert len(found) == 1, i
        scene, at = found[0]
        order = [int((data.positions[scene, at[0], :, 2] - z).abs().argmin()) for z in batch.positions[i, 0, :, 2]]
        for name in ("points", "point_mask", "objects", "properties"):
            assert torch.equal(getattr(batch, name)[i], getattr(data, name)[scene][order])
        flat = (data.positions[scene, at[0], order[0]], batch.positions[i, 0, 0])
        turn = float(torch.atan2(flat[1][1], flat[1][0]) - torch.atan2(flat[0][1], flat[0][0])) % (2 * math.pi)
        fives = round(turn / math.radians(5))
        assert abs(turn - fives * math.radians(5)) < 1e-4
        about = torch.tensor([math.cos(turn / 2), 0, 0, math.sin(turn / 2)])
        expected = from_quaternion(about) @ from_quaternion(data.quaternions[scene, at][:, order])
        torch.testing.assert_close(from_quaternion(batch.quaternions[i]), expected, rtol=0, atol=1e-4)
        turned, shuffled = turned + (fives % 72 > 0), shuffled + (order != [0, 1, 2])
        cut += int(not batch.frames[i].all())
    assert 36 < turned < 82  # half but for 1 angle in 72, +-4 standard deviations
    assert 27 < shuffled < 73  # half of 5 orders in 6
    assert 12 < cut < 60
    assert batch.frames[:, :3].all()
    assert tree.bits_equal(batch, drawn(task, 120))


def test_held_out_clips_follow_each_other_through_every_scene(task: Recipe) -> None:
    """24 frames: at step 1 starts 0, 5, 10, 15, 20; at step 3 starts 0 and 15. Three scenes each."""
    assert len(task.validation.step) == 3 * (5 + 2)
    assert sum(len(batch.step) for batch in task.batches(task.validation, 4)) == 21
    assert (task.validation.step == 1).sum() == 15


def test_the_loss_is_that_of_plain_loops(task: Recipe) -> None:
    """One scene, object and anchor after the other, from the network's own steps."""
    params, batch = doubled(started(task)), doubled(drawn(task))
    a = rigidformer.architecture(TINY)
    value, aux = task.loss(params, (), batch, keys.key(0))
    total, items, distance = 0.0, 0, 0.0
    for i in range(4):
        one = tree.map(lambda x, i=i: x[i : i + 1], batch)
        bodies = model.prepare(one.points, one.point_mask, one.objects, one.properties)
        poses = [model.pose(one.positions[:, t], one.quaternions[:, t], one.objects) for t in range(5)]
        dt = float(one.step) * FRAME_DT
        found = model.roll_out(params, a, bodies, *poses[:2], one.step, one.step * FRAME_DT, 3)
        for o in range(3):
            for k in range(4):
                if not (one.objects[0, o] and one.point_mask[0, o, k]):
                    continue
                true = [x.rotation[0, o] @ one.points[0, o, k] + x.position[0, o] for x in poses]
                path = true[:2]
                for t in range(2, 5):
                    step = found[t - 2]
                    path.append(step.rigid[0, o, k])
                    if not one.frames[0, t]:
                        continue
                    wanted = (true[t] - 2 * true[t - 1] + true[t - 2]) / dt**2
                    moved = (path[t] - 2 * path[t - 1] + path[t - 2]) / dt**2
                    for gap, weight in (
                        ((step.raw[0, o, k] - true[t]) / dt**2, 10),
                        ((step.rigid[0, o, k] - true[t]) / dt**2, 10),
                        (step.acceleration[0, o, k] - wanted, 1),
                        (moved - wanted, 1),
                    ):
                        total += weight * float(F.smooth_l1_loss(gap, 0 * gap, reduction="sum"))
                    items += 1
                    distance += float((step.rigid[0, o, k] - true[t]).norm())
    assert math.isclose(value, total, rel_tol=1e-6)
    assert math.isclose(aux.metrics["distance"], distance, rel_tol=1e-9)
    assert task.count(batch) == items
    assert task.count(batch).dtype == torch.int64
    assert torch.equal(task.validate(params, (), batch)["loss"], value)


def test_what_is_not_valid_changes_no_bit(task: Recipe) -> None:
    """Padded objects, padded points and frames behind the end, filled with NaN."""
    params, batch = started(task), drawn(task, 12)
    assert not batch.frames.all()
    lost = {
        name: torch.where(mask, getattr(batch, name), math.nan)
        for name, mask in {
            "positions": (batch.objects[:, None] & batch.frames[..., None])[..., None],
            "quaternions": (batch.objects[:, None] & batch.frames[..., None])[..., None],
            "points": (batch.point_mask & batch.objects[..., None])[..., None],
            "properties": batch.objects[..., None],
        }.items()
    }
    assert tree.bits_equal(gradient(task, params, batch._replace(**lost)), gradient(task, params, batch))


def test_no_valid_item_gives_a_finite_zero(task: Recipe) -> None:
    batch = drawn(task)
    for empty in (
        batch._replace(objects=torch.zeros_like(batch.objects)),
        batch._replace(frames=torch.zeros_like(batch.frames)),
        batch._replace(point_mask=torch.zeros_like(batch.point_mask)),
    ):
        assert task.count(empty) == 0
        found, value = gradient(task, started(task), empty)
        assert value == 0
        assert all(not x.any() for x in tree.leaves(found))


@pytest.mark.parametrize("parts", [(4, 8), (1, 1, 10)])
def test_a_batch_in_parts_has_the_same_sum_and_gradient(task: Recipe, parts: tuple[int, ...]) -> None:
    """However uneven the ranks are: 1e-12 in float64."""
    params, batch = doubled(started(task)), doubled(drawn(task, 12))
    split = [Clips(*x) for x in zip(*(leaf.split(parts) for leaf in batch), strict=True)]
    found = [gradient(task, params, part) for part in split]
    total = found[0]
    for more in found[1:]:
        total = tree.add(total, more)
    for a, b in zip(tree.leaves(total), tree.leaves(gradient(task, params, batch)), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9 * float(b.abs().max()))
    assert sum(int(task.count(part)) for part in split) == task.count(batch)


def test_more_padding_and_another_order_leave_loss_and_gradient(task: Recipe) -> None:
    params, batch = doubled(started(task)), doubled(drawn(task, 6))
    order = [2, 0, 1, 4, 3]

    def widened(x: torch.Tensor, axis: int, number: int) -> torch.Tensor:
        shape = [*x.shape]
        shape[axis] = number
        return torch.cat((x, torch.zeros(shape, dtype=x.dtype)), axis)

    other = batch._replace(
        **{name: widened(getattr(batch, name), 2, 2)[:, :, order] for name in ("positions", "quaternions")},
        **{name: widened(getattr(batch, name), 1, 2)[:, order] for name in ("objects", "properties")},
        **{name: widened(widened(getattr(batch, name), 2, 5), 1, 2)[:, order] for name in ("points", "point_mask")},
    )
    for a, b in zip(*(tree.leaves(gradient(task, params, x)) for x in (other, batch)), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-8, atol=1e-9 * float(b.abs().max()))


def test_every_parameter_is_reached(task: Recipe) -> None:
    found, _ = gradient(task, started(task), drawn(task, 8))
    for name, x in tree.named(found).items():
        assert torch.isfinite(x).all(), name
        assert float((x != 0).double().mean()) > (0.99 if "film" in name else 0.5), name


def test_scenes_that_end_early_are_drawn_where_they_allow_it(task: Recipe) -> None:
    """Of lengths 3, 6, 7, 24, 2 and 0 a clip of step 1 takes the first four, one of step 3 the third and fourth."""
    lengths = torch.tensor([3, 6, 7, 24, 2, 0])
    data = task.data._replace(lengths=lengths, kinds=torch.arange(6)[:, None].expand(6, 3))
    data = data._replace(properties=torch.arange(1.0, 7)[:, None, None].expand(6, 3, 3))  # the scene's number
    batch = rigid_clips.sample(data, keys.key(2), 300, steps=(1, 3), length=5)
    assert batch.frames[:, :3].all()
    number = batch.properties[:, 0, 0].long() - 1
    assert {1.0: {0, 1, 2, 3}, 3.0: {2, 3}} == {step: set(number[batch.step == step].tolist()) for step in (1.0, 3.0)}
    for step, scenes in ((1, 4), (3, 2)):
        counts = torch.bincount(number[batch.step == step], minlength=6)
        assert int(counts[counts > 0].min()) > 0.5 * int(counts.sum()) / scenes
    with pytest.raises(ValueError, match="ends after 6 frames, and a clip of step 3 takes 7"):
        rigidformer.assemble(TINY, data._replace(lengths=lengths.clamp(max=6)), made(3), "none")
    with pytest.raises(ValueError, match=r"held-out scenes ends after 15 frames, and .* take 16"):
        rigidformer.assemble(TINY, data, made(3)._replace(lengths=torch.tensor([15, 3, 0])), "none")


def test_under_bfloat16_geometry_stays_in_float32(task: Recipe) -> None:
    """An untrained network says nothing, and what is left is geometry alone: the loss has the same bits.

    In general position the network's own products differ, by 2^-9 of each: 2 in 100 of the loss.
    """
    batch = drawn(task, 8)
    for params, tolerance in ((task.init(keys.key(0))[0], 0.0), (started(task), 0.02)):
        expected = float(task.loss(params, (), batch, keys.key(0))[0])
        with torch.autocast("cpu", torch.bfloat16):
            found = float(task.loss(params, (), batch, keys.key(0))[0])
        assert abs(found / expected - 1) <= tolerance


def test_sampling_and_loss_compile_whole(task: Recipe) -> None:
    """One predicted frame: compiling takes as long as there are frames."""
    params = started(task)

    def value(params: dict, data: Scenes, key: torch.Tensor) -> torch.Tensor:
        batch = rigid_clips.sample(data, key, 3, steps=(1, 3), length=3)
        return torch.func.grad_and_value(lambda p: task.loss(p, (), batch, key)[0])(params)

    compiled = torch.compile(value, fullgraph=True, backend="eager")(params, task.data, keys.key(1))
    expected = value(params, task.data, keys.key(1))
    for a, b in zip(tree.leaves(compiled), tree.leaves(expected), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4 * float(b.abs().max()))


def test_a_fresh_model_learns(task: Recipe) -> None:
    """Thirty steps of Adam make its error on what it saw a third smaller."""

    def mean(params: dict, buffers: tuple, batch: Clips, key: torch.Tensor) -> tuple:
        value, aux = task.loss(params, buffers, batch, key)
        return value / task.count(batch), aux

    step = make_step(mean, optim.chain(optim.clip_by_global_norm(1.0), optim.adam(1e-2)))
    state = step.init(*task.init(keys.key(0)))
    clips = drawn(task, 8)

    before = mean(state.params, (), clips, keys.key(0))[0]
    for _ in range(30):
        state, _, _ = step.update(state, clips, keys.key(0))
    assert mean(state.params, (), clips, keys.key(0))[0] < 0.67 * before


def test_the_bundle_predicts_what_the_recipe_does_bit_by_bit(task: Recipe, tmp_path: Path) -> None:
    params = started(task)
    packed = task.bundle(params, ())
    loaded = bundles.load(bundles.save(packed, tmp_path / "model.safetensors"))
    found = loaded.predict(loaded.bundle.inputs)
    x = packed.inputs
    a = rigidformer.architecture(TINY)
    bodies = model.prepare(x["points"], x["point_mask"], x["objects"], x["properties"])
    poses = [model.pose(x["positions"][:, i], x["quaternions"][:, i], x["objects"]) for i in range(2)]
    order = model.farthest_point.order(bodies.points, bodies.point_mask)
    points = bodies.points.gather(-2, order[..., None].expand(*order.shape, 3))
    bodies = model.prepare(points, bodies.point_mask.gather(-1, order), x["objects"], x["properties"])
    step = model.advance(params, a, bodies, *poses, x["step"], x["step"] * FRAME_DT)
    assert torch.equal(found["positions"], step.pose.position)
    assert torch.equal(found["accelerations"], step.acceleration)
    turned = from_quaternion(found["quaternions"])
    torch.testing.assert_close(turned, step.pose.rotation, rtol=0, atol=1e-6)
    about = loaded.about
    assert about["conventions"]["quaternion"].startswith("wxyz")
    assert about["recipe"] == "rigidformer"
    assert about["inputs"].keys() == loaded.bundle.inputs.keys()
    assert about["outputs"].keys() == found.keys()
    for told, tensors in ((about["inputs"], loaded.bundle.inputs), (about["outputs"], found)):
        for name, x in tensors.items():
            width = x.shape[-1] if told[name]["axes"][-1] == "channel" else 1
            assert (len(told[name]["axes"]), told[name]["width"]) == (x.ndim, width), name
    assert about["inputs"]["properties"]["channels"] == [["mass", "kg"], ["friction", ""], ["restitution", ""]]
    assert about["data"]["simulator"] == "none"
    assert about["data"]["validation"]["digest"] == tree.digest(made(3, 1))
    assert about["data"]["training"]["objects"] == [1, 3]


def test_data_are_kept_in_a_folder_and_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("mujoco")
    config = dataclasses.replace(TINY, path=str(tmp_path / "data"), scenes=2, validation_scenes=2)
    first = rigidformer.build(config)
    assert sorted(x.name for x in (tmp_path / "data").iterdir()) == ["training.safetensors", "validation.safetensors"]
    monkeypatch.setattr(rigid_bodies, "generate", None)
    second = rigidformer.build(config)
    assert tree.bits_equal((first.data, first.validation), (second.data, second.validation))
    for fields in ({"scenes": 3}, {"data_seed": 1}, {"objects": (1, 2)}, {"frames": 25}):
        with pytest.raises(ValueError, match=r"training\.safetensors: 'drawn' is .* expected"):
            rigidformer.build(dataclasses.replace(config, **fields))
    shutil.copy(tmp_path / "data" / "training.safetensors", tmp_path / "data" / "validation.safetensors")
    with pytest.raises(ValueError, match=r"validation\.safetensors: 'drawn' is .*'training'.* expected .*'validation'"):
        rigidformer.build(config)


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rigid_bodies, "generate", lambda key, count, ranges: made(6))
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match=r"file/data/training.safetensors: cannot write"):
        rigidformer.build(dataclasses.replace(TINY, path=str(tmp_path / "file" / "data")))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"scenes": 0}, "scenes=0: must be at least 1"),
        ({"steps": (1, 0)}, r"steps=\(1, 0\): must be at least 1"),
        ({"steps": ()}, r"steps=\(\): must name at least one"),
        ({"horizons": ()}, r"horizons=\(\): must name at least one"),
        ({"depths": ()}, r"depths=\(\): must name at least one"),
        ({"objects": (3, 2)}, r"objects=\(3, 2\): must be the fewest and the most, from 1 to 8"),
        ({"objects": (9, 9)}, r"objects=\(9, 9\): must be the fewest and the most, from 1 to 8"),
        ({"points": (24,)}, r"points=\(24,\): must be the fewest and the most, at least 24"),
        ({"points": (4, 8)}, r"points=\(4, 8\): must be the fewest and the most, at least 24"),
        ({"spin": -1.0}, r"spin=-1.0: must be finite and not negative"),
        ({"throw": math.nan}, r"throw=nan: must be finite and not negative"),
        ({"clip": 2}, "clip=2: two observed frames and at least one more"),
        ({"horizons": (21,)}, r"horizons=\(21,\), steps=\(1, 3\): take 25 frames, and .* frames=24 ends before"),
        # 7 frames divide 15 worse than 8 do: 8 + 21 = 29.
        ({"horizons": (15,), "steps": (7, 8), "frames": 29}, "take 30 frames, and a scene of frames=29 ends before"),
        ({"head_size": 11}, "head_size=11: must be at least 6 x frequencies=2"),
        ({"depths": (0, 2)}, r"depths=\(0, 2\): decoder states are numbered 0 to layers=1"),
    ],
)
def test_settings_that_cannot_be_meant(fields: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(TINY, **fields)
