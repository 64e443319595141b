"""Stop requests to a supervisor: the user's own, and those of other nodes."""

import os
import signal

import pytest

from shardwise.launcher.local.processes import start_program
from shardwise.launcher.local.supervise import supervise

SAVING = """
trap 'touch asked; while [ ! -e saved ]; do sleep 0.02; done; exit 75' TERM USR1
touch ready
while :; do sleep 0.02; done
"""
"""A rank that saves until the file `saved` exists."""


class Others:
    """Other nodes that ask for a stop once the rank is ready, and remember what is reported to them."""

    def __init__(self, folder, number):
        self.folder, self.number = folder, number
        self.reported = []

    def requested_stop(self):
        return self.number if (self.folder / "ready").exists() else 0

    def report_failure(self, exit_):
        self.reported.append(exit_)

    def report_signal(self, number):
        self.reported.append(number)


class User:
    """Sends this process signals, one as soon as each of these files is there; ten looks later the rank has saved."""

    def __init__(self, *files, number, saved):
        self.files, self.number, self.saved = list(files), number, saved
        self.looks = 0

    def tick(self):
        if self.files and self.files[0].exists():
            self.files.pop(0)
            os.kill(os.getpid(), self.number)
        elif not self.files:
            self.looks += 1
            if self.looks == 10:
                self.saved.touch()


def run(folder, monkeypatch, *, user, others=None):
    monkeypatch.chdir(folder)
    rank = start_program(0, ["sh", "-c", SAVING], os.environ, stdout=folder / "out", stderr=folder / "err")
    return supervise([rank], failure_of=lambda *_: None, observers=[user], other_nodes=others, timeout_s=60)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_own_signal_after_a_request_of_other_nodes_does_not_kill_ranks_that_save(tmp_path, monkeypatch, number):
    others = Others(tmp_path, signal.SIGTERM)
    outcome = run(
        tmp_path, monkeypatch, user=User(tmp_path / "asked", number=number, saved=tmp_path / "saved"), others=others
    )
    assert [exit_.returncode for exit_ in outcome.exits] == [75]
    assert others.reported == [number]


def test_request_of_other_nodes_after_an_own_signal_is_not_a_second_one(tmp_path, monkeypatch):
    others = Others(tmp_path, signal.SIGTERM)
    outcome = run(
        tmp_path,
        monkeypatch,
        user=User(tmp_path / "ready", number=signal.SIGTERM, saved=tmp_path / "saved"),
        others=others,
    )
    assert [exit_.returncode for exit_ in outcome.exits] == [75]
    assert others.reported == [signal.SIGTERM]


def test_second_own_signal_kills(tmp_path, monkeypatch):
    user = User(tmp_path / "ready", tmp_path / "asked", number=signal.SIGTERM, saved=tmp_path / "never")
    outcome = run(tmp_path, monkeypatch, user=user)
    assert [exit_.returncode for exit_ in outcome.exits] == [-signal.SIGKILL]
