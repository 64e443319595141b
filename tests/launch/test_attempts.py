"""Launches of small scripts on this machine: what ranks inherit, and what is left after them."""

import os
import signal

import pytest

from shardwise.launch import Finish, LaunchSpec, Script, launch, run_forked
from shardwise.run import create_run

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
    return os.read(reader, 4096).decode()
"""


class Run:
    """Launches scripts that need no torch, so that a launch costs a fraction of a second."""

    def __init__(self, folder):
        self.folder = folder
        self.directory = create_run(folder / "run", "run")

    def launch(self, text, *arguments, nproc=1, **options):
        script = self.folder / "script.py"
        script.write_text(text)
        spec = LaunchSpec(target=Script(str(script), arguments), nproc=nproc, preload=(), **options)
        launched = launch(spec, self.directory)
        self.outputs = [self.directory.stdout(rank).read_text() for rank in range(nproc)]
        self.errors = [self.directory.stderr(rank).read_text() for rank in range(nproc)]
        return launched


@pytest.fixture
def run(tmp_path):
    return Run(tmp_path)


@pytest.fixture
def temporary(tmp_path, monkeypatch):
    folder = tmp_path / "t"
    folder.mkdir()
    monkeypatch.setenv("TMPDIR", str(folder))
    return folder


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
