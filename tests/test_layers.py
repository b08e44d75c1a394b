"""Imports point one way. The contracts are import-linter's; what a static list of modules cannot see is looked at here."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "src" / "slipstream"
IMPORTERS = {"import_module", "__import__"}


def imported_names(tree: ast.AST) -> Iterator[str]:
    """Every module that code imports, at any depth: in functions, under conditions, and by name through importlib."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield "slipstream" if node.level else str(node.module)
        elif isinstance(node, ast.Call):
            called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            if called in IMPORTERS:
                first = node.args[0] if node.args else None
                yield str(first.value) if isinstance(first, ast.Constant) else "a computed name"


RELAY = sorted((SOURCE / "relay").rglob("*.py"))


@pytest.mark.parametrize("file", RELAY, ids=lambda file: file.stem)
def test_relay_imports_torch_and_the_standard_library_only(file: Path) -> None:
    for name in imported_names(ast.parse(file.read_text())):
        top = name.split(".")[0]
        inside = name.startswith("slipstream.relay.")
        assert inside or top == "torch" or top in sys.stdlib_module_names, f"{file.name} imports {name}"


@pytest.mark.parametrize(
    ("code", "found"),
    [
        ("def f():\n    from slipstream.types import x", "slipstream.types"),
        ("def f():\n    if 1:\n        import slipstream.errors as e", "slipstream.errors"),
        ("class A:\n    def f(self):\n        import importlib\n        importlib.import_module('slipstream')", "slipstream"),
        ("from .. import types", "slipstream"),
        ("__import__(name)", "a computed name"),
    ],
)
def test_the_search_sees_hidden_imports(code: str, found: str) -> None:
    assert found in set(imported_names(ast.parse(code)))


def test_relay_runs_without_the_rest_of_the_package() -> None:
    """Nothing of slipstream is loaded but relay and the (empty) package above it."""
    script = "import sys, slipstream.relay; print([m for m in sys.modules if m.startswith('slipstream')])"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert set(ast.literal_eval(done.stdout)) == {"slipstream", *(_module(file) for file in RELAY)}


def test_every_package_has_a_light_init() -> None:
    """Each package says what it is, and its `__init__` imports no third party."""
    for folder in {file.parent for file in SOURCE.rglob("*.py")}:
        init = folder / "__init__.py"
        assert init.is_file(), f"{folder.name} has no __init__.py"
        tree = ast.parse(init.read_text())
        assert ast.get_docstring(tree), f"{folder.name}/__init__.py says nothing"
        at_top = [node for node in tree.body if isinstance(node, (ast.Import, ast.ImportFrom))]
        tops = {name.split(".")[0] for node in at_top for name in imported_names(node)}
        assert tops <= {"slipstream", *sys.stdlib_module_names}, f"{folder.name}/__init__.py imports {tops}"


def test_files_stay_short() -> None:
    long = {file.name: lines for file in SOURCE.rglob("*.py") if (lines := len(file.read_text().splitlines())) > 400}
    assert not long, f"over 400 lines: {long}"


def _module(file: Path) -> str:
    parts = file.relative_to(SOURCE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
