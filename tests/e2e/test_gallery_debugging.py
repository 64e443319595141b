"""The troubleshooting guide of chapter 4: every transcript is what its command prints, every point names a command."""

import importlib
import re
import shutil

import click
import pytest

from e2e.gallery import EXAMPLES, MARKDOWN, Chapter, stop

CHAPTER = Chapter(EXAMPLES / "04-nccl-operations")
GUIDE = (CHAPTER.folder / "nccl_debugging.md").read_text()
TRANSCRIPTS = re.findall(r"^```bash\n(.*?)\n```\n\n```\n(.*?)\n```", GUIDE, MARKDOWN)
POINTS = re.findall(r"^- \[ \] (.*)$", GUIDE, re.MULTILINE)
QUICK = "NCCL_NET"


def plain(text):
    """Leave out what differs from run to run: times, and how wide a table is."""
    return re.sub(r" +", " ", re.sub(r"\d{8}-\d{6}", "TIME", re.sub(r"for \d+ s", "for N s", text)))


def param(command, transcript):
    return pytest.param(command, transcript, id=command, marks=[] if command.startswith(QUICK) else [pytest.mark.prove])


@pytest.mark.parametrize(("command", "transcript"), [param(*found) for found in TRANSCRIPTS])
def test_a_transcript_is_what_its_command_prints(tmp_path, command, transcript):
    for name in ("broken.py", "collective_ops.py", "ranks.py"):
        shutil.copy(CHAPTER.folder / name, tmp_path)
    process = Chapter(tmp_path).start(command)
    try:
        output, _ = process.communicate(timeout=200)
    finally:
        stop(process)
    printed = plain(output).splitlines()
    assert [line for line in plain(transcript).splitlines() if line not in printed] == [], output


def test_every_mistake_is_shown():
    source = (CHAPTER.folder / "broken.py").read_text()
    mistakes = re.findall(r"^def (\w+)\(me: Me\)", source, re.MULTILINE)
    assert len(mistakes) == 8
    assert [name for name in mistakes if not any(command.endswith(name) for command, _ in TRANSCRIPTS)] == []


def test_every_point_of_the_three_checklists_ends_in_a_command_that_there_is():
    assert len(POINTS) >= 9
    for point in POINTS:
        argv = re.search(r"→ `shardwise ([^`]*)`$", point)[1].split()
        name, command = argv[0], importlib.import_module(f"shardwise.cli.{argv[0]}").command
        while isinstance(command, click.Group) and len(argv) > 1 and argv[1] in command.list_commands(None):
            command, argv = command.get_command(None, argv[1]), argv[1:]
        known = {option for parameter in command.params for option in parameter.opts}
        assert {argument for argument in argv if argument.startswith("--")} <= known, (name, point)


def test_the_variables_of_the_guides_are_explained():
    assert [name for name in ("NCCL_DEBUG=INFO", "TORCH_DISTRIBUTED_DEBUG=DETAIL") if name not in GUIDE] == []
