"""The index of trials names tests that exist, and every test of this folder is in it."""

from __future__ import annotations

import re
from pathlib import Path

TESTS = Path(__file__).parents[1]
ROWS = re.findall(r"^\| (B\d\d) \|(.*)\|$", (TESTS / "faults" / "README.md").read_text(), re.MULTILINE)
NAMED = {place for _, row in ROWS for place in re.findall(r"`([\w/]+\.py::\w+)`", row)}


def defined(path: Path) -> set[str]:
    return {
        f"{path.relative_to(TESTS)}::{name}" for name in re.findall(r"^def (test_\w+)", path.read_text(), re.MULTILINE)
    }


def test_every_trial_names_tests_that_exist():
    assert [number for number, _ in ROWS] == sorted({number for number, _ in ROWS})
    assert all("`" in row for _, row in ROWS)
    found = {name for path in {TESTS / place.partition("::")[0] for place in NAMED} for name in defined(path)}
    assert NAMED - found == set()


def test_every_test_of_this_folder_is_in_the_index():
    here = {name for path in (TESTS / "faults").glob("test_*.py") if path != Path(__file__) for name in defined(path)}
    assert here - NAMED == set()
