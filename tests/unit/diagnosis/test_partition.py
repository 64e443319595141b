"""Nodes that have lost each other, from the kernel's table of connections."""

import os
import socket

import pytest
from diagnosis.collectives import waiting, world

from shardwise.diagnosis.guard.hang import decide
from shardwise.diagnosis.guard.replicas import Links, describe_partition, find_connections, read_links

HEAD = "  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode"


def row(*, remote="0300A00A:C350", state="01", timer="01", repeats=5, inode=77):
    queues = "00000020:00000000"
    return f"   1: 0200A00A:1F90 {remote} {state} {queues} {timer}:00000100 {repeats:08X}     0        0 {inode} 2"


@pytest.mark.parametrize(
    ("changes", "found"),
    [
        ({}, {"10.160.0.3"}),
        ({"remote": "0000000000000000FFFF00000300A00A:C350"}, {"10.160.0.3"}),
        ({"remote": "B80D0120000000000000000001000000:C350"}, {"2001:db8::1"}),
        ({"repeats": 2}, set()),  # a lost packet or two
        ({"timer": "04"}, set()),  # the other end is there and takes nothing, as a stopped process
        ({"timer": "00"}, set()),
        ({"state": "02"}, {"10.160.0.3"}),  # it is still being made
        ({"state": "0A"}, set()),
        ({"inode": 78}, set()),  # of another process
    ],
    ids=str,
)
def test_a_connection_counts_when_its_data_is_sent_again_and_again(changes, found):
    connections = find_connections([HEAD, row(**changes)], {"77"})
    assert {each.remote for each in connections if not each.is_answered} == found


def test_a_connection_that_is_answered_is_not_reported():
    with socket.create_server(("127.0.0.1", 0)) as listener, socket.create_connection(listener.getsockname()) as one:
        one.send(b"x")
        assert read_links(1, "10.0.0.2", [os.getpid()]) == Links(1, socket.gethostname(), ("10.0.0.2",))


ZERO, ONE, TWO = (Links(node, host, (f"10.0.0.{node + 1}", f"fd00::{node + 1}")) for node, host in enumerate("abc"))


def without_answer(links, *addresses):
    return Links(links.node, links.host, links.addresses, addresses)


def test_a_pair_is_named_once_with_both_hosts():
    text = describe_partition([ZERO, without_answer(TWO, "10.0.0.2"), without_answer(ONE, "10.0.0.3", "fd00::3")])
    assert text.startswith("node 1 (b, 10.0.0.2) gets no answer from node 2 (c, 10.0.0.3)")
    assert text.count("gets no answer") == 1


def test_an_address_of_no_node_is_left_out():
    assert describe_partition([ZERO, without_answer(ONE, "35.186.0.1")]) == ""


def test_links_that_work_are_not_reported():
    assert describe_partition([ZERO, ONE, TWO]) == ""


def test_ranks_that_are_all_in_the_call_wait_for_the_network():
    ranks = world(*(waiting(rank) for rank in range(4)))
    assert decide(ranks, 10) is None
    stall = decide(ranks, 10, "node 1 gets no answer from node 2")
    assert stall.is_verdict
    assert stall.text.startswith("ranks 0-3 wait in all_reduce #5")
    assert stall.text.endswith("for 12 s; node 1 gets no answer from node 2")
    assert decide(ranks, 20, "node 1 gets no answer from node 2") is None
