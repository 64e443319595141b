import msgspec
import pytest

from shardwise.launcher.local.orders import decode_line, encode_line
from shardwise.launcher.ssh.session import Order, Start


def test_a_message_comes_back_with_bytes_that_are_not_utf8():
    order = Start(words=["train.py", "odd \udcff", "é\n"], variables={"NAME\udc80": "\udcff"}, grace_s=1.5)
    line = encode_line(order)
    assert line.count(b"\n") == 1
    assert decode_line(line, Order) == order


@pytest.mark.parametrize("line", [b"\xff", b"{", b"{}", b'{"type":"beat"', b'{"type":"no such"}', b"[" * 100_000])
def test_what_is_not_a_message_is_a_decode_error(line):
    with pytest.raises(msgspec.DecodeError):
        decode_line(line, Order)
