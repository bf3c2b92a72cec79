"""Figures of a model on held-out data: sums over all valid items, divided once."""

from __future__ import annotations

import torch

from functional_sl.recipe import Recipe
from functional_sl.training import admission
from functional_sl.training.errors import ContractError
from functional_sl.training.update import autocast
from functional_sl.tree import Tree


def figures(
    recipe: Recipe, params: Tree, buffers: Tree, batch_size: int, dtype: str, device: torch.device
) -> dict[str, float]:
    """Returns the means of `validate` over every held-out item, their number as `count`, and what `evaluate` gives.

    The sums of batches are added in float64 and divided by the exact number of items, so the batch size weighs no
    item more than another. One process computes all of them; nothing is changed.

    Args:
      recipe: with its data on `device`.
      params: parameters.
      buffers: buffers.
      batch_size: rows of a batch.
      dtype: as `compute_dtype` of the trainer.
      device: where the model runs.

    Raises:
      ContractError: if `evaluate` gives a figure of a taken name, or something else than figures.
    """
    validate = autocast(recipe.validate, dtype, device)
    items, sums = 0, {}
    with torch.no_grad():
        for batch in recipe.batches(recipe.validation, batch_size):
            items += int(recipe.count(batch))
            for name, value in validate(params, buffers, batch).items():
                sums[name] = sums.get(name, 0.0) + float(value)
        found = {name: total / items for name, total in sums.items()} | {"count": items}
        more = admission.numbers(recipe, "evaluate", recipe.evaluate(params, buffers)) if recipe.evaluate else {}
    if taken := sorted(found.keys() & more.keys()):
        raise ContractError(f"recipe {recipe.name}: evaluate gives {', '.join(taken)}, which validate has; rename them")
    return found | more
