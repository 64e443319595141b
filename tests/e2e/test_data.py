"""`shardwise data` as processes: SIGKILL and Ctrl-C while preparing, no torch, no process left, a progress bar."""

import json
import os
import pty
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from e2e.processes import wait_for, working_in

SHARDWISE = [sys.executable, "-m", "shardwise"]


def write_documents(path, num_bytes):
    """Write rows of random letters with lengths from 0 to 4,000."""
    random = np.random.default_rng(0)
    letters = random.integers(97, 123, num_bytes, dtype=np.uint8).tobytes().decode()
    start = 0
    with path.open("w") as file:
        while start < num_bytes:
            length = int(random.integers(0, 4000))
            file.write(json.dumps({"text": letters[start : start + length]}) + "\n")
            start += length


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.name != "prepare.jsonl"}


@pytest.fixture(scope="module")
def documents(tmp_path_factory):
    path = tmp_path_factory.mktemp("documents") / "documents.jsonl"
    write_documents(path, 24_000_000)  # half a second, so that a signal arrives before the end
    return path


@pytest.fixture(scope="module")
def few_documents(tmp_path_factory):
    path = tmp_path_factory.mktemp("few") / "documents.jsonl"
    write_documents(path, 3_000_000)
    return path


def command(documents, out, processes):
    shards = ["--shard-tokens", "100000"]
    return [*SHARDWISE, "data", "prepare", str(documents), "--out", out, "--processes", str(processes), *shards]


def test_the_corpus_is_the_same_with_1_2_and_4_processes_and_after_sigkill(documents, tmp_path):
    for processes in (1, 2, 4):
        subprocess.run(command(documents, f"out-{processes}", processes), cwd=tmp_path, check=True, capture_output=True)
    expected = contents(tmp_path / "out-1")
    assert contents(tmp_path / "out-2") == expected
    assert contents(tmp_path / "out-4") == expected

    killed = subprocess.Popen(command(documents, "killed", 2), cwd=tmp_path, stdout=subprocess.DEVNULL)
    wait_for((tmp_path / "killed" / "shard-00004.bin").exists)
    killed.kill()
    assert killed.wait() == -signal.SIGKILL
    wait_for(lambda: not working_in(tmp_path), what=lambda: f"processes {working_in(tmp_path)} are left")
    assert not (tmp_path / "killed" / "index.json").exists()
    again = subprocess.run(
        [*command(documents, "killed", 4), "--json"], cwd=tmp_path, check=True, capture_output=True, text=True
    )
    report = json.loads(again.stdout)
    assert 4 <= report["num_kept"] < report["num_shards"]
    assert contents(tmp_path / "killed") == expected


def test_ctrl_c_ends_the_workers_and_keeps_complete_shards(documents, tmp_path):
    stopped = subprocess.Popen(command(documents, "out", 2), cwd=tmp_path, stdout=subprocess.DEVNULL)
    wait_for((tmp_path / "out" / "shard-00002.bin").exists)
    stopped.send_signal(signal.SIGINT)
    assert stopped.wait(30) == 130
    assert working_in(tmp_path) == []
    assert not list((tmp_path / "out").glob(".tmp-*"))
    assert len((tmp_path / "out" / "prepare.jsonl").read_text().splitlines()) >= 4


def test_preparing_imports_no_torch(documents, tmp_path):
    code = (
        "import sys; from shardwise.cli.main import main;"
        f"assert main({command(documents, 'out', 2)[3:]!r}) == 0;"
        "assert main(['data', 'inspect', 'out']) == 0; sys.exit('torch' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], cwd=tmp_path, check=True, capture_output=True)


def test_a_terminal_has_a_progress_bar(few_documents, tmp_path):
    terminal, slave = pty.openpty()  # its buffer has 4 KiB
    subprocess.run(command(few_documents, "out", 2), cwd=tmp_path, check=True, stdout=subprocess.DEVNULL, stderr=slave)
    os.close(slave)
    shown = os.read(terminal, 10**6).decode(errors="replace")
    os.close(terminal)
    assert "tokens" in shown
    assert "MB" in shown


def test_the_example_of_the_guide_runs():
    guide = Path(__file__).resolve().parents[2] / "docs" / "guides" / "data.py"
    done = subprocess.run([sys.executable, guide], check=True, capture_output=True, text=True)
    assert done.stdout.startswith("2 documents, 57 tokens")
    assert "books" in done.stdout  # its share in the mixture
