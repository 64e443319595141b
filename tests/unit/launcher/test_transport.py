"""Messages over sockets and pipes arrive whole, and unauthenticated clients cannot break the receiver."""

import os
import socket
from concurrent.futures import ThreadPoolExecutor

import msgspec
import pytest

from shardwise.launcher.nodes.messages import Proof
from shardwise.launcher.ssh.session import Order, Signal, Start
from shardwise.launcher.transport import MessageStream, decode_line, encode_line


def test_a_message_comes_back_with_bytes_that_are_not_utf8():
    order = Start(arguments=["train.py", "odd \udcff", "é\n"], variables={"NAME\udc80": "\udcff"}, grace_s=1.5)
    line = encode_line(order)
    assert line.count(b"\n") == 1
    assert decode_line(line, Order) == order


@pytest.mark.parametrize("line", [b"\xff", b"{", b"{}", b'{"type":"beat"', b'{"type":"no such"}', b"[" * 100_000])
def test_what_is_not_a_message_is_a_decode_error(line):
    with pytest.raises(msgspec.DecodeError):
        decode_line(line, Order)


@pytest.mark.parametrize("line", [b'{"type":"proof","mac":"\\ud800"}', b'{"type":"proof","mac":"\xff"}'])
def test_a_strict_stream_refuses_strings_that_are_not_unicode(line):
    assert decode_line(b'{"type":"proof","mac":"\\ud7ff"}', Proof, strict=True) == Proof("\ud7ff")
    with pytest.raises(msgspec.DecodeError):
        decode_line(line, Proof, strict=True)


@pytest.fixture
def ends():
    ours, theirs = socket.socketpair()
    with ours, theirs:
        yield MessageStream(ours, Order), MessageStream(theirs, Order)


def test_messages_arrive_whole_however_they_are_split(ends):
    ours, theirs = ends
    first, second = encode_line(Signal(1)), encode_line(Signal(2))
    os.write(ours.fileno(), first[:5])
    assert theirs.receive() == []
    os.write(ours.fileno(), first[5:] + second)
    assert theirs.receive(60) == [Signal(1), Signal(2)]
    os.write(ours.fileno(), first)
    ours.close()
    assert theirs.receive(60) == [Signal(1)]  # what came before the end is not lost
    assert theirs.receive(60) is None


def test_a_message_larger_than_the_buffers_is_sent_whole_with_its_descriptor(ends):
    ours, theirs = ends
    large = Start(arguments=["x" * (4 << 20)], variables={}, grace_s=0.0)
    reader, writer = os.pipe()
    with ThreadPoolExecutor() as pool:
        received = pool.submit(theirs.receive, 60)
        ours.send(large, [writer])
        assert received.result() == [large]
    os.close(writer)
    os.write(copy := theirs.take_descriptor(), b"sent")
    assert os.read(reader, 4) == b"sent"
    os.close(copy)
    os.close(reader)


def test_more_than_the_limit_without_a_line_end_is_the_end(ends):
    ours, theirs = ends
    theirs.limit_bytes = 100
    os.write(ours.fileno(), b"x" * 101)
    assert theirs.receive(60) is None


def test_what_cannot_be_sent_any_more_is_dropped(ends):
    ours, theirs = ends
    theirs.close()
    ours.send(Signal(1))
    ours.queue(Signal(1))
    assert not ours.has_unsent
    assert ours.receive(60) is None
