"""A cable with a delay: two TAP interfaces in two network namespaces, every frame passed on after a while.

Arguments: process and interface of one end, process and interface of the other, milliseconds.
"""

import collections
import ctypes
import fcntl
import os
import select
import struct
import sys
import time

TUNSETIFF, TAP, NO_PACKET_INFORMATION = 0x400454CA, 0x0002, 0x1000
FRAME = 65536


def open_tap(pid, name):
    """Make a TAP interface in the network namespace of process `pid`; it lives as long as the descriptor."""
    space = os.open(f"/proc/{pid}/ns/net", os.O_RDONLY)
    if ctypes.CDLL(None, use_errno=True).setns(space, 0):
        raise OSError(ctypes.get_errno(), f"no way into the namespace of {pid}")
    os.close(space)
    tap = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(tap, TUNSETIFF, struct.pack("16sH22x", name.encode(), TAP | NO_PACKET_INFORMATION))
    return tap


def relay(left, right, delay_s):
    """Pass frames both ways for ever, each `delay_s` after it came."""
    other = {left: right, right: left}
    waiting = collections.deque()  # one delay for all, so that those who came first are due first
    while True:
        rest_s = None if not waiting else max(0.0, waiting[0][0] - time.monotonic())
        for tap in select.select(list(other), [], [], rest_s)[0]:
            waiting.append((time.monotonic() + delay_s, other[tap], os.read(tap, FRAME)))
        while waiting and waiting[0][0] <= time.monotonic():
            _, tap, frame = waiting.popleft()
            try:
                os.write(tap, frame)
            except OSError:  # an interface that is down takes nothing, as an unplugged cable
                continue


if __name__ == "__main__":
    one, other_end = (open_tap(sys.argv[i], sys.argv[i + 1]) for i in (1, 3))
    print("ready", flush=True)
    relay(one, other_end, float(sys.argv[5]) / 1000)
