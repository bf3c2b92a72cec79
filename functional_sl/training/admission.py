"""Checks of a recipe before a run begins: one batch goes through its functions."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from functional_sl import tree, wire
from functional_sl.recipe import Recipe
from functional_sl.step import Aux
from functional_sl.training.errors import ContractError
from functional_sl.tree import Tree

_FUNCTIONS = ("init", "sample", "count", "loss", "batches", "validate", "score")
_VALUES = {"name": (str, "a text"), "schema": (Mapping, "a dict of JSON values"), "captured": (bool, "True or False")}
_OPTIONAL_FUNCTIONS = ("evaluate", "bundle", "draw")


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
      ContractError: names the function that breaks the contract, what it gave and what is expected.
    """
    wire.layout(params)
    _check_dicts(recipe, (params, buffers))
    try:
        batch = recipe.sample(recipe.data, key, batch_size)
    except StopIteration as error:
        raise _broken(recipe, "sample", "StopIteration", "a draw with replacement, which never ends") from error
    check_rows(recipe, batch, batch_size)
    _check_count(recipe, "sample", batch)
    aux = _check_loss(recipe, params, buffers, batch, key)
    _check_validation(recipe, params, buffers, batch_size)
    return [name for name in aux.metrics if name != "loss"]


def check_rows(recipe: Recipe, batch: Tree, batch_size: int) -> None:
    """Checks that a drawn batch holds tensors of `batch_size` rows; it reads shapes alone.

    Raises:
      ContractError: names the leaf and its shape.
    """
    _check_tensors(recipe, "sample", "leaf", batch)
    if not tree.leaves(batch):
        raise _broken(recipe, "sample", _kind(batch), "a batch of tensors")
    for name, leaf in tree.named(batch).items():
        if leaf.ndim == 0 or leaf.shape[0] != batch_size:
            raise _broken(recipe, "sample", f"leaf {name!r} of shape {tuple(leaf.shape)}", f"{batch_size} rows")


def check_names(recipe: Recipe, found: Iterable[str], expected: Iterable[str]) -> None:
    """Checks that the loss has the metrics that it had at the start.

    Raises:
      ContractError: names those that are new or missing.
    """
    if changed := sorted(set(found) ^ set(expected)):
        raise _broken(recipe, "loss", f"{', '.join(changed)} in some updates only", "the same metrics in all of them")


def numbers(recipe: Recipe, function: str, found: Any) -> dict[str, float]:
    """Returns the figures that `evaluate` has given, as floats by name.

    Raises:
      ContractError: tells what it has given instead.
    """
    _check_mapping(recipe, function, found, "figures by name")
    return {name: number(recipe, f"{function} ({name!r})", value) for name, value in found.items()}


def number(recipe: Recipe, function: str, found: Any) -> float:
    """Returns what a function of the recipe has given as a float.

    Raises:
      ContractError: if it is no number.
    """
    try:
        return float(found)
    except (TypeError, ValueError, RuntimeError) as error:
        raise _broken(recipe, function, _kind(found), "a number") from error


def check_built(recipe: Any, name: str) -> None:
    """Checks that what a recipe function has built is a recipe whose data are tensors.

    Raises:
      ContractError: names the function and what it gave.
    """
    if not isinstance(recipe, Recipe):
        raise ContractError(f"{name} gives {_kind(recipe)}, expected a functional_sl.recipe.Recipe")
    for part, (kind, expected) in _VALUES.items():
        if not isinstance(getattr(recipe, part), kind):
            raise ContractError(f"{name}: the recipe's {part} is {_kind(getattr(recipe, part))}, expected {expected}")
    for part in (*_FUNCTIONS, *_OPTIONAL_FUNCTIONS):
        found = getattr(recipe, part)
        if not callable(found) and (part in _FUNCTIONS or found is not None):
            raise ContractError(f"{name}: the recipe's {part} is {_kind(found)}, expected a function")
    for part, values in (("data", recipe.data), ("validation", recipe.validation)):
        found = tree.named(values)
        if not found:
            raise ContractError(f"recipe {recipe.name}: its {part} is empty")
        if odd := [(leaf, x) for leaf, x in found.items() if not isinstance(x, Tensor)]:
            leaf, value = odd[0]
            raise ContractError(f"recipe {recipe.name}: its {part} {leaf!r} is {_kind(value)}; make it a tensor")


def check_made(recipe: Recipe, made: Any) -> tuple[Tree, Tree]:
    """Returns what `init` has made if it is a pair of trees of tensors.

    Raises:
      ContractError: tells what it is instead.
    """
    if not isinstance(made, tuple) or len(made) != 2:
        raise _broken(recipe, "init", _kind(made), "(parameters, buffers)")
    for what, values in zip(("parameter", "buffer"), made, strict=True):
        _check_tensors(recipe, "init", what, values)
    return made


def _check_dicts(recipe: Recipe, values: Tree) -> None:
    """Refuses dicts without entries, which the compiler cannot flatten: a recipe must not fail on a GPU alone."""
    if isinstance(values, dict):
        if not values:
            raise _broken(recipe, "init", "an empty dict", "() where there is nothing")
        values = list(values.values())
    for entry in values if isinstance(values, list | tuple) else ():
        _check_dicts(recipe, entry)


def _check_loss(recipe: Recipe, params: Tree, buffers: Tree, batch: Tree, key: Tensor) -> Aux:
    # With gradients, so that a loss on which no parameter has any influence shows.
    with torch.enable_grad():
        found = recipe.loss(tree.map(lambda x: x.detach().requires_grad_(), params), buffers, batch, key)
    if not isinstance(found, tuple) or len(found) != 2 or not isinstance(found[1], Aux):
        raise _broken(recipe, "loss", _kinds_of(found), "(error sum, functional_sl.step.Aux)")
    value, aux = found
    _check_scalar(recipe, "loss", value)
    if not value.requires_grad:
        raise _broken(recipe, "loss", f"a {value.dtype} that no parameter moves", "one that depends on the parameters")
    before, after = _kinds(buffers), _kinds(aux.stats)
    if before != after:
        changed = {name: after.get(name) for name in before | after if before.get(name) != after.get(name)}
        raise _broken(recipe, "loss", f"buffers with {changed}", "those of init in structure, shape and dtype")
    _check_mapping(recipe, "loss", aux.metrics, "metrics by name")
    for name, metric in aux.metrics.items():
        _check_scalar(recipe, f"loss (metric {name!r})", metric)
    return aux


def _check_validation(recipe: Recipe, params: Tree, buffers: Tree, batch_size: int) -> None:
    batch = next(_batches(recipe, batch_size), None)
    if batch is None:
        raise _broken(recipe, "batches", "no batch", "every held-out item once")
    _check_tensors(recipe, "batches", "leaf", batch)
    _check_count(recipe, "batches", batch)
    if not any(int(recipe.count(held)) for held in _batches(recipe, batch_size)):
        raise ContractError(f"recipe {recipe.name}: no held-out item is valid; give it more validation data")
    sums = recipe.validate(params, buffers, batch)
    _check_mapping(recipe, "validate", sums, "sums by name")
    if "loss" not in sums:
        raise _broken(recipe, "validate", f"sums of {', '.join(sums) or 'nothing'}", "'loss' among them")
    for name, metric in sums.items():
        _check_scalar(recipe, f"validate (sum {name!r})", metric)


def _batches(recipe: Recipe, batch_size: int) -> Iterator[Tree]:
    found = recipe.batches(recipe.validation, batch_size)
    if not isinstance(found, Iterable):
        raise _broken(recipe, "batches", _kind(found), "an iterator of batches")
    return iter(found)


def _check_tensors(recipe: Recipe, function: str, what: str, values: Tree) -> None:
    odd = [(name, x) for name, x in tree.named(values).items() if not isinstance(x, Tensor)]
    if odd:
        raise _broken(recipe, function, f"{what} {odd[0][0]!r} that is {_kind(odd[0][1])}", "tensors")


def _check_mapping(recipe: Recipe, function: str, found: Any, expected: str) -> None:
    if not isinstance(found, Mapping) or not all(isinstance(name, str) for name in found):
        raise _broken(recipe, function, _kind(found), f"{expected}, a dict with texts as keys")


def _check_count(recipe: Recipe, source: str, batch: Tree) -> None:
    items = recipe.count(batch)
    if not isinstance(items, Tensor) or items.dtype != torch.int64 or items.ndim:
        raise _broken(recipe, "count", _kind(items), "a 0-d int64 tensor: mask.sum()")
    if int(items) < 0:
        raise _broken(recipe, "count", f"{int(items)} for what {source} gives", "a number of items, 0 or more")


def _check_scalar(recipe: Recipe, function: str, value: Any) -> None:
    if not isinstance(value, Tensor) or value.ndim:
        raise _broken(recipe, function, _kind(value), "a 0-d tensor, summed over the valid items")


def _kinds(buffers: Tree) -> dict[str, str]:
    return {name: _kind(leaf) for name, leaf in tree.named(buffers).items()}


def _kind(value: Any) -> str:
    return (
        f"{value.dtype} {tuple(value.shape)}" if isinstance(value, Tensor) else f"{type(value).__name__} {value!r:.60}"
    )


def _kinds_of(value: Any) -> str:
    return f"({', '.join(type(x).__name__ for x in value)})" if isinstance(value, tuple) else _kind(value)


def _broken(recipe: Recipe, function: str, found: str, expected: str) -> ContractError:
    return ContractError(f"recipe {recipe.name}: {function} gives {found}, expected {expected}")
