from refusals import refuses
from shardwise.launcher.nodes import network
from shardwise.launcher.nodes.network import interface_of, is_own, listen, listening_address, own_addresses, resolve


def named(monkeypatch, address):
    """Have every host name mean `address`."""
    monkeypatch.setattr(network, "resolve", lambda *_: (address,))


def test_loopback_is_an_own_address_on_lo():
    assert own_addresses()["lo"] == "127.0.0.1"
    assert interface_of("127.0.0.1") == "lo"
    assert is_own("127.0.0.1")
    assert not is_own("192.0.2.1")
    assert interface_of("192.0.2.1") == ""


def test_name_that_means_nothing_is_refused_within_seconds():
    with refuses("rendezvous.host-not-resolved"):
        resolve("no-such-host.invalid", 1, timeout_s=0.1)


def test_address_that_the_user_typed_is_taken_as_it_is():
    assert listening_address("127.0.0.1", 1, "") == "127.0.0.1"
    assert listening_address("192.0.2.1", 1, "127.0.0.1") == "127.0.0.1"


def test_node_zero_elsewhere_than_its_endpoint_is_refused_with_the_addresses_it_has():
    with refuses("launch.master-address-foreign", "192.0.2.1"):
        listening_address("192.0.2.1", 1, "")
    with refuses("launch.local-address-unknown", "192.0.2.1"):
        listening_address("127.0.0.1", 1, "192.0.2.1")


def test_host_name_that_leads_to_loopback_means_the_only_address_that_others_reach(monkeypatch):
    named(monkeypatch, "127.0.1.1")
    monkeypatch.setattr(network, "own_addresses", lambda: {"lo": "127.0.0.1", "eth0": "10.0.0.7"})
    assert listening_address("node0", 1, "") == "10.0.0.7"
    monkeypatch.setattr(network, "own_addresses", lambda: {"eth0": "10.0.0.7", "ib0": "10.1.0.7"})
    with refuses("launch.master-address-loopback", "10.0.0.7 on eth0, 10.1.0.7 on ib0"):
        listening_address("node0", 1, "")


def test_listener_is_bound_to_one_address_and_a_taken_port_is_named():
    with listen("127.0.0.1", 0) as first:
        host, port = first.getsockname()
        assert host == "127.0.0.1"
        with refuses("launch.port-in-use", f"port {port} of 127.0.0.1"):
            listen("127.0.0.1", port)
