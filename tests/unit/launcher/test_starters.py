"""What starters hand to the processes they start."""

import os
import signal
import socket
from pathlib import Path

import pytest

from shardwise.environment import variables
from shardwise.launcher.explain import verdict
from shardwise.launcher.local.attempts import describe_lost
from shardwise.launcher.local.processes import RankProcess, RendezvousResult, StartRendezvous
from shardwise.launcher.local.starters import ForkStarter, Output, PlainStarter
from shardwise.launcher.local.supervise import supervise
from shardwise.launcher.local.target import Program, Script
from shardwise.launcher.transport import MessageStream


@pytest.mark.timeout(120)
@pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="reads /proc")
def test_a_rendezvous_gets_the_environment_and_no_command_line_shows_it():
    from torch.distributed import TCPStore

    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    order = StartRendezvous(
        host="127.0.0.1",
        port=store.port,
        run_id="one",
        node=0,
        nproc=3,
        least=1,
        most=1,
        join_s=60.0,
        last_call_s=0.1,
        environ={**variables(""), "MY_TOKEN": "hidden-value"},
    )
    ours, theirs = socket.socketpair()
    with theirs:
        process = PlainStarter().start_rendezvous(order, theirs)
    try:
        assert MessageStream(ours, RendezvousResult).receive(60) == [RendezvousResult((0,), (3,), 3)]
        assert b"MY_TOKEN=hidden-value" in Path(f"/proc/{process.pid}/environ").read_bytes()
        assert b"MY_TOKEN" not in Path(f"/proc/{process.pid}/cmdline").read_bytes()
    finally:
        process.end()
        ours.close()


@pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="reads /proc")
def test_a_forked_rank_has_its_own_title(tmp_path):
    (tmp_path / "train.py").write_text(
        "from pathlib import Path\nfor name in ('comm', 'cmdline', 'environ'):\n"
        "    print(Path('/proc/self', name).read_bytes().rstrip(b'\\0\\n')[:40])\n"
    )
    environ = {"FIRST": "kept", **variables("")}
    with ForkStarter.start(environ, ()) as starter:
        assert not starter.wait_until_ready()
        output = Output(stdout=tmp_path / "out", stderr=tmp_path / "err")
        target = Script(str(tmp_path / "train.py"))
        rank = starter.start_rank(12, target, environ, output=output, failure=tmp_path / "error")
        supervise([rank], failure_of=lambda *_: None, timeout_s=60)
    comm, cmdline, kept = (tmp_path / "out").read_text().splitlines()
    assert (comm, cmdline) == ("b'rank12 train.py'", "b'train.py [rank 12]'")
    assert "rank" not in kept


class KilledWhenPolled(RankProcess):
    """A child of the fork parent, which is killed in the moment before the child is polled."""

    def __init__(self, child, parent):
        super().__init__(child.rank, child.pid)
        self._child, self._parent = child, parent

    def poll(self):
        if self._parent is not None:
            os.kill(self._parent, signal.SIGKILL)
            os.waitid(os.P_PID, self._parent, os.WEXITED | os.WNOWAIT)
            self._parent = None
        return self._child.poll()


@pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="ranks are not forked here")
@pytest.mark.parametrize("polled", ["store", "rank"])
def test_a_killed_fork_parent_is_the_cause_though_its_child_is_seen_first(tmp_path, polled):
    target, environ = Program("sleep", ("1000",)), variables("")
    output = Output(stdout=tmp_path / "out", stderr=tmp_path / "err")
    with ForkStarter.start(environ, (), fresh=True) as starter:
        starter.wait_until_ready()
        child = starter.start_rank(0, target, environ, output=output, failure=tmp_path / "error")
        parent = int(Path(f"/proc/{child.pid}/stat").read_text().rpartition(")")[2].split()[1])
        killed = KilledWhenPolled(child, parent)
        rank, store = (killed, None) if polled == "rank" else (child, killed)
        outcome = supervise(
            [rank], failure_of=lambda *_: None, lost=lambda: describe_lost(starter, store), timeout_s=60
        )
    text = verdict(outcome)
    assert text.startswith(f"the fork parent of the ranks (pid {parent}) ended with SIGKILL"), text
    assert not any(exit_.failed for exit_ in outcome.exits)
