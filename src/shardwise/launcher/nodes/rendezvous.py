"""The rendezvous of a round: torch's dynamic rendezvous in a separate process; the launcher does not import torch."""

from __future__ import annotations

import os
import signal
import socket
import sys
from datetime import timedelta
from typing import TYPE_CHECKING

import msgspec

from shardwise.environment import adopt, variables
from shardwise.launcher.local.processes import (
    KEY_VARIABLE,
    RendezvousResult,
    StartRendezvous,
    die_with_parent,
    ignore_stop_signals,
)
from shardwise.launcher.transport import MessageStream
from shardwise.runs.events import boot_id

if TYPE_CHECKING:
    from collections.abc import Callable

PRELOAD = "torch.distributed.elastic.rendezvous.dynamic_rendezvous"
_NO_KEEP_ALIVE = timedelta(hours=1)
"""Disables torch's keep-alive, which drops nodes with clock skew; the hub detects lost nodes."""


class _NodeCard(msgspec.Struct):
    """What a node publishes in the store after it has joined: its number, its ranks, and the CPU cores that it uses."""

    node: int
    nproc: int
    cores: str


def rendezvous_work(order: StartRendezvous, descriptor: int | None, parent: int) -> Callable[[], None]:
    """Return a function that joins the rendezvous, reports the result on socket `descriptor`, and runs until killed."""
    die_with_parent(parent)
    ignore_stop_signals()
    # Ranks use the launcher's store of the round; torch would create a second one on this node.
    adopt({**order.environ, "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"})
    answer: MessageStream[RendezvousResult] = MessageStream(socket.socket(fileno=descriptor), RendezvousResult)

    def work() -> None:
        try:
            result = _join(order)
        except Exception as error:  # noqa: BLE001 - the launcher reports whatever torch raises
            result = RendezvousResult(refusal=f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}")
        answer.send(result)
        while True:
            signal.pause()  # torch's thread keeps the rendezvous open for slower nodes

    return work


def _join(order: StartRendezvous) -> RendezvousResult:
    """Join the rendezvous through the store of this round and return the nodes that joined."""
    from torch.distributed import TCPStore  # type: ignore[attr-defined]
    from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend
    from torch.distributed.elastic.rendezvous.dynamic_rendezvous import DynamicRendezvousHandler, RendezvousTimeout

    from shardwise.launcher.nodes.signed_rendezvous import SignedBackend

    limit = timedelta(seconds=order.join_s)
    store = TCPStore(order.host, order.port, is_master=False, timeout=limit, wait_for_workers=False)
    handler = DynamicRendezvousHandler.from_backend(
        order.run_id,
        store,
        SignedBackend(C10dRendezvousBackend(store, order.run_id), order.key),
        order.least,
        order.most,
        # torch ranks nodes by the alphabetical order of their addresses, so the node number is the address.
        local_addr=f"{order.node:06d}",
        timeout=RendezvousTimeout(join=limit, last_call=timedelta(seconds=order.last_call_s)),
        keep_alive_interval=int(_NO_KEEP_ALIVE.total_seconds()),
    )
    info = handler.next_rendezvous()
    cores = _own_cores()
    info.store.set(f"card/{info.rank}", msgspec.json.encode(_NodeCard(order.node, order.nproc, cores)))
    cards = [msgspec.json.decode(info.store.get(f"card/{rank}"), type=_NodeCard) for rank in range(info.world_size)]
    return RendezvousResult(
        nodes=tuple(card.node for card in cards),
        nprocs=tuple(card.nproc for card in cards),
        num_local=sum(card.nproc for card in cards if card.cores == cores),
    )


def _own_cores() -> str:
    """Return the machine and the CPU cores of this process, equal for launchers that share cores."""
    affinity = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    return f"{socket.gethostname()} {boot_id()} {affinity}"


if __name__ == "__main__":
    text, end, launcher = sys.argv[1:4]
    environ = variables("")
    key = environ.pop(KEY_VARIABLE)
    order = msgspec.structs.replace(msgspec.json.decode(text, type=StartRendezvous), environ=environ, key=key)
    rendezvous_work(order, int(end), int(launcher))()
