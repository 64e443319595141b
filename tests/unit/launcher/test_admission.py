"""A socket filter: admitted machines connect, others get no answer. Loopback's many addresses stand for machines."""

import socket
import sys

import pytest

from shardwise.launcher.nodes.network import admit_only

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="socket filters are Linux's")


@pytest.fixture
def listener():
    with socket.create_server(("127.0.0.1", 0)) as made:
        yield made


def connects(listener, source):
    """Return whether one at address `source` gets a connection, which then works."""
    with socket.socket(listener.family) as end:
        end.settimeout(0.5)
        end.bind((source, 0))
        try:
            end.connect(listener.getsockname()[:2])
        except TimeoutError:
            return False
        accepted, _ = listener.accept()
        with accepted:
            accepted.sendall(b"x")
            return end.recv(1) == b"x"


def test_admitted_addresses_and_the_own_one_connect_and_others_get_no_answer(listener):
    assert connects(listener, "127.0.0.9")
    assert admit_only(listener, ["127.0.0.2", "127.0.0.3"])
    assert [connects(listener, f"127.0.0.{host}") for host in (1, 2, 3, 4)] == [True, True, True, False]


def test_the_last_list_counts(listener):
    admit_only(listener, ["127.0.0.2"])
    admit_only(listener, ["127.0.0.3"])
    assert [connects(listener, f"127.0.0.{host}") for host in (2, 3)] == [False, True]


def test_a_thousand_machines_fit_and_more_than_a_filter_holds_are_left_unfiltered(listener):
    machines = [f"127.0.{block}.{host}" for block in range(1, 5) for host in range(1, 251)]
    assert admit_only(listener, machines)
    assert [connects(listener, source) for source in ("127.0.4.250", "127.0.4.251")] == [True, False]
    assert not admit_only(listener, [f"127.1.{block}.{host}" for block in range(1, 9) for host in range(1, 251)])


def test_ipv6_addresses_are_compared_whole():
    if not socket.has_ipv6:
        pytest.skip("no IPv6")
    try:
        listener = socket.create_server(("::1", 0), family=socket.AF_INET6)
    except OSError:
        pytest.skip("no IPv6 on loopback")
    with listener:
        assert admit_only(listener, ["10.0.0.1", "fe80::1%lo"])
        assert connects(listener, "::1")
