"""The probe on this machine: it answers, serves only those who know the secret, and leaves nothing behind."""

import signal
import socket
import subprocess
import time
from contextlib import contextmanager

import pytest

from shardwise.diagnosis.network.facts import Probes, ProbeSession, probe_command
from shardwise.diagnosis.network.probe import SILENCE_S
from shardwise.launcher.nodes.network import listen
from shardwise.launcher.ssh.run import HostSpec

HERE = "127.0.0.1"
SECRET, GREETING = "w" * 32, "g" * 32
PATIENCE_S = 30


@contextmanager
def probes(count=1):
    sessions = [ProbeSession(HostSpec(name=f"p{number}"), f"p{number}", is_here=True) for number in range(count)]
    with Probes(sessions) as hub:
        yield hub
    assert all(session.process.poll() is not None for session in sessions)


@pytest.fixture(scope="module")
def pair():
    """Two probes, of which the second has a door open."""
    with probes(2) as hub:
        order = {"type": "open", "word": SECRET, "greeting": GREETING, "doors": [[HERE, 0]]}
        opened = hub.question({"p0": {**order, "doors": []}, "p1": order}, PATIENCE_S)
        yield hub, opened["p1"]["doors"][0]


def ask(hub, probe, /, **order):
    return hub.question({probe: order}, PATIENCE_S)[probe]


def test_a_probe_reports_versions_without_importing_torch(pair):
    answer = ask(pair[0], "p0", type="look", folders=["/", "/nowhere"])
    assert answer["versions"]["torch"]
    assert answer["versions"]["shardwise"]
    assert answer["folders"] == ["/"]
    assert not any(interface["address"].startswith("127.") for interface in answer["interfaces"])


def test_a_probe_reports_names_and_addresses(pair):
    answer = ask(pair[0], "p0", type="lookup", names=["localhost", "no-such-name.invalid"], addresses=[HERE])
    assert HERE in answer["forward"]["localhost"]
    assert answer["forward"]["no-such-name.invalid"] == []
    assert set(answer["reverse"]) == {HERE}


def test_a_probe_comes_to_another_and_knows_it_by_its_greeting(pair):
    hub, door = pair
    targets = [[HERE, door["port"], GREETING], [HERE, door["port"], "x" * 32]]
    reached = ask(hub, "p0", type="reach", targets=targets)["reached"]
    assert reached[0] == {"own": HERE, "refusal": ""}
    assert reached[1]["refusal"] == "a different machine answers there"


def test_a_probe_reports_why_it_cannot_connect(pair):
    with socket.socket() as closed:
        closed.bind((HERE, 0))  # bound, and nobody listens
        reached = ask(pair[0], "p0", type="reach", targets=[[HERE, closed.getsockname()[1], GREETING]])["reached"]
    assert reached[0]["refusal"] == "Connection refused"


def test_links_are_measured_and_packets_of_the_interfaces_size_arrive(pair):
    hub, door = pair
    found = ask(hub, "p0", type="measure", address=HERE, port=door["port"], seconds=0.05)
    assert 0 < found["latency_s"] <= found["usual_s"]
    assert found["bytes_per_s"] > 0
    assert ask(hub, "p0", type="path", address=HERE, port=door["datagrams"], sizes=[60_000, 1500])["mtu"] == 60_000


def test_a_packet_that_the_interface_does_not_take_does_not_arrive(pair):
    """Loopback takes 65536 bytes; a datagram that is larger with its headers is not sent at all."""
    hub, door = pair
    assert ask(hub, "p0", type="path", address=HERE, port=door["datagrams"], sizes=[65_600, 576])["mtu"] == 576


def test_an_unauthenticated_client_is_not_served(pair):
    with socket.create_connection((HERE, pair[1]["port"]), timeout=PATIENCE_S) as end:
        end.sendall(b"x" * 32)
        assert end.recv(64) == b""


def test_a_port_that_is_taken_is_refused_by_its_reason(pair):
    order = {"type": "open", "word": SECRET, "greeting": GREETING, "doors": [[HERE, pair[1]["port"]]]}
    assert ask(pair[0], "p0", **order)["doors"][0]["refusal"] == "Address already in use"


def test_an_impossible_request_gives_no_answer_and_the_probe_continues(pair):
    assert pair[0].question({"p0": {"type": "measure", "address": HERE, "port": 1, "seconds": 0.01}}, PATIENCE_S) == {}
    assert ask(pair[0], "p0", type="clock")["at"] > 0


def started():
    """Start a probe that stands alone, and have it write a file and open a door."""
    session = ProbeSession(HostSpec(name="alone"), "alone", is_here=True)
    return session, Probes([session])


@pytest.mark.parametrize("end", ["stdin", "SIGTERM", "SIGHUP"])
def test_a_probe_that_ends_takes_its_files_and_ports_along(tmp_path, end):
    session, hub = started()
    with hub:
        assert ask(hub, "alone", type="write", folder=str(tmp_path), name="word", text="me")["refusal"] == ""
        assert ask(hub, "alone", type="read", folder=str(tmp_path), name="word")["text"] == "me"
        order = {"type": "open", "word": SECRET, "greeting": GREETING, "doors": [[HERE, 0]]}
        port = ask(hub, "alone", **order)["doors"][0]["port"]
        with socket.create_connection((HERE, port), timeout=PATIENCE_S) as client:
            client.sendall(SECRET.encode() + b"g")
            while client.recv(64):  # the probe closes the connection, which stays in TIME-WAIT on its port
                pass
        if end == "stdin":
            session.close_stdin()
        else:
            session.process.send_signal(getattr(signal, end))
        session.process.wait(PATIENCE_S)
        assert list(tmp_path.iterdir()) == []
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection((HERE, port), timeout=PATIENCE_S)
        listen(HERE, port).close()  # a launcher may use the port at once


@pytest.mark.prove
def test_a_probe_that_hears_nothing_leaves(tmp_path):
    session, hub = started()
    assert ask(hub, "alone", type="write", folder=str(tmp_path), name="word", text="me")["refusal"] == ""
    begun = time.monotonic()
    session.process.wait(PATIENCE_S)  # nobody beats outside the context
    assert time.monotonic() - begun > SILENCE_S - 2
    assert list(tmp_path.iterdir()) == []
    with hub:
        pass


def test_a_missing_python_is_recognised_by_its_exit_code():
    command = probe_command().replace("test -x ", "test -x /nowhere")
    assert subprocess.run(["/bin/sh", "-c", command], stdin=subprocess.DEVNULL, check=False).returncode == 92
