"""The hub and its links over real sockets: who gets in, who is heard, who is missed."""

import contextlib
import socket
import time

import pytest

from refusals import refuses
from shardwise.launcher.nodes import node as node_module
from shardwise.launcher.nodes.hub import start_hub
from shardwise.launcher.nodes.membership import NodeLimits
from shardwise.launcher.nodes.messages import (
    PROTOCOL,
    Admit,
    Challenge,
    FromHub,
    Hello,
    JoinRound,
    Leaving,
    NodeEnded,
    NodeReady,
    Opened,
    Over,
    RoundJoined,
    node_stream,
)
from shardwise.launcher.nodes.network import listen
from shardwise.launcher.nodes.node import _authenticate, join_hub
from shardwise.launcher.policy import RankExit

FACTS = {"shardwise": "1", "command": "train.py"}


@pytest.fixture
def port():
    """A hub for two nodes; its port."""
    with listen("127.0.0.1", 0) as listener:
        number = listener.getsockname()[1]
        hub = start_hub(
            listener, "secret", NodeLimits(least=2, most=2, join_s=60), facts=FACTS, host="a", run="/run/of/a"
        )
    yield number
    hub.end()


def join(port, host="a", *, secret="secret", timeout_s=60.0, **facts):
    hello = Hello(host, None, {**FACTS, **facts}, is_host=host == "a")
    return join_hub("127.0.0.1", port, secret, hello, timeout_s=timeout_s, note=lambda _: None)


def heard(link, kind, seconds=60):
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        for message in link.take():
            if isinstance(message, kind):
                return message
        time.sleep(0.01)
    raise AssertionError(f"no {kind.__name__}; link: {link.lost or 'fine'}")


def test_two_nodes_join_a_round_and_learn_how_it_ended(port):
    a, b = join(port), join(port, "b")
    assert (a.node, b.node, b.run) == (0, 1, "/run/of/a")
    a.send(Opened(0, 4000))
    b.send(NodeReady())
    assert heard(a, JoinRound) == heard(b, JoinRound)
    for link in (a, b):
        link.send(RoundJoined(0, (0, 1)))
        link.send(NodeEnded(0, (RankExit(rank=link.node, returncode=0, at=0.0),)))
    assert heard(a, Over) == heard(b, Over) == Over()
    a.close()
    b.close()


def test_the_limit_of_silence_is_that_of_node_0(monkeypatch):
    monkeypatch.setattr(node_module, "BEAT_S", 60.0)  # no node sends a second heartbeat
    limits = NodeLimits(least=1, most=2, join_s=60, lost_s=0.4)
    with listen("127.0.0.1", 0) as listener:
        port = listener.getsockname()[1]
        hub = start_hub(listener, "secret", limits, facts=FACTS, host="a", run="/run")
    start = time.monotonic()
    a = join(port)
    while not a.lost and time.monotonic() < start + 60:
        time.sleep(0.01)
    assert 0.3 < time.monotonic() - start < 4.0
    assert a.lost
    a.close()
    hub.end()


def relayed(link, seconds=60):
    deadline = time.monotonic() + seconds
    while not (found := link.take_relayed()) and time.monotonic() < deadline:
        time.sleep(0.01)
    return found


def test_messages_of_guards_go_to_node_0_and_from_it_to_the_others(port):
    a, b = join(port), join(port, "b")
    b.relay("seen")
    assert relayed(a) == ["seen"]
    a.relay("missed", to_all=True)
    assert relayed(b) == ["missed"]
    assert a.take_relayed() == []
    a.close()
    b.close()


@pytest.mark.parametrize(
    ("options", "refusal"),
    [
        ({"secret": "other"}, ("rendezvous.wrong-secret", "SHARDWISE_SECRET", "--rdzv-id")),
        ({"command": "other.py"}, ("rendezvous.nodes-differ", "b has command 'other.py'", "(a) has 'train.py'")),
    ],
)
def test_one_that_does_not_belong_is_refused(port, options, refusal):
    with refuses(*refusal):
        join(port, "b", **options)


def test_node_that_hangs_up_is_missed_at_once(port):
    a, b = join(port), join(port, "b")
    b.send(NodeReady())
    a.send(Opened(0, 4000))
    heard(b, JoinRound)
    for link in (a, b):
        link.send(RoundJoined(0, (0, 1)))
    time.sleep(1)  # for the hub to hear of both, which shows nowhere
    b.close()
    a.send(NodeEnded(0, (RankExit(rank=0, returncode=-15, stopped=True, at=0.0),)))
    assert heard(a, Over).lost.startswith("node 1 (b) is lost: its connection closed")
    a.close()


def test_connections_that_send_nonsense_or_nothing_are_closed(port):
    with (
        socket.create_connection(("127.0.0.1", port)) as mumbling,
        socket.create_connection(("127.0.0.1", port)) as mute,
    ):
        mumbling.sendall(b"GET / HTTP/1.1\r\n\r\n")
        mumbling.settimeout(4.5)  # sooner than a silent one
        while mumbling.recv(4096):
            pass
        mute.settimeout(60)
        while mute.recv(4096):
            pass
    assert join(port).node == 0  # and it still serves


def test_a_flood_of_half_open_connections_keeps_no_node_out_and_loses_none(port):
    a = join(port)
    with contextlib.ExitStack() as stack:
        flood = [stack.enter_context(socket.create_connection(("127.0.0.1", port))) for _ in range(600)]
        b = join(port, "b")
        a.send(Opened(0, 4000))
        b.send(NodeReady())
        assert heard(a, JoinRound) == heard(b, JoinRound)
        flood[0].settimeout(60)
        while flood[0].recv(4096):  # the oldest is closed in favour of those that came later
            pass
    assert not a.lost
    a.close()
    b.close()


def test_node_0_receives_the_addresses_of_all_nodes_before_they_are_sent_to_its_store(port):
    a, b = join(port), join(port, "b")
    a.send(Opened(0, 4000))
    b.send(NodeReady())
    first, *_, last = until(a, JoinRound)
    assert (first, type(last)) == (Admit(("127.0.0.1",)), JoinRound)
    assert not any(isinstance(message, Admit) for message in until(b, JoinRound))
    a.close()
    b.close()


def until(link, kind, seconds=60):
    """Return all that is heard, up to the first of one kind."""
    found, deadline = [], time.monotonic() + seconds
    while not any(isinstance(message, kind) for message in found):
        assert time.monotonic() < deadline, found
        found += link.take()
        time.sleep(0.01)
    return found


@pytest.mark.parametrize(
    "line",
    [
        '{"type":"proof","mac":"é","nonce":"a"}'.encode(),
        b'{"type":"proof","mac":"\xff","nonce":"a"}',
        b'{"type":"beat","x":' + b"[" * 1900,
    ],
    ids=["not ASCII", "not UTF-8", "nested"],
)
def test_line_of_an_unauthenticated_peer_cannot_end_the_hub(port, line):
    with socket.create_connection(("127.0.0.1", port)) as client:
        client.settimeout(60)
        client.sendall(line + b"\n")
        while client.recv(4096):
            pass
    a = join(port)
    assert a.node == 0
    a.close()


def test_node_that_leaves_by_a_signal_there_is_not_is_hung_up_on(port):
    a, b = join(port), join(port, "b")
    b.send(Leaving(99))
    deadline = time.monotonic() + 60
    while not b.lost and time.monotonic() < deadline:
        time.sleep(0.01)
    assert "closed its connection" in b.lost
    again = join(port, "b")
    assert (again.node, a.lost) == (1, "")
    for link in (a, b, again):
        link.close()


def test_endless_line_of_an_unauthenticated_peer_is_not_kept(port):
    with socket.create_connection(("127.0.0.1", port)) as client:
        client.settimeout(60)
        with pytest.raises(ConnectionError):
            client.sendall(b"x" * (64 << 20))


def test_hub_that_speaks_another_language_is_refused():
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(5)
        client = socket.create_connection(server.getsockname())
        end, _ = server.accept()
        node_stream(end, FromHub).queue(Challenge("nonce", PROTOCOL + 1, "9.9"))
        with refuses("rendezvous.protocol-mismatch", "'9.9'", "'1'"):
            _authenticate(node_stream(client, FromHub), "here", "secret", Hello("b", None, FACTS))
        client.close()
        end.close()


def test_nobody_at_the_endpoint_is_an_error_after_the_time_that_was_given():
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        with refuses("rendezvous.unreachable", "127.0.0.1:"):
            join(unused.getsockname()[1], "b", timeout_s=0.2)
