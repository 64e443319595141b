"""A plain script becomes a parallel one in no more lines than with Accelerate, and prints what the plain one prints."""

import contextlib
import difflib
import io
import os
import re
from pathlib import Path

import pytest
import torch

from shardwise.testing import run_ranks

FOLDER = Path(__file__).resolve().parents[3] / "examples" / "convert"
RULES = 'tensor_rules={"up": "column", "down": "row"}'


def added(name):
    """Return the lines that the conversion `name` has and the plain script does not."""
    plain, converted = ((FOLDER / each).read_text().splitlines() for each in ("plain.py", name))
    lines = difflib.unified_diff(plain, converted, n=0, lineterm="")
    return [line for line in lines if re.match(r"\+(?!\+)\s*\S", line)]


def test_conversion_takes_no_more_lines_than_with_accelerate():
    assert len((FOLDER / "plain.py").read_text().splitlines()) == 65
    assert 0 < len(added("with_shardwise.py")) <= len(added("with_accelerate.py")), added("with_shardwise.py")


def run_script(_, name, folder, plan="", epochs=3):
    """Run a script in fp64 and unshuffled, in `folder`; return what it prints."""
    source = (FOLDER / name).read_text()
    changes = {
        "EPOCHS, CHECKPOINT = 3": f"EPOCHS, CHECKPOINT = {epochs}",
        "shuffle=True": "shuffle=False",
        "torch.autocast(device, torch.bfloat16)": "torch.autocast(device, torch.bfloat16, enabled=False)",
        'preset("fsdp"': f'preset("{plan}"',
        'precision="bf16"': 'precision="fp64"',
        "Classifier().to(device), plan, world": f"Classifier().to(device), plan, world, {RULES}",
    }
    for old, new in changes.items():
        source = source.replace(old, new)
    os.chdir(folder)  # of this forked rank alone
    torch.set_default_dtype(torch.float64)
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(source, name, "exec"), {"__name__": "__main__"})
    return [[float(number) for number in re.findall(r"[\d.]+", line)] for line in printed.getvalue().splitlines()]


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    (lines,) = run_ranks(run_script, 1, "plain.py", tmp_path_factory.mktemp("plain"))
    assert [line[0] for line in lines] == [0, 1, 2]
    return lines


@pytest.mark.parametrize(("name", "resumed"), [("ddp", "fsdp"), ("fsdp", "tp"), ("tp", "ddp")])
def test_converted_script_prints_what_the_plain_one_does_and_resumes_under_another_plan(plain, tmp_path, name, resumed):
    first, nothing = run_ranks(run_script, 2, "with_shardwise.py", tmp_path, plan=name, epochs=2)
    second, _ = run_ranks(run_script, 2, "with_shardwise.py", tmp_path, plan=resumed)
    assert nothing == []  # rank 0 alone prints
    for found, wanted in zip(first + second, plain, strict=True):
        assert found == pytest.approx(wanted, rel=1e-9)
