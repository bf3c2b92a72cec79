"""Every public module, class, function and method says what it is."""

from __future__ import annotations

import ast
import pathlib
from collections.abc import Iterator

import functional_sl

ROOT = pathlib.Path(functional_sl.__file__).parent.parent
DEFINITIONS = (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def public(body: list[ast.stmt], prefix: str) -> Iterator[tuple[str, ast.AST]]:
    """Yields public definitions by dotted name: of a module, and of its public classes."""
    for node in body:
        if isinstance(node, DEFINITIONS) and not node.name.startswith("_"):
            yield f"{prefix}.{node.name}", node
            if isinstance(node, ast.ClassDef):
                yield from public(node.body, f"{prefix}.{node.name}")


def undocumented(source: str, module: str) -> list[str]:
    parsed = ast.parse(source)
    return [name for name, node in [(module, parsed), *public(parsed.body, module)] if not ast.get_docstring(node)]


def test_every_public_name_has_a_docstring() -> None:
    missing = []
    assert (ROOT / "functional_sac" / "cycle.py").exists()
    for package in ("functional_sl", "functional_sac"):
        for path in sorted((ROOT / package).rglob("*.py")):
            missing += undocumented(path.read_text(), ".".join(path.relative_to(ROOT).with_suffix("").parts))
    assert not missing, "without a docstring: " + ", ".join(missing)


def test_the_search_sees_what_is_missing() -> None:
    source = '''
def told():
    """Says it."""
    def inner(): ...
def untold(): ...
def _private(): ...
class Told:
    """Says it."""
    x: int
    def untold(self): ...
    def __len__(self): ...
'''
    assert undocumented(source, "m") == ["m", "m.untold", "m.Told.untold"]
