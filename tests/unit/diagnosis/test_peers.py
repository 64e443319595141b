"""Guards of several nodes: all report to node 0 what they see, and it alone decides."""

import os

from diagnosis.collectives import away, call, doing, waiting

from shardwise.diagnosis.guard.peers import PeerGuards


class Wires:
    """Two nodes and a hub, without sockets."""

    def __init__(self):
        self.inboxes = {0: [], 1: []}
        self.ends = [End(self, node) for node in (0, 1)]


class End:
    def __init__(self, wires, node):
        self.wires, self.node, self.own_address = wires, node, f"10.0.0.{node + 1}"

    def relay(self, body, *, to_all=False):
        for node, inbox in self.wires.inboxes.items():
            if node != self.node and (to_all or node == 0):
                inbox.append(body)

    def take_relayed(self):
        found, self.wires.inboxes[self.node] = self.wires.inboxes[self.node], []
        return found


def pair():
    return [PeerGuards(end, poll_s=1.0) for end in Wires().ends]


def test_a_status_arrives_as_it_was_sent():
    zero, one = pair()
    statuses = {2: waiting(2), 3: away(3, activity=doing("compiles"))}
    one.share(statuses, quiet_s=5)
    zero.receive(now=100.0)
    assert zero.ranks(now=100.0) == statuses


def test_links_are_shared_with_node_0_and_forgotten_when_nothing_follows():
    zero, one = pair()
    one.share_links([os.getpid()], now=100.0)
    zero.receive(now=100.0)
    assert [(links.node, links.addresses[0]) for links in zero.links(now=100.0)] == [(1, "10.0.0.2")]
    assert zero.links(now=110.0) == []


def test_nothing_is_reported_while_ranks_progress():
    zero, one = pair()
    one.share({3: away(3, quiet_s=1)}, quiet_s=5)
    zero.receive(now=100.0)
    assert zero.ranks(now=100.0) == {}


def test_reports_are_forgotten_when_nothing_follows():
    zero, one = pair()
    one.share({2: waiting(2)}, quiet_s=5)
    zero.receive(now=100.0)
    assert zero.ranks(now=103.0)
    assert zero.ranks(now=110.0) == {}


def test_node_0_decides_requests_and_reports():
    zero, one = pair()
    assert (zero.decides, one.decides) == (True, False)
    zero.request_activity([3])
    zero.relay("rank 3 sleeps")
    one.receive(now=0.0)
    assert one.missed == {3}
    assert one.verdicts == ["rank 3 sleeps"]
    one.receive(now=1.0)
    assert (one.missed, one.verdicts) == (set(), [])


def test_new_calls_are_sent_to_node_0_and_by_it_to_no_other():
    zero, one = pair()
    news = {2: [call(1), call(2, match="max float32*4")], 3: [call(1)]}
    one.share_calls(news)
    zero.share_calls(news)
    zero.receive(now=0.0)
    one.receive(now=0.0)
    assert [(run.rank, run.calls()) for run in zero.calls] == [(2, news[2])]
    assert one.calls == []
    zero.receive(now=1.0)
    assert zero.calls == []


def test_messages_about_ranks_that_have_ended_are_dropped():
    zero, one = pair()
    one.share({2: waiting(2)}, quiet_s=5)
    zero.receive(now=0.0)
    one.share_calls({2: [call(1)]})
    zero.forget()
    zero.receive(now=1.0)
    assert (zero.calls, zero.ranks(now=1.0)) == ([], {})
