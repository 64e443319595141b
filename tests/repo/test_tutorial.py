"""The tutorial and the README show what their commands print: each block runs in order, and its output is compared.

Numbers with four decimals or more are compared to 2 %: losses. Any other number matches any other: times, rates,
ports. A line of dots stands for any lines, dots inside of a line for any text.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs" / "tutorial").glob("*.md"))]
BLOCK = re.compile(r"^```bash\n(.*?)^```\n(?:\n```text\n(.*?)^```\n)?", re.DOTALL | re.MULTILINE)
NUMBER = re.compile(r"\d+(?:[.,:]\d+)*(?:e[-+]?\d+)?")


def blocks(page):
    """Return the commands of each block of a page and the output that is shown below it, or None."""
    found = [(match[1], match[2]) for match in BLOCK.finditer(page.read_text())]
    return [(commands, shown) for commands, shown in found if not commands.startswith("make ")]


def run(commands):
    environ = {**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "110"}
    environ["PATH"] = f"{Path(sys.executable).parent}:{environ['PATH']}"  # as in an activated environment
    done = subprocess.run(
        ["bash", "-ec", commands], cwd=ROOT, env=environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False
    )
    return done.returncode, done.stdout.decode()


def line_matches(shown, line):
    """Return whether a line of output is the one that is shown, but for numbers that may differ."""
    pieces = [re.escape(NUMBER.sub("\0", piece)) for piece in shown.split("...")]
    pattern = ".*".join(piece.replace(re.escape("\0"), "#") for piece in pieces)
    if not re.fullmatch(pattern, NUMBER.sub("#", line)):
        return False
    if "..." in shown:
        return True
    pairs = zip(NUMBER.findall(shown), NUMBER.findall(line), strict=True)
    compared = [(float(one), float(other)) for one, other in pairs if re.fullmatch(r"\d+\.\d{4,}", one)]
    return all(abs(one - other) <= 0.02 * one for one, other in compared)


def matches(shown, output):
    """Return whether the output is what is shown; "..." alone skips any number of lines."""
    lines = [" ".join(line.split()) for line in output.splitlines() if line.strip()]
    expected = [" ".join(line.split()) for line in shown.splitlines() if line.strip()]
    return lines_match(expected, lines)


def lines_match(expected, lines):
    if not expected:
        return not lines
    if expected[0] == "...":
        return any(lines_match(expected[1:], lines[count:]) for count in range(len(lines) + 1))
    return bool(lines) and line_matches(expected[0], lines[0]) and lines_match(expected[1:], lines[1:])


@pytest.mark.prove
@pytest.mark.timeout(900)
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_print_what_the_page_shows(page):
    assert blocks(page)
    for commands, shown in blocks(page):
        code, output = run(commands)
        assert code == 0, output
        if shown is not None:
            assert matches(shown, output), f"{commands}\n{output}"


@pytest.mark.slow
def test_the_loop_of_the_tutorial_prints_what_the_page_shows(tmp_path):
    """The slice of the above that `make test` runs: data parallel on two processes."""
    page = ROOT / "docs" / "tutorial" / "loop.md"
    [(commands, shown)] = [block for block in blocks(page) if "--nproc 2" in block[0] and " ddp " in block[0]]
    code, output = run(commands.replace("runs/tutorial/two", str(tmp_path / "two")))
    assert code == 0, output
    assert matches(shown, output), output


@pytest.mark.parametrize(
    ("shown", "output", "expected"),
    [
        ("loss 0.4869", "loss 0.4870", True),
        ("loss 0.4869", "loss 0.6869", False),
        ("took 3 s", "took 17.5 s", True),
        ("a\n...\nz", "a\nb\nc\nz", True),
        ("a\n...\nz", "a\nb", False),
        ("a\nz", "a\nb\nz", False),
        ("state: ... done", "state: nearly done", True),
        ("...\nz", "y\nz", True),
        ("z\n...", "z\ny", True),
        ("a", "a\nb", False),
        ("...\nz", "z\ny\nz", True),
    ],
)
def test_output_is_compared_line_by_line(shown, output, expected):
    assert matches(shown, output) is expected
