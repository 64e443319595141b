"""Launches of small scripts on this machine: what ranks inherit, and what is left after them."""

import json
import os
import signal
import tempfile
from pathlib import Path

import pytest

from env.small_disk import fill, needs_small_disk, on_small_disk
from refusals import refuses
from shardwise.launcher.explain import explain_outcome
from shardwise.launcher.local.attempts import LocalLaunch, launch
from shardwise.launcher.local.function import run_forked
from shardwise.launcher.local.target import Script
from shardwise.launcher.policy import Finish
from shardwise.runs import create_run

LISTENING = """
import os, signal, sys
from multiprocessing import Process, connection, util

def listen(ready):
    with connection.Listener(family="AF_UNIX") as listener:
        os.write(ready, listener.address.encode())
        signal.pause()

def start_listening():
    reader, ready = os.pipe()
    Process(target=listen, args=(ready,), daemon=True).start()
    os.close(ready)  # so that a listener that could not start ends the read below
    address = os.read(reader, 4096).decode()
    assert address, "the listener did not start"
    return address
"""


class Run:
    """Launches scripts that need no torch, so that a launch costs a fraction of a second."""

    def __init__(self, folder):
        self.folder = folder
        self.directory = create_run(folder / "run", "run")

    def launch(self, text, *arguments, nproc=1, script="script.py", **options):
        script = self.folder / script
        script.write_text(text)
        spec = LocalLaunch(target=Script(str(script), arguments), nproc=nproc, preload=(), **options)
        launched = launch(spec, self.directory)
        self.outputs = [self.directory.stdout(rank).read_text() for rank in range(nproc)]
        self.errors = [self.directory.stderr(rank).read_text() for rank in range(nproc)]
        return launched


@pytest.fixture
def run(tmp_path):
    return Run(tmp_path)


@pytest.fixture
def temporary(monkeypatch):
    """A temporary directory with a short path: a Unix socket in it may have one of 107 bytes, and pytest's are long."""
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        monkeypatch.setenv("TMPDIR", folder)
        yield Path(folder)


@pytest.mark.parametrize("fork", [True, False])
def test_sighup_that_nohup_ignores_stops_neither_launcher_nor_ranks(run, fork):
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        text = (
            "import os, signal\nfor pid in (os.getpid(), int(sys.argv[1])): os.kill(pid, signal.SIGHUP)\nprint('done')"
        )
        launched = run.launch(f"import sys\n{text}", str(os.getpid()), fork=fork)
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)
    assert launched.decision == Finish()
    assert run.outputs == ["done\n"]


@pytest.mark.parametrize("fork", [True, False])
def test_restart_after_a_killed_rank_leaves_no_folder_of_a_listener(run, temporary, fork):
    text = f"""{LISTENING}
print(start_listening(), flush=True)
if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    os.kill(os.getpid(), signal.SIGKILL)
"""
    launched = run.launch(text, max_restarts=1, fork=fork, record=True)
    assert (launched.decision, launched.restarts) == (Finish(), 1), run.errors
    addresses = run.outputs[0].split()
    assert len(addresses) == 2
    assert all(address.startswith(str(temporary)) for address in addresses)
    assert list(temporary.iterdir()) == []


def test_killed_rank_of_a_function_leaves_no_folder_of_a_listener(temporary, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(temporary))
    names = {}
    exec(LISTENING, names)

    def body(_rank):
        names["start_listening"]()
        os.kill(os.getpid(), signal.SIGKILL)

    with pytest.raises(Exception, match="SIGKILL"):
        run_forked(body, 1, timeout_s=60)
    assert list(temporary.iterdir()) == []


NOT_UTF8 = os.fsdecode(b"odd \xff")
"""As Python shows a variable or an argument that is not UTF-8."""


@pytest.mark.parametrize("fork", [True, False])
def test_variables_arguments_and_paths_that_are_not_utf8_reach_the_rank_unchanged(run, fork, monkeypatch):
    monkeypatch.setenv("ODD", NOT_UTF8)
    monkeypatch.setenv("LD_LIBRARY_PATH", NOT_UTF8)
    text = """
import os, sys
print(os.environb[b"ODD"], [os.fsencode(argument) for argument in sys.argv])
raise ValueError(sys.argv[1])
"""
    launched = run.launch(text, NOT_UTF8, fork=fork, script=f"{NOT_UTF8}.py")
    path = os.fsencode(run.folder / NOT_UTF8) + b".py"
    assert run.outputs == [f"{os.fsencode(NOT_UTF8)} {[path, os.fsencode(NOT_UTF8)]}\n"], run.errors
    failure = launched.outcome.exits[0].failure
    assert (failure.kind, failure.message) == ("ValueError", "odd \\udcff")
    assert json.loads(run.directory.environment.read_text())["LD_LIBRARY_PATH"] == "odd \\udcff"
    events = [json.loads(line) for line in run.directory.launcher_events().read_text().splitlines()]
    assert [event["kind"] for event in events] == ["attempt", "exit", "verdict", "finish"]
    assert "odd \\udcff.py" in events[0]["target"]


def test_bad_input_of_a_script_is_one_sentence_and_its_line_without_tracebacks(run):
    text = """
from shardwise.errors import PlanError
raise PlanError("tp=3 is too many" + " ranks" * 50, code="plan.test", fix="set tp=2")
"""
    launched = run.launch(text, nproc=2, fork=True)
    where, verdict = explain_outcome(launched.outcome, run.directory).splitlines()[-2:]
    assert run.errors == ["", ""]
    assert "script.py:3" in where
    assert "set tp=2 [plan.test]" in verdict


@needs_small_disk
@pytest.mark.parametrize("fork", [True, False])
def test_full_disk_is_the_cause_of_a_rank_that_could_not_write_its_traceback(tmp_path, fork):
    text = """
import os
if os.environ["RANK"] == "1":
    while True:
        print("x" * 4095, flush=True)
"""

    def body(folder):
        run = Run(folder)
        (run.directory.checkpoints / "step-00000040").mkdir(parents=True)
        launched = run.launch(text, nproc=2, fork=fork)
        return explain_outcome(launched.outcome, run.directory), sorted(
            path.name for path in run.directory.path.iterdir()
        )

    report, names = on_small_disk(tmp_path, body)
    kept, verdict = report.splitlines()[-2:]
    assert "1 checkpoint, the newest step-00000040" in kept
    assert verdict.startswith("rank 1 failed first: OSError: No space left on device")
    assert "the disk is full: " in verdict
    assert names == ["checkpoints", "environment.json", "errors", "events", "logs"]


@needs_small_disk
def test_run_directory_on_a_full_disk_is_refused_and_removed(tmp_path):
    def body(folder):
        fill(folder)
        with refuses("run.write-failed", "No space left on device"):
            create_run(folder / "run", "run")
        return [path.name for path in folder.iterdir()]

    assert on_small_disk(tmp_path, body) == ["file"]
