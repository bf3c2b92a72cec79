"""Behaviour cloning from pixels: masks are in force, exports repeat the policy, and what is not sensed is seen."""

from __future__ import annotations

import dataclasses
import pathlib
import subprocess
import sys
from typing import Any

import pytest
import tiny_pixels
import torch
from equal import all_finite, assert_bits_equal
from torch import Tensor

from functional_sl import bundle, keys, optim, recipe, step, tree
from functional_sl.models import vision, visual_policy
from functional_sl.models.visual_policy import Seen
from functional_sl.recipe import Recipe
from functional_sl.recipes import bc_visual, chunks
from functional_sl.recipes.bc_visual import BCVisual
from functional_sl.sources import demonstrations, episodes, pixels, windows, worlds
from functional_sl.sources.episodes import Episodes, Feature, Schema

STORED = {
    "world": None, "expert": None, "camera": None, "chunk": 5, "hidden": (16,), "picture": 12, "crop": 10,
    "widths": (8,), "strides": (1,), "keypoints": 4,
}  # fmt: skip
DOTS = tiny_pixels.SETTINGS


def pictured(own: int = 2, lengths: tuple[int, ...] = (3, 4, 9, 9)) -> Episodes:
    """Noise in pictures, proprioception of `own` channels and actions."""
    total = sum(lengths)
    values = {
        "image": keys.randint(keys.key(0), (total, 3, 12, 12), 0, 256).to(torch.uint8),
        "proprioception": 5.0 + keys.normal(keys.key(1), (total, own)),
        "action": 3.0 * keys.normal(keys.key(2), (total, 2)),
    }
    features = (
        Feature("image", (3, 12, 12), "uint8", pixels.COLOURS),
        Feature("proprioception", (own,), "float32", episodes.unnamed_channels(own, "joint")),
        Feature("action", (2,), "float32", (("u", "N"), ("v", "N"))),
    )
    return Episodes(Schema(features, 0.1, "", {}), values, torch.tensor(lengths), torch.ones(len(lengths)) > 0)


def built(tmp_path: pathlib.Path, stored: Episodes | None = None, **settings: Any) -> Recipe:
    path = tmp_path / "pictures.safetensors"
    episodes.write(path, stored or pictured())
    return bc_visual.build(BCVisual(**{**STORED, "demonstrations": str(path), **settings}))


def all_windows(made: Recipe) -> Any:
    return next(iter(made.batches(made.data, 1000)))


def architecture(made: Recipe, **settings: Any) -> visual_policy.Architecture:
    return bc_visual.architecture(BCVisual(**{**STORED, "demonstrations": "x", **settings}), made.data)


@pytest.mark.parametrize("loss", chunks.LOSSES)
def test_what_is_padded_changes_no_bit(tmp_path: pathlib.Path, loss: str) -> None:
    made = built(tmp_path, loss=loss)
    params, buffers = made.init(keys.key(0))
    batch = all_windows(made)
    padded = ~batch.valid[..., None]
    assert bool(padded.any())

    def graded(fill: float, batch: Any = batch) -> tuple[Any, Any]:
        filled = batch._replace(action=torch.where(padded, fill, batch.action))
        return torch.func.grad_and_value(lambda p: made.loss(p, buffers, filled, keys.key(1)), has_aux=True)(params)

    for fill in (torch.nan, 1e6, torch.inf):
        assert_bits_equal(graded(fill), graded(0.0))
    none = batch._replace(valid=batch.valid & (torch.arange(len(batch.valid)) % 3 > 0)[:, None])
    own = torch.where(none.valid.any(1)[:, None, None], batch.observation.proprioception, torch.nan)
    lost = none._replace(observation=batch.observation._replace(proprioception=own))
    assert_bits_equal(graded(0.0, lost), graded(0.0, none))
    assert all_finite(graded(0.0, lost))
    nothing = batch._replace(valid=torch.zeros_like(batch.valid))
    assert int(made.count(nothing)) == 0
    assert all(bool((leaf == 0).all()) for leaf in tree.leaves(graded(torch.nan, nothing)[0]))


def test_the_error_is_summed_over_the_51_of_80_valid_steps(tmp_path: pathlib.Path) -> None:
    """Chunks of 5 over episodes of 3, 4 and 9 frames: 6 + 10 + 35 steps are inside."""
    made = built(tmp_path)
    params, buffers = made.init(keys.key(0))
    frames = bc_visual.frames(episodes.select(pictured(), [0, 1, 2]))
    batch = windows.window(frames, torch.arange(16), history=2, chunk=5, padding="mask")
    assert (int(made.count(batch)), batch.valid.numel()) == (51, 80)
    assert batch.observation.image.shape == (16, 2, 3, 12, 12)
    assert torch.equal(batch.observation.image[4], frames.observation.image[3:5])
    planned = visual_policy.act(params, buffers, architecture(made), batch.observation)
    gaps = ((planned - batch.action) / buffers.action.std).square()
    by_hand = [gaps[i, j].mean() for i in range(16) for j in range(5) if batch.valid[i, j]]
    found = made.validate(params, buffers, batch)
    torch.testing.assert_close(found["loss"], torch.stack(by_hand).sum(), rtol=1e-5, atol=0)


def test_the_crop_comes_from_the_key_and_is_the_middle_in_use(tmp_path: pathlib.Path) -> None:
    made = built(tmp_path)
    params, buffers = made.init(keys.key(0))
    batch = all_windows(made)
    losses = [float(made.loss(params, buffers, batch, keys.key(s))[0]) for s in (1, 1, 2)]
    assert losses[0] == losses[1] != losses[2]
    middle = batch._replace(
        observation=batch.observation._replace(image=vision.centre_crop(batch.observation.image, 10))
    )
    assert float(made.validate(params, buffers, middle)["loss"]) == float(made.validate(params, buffers, batch)["loss"])
    whole = built(tmp_path, crop=12)
    found = whole.loss(params, buffers, batch, keys.key(1))
    assert_bits_equal({"loss": found[0], **found[1].metrics}, whole.validate(params, buffers, batch))


@pytest.mark.parametrize("own", [0, 2])
@pytest.mark.parametrize("loss", ["mse", "gmm"])
def test_the_bundle_predicts_what_the_policy_predicts(tmp_path: pathlib.Path, own: int, loss: str) -> None:
    made = built(tmp_path, pictured(own), loss=loss)
    params, buffers = made.init(keys.key(0))
    path = bundle.save(made.bundle(params, buffers), tmp_path / "policy.safetensors")
    loaded = bundle.load(path)
    assert loaded.self_test.bit_equal
    for batch in (1, 7):
        image = keys.randint(keys.key(3), (batch, 2, 3, 12, 12), 0, 256).to(torch.uint8)
        seen = Seen(image, keys.normal(keys.key(4), (batch, 2, own)))
        inputs = {"image": image, "proprioception": seen.proprioception} if own else {"image": image}
        expected = visual_policy.act(params, buffers, architecture(made, loss=loss), seen)
        assert torch.equal(loaded.predict(inputs)["action"], expected)
    assert loaded.about["inputs"]["image"]["channels"] == [list(colour) for colour in pixels.COLOURS]


def test_a_bundle_runs_without_what_trained_it(tmp_path: pathlib.Path) -> None:
    made = built(tmp_path)
    path = bundle.save(made.bundle(*made.init(keys.key(0))), tmp_path / "policy.safetensors")
    code = (
        f"import sys; from functional_sl import bundle; assert bundle.load({str(path)!r}).self_test.bit_equal; "
        "print([m for m in sys.modules if m.startswith(('functional_sl.recipes', 'functional_sl.training'))])"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120)
    assert found.stdout.strip() == "[]"


def test_an_update_compiles_whole(tmp_path: pathlib.Path) -> None:
    """Draw, crop, loss and gradient as one graph, with the eager numbers to rounding."""
    made = built(tmp_path)
    params, buffers = made.init(keys.key(0))

    def update(params: Any, data: Any, key: Tensor) -> tuple[Any, Tensor]:
        batch = made.sample(data, key, 6)
        return torch.func.grad(lambda p: made.loss(p, buffers, batch, key)[0])(params), made.count(batch)

    compiled = torch.compile(update, fullgraph=True, backend="aot_eager")(params, made.data, keys.key(1))
    for a, b in zip(tree.leaves(compiled), tree.leaves(update(params, made.data, keys.key(1))), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_a_policy_points_at_what_only_its_picture_shows(tmp_path: pathlib.Path) -> None:
    """The same policy before an empty scene does no better than standing still at some place."""
    made = bc_visual.build(BCVisual(**DOTS))

    def mean(params: Any, buffers: Any, batch: Any, key: Tensor) -> tuple[Tensor, step.Aux]:
        total, aux = made.loss(params, buffers, batch, key)
        return total / made.count(batch), aux

    learner = step.make_step(mean, optim.adam(1e-2))
    state = learner.init(*made.init(keys.key(0)))
    for key in keys.split(keys.key(1), 120):
        drawn, noise = keys.split(key)
        state, _, _ = learner.update(state, made.sample(made.data, drawn, 32), noise)
    found = made.evaluate(state.params, state.stats)
    assert found["success"] >= 0.95
    assert made.score({**found, "loss": 1.0}) == found["success"]

    world, expert = worlds.load(DOTS["world"]), demonstrations.load_expert(DOTS["expert"])
    config, camera = BCVisual(**DOTS), pixels.load(DOTS["camera"])
    task = bc_visual.Task(config, bc_visual.architecture(config, made.data), state.stats)
    blind = bc_visual.evaluate(task, world, camera._replace(scene=lambda _: ()), expert, state.params, state.stats)
    assert blind["success"] < 0.6  # the best answer to every disc alike has 1 / 2
    made.draw(state.params, state.stats, str(tmp_path))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["chunk_error.png", "x.png", "y.png"]


def test_stored_pictures_are_those_that_are_recorded(tmp_path: pathlib.Path) -> None:
    config = BCVisual(**{**DOTS, "episodes": 4})
    path = tmp_path / "p.safetensors"
    episodes.write(path, pixels.record(chunks.demonstrate(config), config.camera, config.picture))
    recorded, stored = (bc_visual.build(dataclasses.replace(config, demonstrations=x)) for x in (None, str(path)))
    assert_bits_equal(recorded.data, stored.data)
    assert recorded.schema == stored.schema
    assert recorded.schema["window"] == {"history": 2, "chunk": 2, "padding": "mask"}
    short = bc_visual.build(dataclasses.replace(config, longest=3))
    assert len(short.data.valid) == 3 / 5 * len(recorded.data.valid)
    with pytest.raises(ValueError, match="was recorded by tiny_pixels:camera; name that camera"):
        bc_visual.build(dataclasses.replace(config, demonstrations=str(path), camera="tiny_pixels:near"))
    with pytest.raises(ValueError, match="the pictures have 20 pixels a side: say picture=20"):
        bc_visual.build(dataclasses.replace(config, demonstrations=str(path), picture=24))


def test_data_without_pictures_are_refused(tmp_path: pathlib.Path) -> None:
    stored = pictured()
    values = {name: x for name, x in stored.values.items() if name != "image"}
    bare = stored._replace(values=values, schema=stored.schema._replace(features=stored.schema.features[1:]))
    with pytest.raises(ValueError, match="the feature 'image' is absent; expected square pictures"):
        built(tmp_path, bare)


WRONG = {
    "crop is 53; it must not exceed picture=52": {"crop": 53},
    "kernel is 4; it must be odd": {"kernel": 4},
    "kernel is 49; it must not exceed the 48 pixels": {"kernel": 49},
    "widths has 12; a stage has a multiple of 8": {"widths": (8, 12)},
    "2 widths and 1 strides": {"strides": (1,)},
    r"strides=\(0, 1\), blocks=1: must be at least 1": {"strides": (0, 1)},
    r"strides=\(30, 30\) leave 1 pixel a side": {"strides": (30, 30)},
    "blocks is 0": {"blocks": 0},
    "picture is 0": {"picture": 0},
    "keypoints is 0": {"keypoints": 0},
    "longest is 0": {"longest": 0},
    "need a camera": {"camera": None},
    "execute is 9": {"execute": 9},
}


@pytest.mark.parametrize("message", WRONG)
def test_settings_that_cannot_be_meant(message: str) -> None:
    with pytest.raises(ValueError, match=message):
        BCVisual(**WRONG[message])


def test_the_recipe_loads_by_name_and_its_sizes_name_its_settings() -> None:
    builder = recipe.load("functional_sl.recipes.bc_visual:build")
    assert builder.settings is BCVisual
    for size in builder.sizes.values():
        BCVisual(**size["recipe"])
