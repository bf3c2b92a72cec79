"""The NeRD recipe: windows, loss and counts against plain loops, open-loop errors, and the bundle's own prediction."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path

import pytest
import torch
from ranks import run_ranks

from functional_sl import bundle as bundles
from functional_sl import keys, optim, recipe, schedules, tree
from functional_sl.models import nerd as model
from functional_sl.models import transformer
from functional_sl.models.articulation import CARTPOLE, ROBOTS
from functional_sl.recipe import Recipe
from functional_sl.recipes import nerd, nerd_windows
from functional_sl.recipes.nerd import NeRD
from functional_sl.recipes.nerd_windows import Transitions
from functional_sl.sources import nerd_data
from functional_sl.step import make_step

TINY = NeRD(
    trajectories=6,
    steps=8,
    validation_trajectories=3,
    history=4,
    width=8,
    layers=1,
    heads=2,
    context=5,
    horizons=(3, 6),
    evaluation_trajectories=5,
)
NAME = "functional_sl.recipes.nerd:build"


def tiny(robot: str = "cartpole", **fields: object) -> Recipe:
    if robot != "cartpole":
        pytest.importorskip("mujoco")
    source = "analytic" if robot == "cartpole" else "mujoco"
    return nerd.build(dataclasses.replace(TINY, robot=robot, source=source, **fields))


def started(task: Recipe, scale: float = 20.0) -> tuple[dict, model.Statistics]:
    params, statistics = task.init(keys.key(0))
    return tree.map(lambda x: x * scale, params), statistics


@pytest.mark.parametrize("robot", ROBOTS)
def test_it_is_a_recipe_whose_schema_counts_the_inputs(robot: str) -> None:
    assert recipe.load(NAME).settings is NeRD
    task = tiny(robot)
    assert json.loads(json.dumps(task.schema)) == task.schema
    assert sum(entry["width"] for entry in task.schema["inputs"]) == task.data.inputs.shape[-1]
    assert [entry["channel"] for entry in task.schema["targets"]] == [*range(task.data.targets.shape[-1])]
    assert {"cartpole": 9, "double_pendulum": 37, "ant": 215}[robot] == task.data.inputs.shape[-1]  # body frame
    assert task.schema["conventions"]["simulator"].startswith("analytic" if robot == "cartpole" else "mujoco")
    assert [len(split.inputs) for split in (task.data, task.validation)] == [6, 3]


@pytest.mark.parametrize("size", nerd.SIZES)
def test_sizes_are_settings_of_trainer_and_recipe(size: str) -> None:
    from functional_sl.training.config import TrainConfig

    TrainConfig(**nerd.SIZES[size]["train"])
    config = NeRD(**nerd.SIZES[size]["recipe"])
    assert (config.width, config.layers, config.heads) == {"small": (64, 2, 4), "paper": (192, 6, 12)}[size]


def test_targets_lead_from_state_to_state() -> None:
    """The cartpole in world axes: inputs are state and effort, targets differences, the pole's modulo a turn."""
    data = nerd_data.generate(CARTPOLE, "analytic", keys.key(2), 4, 9)
    found = nerd_windows.transitions(CARTPOLE, model.convention(CARTPOLE, "world"), data)
    assert torch.equal(found.inputs, torch.cat([data.states[:, :-1], data.actuation], -1).float())
    gap = data.states[:, 1:] - data.states[:, :-1]
    turns = torch.round(gap[..., 1] / (2 * math.pi))
    gap[..., 1] -= 2 * math.pi * turns
    torch.testing.assert_close(found.targets, gap.float(), rtol=1e-6, atol=1e-7)


def test_statistics_are_those_of_numpys_definition_and_survive_a_dead_channel() -> None:
    data = tiny().data
    statistics = nerd_windows.fit(data)
    flat = data.targets.double().flatten(0, 1)
    torch.testing.assert_close(
        statistics.targets.std, (flat.var(0, correction=0) + 1e-5).sqrt().float(), rtol=1e-6, atol=0.0
    )
    assert not data.inputs[..., 5].any()  # no motor on the pole
    assert (statistics.inputs.mean[5], statistics.inputs.std[5]) == (0, 1)
    assert statistics.active.all()
    still = nerd_windows.fit(data._replace(targets=data.targets * torch.tensor([1.0, 0.0, 1.0, 1.0])))
    assert still.active.tolist() == [True, False, True, True]


def test_windows_are_every_slice_and_draws_cover_them() -> None:
    """6 trajectories of 8 steps hold 6 * 5 windows of 4; 2000 draws miss one with probability 30 * (29/30)^2000."""
    steps = torch.arange(48.0).reshape(6, 8, 1)
    data = Transitions(steps, steps)
    expected = {(8 * i + j, 8 * i + j + 3) for i in range(6) for j in range(5)}
    held = [row for batch in nerd_windows.batches(data, 7, history=4) for row in batch.inputs[..., 0]]
    assert sorted((int(row[0]), int(row[-1])) for row in held) == sorted(expected)
    batch = nerd_windows.sample(data, keys.key(5), 2000, history=4)
    assert {(int(row[0]), int(row[-1])) for row in batch.inputs[..., 0]} == expected
    assert torch.equal(batch.inputs[:, 1:] - batch.inputs[:, :-1], torch.ones(2000, 3, 1))
    assert tree.bits_equal(batch, nerd_windows.sample(data, keys.key(5), 2000, history=4))
    assert not torch.equal(batch.inputs, nerd_windows.sample(data, keys.key(6), 2000, history=4).inputs)


def test_the_loss_is_the_sum_over_windows_positions_and_active_channels() -> None:
    task = tiny()
    params, statistics = started(task)
    statistics = statistics._replace(active=torch.tensor([True, False, True, True]))
    batch = task.sample(task.data, keys.key(1), 3)
    total = 0.0
    for window, targets in zip(batch.inputs, batch.targets, strict=True):
        for t in range(4):
            seen = (window[: t + 1] - statistics.inputs.mean) / statistics.inputs.std
            output = transformer.apply(params, seen, 2)[-1]
            error = output - (targets[t] - statistics.targets.mean) / statistics.targets.std
            total += float(error[[0, 2, 3]].double().square().sum())
    value, aux = task.loss(params, statistics, batch, keys.key(0))
    assert math.isclose(value, total, rel_tol=1e-5)
    assert aux.stats is statistics
    assert torch.equal(task.validate(params, statistics, batch)["loss"], value)
    assert nerd_windows.count(batch, active=3) == 3 * 4 * 3
    assert task.count(batch) == 3 * 4 * 4
    assert task.count(batch).dtype == torch.int64
    wrong = batch._replace(targets=batch.targets + torch.tensor([0.0, 1e3, 0.0, 0.0]))
    assert torch.equal(task.loss(params, statistics, wrong, keys.key(0))[0], value)


def test_a_step_compiles_whole_and_learns() -> None:
    """Sampling included; forty steps of Adam halve a fresh model's error on what it saw."""
    task = tiny()
    step = make_step(lambda *inputs: task.loss(*inputs), optim.adam(1e-2))
    state = step.init(*task.init(keys.key(0)))

    def update(state: object, data: Transitions, key: torch.Tensor) -> tuple[object, torch.Tensor]:
        state, _, aux = step.update(state, task.sample(data, key, 16), key)
        return state.params, aux.stats.active

    compiled = torch.compile(update, fullgraph=True, backend="aot_eager")(state, task.data, keys.key(1))
    eager = update(state, task.data, keys.key(1))
    for a, b in zip(tree.leaves(compiled), tree.leaves(eager), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)

    def error(state: object) -> float:
        batch = next(iter(task.batches(task.data, 30)))
        return float(task.validate(state.params, state.stats, batch)["loss"]) / int(task.count(batch))

    before = error(state)
    for i in range(40):
        state, _, _ = step.update(state, task.sample(task.data, keys.key(i), 16), keys.key(i))
    assert error(state) < 0.5 * before


@pytest.mark.parametrize("robot", ROBOTS)
def test_evaluation_averages_over_all_steps_up_to_the_horizon(robot: str) -> None:
    task = tiny(robot)
    params, statistics = started(task)
    figures = task.evaluate(params, statistics)
    names = {"cartpole": ["cart_m", "pole_rad"], "double_pendulum": ["upper_rad", "lower_rad"]}
    names = names.get(robot, ["base_m", "base_rad", "joint_rad"])
    expected = {f"{hold}{name}_{h}" for hold in ("", "hold_") for name in names for h in (3, 6)}
    assert set(figures) == expected | {"gain_3", "gain_6"}
    assert all(math.isfinite(x) and x >= 0 for x in figures.values())
    gain = min(figures[f"hold_{name}_6"] / figures[f"{name}_6"] for name in names)
    assert math.isclose(figures["gain_6"], gain, rel_tol=1e-9)
    assert task.score({**figures, "loss": 1.0}) == figures["gain_3"]


def test_standing_still_and_knowing_the_truth_are_the_ends_of_the_scale(monkeypatch: pytest.MonkeyPatch) -> None:
    task, seen = tiny(), {}

    def fake(task_: nerd.Task, passive: object, *_: object) -> torch.Tensor:
        seen["states"] = passive.states
        return passive.states if seen["perfect"] else passive.states[:, :1].expand_as(passive.states)

    monkeypatch.setattr(nerd, "predict_open_loop", fake)
    params, statistics = started(task)
    seen["perfect"] = False
    figures = task.evaluate(params, statistics)
    assert figures["gain_3"] == figures["gain_6"] == 1
    way = (seen["states"][:, 1:4, 0] - seen["states"][:, :1, 0]).abs().mean()
    assert math.isclose(figures["hold_cart_m_3"], way, rel_tol=1e-9)
    seen["perfect"] = True
    assert task.evaluate(params, statistics)["cart_m_6"] == 0


def test_a_prediction_that_blows_up_has_a_finite_error() -> None:
    task = tiny()
    params, statistics = started(task)
    figures = task.evaluate(
        params, statistics._replace(targets=statistics.targets._replace(std=torch.full((4,), 1e38)))
    )
    assert figures["cart_m_6"] == pytest.approx(1e6, rel=0.2)  # one step of six may still be finite
    assert all(math.isfinite(x) for x in figures.values())


@pytest.mark.parametrize(
    ("robot", "fields"),
    [("cartpole", {"embedding": "sinusoidal", "frame": "translation"}), ("double_pendulum", {}), ("ant", {})],
)
def test_the_bundle_predicts_what_the_recipe_does_bit_by_bit(robot: str, fields: dict, tmp_path: Path) -> None:
    task = tiny(robot, **fields)
    params, statistics = started(task, 3.0)
    packed = task.bundle(params, statistics)
    path = bundles.save(packed, tmp_path / "model.safetensors")
    loaded = bundles.load(path)
    predicted = loaded.predict(loaded.bundle.inputs)["next_states"]

    c = model.convention(ROBOTS[robot], fields.get("frame", "body"), fields.get("embedding", "identity"))
    states = packed.inputs["states"]
    tokens = next(iter(task.batches(task.validation, 6))).inputs[[0, 5]]  # the first window of two trajectories
    change = model.change(params, statistics, tokens, 2)
    own = model.from_frame(c, model.advance(c, model.to_frame(c, states, states), change), states)
    # The recipe's tokens were made in float64, the bundle's in float32.
    torch.testing.assert_close(predicted, own, rtol=1e-3, atol=1e-4)
    again = model.predict(packed.tensors, packed.inputs, **packed.arguments)["next_states"]
    assert torch.equal(predicted, again)
    contacts = slots = None
    if "contact_depths" in packed.inputs:
        found = (packed.inputs[f"contact_{part}"] for part in ("normals", "points_1", "depths"))
        contacts, slots = model.Contacts(*found), packed.inputs["contact_thicknesses"]
    tokens = model.features(c, states, packed.inputs["joint_acts"], contacts, slots, packed.inputs["gravity_dir"])
    change = model.change(params, statistics, tokens, 2)
    own = model.from_frame(c, model.advance(c, model.to_frame(c, states, states), change), states)
    assert torch.equal(predicted, own)
    about = loaded.about
    assert (about["input_width"], about["history"]) == (tokens.shape[-1], 4)
    assert (about["conventions"]["quaternion"], about["architecture"]["heads"]) == ("xyzw", 2)


def test_pictures_are_drawn(tmp_path: Path) -> None:
    task = tiny()
    task.draw(*started(task), str(tmp_path))
    drawn = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    assert sorted(drawn) == ["error_cart_m.png", "error_pole_rad.png", "trajectory_cart.png", "trajectory_pole.png"]
    assert all(data.startswith(b"\x89PNG") for data in drawn.values())


def test_data_are_kept_in_a_folder_and_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = str(tmp_path / "data")
    first = tiny(path=path)
    files = {file.name: file.read_bytes() for file in Path(path).iterdir()}
    assert sorted(files) == [f"{name}.safetensors" for name in ("passive", "training", "validation")]
    monkeypatch.setattr(nerd_data, "generate", None)
    second = tiny(path=path)
    assert tree.bits_equal((first.data, first.validation), (second.data, second.validation))
    assert first.evaluate(*started(first)) == second.evaluate(*started(second))
    for fields in ({"trajectories": 7}, {"data_seed": 1}, {"effort": 0.5}):
        with pytest.raises(ValueError, match=r"training\.safetensors: 'drawn' is .* expected"):
            tiny(path=path, **fields)
    assert {file.name: file.read_bytes() for file in Path(path).iterdir()} == files


def build_in(path: str) -> list[str]:
    task = tiny(path=path)
    return [tree.digest(part) for part in (task.data, task.validation)]


def test_ranks_that_share_an_empty_folder_agree(tmp_path: Path) -> None:
    first, second = run_ranks(2, build_in, str(tmp_path / "data"))
    assert first == second == build_in(str(tmp_path / "data"))
    assert len(list((tmp_path / "data").iterdir())) == 3


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match=r"file/data/training.safetensors: cannot write"):
        tiny(path=str(tmp_path / "file" / "data"))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"history": 9}, "history=9: must not exceed steps=8"),
        ({"history": 6}, "history=6: must not exceed context=5"),
        ({"heads": 3}, "width=8: must be a multiple of heads=3"),
        ({"robot": "ant"}, "source=analytic: ant needs --source=mujoco"),
        ({"trajectories": 0}, "trajectories=0: must be at least 1"),
        ({"horizons": (3, 0)}, "horizons=.3, 0.: must be at least 1"),
        ({"effort": 1.5}, r"effort=1.5: must lie in \[0, 1\]"),
    ],
)
def test_settings_that_cannot_be_meant(fields: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(TINY, **fields)


def test_a_short_training_beats_standing_still() -> None:
    """`--size=small` in 3 s: 300 updates predict 100 steps of held-out motion 15 times as well as standing still."""
    config = NeRD(
        trajectories=300, validation_trajectories=2, effort=0.2, start="slow", frame="translation",
        embedding="sinusoidal", history=4, width=32, layers=1, heads=2, horizons=(100,), evaluation_trajectories=16,
    )  # fmt: skip
    task = nerd.build(config)
    rate = schedules.linear(1e-2, 0.0, 300)

    def mean(params: dict, statistics: model.Statistics, batch: Transitions, key: torch.Tensor) -> tuple:
        value, aux = task.loss(params, statistics, batch, key)
        return value / task.count(batch), aux

    step = make_step(mean, optim.chain(optim.clip_by_global_norm(1.0), optim.adam(rate)))
    state, key = step.init(*task.init(keys.key(0))), keys.key(1)
    for i in range(300):
        state, _, _ = step.update(state, task.sample(task.data, keys.fold_in(key, i), 64), key)
    assert task.evaluate(state.params, state.stats)["gain_100"] > 6
