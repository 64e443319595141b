"""Engines stay behind their protocol: outside `engines/` no import of one and no branch on its name."""

import ast
from pathlib import Path

import shardwise

SOURCE = Path(shardwise.__file__).parent
NAMES = {"mlx", "deepspeed", "mpi"}
LIBRARIES = {"mlx", "deepspeed", "mpi4py"}
EXCEPT = ("engines/", "checkpoint/convert/", "environment.py")
"""The engines themselves, conversion formats, and the module that reads launchers' variables."""


def imported(node):
    if isinstance(node, ast.Import):
        return [name.name for name in node.names]
    if isinstance(node, ast.ImportFrom):
        return [f"{node.module}.{name.name}" for name in node.names]
    return []


def is_of_engine(module):
    parts = module.split(".")
    return parts[0] in LIBRARIES or (parts[:2] == ["shardwise", "engines"] and parts[2] in NAMES)


def compares(node):
    if not isinstance(node, (ast.Compare, ast.MatchValue)):
        return False
    return any(isinstance(part, ast.Constant) and part.value in NAMES for part in ast.walk(node))


def leaks(text):
    """Return the lines that import an engine or compare something with its name."""
    nodes = list(ast.walk(ast.parse(text)))
    return [node.lineno for node in nodes if compares(node) or any(map(is_of_engine, imported(node)))]


def test_no_engine_is_imported_or_compared_outside_engines():
    found = {}
    for path in sorted(SOURCE.rglob("*.py")):
        name = path.relative_to(SOURCE).as_posix()
        if not name.startswith(EXCEPT) and (lines := leaks(path.read_text())):
            found[name] = lines
    assert found == {}


def test_leaks_are_seen():
    assert leaks("import mlx.core as mx\nfrom shardwise.engines.mpi import start\n") == [1, 2]
    assert leaks("if plan.engine == 'mlx' or backend in ('mpi', 'ucc'):\n    pass\n") == [1, 1]
    assert leaks("from shardwise.engines.engine import engine_named\n") == []
