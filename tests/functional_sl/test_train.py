"""The command: settings of trainer and recipe side by side, what it leaves, and how it ends."""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
import re
import signal
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_recipes
import tiny_training
import torch
from torch import Tensor

from functional_sl import data, train, tree
from functional_sl.recipe import Recipe
from functional_sl.run import loading
from functional_sl.run.cli import UsageError, option
from functional_sl.step import Aux
from functional_sl.training import optimizer, request
from functional_sl.training.config import TrainConfig
from functional_sl.training.errors import ContractError, UpdateError

LINE = "--recipe=tiny_recipes:line"


@dataclasses.dataclass(frozen=True)
class Numbers:
    count: int = option(21, "Held-out samples, of feature and target i.")


def ids(config: Numbers) -> Recipe:
    """Sample i has the feature i; the loss of a sample is i, whatever the model."""
    values = torch.arange(config.count, dtype=torch.float64)

    def loss(w: Tensor, buffers: tuple, batch: Tensor, key: Tensor) -> tuple[Tensor, Aux]:
        return (batch + 0 * w).sum(), Aux(buffers, {})

    return Recipe(
        name="ids",
        schema={"inputs": ["i"]},
        data=values,
        validation=values,
        init=lambda key: (torch.zeros((), dtype=torch.float64), ()),
        sample=data.uniform,
        count=lambda batch: torch.tensor(batch.shape[0]),
        loss=loss,
        batches=data.in_order,
        validate=lambda w, buffers, batch: {"loss": batch.sum()},
    )


@dataclasses.dataclass(frozen=True)
class Clashing:
    updates: int = option(1, "A name of the trainer's.")


def clashing(config: Clashing) -> Recipe:
    raise AssertionError("never built")


@pytest.fixture(autouse=True)
def _here(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setitem(sys.modules, "my_tasks", sys.modules[__name__])
    monkeypatch.chdir(tmp_path)
    with tiny_training.prepared():
        yield


def ended(capsys: pytest.CaptureFixture, *argv: str) -> tuple[int, str, str]:
    """Returns exit code, stdout and the last line on stderr."""
    try:
        train.main([*argv, "--device=cpu", "--notensorboard"])
        code: Any = 0
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else 1
        if isinstance(stop.code, str):
            print(stop.code, file=sys.stderr)
    out, err = capsys.readouterr()
    return code, out, (err.splitlines() or [""])[-1]


def test_a_run_leaves_its_folder_and_one_line(capsys, tmp_path):
    code, out, _ = ended(capsys, LINE, "--run_dir=run")
    assert code == 0
    summary = json.loads(out)
    assert list(summary) == [
        "run_id", "run_dir", "updates", "train_loss", "validation", "seconds", "samples_per_s",
    ]  # fmt: skip
    assert summary["updates"] == 12
    records = tiny_training.records(tmp_path / "run")
    assert [record["step"] for record in records] == [*range(1, 13)]
    assert [record["samples"] for record in records] == [4 * n for n in range(1, 13)]
    assert summary["train_loss"] == records[-1]["train_loss"]
    assert records[-1]["validation_count"] == summary["validation"]["count"] > 0
    assert (tmp_path / "run" / "loss.png").stat().st_size
    assert json.loads((tmp_path / "run" / "schema.json").read_text())["outputs"] == ["y"]
    assert tiny_training.manifest(tmp_path / "run")["extra"]["counts"]["samples"] == 48


@pytest.mark.parametrize("size", [4, 5, 21, 100])
def test_every_held_out_item_counts_once(size, tmp_path):
    """The mean of 0 ... 20 is 10, however the 21 are batched."""
    config, task = train.settings(
        "my_tasks:ids", batch_size=size, updates=1, run_dir=str(tmp_path / "run"), **tiny_training.TINY
    )
    assert train.run(config, task)["validation"] == {"loss": 10.0, "count": 21}


def test_a_record_is_the_mean_since_the_last_one(tmp_path):
    """Batches of one size: every second record of pairs is the mean of two single ones, exactly in float64."""
    found = {}
    for every in (1, 2):
        tiny_training.run(tmp_path / str(every), "my_tasks:ids", updates=4, batch_size=4, log_every=every)
        found[every] = [record["train_loss"] for record in tiny_training.records(tmp_path / str(every))]
    first, second, third, fourth = found[1]
    assert found[2] == [(first + second) / 2, (third + fourth) / 2]
    assert len(set(found[1])) > 1


def test_every_recipe_that_is_named_is_there(capsys):
    _, _, err = ended(capsys, "--updates=3")
    assert "functional_sl.recipes.NAME:build for the names bc_state, bc_visual, nerd, rwm, rigidformer" in err
    for name in request.RECIPES:
        assert callable(loading.load(f"functional_sl.recipes.{name}:build"))


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--updates=3"], "no recipe: give --recipe"),
        (["--recipe=my_tasks"], "expected package.module:name"),
        (["--recipe=no_such_module:build"], "No module named 'no_such_module'"),
        (["--recipe=my_tasks:LINE"], "a recipe is a function"),
        (["--recipe=my_tasks:clashing"], "the recipe's settings updates have names of the trainer's"),
        ([LINE, "--hiden=3"], "unknown flag --hiden; did you mean --hidden?"),
        ([LINE, "--size=paper"], "tiny_recipes has small, wide"),
        (["--recipe=my_tasks:ids", "--size=wide"], "has no sizes"),
        ([LINE, "--updates=0"], "updates=0: must be positive"),
        ([LINE, "--threads=100000000"], "threads=100000000: must be at most 1024"),
        ([LINE, "--weight_decay=0.1"], "adamw decays weights"),
        ([LINE, "--backend=nccl"], "nccl moves CUDA tensors"),
        ([LINE, "--resume=x", "--init_from=y"], "x: no such folder"),
        ([LINE, "--run_dir="], "names no folder"),
        ([LINE, "--init_from=nowhere"], "nowhere: no such folder"),
        ([LINE, "--config=config.yaml"], "config.yaml line 2: unknown key batchsize; did you mean batch_size?"),
        ([LINE, "--lr_schedule=linear", "--lr_warmup_updates=20"], "the warm-up is part of the decay"),
    ],
)
def test_a_mistake_is_one_line(argv, message, capsys, tmp_path):
    Path("config.yaml").write_text("hidden: 3\nbatchsize: 3\n")
    code, out, err = ended(capsys, *argv)
    assert (code, out) == (2, "")
    assert message in err
    assert sorted(os.listdir(tmp_path)) == ["config.yaml"]


def test_what_is_no_run_cannot_go_on(capsys, tmp_path):
    code, _, err = ended(capsys, f"--resume={tmp_path}")
    assert (code, "holds no run" in err) == (2, True)
    with pytest.raises(UsageError, match=r"functional_sl\.train\.resume goes on"):
        train.run(TrainConfig(resume=str(tmp_path), updates=3))


def test_a_run_without_settings_of_the_task_takes_those_of_the_size(tmp_path):
    train.run(
        TrainConfig(recipe="tiny_recipes:line", size="wide", updates=1, run_dir=str(tmp_path), **tiny_training.TINY)
    )
    assert tiny_training.manifest(tmp_path)["config"]["hidden"] == 16


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a device")
def test_a_cuda_config_without_a_device_is_one_line(capsys):
    Path("config.yaml").write_text("device: cuda\nrecipe: tiny_recipes:line\n")
    with pytest.raises(SystemExit):
        train.main(["--config=config.yaml"])
    assert capsys.readouterr().err == (
        "functional_sl.train: --device=cuda: torch sees no CUDA device; use --device=cpu or a CUDA build of torch\n"
    )


def test_layers_override_each_other(tmp_path):
    """Defaults, then --size, then the file, then flags; all three are read before the recipe is known."""
    Path("config.yaml").write_text("recipe: tiny_recipes:line\nsize: wide\nhidden: 7\nbatch_size: 9\n")
    line = train.request.parse(["--config", "config.yaml", "--batch_size=3"], "p", "d")
    values = line.values
    assert (values["updates"], values["hidden"], values["batch_size"], values["rows"]) == (24, 7, 3, 40)
    assert line.given == {"recipe", "size", "hidden", "batch_size"}


def test_help_lists_both(capsys):
    with pytest.raises(SystemExit) as stop:
        train.main(["--help", LINE, "--size=wide"])
    text = capsys.readouterr().out
    assert stop.value.code == 0
    for expected in ("--updates=INT (default: 24)", "--hidden=INT (default: 16)", "tiny_recipes:"):
        assert expected in text


def test_more_updates_keep_the_schedule(capsys):
    """Warm-up 2, cosine to 12: the rates up to 12 stand, and from there on the run stays at the end's."""
    argv = [LINE, "--run_dir=run", "--lr_schedule=cosine", "--lr_warmup_updates=2", "--learning_rate=0.5"]
    assert ended(capsys, *argv, "--lr_end=0.25")[0] == 0
    train.main(["--resume=run", "--updates=14"])
    assert "the schedule keeps lr_decay_updates=12" in capsys.readouterr().err
    rates = [record["learning_rate"] for record in tiny_training.records(Path("run"))]
    config = TrainConfig(learning_rate=0.5, lr_end=0.25, lr_schedule="cosine", lr_warmup_updates=2, lr_decay_updates=12)
    assert rates == [float(optimizer.learning_rate(config)(torch.tensor(n))) for n in range(14)]
    assert rates[:3] == [0.0, 0.25, 0.5]
    assert rates[12:] == [0.25, 0.25]


def test_a_signal_ends_the_run_in_good_order(capsys, tmp_path, monkeypatch):
    def stopping(config: tiny_recipes.Line) -> Recipe:
        recipe = tiny_recipes.line(config)
        drawn: list[int] = []

        def sample(rows: Any, key: Tensor, size: int) -> Any:
            drawn.append(size)
            if len(drawn) == 6:  # the admission's draw is the first
                os.kill(os.getpid(), signal.SIGTERM)
            return recipe.sample(rows, key, size)

        return recipe._replace(sample=sample)

    stopping.__annotations__["config"] = tiny_recipes.Line
    stopping.__module__ = "tiny_recipes"
    monkeypatch.setattr(tiny_recipes, "stopping", stopping, raising=False)
    code, out, _ = ended(capsys, "--recipe=tiny_recipes:stopping", "--run_dir=run", "--validate_every=0")
    assert code == 143
    assert json.loads(out)["updates"] == 5
    assert json.loads(out)["stopped"] == "SIGTERM"
    assert tiny_training.steps(tmp_path / "run") == [5]


def masked(rows: tiny_recipes.Rows, key: Tensor, size: int) -> tiny_recipes.Rows:
    batch = data.uniform(rows, key, size)
    return batch._replace(valid=torch.zeros_like(batch.valid))


def bad(**parts: Any) -> Any:
    return lambda config: tiny_recipes.line(config)._replace(**parts)


@pytest.mark.parametrize(
    ("parts", "kind", "message"),
    [
        ({"count": lambda batch: batch.valid.float().sum()}, UsageError, "count gives torch.float32"),
        ({"loss": lambda p, b, batch, key: (p.w1, Aux(b, {}))}, UsageError, r"loss gives torch.float32 \(3, 4\)"),
        ({"loss": lambda p, b, batch, key: (p.w1.sum(), Aux((), {}))}, UsageError, "loss gives buffers with"),
        ({"loss": lambda p, b, batch, key: (p.w1.sum(), b)}, UsageError, r"loss gives \(Tensor, Moving\)"),
        ({"sample": lambda d, key, size: d}, UsageError, "sample gives leaf 'x' of shape"),
        ({"validate": lambda p, b, batch: {}}, UsageError, "validate gives sums of nothing"),
        ({"batches": lambda d, size: []}, UsageError, "batches gives no batch"),
        ({"init": lambda key: torch.zeros(3)}, UsageError, r"init gives torch.float32 \(3,\)"),
        ({"init": lambda key: ({"w": torch.zeros(3)}, {})}, UsageError, "init gives an empty dict"),
        ({"data": {"x": np.zeros(3)}}, UsageError, "its data 'x' is ndarray"),
        ({"validation": ()}, UsageError, "its validation is empty"),
        ({"count": lambda batch: batch.valid.sum() * 0}, UsageError, "no held-out item is valid"),
        ({"name": None}, UsageError, "the recipe's name is NoneType None, expected a text"),
        ({"schema": ["x"]}, UsageError, r"the recipe's schema is list \['x'\], expected a dict"),
        ({"evaluate": "rollouts"}, UsageError, "the recipe's evaluate is str 'rollouts', expected a function"),
        ({"init": lambda key: ({"w": 3.0}, ())}, UsageError, "init gives parameter 'w' that is float 3.0"),
        ({"sample": lambda d, key, size: None}, UsageError, "sample gives NoneType None, expected a batch"),
        ({"sample": lambda d, key, size: [1.0]}, UsageError, "sample gives leaf '0' that is float 1.0"),
        ({"sample": lambda d, key, size: next(iter(()))}, UsageError, "sample gives StopIteration, expected a draw"),
        ({"count": lambda batch: -batch.valid.sum()}, UsageError, "count gives -[1-9] for what sample gives"),
        ({"loss": lambda p, b, batch, key: None}, UsageError, "loss gives NoneType None, expected .error sum"),
        ({"loss": lambda p, b, batch, key: (torch.ones(()), Aux(b, {}))}, UsageError, "that no parameter moves"),
        ({"loss": lambda p, b, batch, key: (p.w1.sum(), Aux(b, None))}, UsageError, "expected metrics by name"),
        ({"batches": lambda d, size: None}, UsageError, "batches gives NoneType None, expected an iterator"),
        ({"batches": lambda d, size: [3]}, UsageError, "batches gives leaf '' that is int 3"),
        ({"validate": lambda p, b, batch: [1.0]}, UsageError, r"validate gives list \[1.0\], expected sums by name"),
        ({"evaluate": lambda p, b: None}, ContractError, "evaluate gives NoneType None, expected figures by name"),
        ({"evaluate": lambda p, b: {"a": "high"}}, ContractError, r"evaluate \('a'\) gives str 'high', expected a num"),
        ({"score": lambda figures: None}, ContractError, "score gives NoneType None, expected a number"),
        ({"sample": masked}, UpdateError, "update 1: no rank has drawn a valid item"),
        (
            {"loss": lambda p, b, batch, key: (p.w1.sum() * float("nan"), Aux(b, {}))},
            UpdateError,
            r"the loss was not finite, or a gradient was not below 2\.8e\+14, in update 1",
        ),
        ({"evaluate": lambda p, b: {"loss": 1.0}}, ContractError, "evaluate gives loss, which validate has"),
    ],
)
def test_a_recipe_that_breaks_the_contract_is_named(parts, kind, message, monkeypatch, tmp_path):
    def build(config: tiny_recipes.Line) -> Recipe:
        return bad(**parts)(config)

    build.__annotations__["config"], build.__module__ = tiny_recipes.Line, "tiny_recipes"
    monkeypatch.setattr(tiny_recipes, "build", build, raising=False)
    with pytest.raises(kind, match=message):
        tiny_training.run(tmp_path / "run", "tiny_recipes:build")
    assert (tmp_path / "run").exists() == (kind is not UsageError)


def end(*found: Any) -> Any:
    return next(iter(()))


def fewer(found: tiny_recipes.Rows) -> tiny_recipes.Rows:
    return tree.map(lambda x: x[:1], found)


def uneven(found: tiny_recipes.Rows) -> tiny_recipes.Rows:
    return found._replace(y=found.y[:1])


def another_metric(found: tuple[Any, Aux]) -> tuple[Any, Aux]:
    return found[0], found[1]._replace(metrics={**found[1].metrics, "late": found[0]})


@pytest.mark.parametrize(
    ("part", "change", "message"),
    [
        ("sample", end, "its data ended in update 4; draw with replacement"),
        ("sample", fewer, r"sample gives leaf 'x' of shape \(1, 3\), expected 4 rows"),
        ("sample", uneven, r"sample gives leaf 'y' of shape \(1, 2\), expected 4 rows"),
        ("loss", another_metric, "loss gives late in some updates only"),
    ],
)
def test_a_recipe_that_breaks_the_contract_on_the_way_is_named(part, change, message, monkeypatch, tmp_path, capsys):
    """What was committed before stays, and the command says one line."""

    def build(config: tiny_recipes.Line) -> Recipe:
        recipe, calls = tiny_recipes.line(config), itertools.count()

        def changing(*arguments: Any) -> Any:
            found = getattr(recipe, part)(*arguments)
            return change(found) if next(calls) == 4 else found  # the admission's call is the first

        return recipe._replace(captured=False, **{part: changing})

    build.__annotations__["config"], build.__module__ = tiny_recipes.Line, "tiny_recipes"
    monkeypatch.setattr(tiny_recipes, "build", build, raising=False)
    with pytest.raises(SystemExit) as ended, tiny_training.prepared():
        train.main(["--recipe=tiny_recipes:build", f"--run_dir={tmp_path / 'run'}", "--device=cpu"])
    assert re.search(message, str(ended.value.code))
    assert tiny_training.steps(tmp_path / "run") == [3]
