"""Guards hear from the launcher whatever its main thread waits for."""

import shlex
import signal
import sys
import time

import pytest

from shardwise.launcher.local.target import Program
from shardwise.launcher.ssh import session as ssh_session
from shardwise.launcher.ssh.run import HostSpec
from shardwise.launcher.ssh.session import Look, Session, Sessions, Signal
from shardwise.launcher.transport import encode_line

SILENCE_S = 1.5
GUARD = f"import sys; from shardwise.launcher.ssh import remote as r; r.SILENCE_S = {SILENCE_S}; sys.exit(r.main())"


def start(monkeypatch, argv):
    """Start a session with this command for a guard."""
    monkeypatch.setattr(ssh_session, "guard_command", lambda _folder: f"exec {shlex.join(argv)}")
    return Session(HostSpec(name="here"), is_here=True)


@pytest.mark.timeout(60)
def test_output_that_nobody_takes_for_long_does_not_end_the_guard(monkeypatch):
    monkeypatch.setattr(ssh_session, "BEAT_S", 0.2)
    session = start(monkeypatch, [sys.executable, "-c", GUARD])
    with Sessions([session]) as sessions:
        assert sessions.query([(session, Look(Program("true")))], 30)  # it runs
        time.sleep(2 * SILENCE_S)
        assert sessions.query([(session, Look(Program("true")))], 30)


@pytest.mark.timeout(60)
def test_signals_are_passed_on_while_nobody_takes_the_output(monkeypatch):
    session = start(monkeypatch, ["cat"])
    with Sessions([session]) as sessions:
        sessions.signals.append(signal.SIGTERM)
        order = encode_line(Signal(signal.SIGTERM))
        while session.streams[0].readline() != order:
            pass
        assert sessions.is_interrupted


def test_leaving_ends_the_thread_and_the_guard(monkeypatch):
    session = start(monkeypatch, ["cat"])
    with Sessions([session]) as sessions:
        thread = sessions._thread
    assert not thread.is_alive()
    assert session.process.returncode == 0
