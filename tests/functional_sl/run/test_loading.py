"""Objects by `package.module:name`."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from functional_sl.run import loading


def test_a_name_is_its_object() -> None:
    assert loading.load("math:sqrt") is math.sqrt


def test_modules_of_the_working_directory_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", ["/nowhere"])
    (tmp_path / "of_my_own.py").write_text("answer = 42")
    assert loading.load("of_my_own:answer") == 42


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("pendulum", "expected package.module:name"),
        ("math:", "expected package.module:name"),
        ("no_such_module:f", "No module named 'no_such_module'"),
        ("math:squirt", "the module math has no 'squirt'"),
    ],
)
def test_what_is_not_there_is_named(name: str, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        loading.load(name)


def test_an_error_of_the_module_itself_is_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "broken_module.py").write_text("import math\nmath.no_such_function")
    with pytest.raises(AttributeError, match="no_such_function"):
        loading.load("broken_module:task")


def test_packages_for_later_are_missed_at_once():
    loading.check_installed("torch", "json")
    with pytest.raises(ValueError, match="package no_such_package is not installed: pip install"):
        loading.check_installed("torch", "no_such_package")


def test_a_function_that_asks_for_more_is_named():
    assert loading.load_function("json:dumps", given=("obj",))({}) == "{}"
    with pytest.raises(ValueError, match="asks for the argument obj; give it a default"):
        loading.load_function("json:dumps")
    with pytest.raises(ValueError, match="'json:__name__': is a str, not a function"):
        loading.load_function("json:__name__")
