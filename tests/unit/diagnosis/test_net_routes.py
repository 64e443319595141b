"""Which addresses hosts use among themselves, whom bad pairs point to, and in which tournament pairs are measured."""

from itertools import combinations

import pytest

from shardwise.diagnosis.network.facts import (
    HostFacts,
    HostInterface,
    ReachedHost,
    blocked_pairs,
    choose_route,
    common_hosts,
    routes,
    tournament,
)


def host(**addresses):
    interfaces = tuple(HostInterface(name, address, "255.255.255.0", 1500) for name, address in addresses.items())
    return HostFacts("name", "python", {}, interfaces)


def all_reach(facts, refused=()):
    """Everybody comes to every address, but for those of `refused`."""
    return [
        ReachedHost(source=one, target=other, address=address, refusal="timed out" if address in refused else "")
        for one in facts
        for other in facts
        if one != other
        for address in facts[other].addresses
    ]


def test_hosts_with_two_networks_have_two_roads():
    facts = {"a": host(eth0="10.0.0.1", ib0="10.1.0.1"), "b": host(eth0="10.0.0.2", ib0="10.1.0.2")}
    assert [str(road) for road in routes(facts)] == ["network 10.0.0.0/24", "network 10.1.0.0/24"]


def test_an_unreachable_network_is_not_chosen():
    facts = {"a": host(eth0="10.0.0.1", ib0="10.1.0.1"), "b": host(eth0="10.0.0.2", ib0="10.1.0.2")}
    road = choose_route(facts, all_reach(facts, refused=("10.0.0.2",)))
    assert road.addresses == {"a": "10.1.0.1", "b": "10.1.0.2"}


def test_hosts_of_routed_networks_connect_by_interface():
    facts = {"a": host(eth0="10.0.0.1"), "b": host(eth0="10.5.0.1")}
    assert str(choose_route(facts, all_reach(facts))) == "interface eth0"


def test_hosts_with_nothing_alike_connect_at_their_first_addresses():
    facts = {"a": host(eth0="10.0.0.1"), "b": host(ens3="10.5.0.1")}
    assert str(choose_route(facts, all_reach(facts))) == "first addresses"


def test_a_bridge_that_every_host_has_for_itself_is_not_a_route():
    facts = {"a": host(docker0="172.17.0.1", eth0="10.0.0.1"), "b": host(docker0="172.17.0.1", eth0="10.0.0.2")}
    road = choose_route(facts, all_reach(facts, refused=("172.17.0.1",)))
    assert str(road) == "network 10.0.0.0/24"


def test_a_host_without_an_address_leaves_no_road():
    assert choose_route({"a": host(eth0="10.0.0.1"), "b": host()}, []) is None


def test_a_pair_without_messages_is_unreachable():
    facts = {"a": host(eth0="10.0.0.1"), "b": host(eth0="10.0.0.2")}
    road = choose_route(facts, [])
    assert set(blocked_pairs(road, [])) == {("a", "b"), ("b", "a")}


@pytest.mark.parametrize(
    ("bad", "who"),
    [
        ([("a", "b")], [("a", "b")]),
        ([("c", "a"), ("a", "c")], [("a", "c")]),
        ([("a", "b"), ("b", "c"), ("d", "b")], [("b",)]),
        ([("a", "b"), ("b", "c"), ("d", "b"), ("c", "d")], [("b",), ("c", "d")]),
        ([], []),
    ],
)
def test_bad_pairs_point_to_a_host_only_when_all_of_its_pairs_are_bad(bad, who):
    assert common_hosts("abcd", bad) == who


@pytest.mark.parametrize("count", [1, 2, 3, 4, 7, 8])
def test_every_pair_has_its_turn_once_and_no_host_twice_in_one(count):
    hosts = [f"h{number}" for number in range(count)]
    found = tournament(hosts)
    assert sorted(tuple(sorted(pair)) for turn in found for pair in turn) == sorted(combinations(hosts, 2))
    assert all(len({host for pair in turn for host in pair}) == 2 * len(turn) for turn in found)
    assert len(found) <= count
