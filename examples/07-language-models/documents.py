"""Writes the documents of this chapter as JSON lines: functions and reference texts that Python itself ships.

    python documents.py

Nothing is downloaded, and nothing needs a license beyond Python's own. `runs/documents/code.jsonl` has one function of
the standard library per line, `runs/documents/prose.jsonl` one topic of Python's reference, such as `help("yield")`.
"""

import ast
import json
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from pydoc_data.topics import topics

FOLDER = Path("runs/documents")
NUM_FUNCTIONS = 400
"""About 350 kB: enough to learn indentation, little enough that every command of the chapter takes seconds."""


def functions() -> Iterator[str]:
    """Yield the source of each top-level function of the standard library, modules in the order of their names."""
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
        for node in ast.parse("".join(lines)).body:
            if isinstance(node, ast.FunctionDef):
                yield "".join(lines[node.lineno - 1 : node.end_lineno])


def write(name: str, documents: list[str]) -> None:
    """Write one document per line, in the field `text`."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    path = FOLDER / f"{name}.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in documents))
    print(f"{path}: {len(documents)} documents, {sum(map(len, documents)):,} characters")


if __name__ == "__main__":
    source = functions()
    write("code", [next(source) for _ in range(NUM_FUNCTIONS)])
    write("prose", [topics[name] for name in sorted(topics)])
