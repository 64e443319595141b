"""The shape of the source: small files, classes and functions, no hidden state, the environment read in one module."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SOURCE = ROOT / "src" / "shardwise"
FILES = sorted(SOURCE.rglob("*.py"))
LIMITS = {"file": 400, "class": 200, "function": 60}
RENDERER = SOURCE / "runs" / "console.py"
ENVIRONMENT = SOURCE / "environment.py"


@pytest.fixture(scope="module")
def trees():
    """Every file with its text and its tree, parsed once."""
    return [(path, text := path.read_text(), ast.parse(text)) for path in FILES]


def named(path, node):
    return f"{path.relative_to(ROOT)}:{node.lineno}"


def length(node):
    return node.end_lineno - node.lineno + 1


def test_files_stay_small(trees):
    assert [str(path) for path, text, _ in trees if text.count("\n") > LIMITS["file"]] == []


@pytest.mark.parametrize(
    ("kinds", "limit"),
    [((ast.ClassDef,), LIMITS["class"]), ((ast.FunctionDef, ast.AsyncFunctionDef), LIMITS["function"])],
    ids=["classes", "functions"],
)
def test_classes_and_functions_stay_small(trees, kinds, limit):
    nodes = [(path, node) for path, _, tree in trees for node in ast.walk(tree) if isinstance(node, kinds)]
    assert nodes
    assert [named(path, node) for path, node in nodes if length(node) > limit] == []


def test_no_module_has_a_global_statement(trees):
    assert [named(p, n) for p, _, tree in trees for n in ast.walk(tree) if isinstance(n, ast.Global)] == []


def test_only_the_renderer_prints(trees):
    calls = [
        named(path, node)
        for path, _, tree in trees
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print"
        if path != RENDERER
    ]
    assert calls == []


def test_only_environment_touches_environment_variables(trees):
    touching = {"environ", "getenv", "putenv", "environb"}
    uses = [
        named(path, node)
        for path, _, tree in trees
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)
        if node.value.id == "os" and node.attr in touching and path != ENVIRONMENT
    ]
    imported = [
        named(path, node)
        for path, _, tree in trees
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.module == "os" and touching & {name.name for name in node.names}
    ]
    assert uses + imported == []


def test_every_file_opens_with_a_sentence(trees):
    openings = {path: ast.get_docstring(tree) for path, _, tree in trees}
    assert [str(path) for path, text in openings.items() if not text or not text.splitlines()[0].endswith(".")] == []


def test_no_package_is_called_utils():
    forbidden = {"utils", "common", "core", "helpers", "misc"}
    assert [str(path) for path in FILES if forbidden & {path.stem, *path.relative_to(SOURCE).parts}] == []
