"""The update of several ranks against one full batch written with `torch.autograd` and `torch.optim` alone."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from typing import Any, NamedTuple

import pytest
import tiny_recipes
import torch
from equal import assert_bits_equal
from ranks import run_ranks
from torch import Tensor

from functional_sl import capture, keys
from functional_sl.parallel import collectives
from functional_sl.parallel.collectives import Collectives
from functional_sl.parallel.lockstep import Lockstep
from functional_sl.parallel.world import world
from functional_sl.recipe import Recipe
from functional_sl.step import Aux
from functional_sl.training import reporting, update
from functional_sl.training.config import TrainConfig
from functional_sl.training.update import Training, TrainState

CPU = torch.device("cpu")
UPDATES = 5
# name -> trainer's settings, type of the numbers
CASES: dict[str, tuple[dict[str, Any], str]] = {
    "sgd float64": ({"optimizer": "sgd", "learning_rate": 0.1}, "float64"),
    "sgd float32": ({"optimizer": "sgd", "learning_rate": 0.1}, "float32"),
    "adam float32": ({"optimizer": "adam", "learning_rate": 0.01}, "float32"),
    "clipped adamw float64": (
        {"optimizer": "adamw", "learning_rate": 0.01, "weight_decay": 0.1, "clip_norm": 0.5, "accumulation": 3},
        "float64",
    ),
    "sgd float32 in 2 parts": ({"optimizer": "sgd", "learning_rate": 0.1, "accumulation": 2}, "float32"),
}


def recipe_of(rank: int, dtype: str = "float32", **changes: Any) -> Recipe:
    """The line with other valid shares on every rank: none at all on rank 1."""
    recipe = tiny_recipes.line(tiny_recipes.Line(dtype=dtype, **changes))

    def sample(data: tiny_recipes.Rows, key: Tensor, size: int) -> tiny_recipes.Rows:
        batch = recipe.sample(data, key, size)
        keep = torch.arange(size) % 6 < (6, 0, 2, 3)[rank]
        return batch._replace(valid=batch.valid & keep[:, None])

    return recipe._replace(sample=sample)


def started(
    recipe: Recipe, config: TrainConfig, ranks: Collectives, rank: int, metrics: Iterable[str] = ("absolute",)
) -> tuple[Training, TrainState]:
    training = update.make_training(recipe, config, ranks, CPU)
    return training, training.init(*recipe.init(keys.key(7)), metrics, rank)


def one_rank() -> dict[str, list[Any]]:
    """Returns the parameters after every update, and the sums, of each case."""
    found = {}
    with world("cpu") as here, torch.no_grad():
        for name, (changes, dtype) in CASES.items():
            recipe = recipe_of(here.rank, dtype)
            training, state = started(recipe, TrainConfig(batch_size=6, **changes), collectives.over(here), here.rank)
            params = []
            for _ in range(UPDATES):
                state, _ = training.update(state, recipe.data)
                params.append(tuple(x.clone() for x in state.step.params))
            found[name] = [params, int(state.own.items), float(state.own.sums["loss"]), int(state.valid)]
    return found


def full_batch(ranks: int, config: TrainConfig, dtype: str) -> tuple[list[tuple[Tensor, ...]], int]:
    """Returns the parameters of one process that takes all ranks' samples as one batch, and the valid items."""
    recipes = [recipe_of(rank, dtype) for rank in range(ranks)]
    w1, b1, w2 = (p.clone().requires_grad_() for p in recipes[0].init(keys.key(7))[0])
    make = {
        "sgd": lambda p: torch.optim.SGD(p, config.learning_rate),
        "adam": lambda p: torch.optim.Adam(p, config.learning_rate),
        "adamw": lambda p: torch.optim.AdamW(p, config.learning_rate, weight_decay=config.weight_decay),
    }
    optimizer, params, valid = make[config.optimizer]([w1, b1, w2]), [], 0
    for cursor in range(UPDATES):
        drawn = []
        for rank, recipe in enumerate(recipes):
            stream = keys.fold_in(keys.fold_in(keys.key(config.seed), update.SAMPLE), rank)
            draw, _ = keys.split(keys.fold_in(stream, cursor)).unbind(0)
            drawn.append(recipe.sample(recipe.data, draw, config.batch_size * config.accumulation))
        x, y, mask = (torch.cat(parts) for parts in zip(*drawn, strict=True))
        error = (torch.tanh(x @ w1 + b1) @ w2 - y)[mask]
        optimizer.zero_grad()
        torch.square(error).sum().div(mask.sum()).backward()
        if config.clip_norm:
            torch.nn.utils.clip_grad_norm_([w1, b1, w2], config.clip_norm)
        optimizer.step()
        params.append(tuple(p.detach().clone() for p in (w1, b1, w2)))
        valid += int(mask.sum())
    return params, valid


def ulps(found: Tensor, expected: Tensor) -> float:
    """Returns the largest difference in units in the last place of the largest value."""
    unit = torch.finfo(found.dtype).eps * 2.0 ** int(torch.log2(expected.abs().max()).floor())
    return float((found - expected).abs().max()) / unit


@pytest.mark.parametrize("ranks", [2, 4])
def test_ranks_equal_one_full_batch(ranks: int) -> None:
    """Rank 1 has no valid item. 1e-12 in float64; SGD in float32 within 2 units in the last place of a leaf's
    largest value after 5 updates."""
    results = run_ranks(ranks, one_rank)
    for name, (changes, dtype) in CASES.items():
        expected, valid = full_batch(ranks, TrainConfig(batch_size=6, **changes), dtype)
        for other in results[1:]:
            assert_bits_equal(other[name][0], results[0][name][0])
        pairs = [
            (f, e) for fs, es in zip(results[0][name][0], expected, strict=True) for f, e in zip(fs, es, strict=True)
        ]
        gap = max(float((found - wanted).abs().max()) for found, wanted in pairs)
        print(f"{ranks} ranks, {name}: largest deviation {gap:.3g}, {max(ulps(f, e) for f, e in pairs):.2f} ulp")
        if dtype == "float64":
            assert gap <= 1e-12
        elif changes["optimizer"] == "sgd":
            assert max(ulps(found, wanted) for found, wanted in pairs) <= 2
        else:
            assert gap <= 1e-6  # of Adam's steps of 0.01
        assert [result[name][3] for result in results] == [valid] * ranks
        assert sum(result[name][1] for result in results) == valid
        assert results[1][name][1] == 0


class Items(NamedTuple):
    error: Tensor  # [N] at w = 1
    valid: Tensor  # [N] bool


def weighing(valid: int, error: float) -> Recipe:
    """Each of a rank's first `valid` of 100 items has the error `error * w^2`."""

    def sample(data: tuple, key: Tensor, size: int) -> Items:
        assert size == 100
        return Items(torch.full((size,), error), torch.arange(size) < valid)

    def loss(w: Tensor, buffers: tuple, batch: Items, key: Tensor) -> tuple[Tensor, Aux]:
        return torch.where(batch.valid, batch.error * w * w, 0.0).sum(), Aux(buffers, {})

    base = tiny_recipes.line(tiny_recipes.Line())
    return base._replace(init=lambda key: (torch.tensor(1.0), ()), sample=sample, loss=loss)


@pytest.mark.parametrize(
    "split", [[(100, 1.0), (2, 5.0)], [(60, 1.0), (2, 5.0), (40, 1.0)]], ids=["2 ranks", "3 ranks"]
)
@pytest.mark.parametrize("parts", [1, 2, 5])
@pytest.mark.parametrize("clip", [None, 10.0, 1.0])
def test_few_valid_items_weigh_no_more(split: list[tuple[int, float]], parts: int, clip: float | None) -> None:
    """(100 * 1 + 2 * 5) / 102 = 1.07843; the gradient 2.15686 is clipped to 1 / (1 + 1e-6 / 2.15686)."""
    config = TrainConfig(
        optimizer="sgd", learning_rate=0.1, clip_norm=clip, batch_size=100 // parts, accumulation=parts
    )
    with contextlib.closing(Lockstep(len(split))) as lockstep, torch.no_grad():
        ranks = [started(weighing(*own), config, lockstep.collectives, i, ()) for i, own in enumerate(split)]
        states = lockstep.map(lambda rank: rank[0].update(rank[1], ())[0], ranks)
    mean = 110 / 102
    gradient = 2 * mean if clip != 1.0 else 1 / (1 + 1e-6 / (2 * mean))
    for state in states:
        assert float(state.step.params) == pytest.approx(1 - 0.1 * gradient, abs=1e-7)
        assert int(state.valid) == 102
    record = reporting.means([reporting.totals(state) for state in states])
    assert record == {"train_loss": pytest.approx(1.07843, abs=5e-6)}
    assert record["train_loss"] == mean


def test_micro_batches_divide_one_draw() -> None:
    """3 x 4 rows are 12 rows: the same items and, to rounding, the same parameters and buffers of the last part."""
    recipe = tiny_recipes.line(tiny_recipes.Line(dtype="float64"))
    found = []
    for size, parts in ((12, 1), (4, 3)):
        config = TrainConfig(batch_size=size, accumulation=parts, optimizer="sgd", learning_rate=0.1)
        training, state = started(recipe, config, collectives.single(), 0)
        for _ in range(3):
            state, _ = training.update(state, recipe.data)
        found.append(state)
    whole, parts = found
    torch.testing.assert_close(parts.step.params, whole.step.params, rtol=0, atol=1e-14)
    assert int(parts.own.items) == int(whole.own.items)
    assert float(parts.own.sums["loss"]) == pytest.approx(float(whole.own.sums["loss"]), abs=1e-12)
    assert not torch.equal(parts.step.stats.key, whole.step.stats.key)  # it has moved three times as often


def test_an_empty_update_moves_nothing_and_is_counted() -> None:
    config = TrainConfig(batch_size=100)
    training, state = started(weighing(0, 1.0), config, collectives.single(), 0, ())
    new, _ = training.update(state, ())
    assert_bits_equal(new.step[:3], state.step[:3])
    assert [int(x) for x in (new.empty_at, new.own.nonfinite_at, new.updates, new.valid)] == [1, -1, 1, 0]


def test_counts_are_exact_where_float32_is_not() -> None:
    many = 2**24 + 1
    recipe = weighing(3, 1.0)._replace(count=lambda batch: torch.tensor(many))
    with contextlib.closing(Lockstep(2)) as lockstep, torch.no_grad():
        ranks = [started(recipe, TrainConfig(batch_size=100), lockstep.collectives, i, ()) for i in range(2)]
        states = lockstep.map(lambda rank: rank[0].update(rank[1], ())[0], ranks)
    assert [(int(state.valid), int(state.own.items)) for state in states] == [(2 * many, many)] * 2


def test_a_bad_number_is_counted_where_it_arose() -> None:
    config = TrainConfig(batch_size=100)
    with contextlib.closing(Lockstep(2)) as lockstep, torch.no_grad():
        kinds = (weighing(3, 1.0), weighing(3, float("nan")))
        ranks = [started(kind, config, lockstep.collectives, i, ()) for i, kind in enumerate(kinds)]
        states = lockstep.map(lambda rank: rank[0].update(rank[1], ())[0], ranks)
    assert [int(state.own.nonfinite_at) for state in states] == [-1, 1]
    assert [int(state.step.gate.skipped) for state in states] == [1, 1]
    assert [float(state.step.params) for state in states] == [1.0, 1.0]
    assert [int(state.own.items) for state in states] == [0, 0]


def test_a_loss_scale_looks_for_its_size() -> None:
    """The derivative 20 w overflows float16's 65504 from a scale of 2^12 on: 2^16 is halved five times."""
    recipe = weighing(100, 10.0)
    config = TrainConfig(batch_size=100, compute_dtype="float16", optimizer="sgd", learning_rate=0.1)

    def loss(w: Tensor, buffers: tuple, batch: Items, key: Tensor) -> tuple[Tensor, Aux]:
        value, aux = recipe.loss(w.half(), buffers, batch._replace(error=batch.error.half()), key)
        return value, aux

    training, state = started(recipe._replace(loss=loss), config, collectives.single(), 0, ())
    for _ in range(6):
        state, _ = training.update(state, ())
    assert [int(state.own.nonfinite_at), int(state.step.gate.skipped)] == [-1, 5]
    assert float(state.scale.scale) == 2**11
    assert float(state.step.params) == -1.0  # 1 - 0.1 * 20


def test_streams_differ_by_rank_update_and_micro_batch() -> None:
    """Three starts of three updates: each has a key for its draw and one for the noise of each of two parts."""
    recipe = tiny_recipes.line(tiny_recipes.Line(rows=1000))
    seen = []

    def noted(function: Any, place: int) -> Any:
        return lambda *arguments: seen.append(tuple(arguments[place].tolist())) or function(*arguments)

    note = recipe._replace(sample=noted(recipe.sample, 1), loss=noted(recipe.loss, 3))
    for seed, rank in ((0, 0), (0, 1), (1, 0)):
        config = TrainConfig(batch_size=4, seed=seed, accumulation=2)
        training, state = started(note, config, collectives.single(), rank)
        for _ in range(3):
            state, _ = training.update(state, recipe.data)
    assert len(seen) == len(set(seen)) == 3 * 3 * 3


@pytest.mark.parametrize("dtype", ["float32", pytest.param("float16", marks=pytest.mark.slow)])
def test_compiled_equals_eager(dtype: str) -> None:
    """Dynamo and its autograd without generated code: the same kernels, hence the same bits."""
    recipe = tiny_recipes.line(tiny_recipes.Line(dropout=0.3))
    config = TrainConfig(batch_size=4, accumulation=2, compute_dtype=dtype)
    training, state = started(recipe, config, collectives.single(), 0)
    compiled = capture.compiled(lambda state: training.update(state, recipe.data), backend="aot_eager")
    other = state
    for _ in range(3):
        (state, _), (other, _) = training.update(state, recipe.data), compiled(other)
    assert_bits_equal(other, state)
