"""Behaviour cloning: masks are in force, exports repeat the policy, and the cloned policy does its task."""

from __future__ import annotations

import dataclasses
import json
import pathlib
from typing import Any

import pytest
import safetensors
import tiny_training
import torch
from equal import all_finite, assert_bits_equal
from safetensors.torch import save_file
from torch import Tensor

from functional_sl import bundle, export, keys, optim, recipe, schedules, step, tree
from functional_sl.models import chunk_policy, mixture, normalizer
from functional_sl.models.chunk_policy import Architecture
from functional_sl.models.mlp import Linear
from functional_sl.recipe import Recipe
from functional_sl.recipes import bc_state, chunks
from functional_sl.recipes.bc_state import BCState
from functional_sl.run.cli import UsageError
from functional_sl.sources import episodes, windows
from functional_sl.sources.demonstrations import generate
from functional_sl.sources.episodes import Episodes, Feature, Schema

ARCHITECTURE = Architecture(observation=3, action=2, history=1, chunk=5, hidden=(16, 16), activation="gelu")
SMALL = {"world": None, "expert": None, "chunk": 5, "hidden": (16, 16), "held_out": 0.1}


def demonstrations(offset: float = 0.0, lengths: tuple[int, ...] = (3, 4, 9, 9)) -> Episodes:
    """Actions are offset + 3 * noise; the observation's last channel is constant."""
    total = sum(lengths)
    observation = 1000.0 + 50.0 * keys.normal(keys.key(0), (total, 3))
    observation[:, 2] = 7.0
    channels = tuple((name, "m") for name in ("x", "y", "payload")), (("u", "N"), ("v", "N"))
    features = Feature("observation", (3,), "float32", channels[0]), Feature("action", (2,), "float32", channels[1])
    values = {"observation": observation, "action": offset + 3.0 * keys.normal(keys.key(1), (total, 2))}
    return Episodes(Schema(features, 0.1, "", {}), values, torch.tensor(lengths), torch.ones(len(lengths)) > 0)


def built(tmp_path: pathlib.Path, stored: Episodes | None = None, **settings: Any) -> Recipe:
    path = tmp_path / "demonstrations.safetensors"
    episodes.write(path, stored or demonstrations())
    return bc_state.build(BCState(**{**SMALL, "demonstrations": str(path), **settings}))


def all_windows(made: Recipe) -> Any:
    return next(iter(made.batches(made.data, 1000)))


@pytest.mark.parametrize("loss", chunks.LOSSES)
def test_what_is_padded_changes_no_bit(tmp_path: pathlib.Path, loss: str) -> None:
    made = built(tmp_path, loss=loss)
    params, buffers = made.init(keys.key(0))
    batch = all_windows(made)
    padded = ~batch.valid[..., None]
    assert bool(padded.any())

    def graded(fill: float) -> tuple[Any, Any]:
        filled = batch._replace(action=torch.where(padded, fill, batch.action))
        return torch.func.grad_and_value(lambda p: made.loss(p, buffers, filled, keys.key(1)), has_aux=True)(params)

    for fill in (torch.nan, 1e6, torch.inf):
        assert_bits_equal(graded(fill), graded(0.0))


def test_what_is_observed_without_a_supervised_step_changes_no_bit(tmp_path: pathlib.Path) -> None:
    made = built(tmp_path)
    params, buffers = made.init(keys.key(0))
    batch = all_windows(made)
    batch = batch._replace(valid=batch.valid & (torch.arange(len(batch.valid)) % 3 > 0)[:, None])

    def graded(fill: float) -> tuple[Any, Any]:
        seen = torch.where(batch.valid.any(1)[:, None, None], batch.observation, fill)
        filled = batch._replace(observation=seen)
        return torch.func.grad_and_value(lambda p: made.loss(p, buffers, filled, keys.key(1)), has_aux=True)(params)

    expected = graded(0.0)
    assert all_finite(expected)
    for fill in (torch.nan, torch.inf, 1e6):
        assert_bits_equal(graded(fill), expected)


def test_statistics_are_of_the_frames_that_count(tmp_path: pathlib.Path) -> None:
    """What stands in masked frames moves neither normaliser, and hides no constant channel."""
    stored, mask = demonstrations(), torch.arange(25) % 4 > 0
    made = []
    for fill in (0.0, 1e6):
        values = {name: torch.where(mask[:, None], x, fill) for name, x in stored.values.items()}
        frames = windows.Frames(values["observation"], values["action"], mask, *[torch.zeros(25)] * 3)
        config = BCState(**{**SMALL, "demonstrations": "x"})
        made.append(chunks.scales(config, frames.observation, frames))
    assert_bits_equal(*made)
    assert_bits_equal(made[0].observation, normalizer.fit(stored.values["observation"][mask]))


def test_the_error_is_summed_over_the_51_of_80_valid_steps(tmp_path: pathlib.Path) -> None:
    """Chunks of 5 over episodes of 3, 4 and 9 frames: 6 + 10 + 35 steps are inside."""
    made = built(tmp_path)
    params, buffers = made.init(keys.key(0))
    frames = windows.frames(episodes.select(demonstrations(), [0, 1, 2]), "observation", "action")
    batch = windows.window(frames, torch.arange(16), history=1, chunk=5, padding="mask")
    assert (int(made.count(batch)), batch.valid.numel()) == (51, 80)
    planned = chunk_policy.act(params, buffers, ARCHITECTURE, batch.observation)
    gaps = ((planned - batch.action) / buffers.action.std).square()
    by_hand = [gaps[i, j].mean() for i in range(16) for j in range(5) if batch.valid[i, j]]
    total, aux = made.loss(params, buffers, batch, keys.key(1))
    torch.testing.assert_close(total, torch.stack(by_hand).sum(), rtol=1e-5, atol=0)
    assert_bits_equal(made.validate(params, buffers, batch), {"loss": total, **aux.metrics})


def test_a_mask_that_the_schema_names_and_the_file_lacks_is_an_error(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "d.safetensors"
    episodes.write(path, demonstrations())
    with safetensors.safe_open(path, "pt") as file:
        header, tensors = file.metadata(), {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    header["schema"] = json.dumps(json.loads(header["schema"]) | {"mask": "action_is_pad"})
    save_file(tensors, path, header)
    with pytest.raises(ValueError, match="'action_is_pad' is missing"):
        bc_state.build(BCState(**{**SMALL, "demonstrations": str(path)}))


def test_padding_and_constant_channels_are_told(tmp_path: pathlib.Path) -> None:
    told = {name: built(tmp_path, padding=name).schema for name in ("mask", "repeat_last")}
    assert told["mask"]["supervised_steps"] < told["mask"]["steps"] == told["repeat_last"]["supervised_steps"]
    assert told["mask"]["constant_channels"] == {"observation": ["payload"], "action": []}
    assert told["mask"]["window"] == {"history": 1, "chunk": 5, "padding": "mask"}


@pytest.mark.parametrize("loss", chunks.LOSSES)
@pytest.mark.parametrize("batch", [1, 17, 1000])
def test_the_bundle_predicts_what_the_policy_predicts(tmp_path: pathlib.Path, loss: str, batch: int) -> None:
    made = built(tmp_path, demonstrations(offset=100.0), loss=loss, history=2)
    params, buffers = made.init(keys.key(0))
    loaded = bundle.load(bundle.save(made.bundle(params, buffers), tmp_path / "policy.safetensors"))
    architecture = dataclasses.replace(ARCHITECTURE, history=2, components=5 if loss == "gmm" else 0)
    observation = 1000.0 + 50.0 * keys.normal(keys.key(2), (batch, 2, 3))
    found = loaded.predict({"observation": observation})["action"]
    assert torch.equal(found, chunk_policy.act(params, buffers, architecture, observation))
    assert loaded.self_test.bit_equal
    assert loaded.about["outputs"]["action"]["channels"] == [["u", "N"], ["v", "N"]]
    with pytest.raises(bundle.BundleError, match=r"expected float32 \['B', 2, 3\]"):
        loaded.predict({"observation": observation[:, :1]})


def test_a_policy_without_opinion_answers_the_mean_action(tmp_path: pathlib.Path) -> None:
    made = built(tmp_path, demonstrations(offset=100.0))
    params, buffers = made.init(keys.key(0))
    params = (*params[:-1], Linear(*tree.zeros_like(params[-1])))
    exported = made.bundle(params, buffers)
    away = {"observation": torch.tensor([[[1e4, -1e4, 7.1]]])}
    found = bundle.predict(exported, away)["action"]
    torch.testing.assert_close(found, made.data.action.mean(0).expand(1, 5, 2), rtol=1e-6, atol=0)


def test_noise_and_dropout_come_from_the_key_and_only_in_training(tmp_path: pathlib.Path) -> None:
    plain, noisy = (built(tmp_path, dropout=x, observation_noise=x) for x in (0.0, 0.5))
    params, buffers = plain.init(keys.key(0))
    batch = all_windows(plain)
    losses = [float(noisy.loss(params, buffers, batch, keys.key(s))[0]) for s in (1, 1, 2)]
    assert losses[0] == losses[1] != losses[2]
    assert float(plain.loss(params, buffers, batch, keys.key(1))[0]) == float(
        noisy.validate(params, buffers, batch)["loss"]
    )


def test_samples_are_windows_of_the_data_and_batches_hold_every_anchor_once(tmp_path: pathlib.Path) -> None:
    made = built(tmp_path)
    whole = all_windows(made)
    rows = {tuple(row.tolist()) for row in whole.action.flatten(1)}
    drawn = made.sample(made.data, keys.key(3), 64)
    assert {tuple(row.tolist()) for row in drawn.action.flatten(1)} <= rows
    assert_bits_equal(tree.concatenate(made.batches(made.data, 7)), whole)


def test_mixture_answers_are_a_component(tmp_path: pathlib.Path) -> None:
    made = built(tmp_path, loss="gmm", components=3)
    params, buffers = made.init(keys.key(0))
    architecture = dataclasses.replace(ARCHITECTURE, components=3)
    head = chunk_policy.output(params, architecture, torch.ones(1, 1, 3))
    mixed = chunk_policy.as_mixture(architecture, head)
    assert mixed.mean.shape == (1, 5, 3, 2)
    found = (chunk_policy.answer(buffers, architecture, head) - buffers.action.mean) / buffers.action.std
    torch.testing.assert_close(found, mixture.mode(mixed), rtol=1e-5, atol=1e-6)


WRONG = {
    "execute is 6": {"execute": 6},
    "disturbance is -0.1": {"disturbance": -0.1},
    "chunk is 0": {"chunk": 0},
    "std_floor is 0.0; it must be finite and positive": {"std_floor": 0.0},
    "observation_noise is inf; it must be finite": {"observation_noise": float("inf")},
    r"hidden is \(16, 0\); a layer has at least 1 unit": {"hidden": (16, 0)},
    "held_out 1.0": {"held_out": 1.0},
    "both world and expert": {"demonstrations": None},
}


@pytest.mark.parametrize("message", WRONG)
def test_settings_that_cannot_be_meant(message: str) -> None:
    with pytest.raises(ValueError, match=message):
        BCState(**{**SMALL, "demonstrations": "x", **WRONG[message]})


def test_data_of_another_world_is_refused(tmp_path: pathlib.Path) -> None:
    world = "functional_sac.envs.pendulum:pendulum"
    with pytest.raises(ValueError, match=r"3 observations and 2 actions are of another world; .*:pendulum has 3 and 1"):
        built(tmp_path, world=world)
    told = demonstrations()
    told = told._replace(schema=told.schema._replace(about={"world": "my.world:make"}))
    with pytest.raises(ValueError, match=r"are of my\.world:make; functional_sac"):
        built(tmp_path, told, world=world)


def test_stored_demonstrations_are_those_that_are_generated(tmp_path: pathlib.Path) -> None:
    config = BCState(episodes=3, data_seed=5)
    key = chunks.key_of(config, chunks.DEMONSTRATIONS)
    path = tmp_path / "d.safetensors"
    episodes.write(path, generate(config.world, config.expert, key, 3, config.disturbance))
    generated, stored = bc_state.build(config), bc_state.build(dataclasses.replace(config, demonstrations=str(path)))
    assert_bits_equal(generated.data, stored.data)
    assert generated.schema == stored.schema


def test_the_recipe_loads_by_name_and_its_sizes_name_its_settings() -> None:
    builder = recipe.load("functional_sl.recipes.bc_state:build")
    assert builder.settings is BCState
    for size in builder.sizes.values():
        BCState(**size["recipe"])


def trained(made: Recipe, updates: int, batch_size: int) -> tuple[Any, Any]:
    def mean(params: Any, buffers: Any, batch: Any, key: Tensor) -> tuple[Tensor, step.Aux]:
        total, aux = made.loss(params, buffers, batch, key)
        return total / made.count(batch), aux

    rate = schedules.linear(2e-3, 0.0, updates)
    learner = step.make_step(mean, optim.chain(optim.clip_by_global_norm(1.0), optim.adam(rate)))
    state = learner.init(*made.init(keys.key(0)))
    for key in keys.split(keys.key(1), updates):
        drawn, noise = keys.split(key)
        state, _, _ = learner.update(state, made.sample(made.data, drawn, batch_size), noise)
    return state.params, state.stats


def test_a_cloned_policy_swings_the_pendulum_up(tmp_path: pathlib.Path) -> None:
    made = bc_state.build(BCState(episodes=64, evaluation_episodes=16, hidden=(128, 128)))
    params, buffers = trained(made, updates=300, batch_size=128)
    found = made.evaluate(params, buffers)
    assert found["success"] >= 0.95
    assert made.score({**found, "loss": 1.0}) == found["success"]
    made.draw(params, buffers, str(tmp_path))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["chunk_error.png", "torque.png"]


def test_data_may_move_and_no_other_data_take_their_place(tmp_path: pathlib.Path, monkeypatch: Any) -> None:
    """A relative path that no longer leads there is answered by one flag, for resuming and for exporting."""
    for folder, offset in (("old", 0.0), ("new", 0.0), ("other", 1.0)):
        (tmp_path / folder).mkdir()
        episodes.write(tmp_path / folder / "d.safetensors", demonstrations(offset))
    monkeypatch.chdir(tmp_path / "old")
    run = tmp_path / "run"
    fields = {**SMALL, "demonstrations": "d.safetensors", "updates": 2, "batch_size": 4, "validate_every": 1}
    tiny_training.run(run, "functional_sl.recipes.bc_state:build", **fields)
    monkeypatch.chdir(tmp_path)
    other, moved = str(tmp_path / "other" / "d.safetensors"), str(tmp_path / "new" / "d.safetensors")
    for place, message in ((None, "no such file of episodes"), (other, "schema is another one")):
        changes = {"demonstrations": place} if place else {}
        with pytest.raises(UsageError, match=message):
            tiny_training.resume(run, updates=3, **changes)
        with pytest.raises(ValueError, match=message):
            export.export(run, tmp_path / "model", places=changes)
    with pytest.raises(UsageError, match="has data at the settings demonstrations"):
        export.export(run, tmp_path / "model", places={"data_seed": "1"})
    assert tiny_training.resume(run, updates=3, demonstrations=moved)["updates"] == 3
    export.main([str(run), str(tmp_path / "model"), "--formats=safetensors"])
    export.main([str(run / "snapshots" / "step_000000000002"), "old", f"--data=demonstrations={moved}"])
    assert bundle.load(tmp_path / "old.safetensors").about["trained"]["updates"] == 2
