"""Validation: every held-out item weighs the same, in the types that training computes in."""

from __future__ import annotations

import pytest
import tiny_recipes
import torch
from torch import Tensor

from functional_sl import keys
from functional_sl.training import validation

CPU = torch.device("cpu")


@pytest.mark.parametrize("size", [1, 4, 21])
def test_the_mean_is_over_valid_items(size: int) -> None:
    recipe = tiny_recipes.line(tiny_recipes.Line(dtype="float64"))
    params, buffers = recipe.init(keys.key(0))
    held = recipe.validation
    error = (torch.tanh(held.x @ params.w1 + params.b1) @ params.w2 - held.y)[held.valid]
    found = validation.figures(recipe, params, buffers, size, "float32", CPU)
    assert found["count"] == int(held.valid.sum()) < held.valid.numel()
    assert found["loss"] == pytest.approx(float(error.square().mean()), rel=1e-14)


@pytest.mark.parametrize(("dtype", "share"), [("float32", 0.0), ("bfloat16", 1.0)])
def test_it_runs_under_the_trainers_autocast(dtype: str, share: float) -> None:
    def narrow(params: tiny_recipes.Net, buffers: tuple, batch: tiny_recipes.Rows) -> dict[str, Tensor]:
        return {"loss": batch.valid.sum() * ((batch.x @ params.w1).dtype == torch.bfloat16)}

    recipe = tiny_recipes.line(tiny_recipes.Line())._replace(validate=narrow)
    assert validation.figures(recipe, *recipe.init(keys.key(0)), 4, dtype, CPU)["loss"] == share
