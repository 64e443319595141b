"""Every error of the family carries a code: `area.condition`, written where the error is made."""

import ast
import re
import tomllib
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SOURCE = ROOT / "src" / "shardwise"
TREES = {path: ast.parse(path.read_text()) for path in sorted(SOURCE.rglob("*.py"))}
AREAS = (
    "job|loss|optimizer|model|data|plan|layout|hardware|env|extra|world|rendezvous|launch|train|checkpoint|verify|bench"
    "|doctor|run|watch|cli|spec|engine|support"
)
"""What an error is about, by the parts of the product that users know: packages may be renamed, areas not."""
CODE = re.compile(rf"({AREAS})\.[a-z0-9]+(-[a-z0-9]+)*")


def last_name(node):
    """Return `b` for both `b` and `a.b`, None for anything else."""
    if isinstance(node, ast.Name):
        return node.id
    return node.attr if isinstance(node, ast.Attribute) else None


def family():
    """Return the names of ShardwiseError and of all classes below it."""
    classes = [node for tree in TREES.values() for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
    names = {"ShardwiseError"}
    while more := {c.name for c in classes if names & {last_name(base) for base in c.bases}} - names:
        names |= more
    return names


def keywords(call):
    return {keyword.arg: keyword.value for keyword in call.keywords}


def is_super_init(node):
    return (
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr == "__init__"
        and isinstance(node.func.value, ast.Call)
        and last_name(node.func.value.func) == "super"
    )


def makes_error(call, names):
    """Whether `call` makes an error: of a class by name, or with a fix by `type(error)(...)` or `cls(...)`."""
    if last_name(call.func) in names:
        return True
    by_class = last_name(call.func) == "cls" or (
        isinstance(call.func, ast.Call) and last_name(call.func.func) == "type"
    )
    return by_class and "fix" in keywords(call)


@cache
def sites():
    """Return the place, the call and the value of `code=` (or None) of every call that makes an error."""
    names, found = family(), []
    for path, tree in TREES.items():
        calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and makes_error(node, names)]
        for node in tree.body:
            if isinstance(node, ast.ClassDef) and node.name in names - {"ShardwiseError"}:
                calls += [call for call in ast.walk(node) if is_super_init(call)]
        found += [(f"{path.relative_to(ROOT)}:{call.lineno}", call, keywords(call).get("code")) for call in calls]
    return found


def literals(value):
    """Return the codes that `value` may be, [] if it is another error's or a parameter, None if something else."""
    if isinstance(value, ast.Constant) and isinstance(value.value, str):
        return [value.value]
    if last_name(value) == "code":
        return []
    if isinstance(value, ast.IfExp):
        parts = [literals(value.body), literals(value.orelse)]
    elif isinstance(value, ast.BoolOp):
        parts = list(map(literals, value.values))
    else:
        return None
    return None if None in parts else [code for part in parts for code in part]


def test_every_error_has_a_code():
    assert [place for place, _, code in sites() if code is None] == []


def test_codes_name_an_area_and_a_condition():
    wrong = []
    for place, call, code in sites():
        if code is None or place.startswith("src/shardwise/errors.py"):  # which fills in the name of an extra
            continue
        found = literals(code)
        if found is None or not all(map(CODE.fullmatch, found)):
            wrong.append(f"{place} {ast.unparse(code)}")
        if {"code", "fix"} <= set(keywords(call)):
            order = [keyword.arg for keyword in call.keywords]
            assert order.index("code") < order.index("fix"), f"{place}: the code stands before the fix"
    assert wrong == []


def test_codes_that_are_passed_on_are_written_as_codes():
    """A function that makes errors for several callers takes the code from them."""
    calls = [node for tree in TREES.values() for node in ast.walk(tree) if isinstance(node, ast.Call)]
    given = [keywords(call)["code"] for call in calls if "code" in keywords(call)]
    written = [code for value in given for code in literals(value) or [] if code]
    assert written
    assert [code for code in written if not CODE.fullmatch(code)] == []


def test_every_extra_makes_a_code():
    """MissingExtraError.of fills in the name of an extra."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert extras
    assert [name for name in extras if not CODE.fullmatch(f"extra.{name}-missing")] == []
