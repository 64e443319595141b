"""A process that serves one attempt's store, for ranks that are not forked."""

from __future__ import annotations

import socket
import sys

from shardwise.launcher.local.fork_parent import store_work
from shardwise.launcher.local.orders import StartStore

if __name__ == "__main__":
    descriptor, parent = (int(text) for text in sys.argv[1:3])
    listener = socket.socket(fileno=descriptor)
    host, port = listener.getsockname()[:2]
    listener.detach()
    store_work(StartStore(port, host), descriptor, parent)()
