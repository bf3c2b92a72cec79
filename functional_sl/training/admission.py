"""Checks of a recipe before a run begins: one batch goes through its functions."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from functional_sl import tree, wire
from functional_sl.recipe import Recipe
from functional_sl.step import Aux
from functional_sl.tree import Tree


def check(recipe: Recipe, params: Tree, buffers: Tree, batch_size: int, key: Tensor) -> list[str]:
    """Runs every function of the recipe once, on the device of the parameters, and changes nothing.

    Args:
      recipe: with its data on that device.
      params: parameters.
      buffers: buffers.
      batch_size: rows of the batches.
      key: [2], for the draw and the loss.

    Returns:
      The names of the loss's metrics.

    Raises:
      ValueError: names the function that breaks the contract, what it gave and what is expected.
    """
    wire.layout(params)
    _check_dicts(recipe, (params, buffers))
    batch = recipe.sample(recipe.data, key, batch_size)
    for name, leaf in tree.named(batch).items():
        if leaf.ndim == 0 or leaf.shape[0] != batch_size:
            raise _broken(recipe, "sample", f"leaf {name!r} of shape {tuple(leaf.shape)}", f"{batch_size} rows")
    _check_count(recipe, batch)
    value, aux = recipe.loss(params, buffers, batch, key)
    _check_scalar(recipe, "loss", value)
    if not isinstance(aux, Aux):
        raise _broken(recipe, "loss", type(aux).__name__, "(error sum, functional_sl.step.Aux)")
    before, after = _kinds(buffers), _kinds(aux.stats)
    if before != after:
        changed = {name: after.get(name) for name in before | after if before.get(name) != after.get(name)}
        raise _broken(recipe, "loss", f"buffers with {changed}", "those of init in structure, shape and dtype")
    for name, metric in aux.metrics.items():
        _check_scalar(recipe, f"loss (metric {name!r})", metric)
    _check_validation(recipe, params, buffers, batch_size)
    return [name for name in aux.metrics if name != "loss"]


def check_built(recipe: Any, name: str) -> None:
    """Checks that what a recipe function has built is a recipe whose data are tensors.

    Raises:
      ValueError: names the function and what it gave.
    """
    if not isinstance(recipe, Recipe):
        raise ValueError(f"{name} gives {_kind(recipe)}, expected a functional_sl.recipe.Recipe")
    for part, values in (("data", recipe.data), ("validation", recipe.validation)):
        found = tree.named(values)
        if not found:
            raise ValueError(f"recipe {recipe.name}: its {part} is empty")
        if odd := [(leaf, x) for leaf, x in found.items() if not isinstance(x, Tensor)]:
            leaf, value = odd[0]
            raise ValueError(f"recipe {recipe.name}: its {part} {leaf!r} is {_kind(value)}; make it a tensor")


def check_made(recipe: Recipe, made: Any) -> tuple[Tree, Tree]:
    """Returns what `init` has made if it is a pair.

    Raises:
      ValueError: tells what it is instead.
    """
    if not isinstance(made, tuple) or len(made) != 2:
        raise _broken(recipe, "init", _kind(made), "(parameters, buffers)")
    return made


def _check_dicts(recipe: Recipe, values: Tree) -> None:
    """Refuses dicts without entries, which the compiler cannot flatten: a recipe must not fail on a GPU alone."""
    if isinstance(values, dict):
        if not values:
            raise _broken(recipe, "init", "an empty dict", "() where there is nothing")
        values = list(values.values())
    for entry in values if isinstance(values, list | tuple) else ():
        _check_dicts(recipe, entry)


def _check_validation(recipe: Recipe, params: Tree, buffers: Tree, batch_size: int) -> None:
    batch = next(iter(recipe.batches(recipe.validation, batch_size)), None)
    if batch is None:
        raise _broken(recipe, "batches", "no batch", "every held-out item once")
    _check_count(recipe, batch)
    if not any(int(recipe.count(held)) for held in recipe.batches(recipe.validation, batch_size)):
        raise ValueError(f"recipe {recipe.name}: no held-out item is valid; give it more validation data")
    sums = recipe.validate(params, buffers, batch)
    if "loss" not in sums:
        raise _broken(recipe, "validate", f"sums of {', '.join(sums) or 'nothing'}", "'loss' among them")
    for name, metric in sums.items():
        _check_scalar(recipe, f"validate (sum {name!r})", metric)


def _check_count(recipe: Recipe, batch: Tree) -> None:
    items = recipe.count(batch)
    if not isinstance(items, Tensor) or items.dtype != torch.int64 or items.ndim:
        raise _broken(recipe, "count", _kind(items), "a 0-d int64 tensor: mask.sum()")


def _check_scalar(recipe: Recipe, function: str, value: Any) -> None:
    if not isinstance(value, Tensor) or value.ndim:
        raise _broken(recipe, function, _kind(value), "a 0-d tensor, summed over the valid items")


def _kinds(buffers: Tree) -> dict[str, str]:
    return {name: _kind(leaf) for name, leaf in tree.named(buffers).items()}


def _kind(value: Any) -> str:
    return (
        f"{value.dtype} {tuple(value.shape)}" if isinstance(value, Tensor) else f"{type(value).__name__} {value!r:.60}"
    )


def _broken(recipe: Recipe, function: str, found: str, expected: str) -> ValueError:
    return ValueError(f"recipe {recipe.name}: {function} gives {found}, expected {expected}")
