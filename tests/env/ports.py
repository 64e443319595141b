"""Ports for tests that must name one before it is listened on."""

import contextlib
import secrets
import socket


def free_port():
    """Return a port that no system hands out by itself, so that it is still free when a command comes to use it."""
    while True:
        port = 20_000 + secrets.randbelow(10_000)  # not `random`: it is seeded alike in tests that run side by side
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
