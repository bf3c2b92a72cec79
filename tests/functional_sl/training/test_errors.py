"""An error of one rank is an error of both, within seconds and with its rank; a stop is everyone's too."""

from __future__ import annotations

import errno
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny_recipes
import tiny_training
from ranks import run_ranks
from torch import Tensor

from functional_sl.recipe import Recipe
from functional_sl.run import snapshot
from functional_sl.step import Aux

LIMIT_S = 60.0  # the watchdog has 20 s; a machine under load takes a while to start


def raising(config: tiny_recipes.Line) -> Recipe:
    raise OSError("the archive is gone")


def in_update_4(function: str, act: Callable[[Any], Any]) -> Callable[[tiny_recipes.Line], Recipe]:
    """Builds the line one of whose functions gives `act(its result)` in update 4."""

    def build(config: tiny_recipes.Line) -> Recipe:
        recipe, calls = tiny_recipes.line(config), [0]

        def wrapped(*arguments: Any) -> Any:
            calls[0] += 1
            found = getattr(recipe, function)(*arguments)
            return act(found) if calls[0] == 5 else found  # the admission's call is the first

        return recipe._replace(**{function: wrapped})

    return build


def fail(found: Any) -> Any:
    raise RuntimeError("the motor is on fire")


def nan(found: tuple[Tensor, Aux]) -> tuple[Tensor, Aux]:
    return found[0] * float("nan"), found[1]


def unlike(config: tiny_recipes.Line) -> Recipe:
    return tiny_recipes.line(config)._replace(schema={"inputs": ["z"]})


def other_buffers(config: tiny_recipes.Line) -> Recipe:
    recipe = tiny_recipes.line(config)

    def init(key: Tensor) -> Any:
        params, moving = recipe.init(key)
        return params, moving._replace(mean=moving.mean + 1)

    return recipe._replace(init=init)


def failing_validation(config: tiny_recipes.Line) -> Recipe:
    return tiny_recipes.line(config)._replace(evaluate=fall)


def fall(*arguments: Any) -> Any:
    raise RuntimeError("the robot fell over")


def full_disk(*arguments: Any, **keywords: Any) -> Any:
    raise snapshot.SnapshotError(os.strerror(errno.ENOSPC))


# what happens -> (rank, recipe, part of the error, snapshots that are there)
FAULTS: dict[str, tuple[int, Callable[..., Recipe] | None, str, list[int]]] = {
    "admission": (
        1,
        raising,
        "building the recipe failed on 1 of 2 ranks: rank 1: ValueError: --recipe=tiny_recipes:line: OSError: the arch",
        [],
    ),
    "schema": (1, unlike, "the ranks were started unlike: the recipe's schema (rank 0: ", []),
    "buffers": (1, other_buffers, "the ranks were started unlike: the first buffers (rank 0: ", []),
    "sampling": (1, in_update_4("sample", fail), "rank 1 failed (RuntimeError: the motor is on fire)", [3]),
    "objective": (1, in_update_4("loss", fail), "rank 1 failed (RuntimeError: the motor is on fire)", [3]),
    "not finite": (1, in_update_4("loss", nan), "update 4 failed on 1 of 2 ranks: rank 1: UpdateError: the loss", [3]),
    "validation": (
        0,
        failing_validation,
        "validation failed on 1 of 2 ranks: rank 0: RuntimeError: the robot fell",
        [],
    ),
    "callback": (0, None, "the callback after validation failed on 1 of 2 ranks: rank 0: ValueError: no good", []),
    "disk": (0, None, "the snapshot of update 3 failed on 1 of 2 ranks: rank 0: SnapshotError: No space left", []),
}


def one_rank(folder: str, fault: str) -> tuple[str, float]:
    """Trains this rank, whose fault strikes where it belongs; returns its error and the time that it took."""
    rank, build, _, _ = FAULTS[fault]
    mine, callback = os.environ["RANK"] == str(rank), None
    with pytest.MonkeyPatch.context() as patch:
        if mine and build is not None:
            build.__annotations__["config"], build.__module__ = tiny_recipes.Line, "tiny_recipes"
            patch.setattr(tiny_recipes, "line", _once(build, tiny_recipes.line))
        if fault == "disk":
            patch.setattr(snapshot, "save", full_disk)
        if fault == "callback":
            callback = no_good
        begin = time.monotonic()
        try:
            tiny_training.run(folder, on_validation=callback)
        except Exception as error:
            return f"{type(error).__name__}: {error}", time.monotonic() - begin
    return "no error", 0.0


def _once(build: Callable[..., Recipe], line: Callable[..., Recipe]) -> Callable[..., Recipe]:
    """Returns `build`, within which the line is the true one."""

    def built(config: tiny_recipes.Line) -> Recipe:
        tiny_recipes.line = line
        return build(config)

    built.__module__ = "tiny_recipes"
    return built


def no_good(validated: Any) -> None:
    raise ValueError("no good")


@pytest.mark.parametrize("fault", FAULTS)
def test_an_error_of_one_rank_ends_both(fault: str, tmp_path: Path) -> None:
    results = run_ranks(2, one_rank, str(tmp_path / "run"), fault)
    for rank, (error, seconds) in enumerate(results):
        own = "RuntimeError: the motor is on fire" if fault in ("sampling", "objective") and rank == 1 else ""
        assert (own or FAULTS[fault][2]) in error
        assert seconds < LIMIT_S
    left = tiny_training.steps(tmp_path / "run") if (tmp_path / "run" / "snapshots").exists() else []
    assert left == FAULTS[fault][3]


def stopped_rank(folder: str) -> dict[str, Any]:
    """Trains this rank; rank 1 gets a SIGTERM in its fourth update."""
    with pytest.MonkeyPatch.context() as patch:
        if os.environ["RANK"] == "1":
            build = in_update_4("sample", lambda found: os.kill(os.getpid(), signal.SIGTERM) or found)
            build.__annotations__["config"] = tiny_recipes.Line
            patch.setattr(tiny_recipes, "line", _once(build, tiny_recipes.line))
        return tiny_training.run(folder, updates=40)


def test_a_signal_of_one_rank_stops_both_after_the_same_update(tmp_path: Path) -> None:
    first, second = run_ranks(2, stopped_rank, str(tmp_path / "run"))
    assert first == second
    assert (first["stopped"], first["updates"]) == ("SIGTERM", 16)
    assert tiny_training.steps(tmp_path / "run")[-1] == 16
