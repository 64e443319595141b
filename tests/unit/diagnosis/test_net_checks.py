"""Every check of hosts and links passes where all is well, and names what is wrong where it is not."""

import dataclasses
from itertools import permutations

import msgspec
import pytest

from shardwise.diagnosis.network.advice import (
    CHECKS,
    check_clocks,
    check_login,
    check_names,
    check_storage,
    check_versions,
    diagnose,
    good_hosts,
    launch_lines,
)
from shardwise.diagnosis.network.facts import (
    HostClock,
    HostFacts,
    HostInterface,
    LinkFacts,
    Lookups,
    NetFacts,
    PathFacts,
    PortFacts,
    Problem,
    ReachedHost,
    Route,
    StorageFacts,
)
from shardwise.diagnosis.network.link_checks import (
    check_exposure,
    check_links,
    check_mtu,
    check_port,
    check_reach,
    matrix,
)

HOSTS = ("a", "b", "c")
ADDRESS = {"a": "10.0.0.1", "b": "10.0.0.2", "c": "10.0.0.3"}
PAIRS = list(permutations(HOSTS, 2))
VERSIONS = {"Python": "3.11.2", "shardwise": "0.1.0", "torch": "2.13.0+cpu", "NCCL": ""}


def changed(value, **fields):
    return msgspec.structs.replace(value, **fields)


def host(name, *, mtu=1500, **versions):
    interface = HostInterface("eth0", ADDRESS[name], "255.255.255.0", mtu)
    return HostFacts(f"{name}.local", "/usr/bin/python3", {**VERSIONS, **versions}, (interface,), ("/runs",))


def healthy():
    lookups = Lookups(
        forward={f"{name}.local": (address,) for name, address in ADDRESS.items()},
        reverse={address: (f"{name}.local", name) for name, address in ADDRESS.items()},
    )
    return NetFacts(
        hosts=HOSTS,
        facts={name: host(name) for name in HOSTS},
        lookups=dict.fromkeys(HOSTS, lookups),
        clocks={name: HostClock(2.0 + 1e-4 * number, 1e-3) for number, name in enumerate(HOSTS)},
        reached=tuple(ReachedHost(source=one, target=other, address=ADDRESS[other]) for one, other in PAIRS),
        route=Route("network", "10.0.0.0/24", ADDRESS),
        port=PortFacts(host="a", address="10.0.0.1", port=29500),
        links=tuple(link(one, other) for one, other in PAIRS),
        paths=tuple(PathFacts(source=one, target=other, mtu=1500, ends=(1500, 1500)) for one, other in PAIRS),
        storage=(StorageFacts(folder="/runs", writer="a", readers=HOSTS),),
    )


def link(source, target, latency_s=2e-5, rate=1e9):
    return LinkFacts(source=source, target=target, latency_s=latency_s, bytes_per_s=rate)


def with_host(found, name, its):
    return changed(found, facts={**found.facts, name: its})


def unreachable(found, *pairs, why="No route to host"):
    reached = [changed(one, refusal=why) if (one.source, one.target) in pairs else one for one in found.reached]
    links = tuple(one for one in found.links if (one.source, one.target) not in pairs)
    return changed(found, reached=tuple(reached), links=links)


def slower(found, pairs, **fields):
    links = [changed(one, **fields) if (one.source, one.target) in pairs else one for one in found.links]
    return changed(found, links=tuple(links))


def renamed(found, where, **fields):
    return changed(found, lookups={**found.lookups, where: changed(found.lookups[where], **fields)})


def lost(found, *pairs, mtu):
    paths = [changed(one, mtu=mtu) if (one.source, one.target) in pairs else one for one in found.paths]
    return changed(found, paths=tuple(paths))


def stored(found, **fields):
    return changed(found, storage=(changed(found.storage[0], **fields),))


def clock_of(found, name, offset_s, error_s=1e-3):
    return changed(found, clocks={**found.clocks, name: HostClock(offset_s, error_s)})


OTHER_NAME = {"b.local": ("127.0.1.1",), "a.local": ("10.0.0.1",), "c.local": ("10.0.0.3",)}
BC = (("b", "c"), ("c", "b"))
TO_C = tuple(pair for pair in PAIRS if "c" in pair)


@dataclasses.dataclass(frozen=True)
class Bad:
    check: object
    found: NetFacts
    state: str
    expected: str
    fix: str = ""


CASES = {
    "a host that refuses the key": Bad(
        check_login,
        changed(healthy(), problems={"c": Problem("host c refused your key", "ssh-copy-id c")}),
        "fail",
        "host c refused your key",
        "ssh-copy-id c",
    ),
    "two names of one machine": Bad(
        check_login, with_host(healthy(), "c", host("b")), "fail", "hosts b and c are the same machine with 10.0.0.2"
    ),
    "another torch": Bad(
        check_versions,
        with_host(healthy(), "c", host("c", torch="2.11.0+cu128")),
        "fail",
        "torch differs: hosts a, b have 2.13.0+cpu, host c has 2.11.0+cu128",
        "install torch 2.13.0+cpu on all",
    ),
    "another minor Python": Bad(
        check_versions, with_host(healthy(), "b", host("b", Python="3.12.1")), "fail", "Python differs"
    ),
    "no shardwise": Bad(
        check_versions,
        with_host(healthy(), "b", host("b", shardwise="")),
        "fail",
        "host b has no shardwise in /usr/bin/python3, other hosts have 0.1.0",
    ),
    "NCCL on some": Bad(
        check_versions, with_host(healthy(), "a", host("a", NCCL="2.28.9")), "fail", "hosts b, c have no NCCL"
    ),
    "a name that is loopback on its own host": Bad(
        check_names,
        renamed(healthy(), "b", forward=OTHER_NAME),
        "warn",
        "b.local, the host name of b, resolves on b to 127.0.1.1, a loopback",
    ),
    "a name that leads to another machine": Bad(
        check_names,
        renamed(healthy(), "a", forward={**OTHER_NAME, "b.local": ("10.0.0.3",)}),
        "warn",
        "b.local, the host name of b, resolves on a to 10.0.0.3, an address of a different machine",
        "add '10.0.0.2 b.local' to /etc/hosts on these hosts",
    ),
    "two hosts of one name": Bad(
        check_names,
        with_host(healthy(), "c", changed(host("c"), hostname="b.local")),
        "warn",
        "hosts b, c have the same host name b.local",
    ),
    "a name without an address": Bad(
        check_names,
        renamed(healthy(), "a", forward={**OTHER_NAME, "b.local": ()}),
        "warn",
        "a cannot resolve b (b.local)",
    ),
    "names that nobody knows": Bad(
        check_names,
        changed(healthy(), lookups=dict.fromkeys(HOSTS, Lookups(forward={}, reverse={}))),
        "warn",
        "all other hosts cannot resolve a (a.local), b (b.local), c (c.local)",
    ),
    "an address with another name": Bad(
        check_names,
        renamed(healthy(), "a", reverse={"10.0.0.2": ("old.local",)}),
        "warn",
        "10.0.0.2 of b.local resolves to old.local on a",
    ),
    "a clock that is ahead": Bad(
        check_clocks, clock_of(healthy(), "b", 5.0), "warn", "the clock of b is 3.0 s ahead of the other clocks"
    ),
    "a clock that is far behind": Bad(
        check_clocks, clock_of(healthy(), "b", -58.0), "fail", "the clock of b is 60.0 s behind the other clocks"
    ),
    "a folder of its own": Bad(
        check_storage, stored(healthy(), readers=("a", "b")), "warn", "/runs of host c is not shared with a"
    ),
    "a folder that is missing": Bad(
        check_storage,
        stored(healthy(), readers=("a",), missing=("b", "c")),
        "fail",
        "hosts b, c have no directory /runs",
    ),
    "a folder nobody can write to": Bad(
        check_storage,
        stored(healthy(), writer="", readers=(), refusal="Read-only file system"),
        "warn",
        "/runs cannot be compared: no host can write to it (Read-only file system)",
    ),
    "an unreachable pair": Bad(
        check_reach,
        unreachable(healthy(), *BC),
        "fail",
        "b does not reach c at 10.0.0.3 (No route to host), nor in the other direction",
    ),
    "a pair that is unreachable in one direction": Bad(
        check_reach,
        unreachable(healthy(), ("c", "b"), why="Connection refused"),
        "fail",
        "c does not reach b at 10.0.0.2 (Connection refused)",
        "run ssh c ip route get 10.0.0.2, and check the firewall",
    ),
    "a disconnected host": Bad(
        check_reach,
        unreachable(healthy(), *TO_C),
        "fail",
        "c at 10.0.0.3 and the other hosts cannot connect to each other",
    ),
    "a host without an address": Bad(
        check_reach,
        changed(with_host(healthy(), "b", changed(host("b"), interfaces=())), route=None),
        "fail",
        "b has no IPv4 address except loopback",
    ),
    "a port in use": Bad(
        check_port,
        changed(healthy(), port=changed(healthy().port, refusal="Address already in use")),
        "warn",
        "a cannot listen on port 29500 (10.0.0.1): Address already in use",
    ),
    "a port behind a firewall": Bad(
        check_port,
        changed(healthy(), port=changed(healthy().port, cut={"b": "timed out", "c": "timed out"})),
        "fail",
        "b and 1 more cannot connect to port 29500 of a (10.0.0.1): timed out",
    ),
    "public addresses": Bad(
        check_exposure,
        changed(healthy(), route=Route("network", "8.8.8.0/24", {**ADDRESS, "b": "8.8.8.8"})),
        "warn",
        "gloo and NCCL would open unauthenticated ports on public addresses of host b, such as 8.8.8.8",
        "allow only these hosts in the firewall, or use a private network",
    ),
    "packets that are lost": Bad(
        check_mtu,
        lost(healthy(), ("b", "c"), mtu=1400),
        "fail",
        "packets above 1400 bytes are lost between b and c, although the MTU is 1500",
        "find the device that drops them, or run ip link set eth0 mtu 1400 on both hosts",
    ),
    "packets that a host loses": Bad(
        check_mtu,
        lost(healthy(), *TO_C, mtu=1280),
        "fail",
        "packets above 1280 bytes are lost between c and the other hosts",
    ),
    "interfaces that differ": Bad(
        check_mtu, with_host(healthy(), "b", host("b", mtu=9000)), "warn", "the MTU differs: a 1500 on eth0, b 9000"
    ),
    "a far pair": Bad(
        check_links, slower(healthy(), BC, latency_s=0.01), "warn", "b and c: latency 10 ms, 500 times as slow as the"
    ),
    "a slow host": Bad(
        check_links,
        slower(healthy(), TO_C, bytes_per_s=1e8),
        "warn",
        "every link of c: bandwidth 100 MB/s, 10 times as slow as the 1 GB/s of the others",
        "check the cable, port and load of c, or exclude one host",
    ),
    "a cluster that is thin everywhere": Bad(
        check_links, slower(healthy(), PAIRS, bytes_per_s=1e7), "warn", "all pairs: bandwidth 10 MB/s, below 100 MB/s"
    ),
    "a stream that is stuck": Bad(
        check_links,
        changed(healthy(), links=tuple(one for one in healthy().links if (one.source, one.target) not in BC)),
        "fail",
        "connections between b and c open, but no data arrives",
    ),
}


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_a_healthy_cluster_passes(check):
    verdicts = check(healthy())
    assert [verdict.state for verdict in verdicts] == ["ok"], verdicts
    assert not verdicts[0].fix


@pytest.mark.parametrize("name", CASES)
def test_what_is_wrong_is_named_with_what_to_do(name):
    case = CASES[name]
    verdicts = case.check(case.found)
    assert verdicts
    assert case.expected in verdicts[0].fact
    assert verdicts[0].state == case.state
    assert case.fix in verdicts[0].fix
    assert verdicts[0].fix


def test_every_check_has_a_case_in_which_it_is_not_ok():
    assert {case.check for case in CASES.values()} == set(CHECKS)


@pytest.mark.parametrize("name", CASES)
def test_a_fault_is_not_reported_twice(name):
    """One fault is reported once: a disconnected host is one sentence, not one for every pair."""
    case = CASES[name]
    assert len(case.check(case.found)) == 1, case.check(case.found)


def test_a_clock_is_not_blamed_for_a_long_way():
    found = clock_of(healthy(), "b", 5.0, error_s=4.0)
    assert [verdict.state for verdict in check_clocks(found)] == ["ok"]


def test_blocked_datagrams_are_no_fault():
    found = lost(healthy(), *PAIRS, mtu=0)
    assert check_mtu(found)[0].state == "ok"
    assert "not tested" in check_mtu(found)[0].fact


def test_one_host_alone_has_no_links_to_check():
    only = changed(healthy(), hosts=("a",), facts={"a": host("a")}, links=(), paths=(), reached=(), port=None)
    names = {verdict.name for verdict in diagnose(only)}
    assert names == {"login", "versions", "clocks", "storage"}


def test_of_hosts_none_of_which_answers_only_that_is_reported():
    problems = {name: Problem(f"host {name} cannot be reached", "ping") for name in HOSTS}
    nobody = NetFacts(hosts=HOSTS, problems=problems, storage=(StorageFacts(folder="/runs"),))
    assert [(verdict.name, verdict.state) for verdict in diagnose(nobody)] == [("login", "fail")] * 3
    assert launch_lines(nobody, TYPED) == []


def test_two_hosts_have_nothing_to_compare_with_and_are_judged_by_themselves():
    both = tuple(one for one in healthy().links if {one.source, one.target} == {"b", "c"})
    facts = {name: host(name) for name in ("b", "c")}
    two = changed(healthy(), hosts=("b", "c"), facts=facts, links=both, route=None)
    two = changed(two, route=Route("network", "10.0.0.0/24", {name: ADDRESS[name] for name in facts}))
    two = changed(two, reached=tuple(one for one in two.reached if {one.source, one.target} == {"b", "c"}))
    assert [verdict.state for verdict in check_links(two)] == ["ok"]
    far = slower(two, BC, latency_s=0.01)
    assert check_links(far)[0].fact == "b and c: latency 10 ms, above 2 ms"


TYPED = {"a": "me@a:8", "b": "b", "c": "c"}


def test_the_launch_line_names_all_hosts_and_their_endpoint():
    line, note = launch_lines(healthy(), TYPED)
    assert line == "shardwise launch --hosts me@a:8,b,c --master-addr 10.0.0.1 train.py"
    assert note.endswith("GLOO_SOCKET_IFNAME=eth0 NCCL_SOCKET_IFNAME=eth0")


@pytest.mark.parametrize(
    ("found", "good"),
    [
        (unreachable(healthy(), *BC), ("a", "b")),
        (unreachable(healthy(), *(pair for pair in PAIRS if "a" in pair)), ("b", "c")),
        (lost(healthy(), *TO_C, mtu=1280), ("a", "b")),
        (with_host(healthy(), "b", host("b", torch="2.11.0")), ("a", "c")),
        (stored(healthy(), missing=("a",)), ("b", "c")),
    ],
    ids=["unreachable pair", "first host disconnected", "lost packets", "other torch", "missing folder"],
)
def test_the_launch_line_leaves_out_what_would_not_work(found, good):
    assert good_hosts(found) == good
    without, line, _ = launch_lines(found, TYPED)
    assert without == f"# without {next(iter(set(HOSTS) - set(good)))}"
    assert f"--master-addr {ADDRESS[good[0]]} " in line


def test_hosts_of_which_no_two_are_good_get_no_launch_line():
    found = with_host(with_host(healthy(), "b", host("b", torch="1")), "c", host("c", torch="2"))
    assert launch_lines(found, TYPED) == []


def test_interfaces_of_different_names_are_reported_by_host():
    other = changed(host("b"), interfaces=(HostInterface("ens3", "10.0.0.2", "255.255.255.0", 1500),))
    note = launch_lines(with_host(healthy(), "b", other), TYPED)[1]
    assert "on a: GLOO_SOCKET_IFNAME=eth0" in note
    assert "on b: GLOO_SOCKET_IFNAME=ens3" in note


def test_the_matrix_shows_every_way_and_marks_the_slow_ones():
    rows = matrix(HOSTS, slower(unreachable(healthy(), ("a", "b")), BC, latency_s=0.01).links)
    assert rows == [
        ["from \\ to", "a", "b", "c"],
        ["a", "-", "-", "20 us / 1 GB/s"],
        ["b", "20 us / 1 GB/s", "-", "10 ms / 1 GB/s*"],
        ["c", "20 us / 1 GB/s", "10 ms / 1 GB/s*", "-"],
    ]
