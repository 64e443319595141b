"""Quote code in pages: copy what a page quotes from the file it names, so that no page has a version of its own.

Usage: python scripts/quotes.py    (rewrites every quote that differs from its file)

    <!-- quote: FILE MARKER -->       the lines between `# <MARKER>` and `# </MARKER>` of the file
    <!-- quote: FILE NAME() -->       a function of the file
    <!-- diff: FILE FILE -->          the lines in which two files differ; with FILE#MARKER all lines of two parts
"""

from __future__ import annotations

import ast
import difflib
import re
import textwrap
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
QUOTE = re.compile(r"(<!-- quote: (\S+) (\S+) -->\n```\w+\n)(.*?)(```\n<!-- end quote -->)", re.DOTALL)
DIFF = re.compile(r"(<!-- diff: (\S+) (\S+) -->\n```diff\n)(.*?)(```\n<!-- end diff -->)", re.DOTALL)


def quoted(path, marker):
    """Return what a quote of a file shows: the text between its markers, or a function."""
    source = (ROOT / path).read_text()
    if marker.endswith("()"):
        functions = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.FunctionDef)]
        [function] = [node for node in functions if node.name == marker.removesuffix("()")]
        return textwrap.dedent(ast.get_source_segment(source, function, padded=True)) + "\n"
    [block] = re.findall(rf"^ *# <{marker}>\n(.*?)^ *# </{marker}>", source, re.DOTALL | re.MULTILINE)
    return textwrap.dedent(block).rstrip() + "\n"  # two blank lines stand before the end marker of a function


def difference(old, new):
    """Return the changed lines of two files; of two marked parts, FILE#MARKER, all lines."""
    texts = [_text(name).splitlines(keepends=True) for name in (old, new)]
    context = len(texts[0]) if "#" in old else 0
    lines = list(difflib.unified_diff(*texts, n=context))[2:]
    return "".join(line for line in lines if not line.startswith("@@"))


def _text(name):
    path, _, marker = name.partition("#")
    return quoted(path, marker) if marker else (ROOT / path).read_text()


def refreshed(text):
    """Return the text of a page with every quote as its file has it."""
    text = QUOTE.sub(lambda match: match[1] + quoted(match[2], match[3]) + match[5], text)
    return DIFF.sub(lambda match: match[1] + difference(match[2], match[3]) + match[5], text)


def main():
    """Rewrite the quotes of all pages."""
    for folder in ("docs", "examples"):
        for page in sorted((ROOT / folder).rglob("*.md")):
            page.write_text(refreshed(page.read_text()))
    readme = ROOT / "README.md"
    readme.write_text(refreshed(readme.read_text()))


if __name__ == "__main__":
    main()
