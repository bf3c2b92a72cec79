"""What names a recipe, and what does not."""

from __future__ import annotations

import dataclasses
import functools

import pytest
import tiny_recipes

from functional_sl import recipe
from functional_sl.training.config import TrainConfig
from functional_sl.training.request import combined


def untyped(config):
    return None


def of_two(first: tiny_recipes.Line, second: int):
    return None


@dataclasses.dataclass(frozen=True)
class Demanding:
    path: str


@dataclasses.dataclass(frozen=True)
class Listed:
    widths: list = dataclasses.field(default_factory=list)


def of_demanding(config: Demanding):
    return None


def of_listed(config: Listed):
    return None


def of_nothing(config: NoSuchClass):  # noqa: F821
    return None


NUMBER = 3
PARTIAL = functools.partial(of_demanding)


def test_a_third_party_module_names_its_settings_and_sizes() -> None:
    found = recipe.load("tiny_recipes:line")
    assert found.build is tiny_recipes.line
    assert found.settings is tiny_recipes.Line
    assert list(found.sizes) == ["small", "wide"]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("untyped", "a recipe takes one argument"),
        ("of_two", "a recipe takes one argument"),
        ("NUMBER", "is int; a recipe is a function"),
        ("PARTIAL", "is partial; a recipe is a function"),
        ("of_demanding", "path: an option needs a default"),
        ("of_listed", "widths: a flag cannot hold"),
        ("of_nothing", "name 'NoSuchClass' is not defined"),
    ],
)
def test_what_is_no_recipe_is_refused(name: str, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiny_recipes, name, globals()[name], raising=False)
    with pytest.raises(ValueError, match=message):
        recipe.load(f"tiny_recipes:{name}")


def test_sizes_have_two_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiny_recipes, "SIZES", {"small": {"trane": {"updates": 3}}})
    with pytest.raises(ValueError, match=r"SIZES\['small'\] has trane"):
        recipe.load("tiny_recipes:line")


@pytest.mark.parametrize("name", ["functional_sl.recipes.bc_state:build", "functional_sl.recipes.nerd:build"])
def test_bundled_recipes_fit_the_trainer(name: str) -> None:
    """No name clashes, every size is one of valid settings, and every setting is told."""
    found = recipe.load(name)
    for size in ("small", "paper"):
        kind = combined(found, size)
        for part in (TrainConfig, found.settings):
            part(**{field.name: getattr(kind, field.name) for field in dataclasses.fields(part) if field.init})
    assert all(field.metadata["help"] for field in dataclasses.fields(kind))
