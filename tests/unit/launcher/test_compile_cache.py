"""Compiled graphs outlive a run: the second one finds them, without anything of the first in /tmp."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from shardwise.launcher.local.processes import CACHE_VARIABLE, compile_cache

JOB = "examples/05-advanced/hybrid_parallelism.py"


def test_graphs_are_kept_with_the_users_other_caches(tmp_path):
    assert compile_cache({"HOME": str(tmp_path)}) == {CACHE_VARIABLE: f"{tmp_path}/.cache/shardwise/compiled"}


def test_a_folder_that_the_user_named_stays(tmp_path):
    assert compile_cache({"HOME": str(tmp_path), CACHE_VARIABLE: "/mine"}) == {}


def test_where_no_folder_can_be_torchs_default_stays(tmp_path):
    (tmp_path / "home").touch()
    assert compile_cache({"HOME": str(tmp_path / "home")}) == {}


def test_looking_makes_no_folder(tmp_path):
    compile_cache({"HOME": str(tmp_path)})
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(sys.platform != "linux", reason="libraries have another form")
def test_a_library_that_a_run_was_killed_over_is_made_anew(tmp_path):
    folder = tmp_path / ".cache" / "shardwise" / "compiled" / "ab"
    folder.mkdir(parents=True)
    maps = Path("/proc/self/maps").read_text().splitlines()
    whole = Path(next(line.split()[-1] for line in maps if ".so" in line)).read_bytes()
    libraries = {"whole.so": whole, "truncated.so": whole[: len(whole) // 2], "empty.so": b"", "zeros.so": bytes(4096)}
    for name, content in libraries.items():
        (folder / name).write_bytes(content)
        os.utime(folder / name, (0, 0))
    (folder / "young.so").touch()  # somebody may be linking it
    compile_cache({"HOME": str(tmp_path)})
    assert {file.name for file in folder.iterdir()} == {"whole.so", "young.so"}


@pytest.mark.prove
def test_the_second_run_finds_every_graph_of_the_first(tmp_path, capsys):
    environ = {name: value for name, value in os.environ.items() if name != CACHE_VARIABLE}
    environ["XDG_CACHE_HOME"] = str(tmp_path / "cache")
    seconds, files = [], []
    for run in (tmp_path / "cold", tmp_path / "warm"):
        command = ["train", JOB, "--nproc", "2", "--plan", "zero3", "--set", "compile=blocks", "--set", "steps=2"]
        command = [sys.executable, "-m", "shardwise", *command, "--run-dir", str(run)]
        subprocess.run(command, check=True, env=environ, capture_output=True)
        phases = {each["name"]: each["seconds"] for each in json.loads((run / "timeline.json").read_text())}
        seconds.append(phases["first step"])
        files.append({file for file in (tmp_path / "cache").rglob("*") if file.is_file()})
    with capsys.disabled():
        print(f"\nfirst step: cold {seconds[0]:.1f} s, warm {seconds[1]:.1f} s, {seconds[0] / seconds[1]:.1f} times")
    assert files[0] == files[1] != set()
    assert seconds[1] < seconds[0]
