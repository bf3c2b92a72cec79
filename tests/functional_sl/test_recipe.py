"""What names a recipe, and what does not."""

from __future__ import annotations

import dataclasses

import pytest
import tiny_recipes

from functional_sl import recipe
from functional_sl.training.config import TrainConfig
from functional_sl.training.request import combined


def untyped(config):
    return None


def of_two(first: tiny_recipes.Line, second: int):
    return None


NUMBER = 3


def test_a_third_party_module_names_its_settings_and_sizes() -> None:
    found = recipe.load("tiny_recipes:line")
    assert found.build is tiny_recipes.line
    assert found.settings is tiny_recipes.Line
    assert list(found.sizes) == ["small", "wide"]


@pytest.mark.parametrize("name", ["untyped", "of_two", "NUMBER"])
def test_what_is_no_recipe_is_refused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiny_recipes, name, globals()[name], raising=False)
    with pytest.raises(ValueError, match="a recipe"):
        recipe.load(f"tiny_recipes:{name}")


@pytest.mark.parametrize("name", ["functional_sl.recipes.bc_state:build", "functional_sl.recipes.nerd:build"])
def test_bundled_recipes_fit_the_trainer(name: str) -> None:
    """No name clashes, every size is one of valid settings, and every setting is told."""
    found = recipe.load(name)
    for size in ("small", "paper"):
        kind = combined(found, size)
        for part in (TrainConfig, found.settings):
            part(**{field.name: getattr(kind, field.name) for field in dataclasses.fields(part) if field.init})
    assert all(field.metadata["help"] for field in dataclasses.fields(kind))
