"""The contract between a supervised task and the trainer: data, model, objective and metrics as pure functions.

A recipe is what `package.module:build` returns for one frozen dataclass of settings. The trainer knows nothing else
of the task, and a recipe knows nothing of ranks, optimizers, snapshots or files.

    batch = sample(data, key, batch_size)            every rank its own, from its own key
    n     = sum of count(batch) over ranks and micro-batches
    loss  = sum over the valid items / n             so the update is that of the joined batch
"""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import sys
import typing
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

from torch import Tensor

from functional_sl.bundle import Bundle
from functional_sl.run import cli, loading
from functional_sl.step import Aux
from functional_sl.tree import Tree


class Recipe(NamedTuple):
    """One supervised task.

    Every function of tensors is pure and draws random numbers from its key alone (`functional_sl.keys`), so that an
    update can be compiled and captured. Whoever must draw from Python's, NumPy's or torch's own generators sets
    `captured=False`; the trainer stores those generators for every rank. State that is to go on after a resume stands
    in the buffers: whatever else a recipe keeps begins anew.
    """

    name: str
    schema: Mapping[str, Any]
    """JSON values: the ordered features with shape, dtype and unit, and whatever else makes data compatible."""

    data: Tree
    """Training tensors on the CPU; the trainer moves them to its device once. Never part of a snapshot."""

    validation: Tree
    """Held-out tensors, likewise."""

    init: Callable[[Tensor], tuple[Tree, Tree]]
    """Key [2] -> (parameters, buffers). Parameters are equal on all ranks. Buffers (normaliser statistics, a dropout
    key) begin equal, move by the loss alone, and are a rank's own from then on; () where there are none. The key that
    the loss gets differs by rank and update, so noise that must differ between ranks from the first update on takes
    it in."""

    sample: Callable[[Tree, Tensor, int], Tree]
    """(data, key, batch size) -> batch, drawn with replacement: a tree of tensors with a leading axis [B]."""

    count: Callable[[Tree], Tensor]
    """Batch -> () int64, the number of its valid items; zero is allowed."""

    loss: Callable[[Tree, Tree, Tree, Tensor], tuple[Tensor, Aux]]
    """(parameters, buffers, batch, key) -> (() error summed over the valid items, Aux(new buffers, metrics)); every
    metric is a sum over the valid items too. What is not valid changes no bit of it."""

    batches: Callable[[Tree, int], Iterable[Tree]]
    """(validation, batch size) -> batches that hold every held-out item once, in a fixed order."""

    validate: Callable[[Tree, Tree, Tree], Mapping[str, Tensor]]
    """(parameters, buffers, batch) -> sums over the valid items, `loss` among them; nothing is changed."""

    evaluate: Callable[[Tree, Tree], Mapping[str, float]] | None = None
    """(parameters, buffers) -> figures that are not sums over held-out items: rollouts, open-loop errors."""

    score: Callable[[Mapping[str, float]], float] = lambda figures: -figures["loss"]
    """Figures of validation and evaluation -> a number; the greatest marks the best snapshot."""

    bundle: Callable[[Tree, Tree], Bundle] | None = None
    """(parameters, buffers) -> what a third party needs to predict without the trainer."""

    draw: Callable[[Tree, Tree, str], None] | None = None
    """(parameters, buffers, folder) -> pictures of what the model predicts, written at the end of a run."""

    captured: bool = True


class Builder(NamedTuple):
    """A loaded recipe function and what goes with it."""

    build: Callable[[Any], Recipe]
    settings: type  # the frozen dataclass that `build` takes
    sizes: Mapping[str, Mapping[str, Mapping[str, Any]]]  # name -> {"train": fields, "recipe": fields}
    places: frozenset[str] = frozenset()  # settings that say where data lie, which may move between attempts


def load(name: str) -> Builder:
    """Returns the builder that `package.module:build` names.

    The one parameter of the function is annotated with its settings, a frozen dataclass whose fields have plain
    defaults and are described by `functional_sl.run.cli.option`. The module may hold `SIZES`, the presets of `--size`
    ({name: {"train": fields, "recipe": fields}}), and `PLACES`, the names of settings that say where data lie: a
    resumed run and an export may give other ones, since digests tell whether the data are the same.

    Raises:
      ValueError: if there is no such function, it takes something else, or a setting cannot be a flag.
    """
    build = loading.load(name)
    if not inspect.isfunction(build):
        raise ValueError(f"{name!r} is {type(build).__name__}; a recipe is a function of one settings dataclass")
    try:
        hints = typing.get_type_hints(build)
        taken = [hints.get(parameter) for parameter in inspect.signature(build).parameters]
        # Values are checked with the flags; here it is their types alone.
        with contextlib.suppress(cli.UsageError):
            if len(taken) == 1 and dataclasses.is_dataclass(taken[0]):
                cli.from_dict(taken[0], {})
    except (NameError, TypeError) as error:
        raise ValueError(f"{name!r}: its settings cannot be flags: {error}") from error
    if len(taken) != 1 or not dataclasses.is_dataclass(taken[0]):
        raise ValueError(f"{name!r}: a recipe takes one argument annotated with a frozen dataclass of settings")
    module = sys.modules[build.__module__]
    sizes = getattr(module, "SIZES", {})
    for size, parts in sizes.items():
        if odd := sorted(parts.keys() - {"train", "recipe"}):
            raise ValueError(f"{name!r}: SIZES[{size!r}] has {', '.join(odd)}; its parts are train and recipe")
    return Builder(build, taken[0], sizes, frozenset(getattr(module, "PLACES", ())))
