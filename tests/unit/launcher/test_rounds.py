"""One node between its ranks and the hub."""

import signal
from types import SimpleNamespace

import pytest

from shardwise.launcher.local.processes import RendezvousResult
from shardwise.launcher.nodes import rounds
from shardwise.launcher.nodes.messages import JoinRound, Leaving
from shardwise.launcher.nodes.rounds import _Node


class Hub:
    """The link to a hub that listens and never answers."""

    lost = ""

    def __init__(self):
        self.heard = []

    def send(self, message):
        self.heard.append(message)

    def take(self):
        return []


def test_signal_after_the_one_that_stopped_the_ranks_is_the_second():
    hub, signals = Hub(), []
    node = _Node(
        spec=None,
        nodes=None,
        link=hub,
        run=None,
        starter=None,
        environ={},
        interface="",
        signals=signals,
        note=lambda _: None,
        log=None,
    )
    node.report_signal(signal.SIGTERM)
    node._poll()
    signals.append(signal.SIGTERM)
    with pytest.raises(KeyboardInterrupt):
        node._poll()
    assert hub.heard == [Leaving(signal.SIGTERM)]


@pytest.mark.parametrize(("num_local", "cores"), [(2, 8), (4, 4), (64, 1)])
def test_launchers_on_one_machine_divide_its_cores(monkeypatch, num_local, cores):
    monkeypatch.setattr(rounds, "usable_cores", lambda: 8)
    link = SimpleNamespace(node=1, hub_address="127.0.0.1")
    join = JoinRound(round=0, port=1, least=2, most=2, last_call_s=1.0, restarts=0)
    members = RendezvousResult(nodes=(0, 1), nprocs=(2, 2), num_local=num_local)
    assert rounds._assign(link, join, members, {}).cores == cores
