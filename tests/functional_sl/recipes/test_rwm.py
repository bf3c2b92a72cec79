"""The RWM recipe: windows, counts and loss against plain loops, errors by hand, and the bundle's own prediction.

The data are x' = x + a of every channel, in which an action that is off by one frame shows at once.
"""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from equal import all_finite, assert_bits_equal

from functional_sl import bundle as bundles
from functional_sl import keys, optim, recipe, schedules, tree
from functional_sl.models import rwm as model
from functional_sl.models.rwm import Forecast, Model
from functional_sl.recipe import Recipe
from functional_sl.recipes import rwm, rwm_windows
from functional_sl.recipes.rwm import RWM
from functional_sl.recipes.rwm_windows import Frames, Windows
from functional_sl.sources import episodes
from functional_sl.sources.episodes import Episodes, Feature, Schema
from functional_sl.step import Aux, make_step

S, C, M, N = 3, 2, 4, 3
LENGTHS = [14, 5, 14, 4, 9, 14, 3, 14, 6, 14, 14, 14]
TINY = RWM(
    worlds=1, steps=len(LENGTHS), episode_steps=14, history=M, forecast=N, hidden=5, head=4, horizons=(1, 4, 10),
    held_out=0.4,
)  # fmt: skip


def recorded(lengths: list[int] = LENGTHS, terminated: bool = True) -> Episodes:
    """Episodes of which those of odd length end in a fall."""
    ends = torch.tensor([terminated and length % 2 == 1 for length in lengths])
    total, last = sum(lengths), torch.cumsum(torch.tensor(lengths), 0) - 1
    drawn = keys.split(keys.key(8), 3).unbind(0)
    action = keys.normal(drawn[0], (total, S))
    start = torch.tensor([0, *(last[:-1] + 1).tolist()])
    state = torch.zeros(total, S)
    for first, length in zip(start.tolist(), lengths, strict=True):
        state[first : first + length] = keys.normal(keys.fold_in(drawn[1], first), (S,))
        state[first + 1 : first + length] += action[first : first + length - 1].cumsum(0)
    fallen = torch.zeros(total, dtype=torch.bool)
    fallen[last[ends]] = True
    names = {"state": S, "action": S, "contact": C}
    features = [
        Feature(n, (w,), "bool" if n == "contact" else "float32", episodes.unnamed_channels(w, n))
        for n, w in names.items()
    ]
    features.append(Feature("terminated", (), "bool", (("fall", ""),)))
    asked = {"seed": 0, "worlds": 1, "steps": len(LENGTHS), "longest": 14, "stream": rwm.quadruped.STREAM}
    about = {"drawn": asked}
    values = {
        "state": state,
        "action": action,
        "contact": keys.uniform(drawn[2], (total, C)) < 0.5,
        "terminated": fallen,
    }
    return Episodes(Schema(tuple(features), 0.02, "", about), values, torch.tensor(lengths), ends)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("data")
    episodes.write(made / rwm.FILE, recorded())
    return made


@pytest.fixture
def tiny(folder: Path) -> Any:
    def make(**fields: Any) -> Recipe:
        return rwm.build(dataclasses.replace(TINY, path=str(folder), **fields))

    return make


def mean(task: Recipe) -> Any:
    def loss(params: Model, scales: model.Scales, batch: Windows, key: torch.Tensor) -> tuple:
        value, aux = task.loss(params, scales, batch, key)
        return value / task.count(batch), Aux(aux.stats, {})

    return loss


def episode_of(frames: Frames) -> torch.Tensor:
    return torch.unique(frames.end, return_inverse=True)[1]


def test_it_is_a_recipe_with_settings_of_trainer_and_model(tiny: Any) -> None:
    from functional_sl.training.config import TrainConfig

    loaded = recipe.load("functional_sl.recipes.rwm:build")
    assert loaded.settings is RWM
    assert loaded.places == {"path"}
    settings = {}
    for size, parts in loaded.sizes.items():
        TrainConfig(**parts["train"])
        settings[size] = RWM(**parts["recipe"])
    assert [(settings[x].history, settings[x].forecast) for x in ("paper", "three_step")] == [(32, 8), (32, 3)]
    assert settings["small"].forecast == 8
    task = tiny()
    assert json.loads(json.dumps(task.schema)) == task.schema
    assert [x["name"] for x in task.schema["features"]] == ["state", "action", "contact", "terminated"]


def test_held_out_episodes_are_whole_and_share_no_frame_with_training(tiny: Any) -> None:
    task = tiny()
    rows = [{tuple(row) for row in part.state.tolist()} for part in (task.data, task.validation)]
    assert not rows[0] & rows[1]
    assert len(rows[0] | rows[1]) == sum(LENGTHS)
    assert len(episode_of(task.validation).unique()) == 5  # 0.4 of 12


@pytest.mark.parametrize("terminated", [True, False])
def test_windows_never_leave_their_episode_and_pair_states_with_the_actions_that_follow(terminated: bool) -> None:
    """An episode of L frames has L - M windows, and sum over them of min(N, frames behind the history) valid steps.

    Where the column of falls is empty the windows are the same: episodes end where their lengths say.
    """
    frames = rwm_windows.frames_of(recorded(terminated=terminated), M, 1)
    assert len(frames.anchor) == sum(max(0, length - M) for length in LENGTHS)
    state, action, contact, fallen, valid = rwm_windows.window(frames, frames.anchor, M, N)
    expected = [min(N, length - M - i) for length in LENGTHS for i in range(length - M)]
    assert valid.sum(1).tolist() == expected
    assert valid.long().tolist() == [[int(k < n) for k in range(N)] for n in expected]
    own = episode_of(frames)
    bounds = list(zip(frames.anchor.tolist(), expected, strict=True))
    for i, (first, n) in enumerate(bounds):
        assert len(own[first : first + M + n].unique()) == 1
        assert torch.equal(state[i, : M + n], frames.state[first : first + M + n])
        assert torch.equal(contact[i, :n], frames.contact[first + M : first + M + n])
        assert torch.equal(fallen[i, :n], frames.terminated[first + M : first + M + n])
        torch.testing.assert_close(state[i, 1 : M + n] - state[i, : M + n - 1], action[i, : M + n - 1])
    assert bool(fallen[valid].any()) == terminated


def test_draws_cover_every_window_and_validation_every_step_once(tiny: Any) -> None:
    task = tiny()
    batch = task.sample(task.data, keys.key(3), 2000)
    assert {tuple(x) for x in batch.state[:, 0].tolist()} == {
        tuple(x) for x in task.data.state[task.data.anchor].tolist()
    }
    assert_bits_equal(batch, task.sample(task.data, keys.key(3), 2000))
    held = list(task.batches(task.validation, 3))
    steps = [tuple(row) for b in held for row in b.state[:, M:][b.valid].tolist()]
    lengths = torch.unique(task.validation.end, return_counts=True)[1]
    assert (
        len(steps) == len(set(steps)) == int((lengths - M).clamp(min=0).sum()) == sum(int(task.count(b)) for b in held)
    )


def test_bootstrap_samples_hold_as_many_rows_and_are_each_members_own() -> None:
    weight = rwm_windows.bootstrap(keys.key(1), 50, 3)
    assert weight.sum(0).tolist() == [50] * 3
    assert not torch.equal(weight[:, 0], weight[:, 1])
    drawn = keys.randint(keys.key(1), (3, 50), 0, 50)
    assert torch.equal(weight, torch.stack([torch.bincount(row, minlength=50) for row in drawn], 1))
    assert torch.equal(rwm_windows.bootstrap(keys.key(1), 50, 1), torch.ones(50, 1, dtype=torch.int64))


@pytest.mark.parametrize(("members", "decay", "beta"), [(1, 1.0, 0.5), (1, 0.5, 0.0), (3, 0.0, 0.5), (3, 0.9, 1.0)])
def test_the_loss_is_the_weighted_sum_over_valid_steps(tiny: Any, members: int, decay: float, beta: float) -> None:
    """The count is that of valid (window, step) pairs, for any decay; a row counts as often as a sample has it."""
    task = tiny(members=members, decay=decay, beta=beta)
    params, scales = task.init(keys.key(0))
    batch, key = task.sample(task.data, keys.key(1), 9), keys.key(2)
    noise = keys.normal(key, (members, 9, N - 1, S))
    total, items = 0.0, 0
    for b in range(members):
        own = params._replace(heads=tree.map(lambda x, b=b: x[b : b + 1], params.heads))
        for i in range(9):
            state = (batch.state[i : i + 1] - scales.state.mean) / scales.state.std
            action = (batch.action[i : i + 1] - scales.action.mean) / scales.action.std
            found = model.forecast(own, state[:, :M], action, noise[b : b + 1, i : i + 1])
            for k in range(N):
                if not batch.valid[i, k]:
                    continue
                log_std = found.log_std[0, 0, k]
                gap = state[0, M + k] - found.mean[0, 0, k]
                value = (0.5 * (gap / log_std.exp()) ** 2 + log_std) * log_std.exp() ** (2 * beta)
                touch = F.binary_cross_entropy_with_logits(found.contact[0, 0, k], batch.contact[i, k].float())
                fall = F.binary_cross_entropy_with_logits(found.termination[0, 0, k], batch.terminated[i, k].float())
                times = int(batch.weight[i, b])
                total += times * decay ** (k + 1) * float(value.mean() + touch + fall)
                items += times
    value, aux = task.loss(params, scales, batch, key)
    assert math.isclose(value, total, rel_tol=1e-4, abs_tol=1e-4)
    assert task.count(batch) == items
    assert task.count(batch).dtype == torch.int64
    assert aux.stats is scales
    assert (decay == 0) == (float(value) == 0)


def test_what_is_not_valid_changes_no_bit_and_nothing_valid_is_a_finite_zero(tiny: Any) -> None:
    task = tiny()
    params, scales = task.init(keys.key(0))
    batch = task.sample(task.data, keys.key(1), 12)
    batch = batch._replace(valid=batch.valid & (torch.arange(12) > 1)[:, None])  # two windows have no valid step
    gone = ~batch.valid
    assert bool(gone[2:].any())

    def filled(value: float) -> Windows:
        state, action = batch.state.clone(), batch.action.clone()
        state[:, M:][gone], action[:, M - 1 :][gone] = value, value
        state[:2], action[:2] = value, value
        return batch._replace(
            state=state, action=action, contact=batch.contact ^ gone[..., None], terminated=batch.terminated ^ gone
        )

    def both(batch: Windows) -> tuple:
        return torch.func.grad_and_value(lambda p: task.loss(p, scales, batch, keys.key(2))[0])(params)

    expected = both(batch)
    for value in (math.nan, 1e6, 0.0):
        assert_bits_equal(both(filled(value)), expected)
    gradient, value = both(filled(math.nan)._replace(valid=torch.zeros_like(batch.valid)))
    assert (float(value), bool(all_finite(gradient))) == (0.0, True)
    assert task.count(batch._replace(valid=torch.zeros_like(batch.valid))) == 0


def test_every_parameter_gets_a_gradient_and_seeds_run_side_by_side(tiny: Any) -> None:
    task = tiny(members=2)
    params, scales = task.init(keys.key(0))
    batch = task.sample(task.data, keys.key(1), 6)
    gradient = torch.func.grad(lambda p: task.loss(p, scales, batch, keys.key(2))[0])(params)
    for name, leaf in tree.named(gradient).items():
        assert bool((leaf != 0).flatten(1).any(1).all()), name
    many = tree.stack([task.init(keys.key(i))[0] for i in range(2)])
    found = torch.func.vmap(lambda p: task.loss(p, scales, batch, keys.key(2))[0])(many)
    for i in range(2):
        alone = task.loss(tree.index(many, i), scales, batch, keys.key(2))[0]
        torch.testing.assert_close(found[i], alone, rtol=1e-5, atol=1e-5)


def test_draw_and_gradient_compile_whole(tiny: Any) -> None:
    task = tiny(layers=1, history=2, forecast=2, members=2)
    params, scales = task.init(keys.key(0))

    def gradient(params: Model, frames: Frames, key: torch.Tensor) -> Model:
        batch = task.sample(frames, key, 6)
        return torch.func.grad(lambda p: task.loss(p, scales, batch, key)[0] / task.count(batch))(params)

    compiled = torch.compile(gradient, fullgraph=True, backend="aot_eager")(params, task.data, keys.key(1))
    for a, b in zip(tree.leaves(compiled), tree.leaves(gradient(params, task.data, keys.key(1))), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)


def test_every_valid_step_of_all_held_out_episodes_is_judged_and_falls_are_seen(tiny: Any) -> None:
    """Forecasts of up to 10 steps from every second frame: together they hold every frame behind a history."""
    task = tiny(evaluation_every=2)
    judged, lengths = task.evaluate.args[1], torch.unique(task.validation.end, return_counts=True)[1]
    found = rwm.judge(task.evaluate.args[0], judged, *task.init(keys.key(0)))
    expected = [min(10, n - M - i) for n in lengths.tolist() for i in range(0, n - M, 2)]
    assert found.valid.sum(1).tolist() == expected
    held = [judged.anchor[i] + M + k for i, n in enumerate(expected) for k in range(n)]
    assert len(set(map(int, held))) == int((lengths - M).clamp(min=0).sum())
    whole = [i for i, n in enumerate(lengths.tolist()) for _ in range(0, n - M, 2)]
    assert torch.equal(found.episode, torch.unique(torch.tensor(whole), return_inverse=True)[1])
    assert int((found.fell & found.valid).sum()) == int(judged.terminated[torch.tensor(held)].sum()) > 0


def test_evaluation_feeds_the_history_and_the_actions_that_training_pairs(
    tiny: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model that knows the law, x' = x + a, has no error; the state that is held has its own."""
    task = tiny()
    params, scales = task.init(keys.key(0))

    def exact(params: Model, states: torch.Tensor, actions: torch.Tensor) -> Forecast:
        raw = actions * scales.action.std + scales.action.mean
        ahead = raw[:, states.shape[1] - 1 :].cumsum(1) / scales.state.std
        found = (states[:, -1:] + ahead)[None]
        return Forecast(found, torch.zeros_like(found), found[..., :C], found[..., 0])

    monkeypatch.setattr(model, "forecast", exact)
    figures = task.evaluate(params, scales)
    assert all(figures[f"{name}_{h}"] < 1e-5 for h in (1, 4, 10) for name in ("nrmse", "median_nrmse"))
    assert figures["hold_nrmse_10"] > figures["hold_nrmse_1"] > 0.1
    assert figures["mean_l1_10"] == pytest.approx(1)
    assert task.score({**figures, "loss": 1.0}) == -figures["nrmse_10"]


@pytest.mark.parametrize("members", [1, 2])
def test_the_bundle_predicts_what_the_recipe_does_bit_by_bit(tiny: Any, tmp_path: Path, members: int) -> None:
    task = tiny(members=members)
    params, scales = task.init(keys.key(0))
    loaded = bundles.load(bundles.save(task.bundle(params, scales), tmp_path / "model.safetensors"))
    inputs = loaded.bundle.inputs
    assert {name: tuple(x.shape) for name, x in inputs.items()} == {"states": (2, M, S), "actions": (2, M + N - 1, S)}
    found = model.forecast(
        params,
        (inputs["states"] - scales.state.mean) / scales.state.std,
        (inputs["actions"] - scales.action.mean) / scales.action.std,
    )
    own = found.mean.mean(0) * scales.state.std + scales.state.mean
    predicted = loaded.predict(inputs)
    assert torch.equal(predicted["states"], own)
    assert torch.equal(predicted["terminations"], torch.sigmoid(found.termination).mean(0))
    assert loaded.about["architecture"]["members"] == members
    assert loaded.about["inputs"]["actions"]["channels"][0] == ["action_0", ""]


def test_pictures_are_drawn(tiny: Any, tmp_path: Path) -> None:
    task = tiny()
    task.draw(*task.init(keys.key(0)), str(tmp_path))
    drawn = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    assert sorted(drawn) == ["error.png", *(f"trajectory_state_{i}.png" for i in range(3))]
    assert all(data.startswith(b"\x89PNG") for data in drawn.values())


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"history": 5}, "history=5 and the longest need 15 frames, but episode_steps=14"),
        ({"forecast": 0}, "forecast=0: must be at least 1"),
        ({"horizons": ()}, r"horizons=\(\)"),
        ({"decay": 1.5}, r"decay=1.5: must lie in \[0, 1\]"),
        ({"held_out": 1.0}, "held_out=1.0: a share"),
    ],
)
def test_settings_that_cannot_be_meant(fields: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(TINY, **fields)


def test_episodes_that_are_too_short_are_named() -> None:
    with pytest.raises(ValueError, match="no episode has more than history=4 frames; the longest has 4"):
        rwm_windows.frames_of(recorded([4, 3]), 4, 1)
    with pytest.raises(ValueError, match="no held-out episode has 14 frames, the longest has 9: more steps"):
        rwm.judged_windows(recorded([9, 3]), TINY)


def test_roll_outs_are_generated_kept_and_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("mujoco")
    config = RWM(
        path=str(tmp_path / "data"), worlds=2, steps=24, episode_steps=12, history=3, forecast=2, hidden=4, head=4,
        horizons=(1, 4), held_out=0.5,
    )  # fmt: skip
    first = rwm.build(config)
    assert first.data.state.shape[1:] == (45,)
    monkeypatch.setattr(rwm.quadruped, "generate", None)
    second = rwm.build(config)
    assert_bits_equal((first.data, first.validation), (second.data, second.validation))
    with pytest.raises(ValueError, match=r"rollouts\.safetensors: 'drawn' is"):
        rwm.build(dataclasses.replace(config, steps=25))


def test_roll_outs_split_and_trainer_draw_from_keys_that_do_not_meet(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither a key nor what is split from it is one of the others', also where the run has the data's seed."""
    pytest.importorskip("mujoco")
    used = []

    def spied(own: Any, place: int) -> Any:
        return lambda *args: (used.append(args[place]), own(*args))[1]

    monkeypatch.setattr(rwm.quadruped, "roll_out", spied(rwm.quadruped.roll_out, 1))
    monkeypatch.setattr(rwm.episodes, "split", spied(rwm.episodes.split, 2))
    rwm.build(RWM(worlds=2, steps=24, episode_steps=12, history=3, horizons=(1, 4), held_out=0.5))
    assert len(used) == 2
    used.append(keys.key(0))  # of the run
    families = [{tuple(k) for k in [key.tolist(), *keys.split(key, 20).tolist()]} for key in used]
    assert len(set.union(*families)) == 3 * 21


def test_forecasts_that_were_trained_beat_holding(tiny: Any) -> None:
    """120 updates on x' = x + a; what is held errs by the sum of ten actions."""
    task = tiny(hidden=24, head=24, layers=1)
    step = make_step(
        mean(task), optim.chain(optim.clip_by_global_norm(1.0), optim.adam(schedules.linear(1e-2, 0.0, 120)))
    )
    state = step.init(*task.init(keys.key(0)))
    with torch.no_grad():
        for i in range(120):
            key = keys.fold_in(keys.key(1), i)
            state, _, _ = step.update(state, task.sample(task.data, key, 32), key)
    figures = task.evaluate(state.params, state.stats)
    assert figures["nrmse_10"] < 0.75 * figures["hold_nrmse_10"]
