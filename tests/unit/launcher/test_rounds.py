"""One node between its ranks and the hub."""

import signal

import pytest

from shardwise.launcher.nodes.messages import Leaving
from shardwise.launcher.nodes.rounds import _Node


class Hub:
    """The link to a hub that listens and says nothing."""

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
