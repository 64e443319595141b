"""Docs that cannot rot: every command in them runs, every quoted example is the file's own text."""

import inspect
import re
import subprocess
import textwrap
from pathlib import Path

import pytest
from torch.nn.parallel import DistributedDataParallel

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
FENCE = re.compile(r"```bash\n(.*?)```", re.DOTALL)
QUOTE = re.compile(r"<!-- quote: (\S+) (\S+) -->\n```\w+\n(.*?)```\n<!-- end quote -->", re.DOTALL)
LINK = re.compile(r"\]\(([^)#:]+)(?:#[^)]*)?\)")


def commands():
    for page in PAGES:
        for block in FENCE.findall(page.read_text()):
            for line in block.replace("\\\n", " ").splitlines():
                command = line.partition("  #")[0].partition(" # ")[0].strip()
                if command and not command.startswith("#") and command != "make test":
                    yield pytest.param(command, id=f"{page.name}: {command}")


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("command", list(commands()))
def test_command_runs_as_written(command):
    done = subprocess.run(["bash", "-c", command], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    if command == "make demo":
        accuracy = re.search(r"test accuracy\s+([0-9.]+)%", done.stdout)
        assert float(accuracy[1]) >= 97
        assert "training time" in done.stdout
        run = re.search(r"run directory\s+(\S+)", done.stdout)
        assert (ROOT / run[1] / "report.md").is_file()


def test_readme_shows_its_first_command_before_line_twenty():
    lines = (ROOT / "README.md").read_text().splitlines()
    assert lines.index("```bash") < 19


def quotes():
    return [(page, *quote) for page in PAGES for quote in QUOTE.findall(page.read_text())]


def test_quoted_examples_are_the_files_own_text():
    assert quotes()
    for page, path, marker, text in quotes():
        source = (ROOT / path).read_text()
        block = re.search(rf"^ *# <{marker}>\n(.*?)^ *# </{marker}>", source, re.DOTALL | re.MULTILINE)
        assert textwrap.dedent(block[1]) == text, f"{page.name} quotes {path}"


def test_links_lead_somewhere():
    pages = [*PAGES, *sorted((ROOT / "examples").rglob("*.md")), *sorted((ROOT / "benchmarks").glob("*.md"))]
    broken = [
        f"{page.relative_to(ROOT)} -> {target}"
        for page in pages
        for target in LINK.findall(page.read_text())
        if not (page.parent / target).exists()
    ]
    assert broken == []


def test_the_table_of_ddp_has_every_argument():
    page = (ROOT / "docs" / "ddp.md").read_text()
    arguments = set(inspect.signature(DistributedDataParallel).parameters)
    assert [name for name in sorted(arguments) if f"`{name}`" not in page] == []
