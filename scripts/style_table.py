"""Print how the source tree reads, as figures: sizes, density, imports inside functions, cycles, clones.

Usage: python scripts/style_table.py [--list FIGURE]

Every figure is counted on the syntax tree of `src/shardwise`. `tests/repo/test_style.py` holds each one at its target,
or, while the tree is still above a target, at the value it has reached.
"""

from __future__ import annotations

import argparse
import ast
import collections
import graphlib
import hashlib
import re
import statistics
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

SOURCE = Path(__file__).resolve().parents[1] / "src" / "shardwise"
COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
CLONE_LINES = 6
"""As many equal lines in two places are a clone."""


@dataclass(frozen=True)
class Module:
    """One file of the tree, parsed."""

    name: str
    path: Path
    text: str
    tree: ast.Module

    @property
    def num_lines(self) -> int:
        """Lines of the file."""
        return self.text.count("\n")

    @cached_property
    def nodes(self) -> list[ast.AST]:
        """Every node of the syntax tree."""
        return list(ast.walk(self.tree))

    @cached_property
    def functions(self) -> list[ast.FunctionDef | ast.AsyncFunctionDef]:
        """Every function and method, inner ones included."""
        return [node for node in self.nodes if isinstance(node, FUNCTIONS)]

    @cached_property
    def classes(self) -> list[ast.ClassDef]:
        """Every class."""
        return [node for node in self.nodes if isinstance(node, ast.ClassDef)]

    def at(self, node: ast.AST) -> str:
        """Return FILE:LINE of a node."""
        return f"{self.path.relative_to(SOURCE.parents[1])}:{node.lineno}"  # type: ignore[attr-defined]


def read_tree(source: Path = SOURCE) -> list[Module]:
    """Parse every file of the package."""
    modules = []
    for path in sorted(source.rglob("*.py")):
        parts = path.relative_to(source.parent).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        text = path.read_text()
        modules.append(Module(name, path, text, ast.parse(text)))
    return modules


@dataclass(frozen=True)
class Figure:
    """One measured property of the tree; `places` are what it counts."""

    name: str
    value: float
    target: float
    places: tuple[str, ...] = ()

    @property
    def is_met(self) -> bool:
        """Whether the value is at or below the target."""
        return self.value <= self.target


def measure(modules: list[Module]) -> list[Figure]:
    """Return every figure of the tree."""
    lines = sum(module.num_lines for module in modules)
    lengths = [length(function) for module in modules for function in module.functions]
    classes = [length(node) for module in modules for node in module.classes]
    per_thousand = 1000 / lines
    comprehensions = count(modules, COMPREHENSIONS)
    conditionals = count(modules, (ast.IfExp,))
    return [
        Figure("files", len(modules), 330),
        Figure("lines", lines, 60_000),
        listed("files under 60 lines", short_files(modules), 35),
        listed("modules under 80 lines with one importer", lonely_modules(modules), 10),
        listed("class names in several modules", repeated_classes(modules), 0),
        listed("nested comprehensions with conditions", nested_comprehensions(modules), 0),
        listed("nested conditional expressions", nested_conditionals(modules), 0),
        Figure("comprehensions per 1,000 lines", comprehensions * per_thousand, 30),
        Figure("conditional expressions per 1,000 lines", conditionals * per_thousand, 20),
        listed("imports inside functions", inner_imports(modules), 0),
        Figure("function p90 lines", quantile(lengths, 0.9), 25),
        Figure("largest file", max(module.num_lines for module in modules), 400),
        Figure("largest class", max(classes), 200),
        listed("import cycles", [" ".join(cycle) for cycle in cycles(runtime_imports(modules))], 0),
        listed("global statements", places(modules, (ast.Global,)), 0),
        listed("cloned lines", cloned_lines(modules), 300),
        listed("files that touch private torch names", private_torch(modules), 0),
    ]


def listed(name: str, found: list[str], target: float) -> Figure:
    """Return a figure that counts `found`."""
    return Figure(name, len(found), target, tuple(found))


def length(node: ast.AST) -> int:
    """Return the lines of a node."""
    return node.end_lineno - node.lineno + 1  # type: ignore[attr-defined, no-any-return]


def quantile(values: list[int], share: float) -> float:
    """Return the value that `share` of all values do not exceed."""
    return statistics.quantiles(values, n=100, method="inclusive")[round(share * 100) - 1]


def count(modules: list[Module], kinds: tuple[type[ast.AST], ...]) -> int:
    """Count nodes of some kinds."""
    return len(places(modules, kinds))


def places(modules: list[Module], kinds: tuple[type[ast.AST], ...]) -> list[str]:
    """Return FILE:LINE of every node of some kinds."""
    return [module.at(node) for module in modules for node in module.nodes if isinstance(node, kinds)]


def short_files(modules: list[Module]) -> list[str]:
    """Return files under 60 lines that hold a definition; package files with a sentence and re-exports do not count."""
    found = []
    for module in modules:
        holds_code = any(isinstance(node, (*FUNCTIONS, ast.ClassDef, ast.Assign)) for node in module.tree.body)
        if module.num_lines < 60 and (holds_code or module.path.name != "__init__.py"):
            found.append(module.name)
    return found


def imported_names(module: Module, nodes: list[ast.AST], known: set[str]) -> set[str]:
    """Return the modules of this tree that some import statements name."""
    found = set()
    for node in nodes:
        if isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                found.add(inner if inner in known else node.module)
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
    return (found & known) - {module.name}


def runtime_imports(modules: list[Module]) -> dict[str, set[str]]:
    """Return what each module imports while it is imported itself: not for types, not inside functions."""
    known = {module.name for module in modules}
    return {module.name: imported_names(module, list(module.tree.body), known) for module in modules}


def lonely_modules(modules: list[Module]) -> list[str]:
    """Return modules under 80 lines that exactly one other module imports."""
    known = {module.name for module in modules}
    importers = collections.Counter[str]()
    for module in modules:
        importers.update(imported_names(module, module.nodes, known))
    return [
        module.name
        for module in modules
        if module.num_lines < 80 and module.path.name != "__init__.py" and importers[module.name] == 1
    ]


def repeated_classes(modules: list[Module]) -> list[str]:
    """Return the names that classes of several modules share."""
    owners = collections.defaultdict(set)
    for module in modules:
        for node in module.classes:
            owners[node.name].add(module.name)
    return [f"{name}: {', '.join(sorted(found))}" for name, found in sorted(owners.items()) if len(found) > 1]


def nested_comprehensions(modules: list[Module]) -> list[str]:
    """Return comprehensions with several loops or another comprehension inside, of which any has a condition."""
    found = []
    for module in modules:
        for node in module.nodes:
            if not isinstance(node, COMPREHENSIONS):
                continue
            inner = [each for each in ast.walk(node) if isinstance(each, COMPREHENSIONS)]
            loops = [loop for each in inner for loop in each.generators]
            if len(loops) > 1 and any(loop.ifs for loop in loops):
                found.append(module.at(node))
    return found


def nested_conditionals(modules: list[Module]) -> list[str]:
    """Return conditional expressions that hold another one."""
    return [module.at(node) for module in modules for node in module.nodes if holds_conditional(node)]


def holds_conditional(node: ast.AST) -> bool:
    """Whether a node is a conditional expression with another one inside."""
    return isinstance(node, ast.IfExp) and sum(isinstance(each, ast.IfExp) for each in ast.walk(node)) > 1


EXTRAS = {
    "deepspeed", "mlx", "mpi4py", "transformers", "peft", "tensorboard", "wandb", "mlflow", "trackio", "safetensors",
    "torch", "numpy", "pynvml", "cloudpickle", "rich", "torchao",
    "pyarrow", "fsspec", "tokenizers", "PIL",
}  # fmt: skip
"""What functions may import: torch, extras, and libraries that cost start-up time."""
HEAVY = EXTRAS - {"numpy", "pynvml", "cloudpickle", "rich", "safetensors"}


def inner_imports(modules: list[Module]) -> list[str]:
    """Return imports inside functions, but for those of the command table, of extras and of torch.

    Torch is imported inside a function also by a module of ours that imports it, where the importer starts without.
    """
    found = []
    heavy = heavy_modules(modules)
    for module in modules:
        if module.name == "shardwise.cli.main":
            continue  # the command table
        top = set(map(id, module.tree.body))
        for node in module.nodes:
            if not isinstance(node, (ast.Import, ast.ImportFrom)) or id(node) in top or in_type_checking(module, node):
                continue
            name = (node.module if isinstance(node, ast.ImportFrom) else node.names[0].name) or ""
            spares_torch = (
                module.name not in heavy and ({name} | {f"{name}.{each.name}" for each in node.names}) & heavy
            )
            if name.partition(".")[0] not in EXTRAS and not spares_torch:
                found.append(module.at(node))
    return found


def heavy_modules(modules: list[Module]) -> set[str]:
    """Return the modules whose import brings in torch or an extra, by themselves or through others of ours."""
    edges = runtime_imports(modules)
    heavy = set()
    for module in modules:
        own = {alias.name for node in module.tree.body if isinstance(node, ast.Import) for alias in node.names}
        own |= {node.module or "" for node in module.tree.body if isinstance(node, ast.ImportFrom)}
        if {name.partition(".")[0] for name in own} & HEAVY:
            heavy.add(module.name)
    while more := {name for name, imported in edges.items() if name not in heavy and imported & heavy}:
        heavy |= more
    return heavy


def in_type_checking(module: Module, node: ast.AST) -> bool:
    """Whether a node stands in a block for type checkers."""
    blocks = [block for block in module.tree.body if isinstance(block, ast.If)]
    blocks = [block for block in blocks if isinstance(block.test, ast.Name) and block.test.id == "TYPE_CHECKING"]
    return any(block.lineno <= node.lineno <= block.end_lineno for block in blocks)  # type: ignore[attr-defined, operator]


def cycles(edges: dict[str, set[str]]) -> list[list[str]]:
    """Return the first circle of modules that import each other, if there is one."""
    try:
        graphlib.TopologicalSorter(edges).prepare()
    except graphlib.CycleError as error:
        return [error.args[1]]
    return []


def cloned_lines(modules: list[Module]) -> list[str]:
    """Return lines of runs of equal lines that were found earlier; imports, blank lines and brackets do not count."""
    seen: dict[str, str] = {}
    found = set()
    for module in modules:
        rows = [(number, line.strip()) for number, line in enumerate(module.text.splitlines(), 1)]
        rows = [(number, line) for number, line in rows if counts_as_code(line)]
        for start in range(len(rows) - CLONE_LINES + 1):
            window = rows[start : start + CLONE_LINES]
            key = hashlib.sha1("\n".join(line for _, line in window).encode(), usedforsecurity=False).hexdigest()
            place = f"{module.name}:{window[0][0]}"
            if seen.setdefault(key, place) != place:
                found |= {f"{module.name}:{number}" for number, _ in window}
    return sorted(found)


def counts_as_code(line: str) -> bool:
    """Whether a line can be part of a clone."""
    return len(line) > 3 and not line.startswith(("import ", "from ", "#", '"""', "@"))


def private_torch(modules: list[Module]) -> list[str]:
    """Return files outside `torch_private` that import or reach for underscored names of torch."""
    pattern = re.compile(
        r"\b(?:torch|dist)(?:\.\w+)*\._[A-Za-z]\w*|from torch[\w.]*\._\w+|from torch[\w.]* import _\w+"
    )
    return [module.name for module in modules if ".torch_private" not in module.name and pattern.search(module.text)]


def main() -> None:
    """Print the table, or what one figure counts."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--list", metavar="FIGURE", help="print the places that this figure counts")
    name = parser.parse_args().list
    figures = measure(read_tree())
    if name:
        print("\n".join(next(figure.places for figure in figures if figure.name == name)))
        return
    for figure in figures:
        state = "met" if figure.is_met else "missed"
        print(f"{figure.name:<44} {figure.value:>10,.1f}   target <= {figure.target:>6,g}   {state}")


if __name__ == "__main__":
    main()
