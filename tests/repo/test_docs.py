"""Docs that cannot rot: every command in them runs, every quoted example is the file's own text."""

import inspect
import os
import re
import shlex
import subprocess
import sys
import tempfile
from collections import defaultdict
from pathlib import Path

import click
import pytest
from torch.nn.parallel import DistributedDataParallel

from e2e.processes import shardwise
from env import mpi
from quotes import QUOTE, refreshed
from shardwise.cli.main import cli

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
CHAPTERS = sorted((ROOT / "examples").rglob("README.md"))
TUTORIAL = sorted((ROOT / "docs" / "tutorial").glob("*.md"))  # whose blocks run in order, in test_tutorial.py
FENCE = re.compile(r"```bash\n(.*?)```", re.DOTALL)
FORKED = tuple(f"shardwise {verb} " for verb in ("train", "verify", "launch", "bench"))
"""Commands of `shardwise` that would import torch."""
MAKES_DIRECTORY = "d=$(mktemp -d) &&"
LINK = re.compile(r"\]\(([^)#:]+)(?:#[^)]*)?\)")


def commands(page):
    for block in FENCE.findall(page.read_text()):
        for line in block.replace("\\\n", " ").splitlines():
            command = line.partition("  #")[0].partition(" # ")[0].strip()
            if command and not command.startswith("#") and command != "make test":
                yield command


def kind(command):
    """Return program, verb and part: what commands have in common that differ in options only."""
    if "mpirun" in command or "--backend mpi" in command:
        return ("mpirun",)
    argv = [argument for argument in command.split() if "=" not in argument and not argument.startswith("-")]
    program = argv[0].rpartition("/")[2]
    return (program, *(argument for argument in argv[1:3] if argument.isalpha()))


def every_command():
    """All run as written in `make prove`, and here the first of each kind, in a fork if it would import torch.

    `make demo` takes a minute, a script of all commands half of one; parts of bench, drills and mpirun are run by tests
    of their own; chains are long.
    """
    alike = defaultdict(list)
    for page in [page for page in PAGES if page not in TUTORIAL]:
        for command in commands(page):
            alike[kind(command)].append((page.name, command))
    for name, group in alike.items():
        is_run_elsewhere = bool({"make", "bench", "drill", "mpirun", "python"} & {*name}) and name != (
            "shardwise",
            "bench",
            "comm",
        )
        for index, (page, command) in enumerate(group):
            is_long = "&&" in command and ("launch" in command or command.count("&&") > 3)
            is_here = index == 0 and not is_run_elsewhere and not is_long
            is_forked = is_here and all(part.startswith(FORKED) for part in parts(command))
            if is_forked:
                yield pytest.param(command, shardwise_in_a_fork, id=f"{page}, forked: {command}")
            marks = [] if is_here and not is_forked else [pytest.mark.prove]
            yield pytest.param(command, as_written, id=f"{page}: {command}", marks=marks)


def as_written(command):
    environ = dict(mpi.environment() if kind(command) == ("mpirun",) else os.environ)
    environ["PATH"] = f"{Path(sys.executable).parent}:{environ['PATH']}"  # as in an activated environment
    return subprocess.run(["bash", "-c", command], cwd=ROOT, env=environ, capture_output=True, text=True, check=False)


def parts(command):
    """Return the commands of a chain, without the first one if it makes the directory `d`."""
    return [part.strip() for part in command.removeprefix(MAKES_DIRECTORY).split("&&")]


def shardwise_in_a_fork(command):
    """Run one command, or a chain to its end or the first that fails."""
    with tempfile.TemporaryDirectory() as folder:
        for part in parts(command):
            arguments = shlex.split(part.replace("$d", folder))[1:]
            done = shardwise(ROOT, *arguments, OMP_NUM_THREADS="1")
            if done.returncode:
                break
    return done


def parse(argv):
    """Parse the arguments of a `shardwise` command as it would, down to the options of its last part."""
    command = cli
    while isinstance(command, click.Group):
        _, command, argv = command.resolve_command(click.Context(command), argv)
    command.make_context("shardwise", argv)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_command_has_the_options_that_the_page_gives_it(page, monkeypatch):
    monkeypatch.chdir(ROOT)
    for command in commands(page):
        if command.startswith("make "):
            show = ["make", "--dry-run", *command.split()[1:]]
            shown = subprocess.run(show, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()[-1]
        else:
            shown = command
        for part in re.split(r"&&|\|\| true", shown):
            argv = shlex.split(part)
            names = [Path(argument).name for argument in argv]
            if "shardwise" in names and argv[-1] != "--version":
                parse(argv[names.index("shardwise") + 1 :])


def test_commands_are_written_for_an_activated_environment():
    written = {str(page): re.search(r"(?<!\. )\.venv/bin", page.read_text()) for page in PAGES}
    assert [page for page, found in written.items() if found] == []


@pytest.mark.parametrize("argv", ["trian job.py", "train --nprocs 2 job.py", "bench comm all_reduce --dtype int32"])
def test_an_option_that_does_not_exist_does_not_parse(argv):
    with pytest.raises(click.UsageError):
        parse(argv.split())


def test_pages_agree_on_what_is_built_and_what_was_tried():
    texts = {page: page.read_text() for page in (*PAGES, *CHAPTERS)}
    assert [page for page, text in texts.items() if "not built yet" in text] == []
    if "not yet on NCCL" in texts[ROOT / "docs" / "status.md"]:
        assert "NCCL have not been tried yet" in texts[ROOT / "docs" / "guides" / "hang.md"]


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("command", "run"), list(every_command()))
def test_command_runs(command, run):
    done = run(command)
    assert done.returncode == 0, done.stdout + done.stderr
    if command == "make demo":
        accuracy = re.search(r"test accuracy\s+([0-9.]+)%", done.stdout)
        assert float(accuracy[1]) >= 97
        assert "training time" in done.stdout
        directory = re.search(r"run directory\s+(\S+)", done.stdout)
        assert (ROOT / directory[1] / "report.md").is_file()


def test_readme_shows_its_first_command_before_line_twenty():
    lines = (ROOT / "README.md").read_text().splitlines()
    assert lines.index("```bash") < 19


@pytest.mark.parametrize("page", [*PAGES, *CHAPTERS], ids=lambda page: str(page.relative_to(ROOT)))
def test_quoted_code_is_the_files_own_text(page):
    text = page.read_text()
    assert refreshed(text) == text, "run python scripts/quotes.py"


def test_the_guide_and_every_chapter_on_training_quote_their_examples():
    quoting = [page for page in CHAPTERS if QUOTE.search(page.read_text())]
    assert {page.parent.name for page in quoting} >= {"examples", "01-ddp-basics", "02-fsdp", "05-advanced"}


def test_links_lead_somewhere():
    pages = [
        *PAGES,
        *sorted(ROOT.glob("*.md")),
        ROOT / "tests" / "README.md",
        *sorted((ROOT / "examples").rglob("*.md")),
        *sorted((ROOT / "benchmarks").glob("*.md")),
    ]
    broken = [
        f"{page.relative_to(ROOT)} -> {target}"
        for page in pages
        for target in LINK.findall(page.read_text())
        if not (page.parent / target).exists()
    ]
    assert broken == []


def test_the_table_of_ddp_has_every_argument():
    page = (ROOT / "docs" / "reference" / "ddp.md").read_text()
    arguments = set(inspect.signature(DistributedDataParallel).parameters)
    assert [name for name in sorted(arguments) if f"`{name}`" not in page] == []
