"""The calls in the source that make an error of the family: their codes, messages and places, found by AST."""

import ast
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SOURCE = ROOT / "src" / "shardwise"


@cache
def trees():
    """Return path -> syntax tree of every file of the package."""
    return {path: ast.parse(path.read_text()) for path in sorted(SOURCE.rglob("*.py"))}


def last_name(node):
    """Return `b` for both `b` and `a.b`, None for anything else."""
    if isinstance(node, ast.Name):
        return node.id
    return node.attr if isinstance(node, ast.Attribute) else None


def family():
    """Return the names of ShardwiseError and of all classes below it."""
    classes = [node for tree in trees().values() for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
    names = {"ShardwiseError"}
    while more := {c.name for c in classes if names & {last_name(base) for base in c.bases}} - names:
        names |= more
    return names


def keywords(call):
    """Return the keyword arguments of a call by name."""
    return {keyword.arg: keyword.value for keyword in call.keywords}


def is_super_init(node):
    """Return whether a node is a call of `super().__init__`."""
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
    for path, tree in trees().items():
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


def arguments(call):
    """Return the expressions of the fact and of the fix of a call that makes an error; None for those it lacks."""
    fact = call.args[0] if call.args else None
    return fact, keywords(call).get("fix")


def message_form(node):
    """Return the text of a message with its values in braces."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(_piece(value) for value in node.values)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return message_form(node.left) + message_form(node.right)
    return "" if node is None else f"{{{ast.unparse(node)}}}"


def _piece(value):
    if isinstance(value, ast.Constant):
        return str(value.value)
    return f"{{{ast.unparse(value.value)}}}"


@cache
def passed_on():
    """Return the place, the call and the code of every call that passes a code to a function that makes the error."""
    made = {id(call) for _, call, _ in sites()}
    found = []
    for path, tree in trees().items():
        calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and id(node) not in made]
        with_code = [call for call in calls if "code" in keywords(call)]
        found += [(f"{path.relative_to(ROOT)}:{call.lineno}", call, keywords(call)["code"]) for call in with_code]
    return found


@cache
def errors_by_code():
    """Return, for every code, the places that raise it, each with the form of its message."""
    found = {}
    for place, call, code in (*sites(), *passed_on()):
        for name in filter(None, literals(code) or []):
            fact, fix = arguments(call)
            parts = [text for text in (message_form(fact), message_form(fix)) if text]
            found.setdefault(name, []).append((place, ": ".join(parts)))
    return dict(sorted(found.items()))
