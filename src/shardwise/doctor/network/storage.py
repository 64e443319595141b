"""Whether a folder is the same storage on all hosts: one writes a word that only we know, all look for it."""

from __future__ import annotations

import secrets
import time
from typing import TYPE_CHECKING

from shardwise.doctor.network.facts import StorageFacts
from shardwise.doctor.network.session import ANSWER_S

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from shardwise.doctor.network.facts import HostFacts
    from shardwise.doctor.network.session import Probes

_NAME = ".shardwise-doctor-"


def store_all(hub: Probes, facts: Mapping[str, HostFacts], folders: Sequence[str]) -> tuple[StorageFacts, ...]:
    """Have one host write into each folder and all read it; the file is removed whatever happens."""
    return tuple(_store(hub, facts, folder) for folder in folders)


def _store(hub: Probes, facts: Mapping[str, HostFacts], folder: str) -> StorageFacts:
    file, text = {"folder": folder, "name": _NAME + secrets.token_hex(8)}, secrets.token_hex(16)
    having = [host for host, its in facts.items() if folder in its.folders]
    missing = tuple(host for host in facts if host not in having)
    refusal = "no host has it"
    for writer in having:
        try:
            written = hub.question({writer: {"type": "write", **file, "text": text}}, ANSWER_S).get(writer)
            refusal = "no answer" if written is None else written["refusal"]
            if not refusal:
                readers = _readers(hub, having, file, text)
                return StorageFacts(folder=folder, writer=writer, readers=readers, missing=missing)
        finally:  # by all, since the writer may be gone
            hub.question({host: {"type": "remove", **file} for host in having}, ANSWER_S)
    return StorageFacts(folder=folder, missing=missing, refusal=refusal)


def _readers(hub: Probes, hosts: Sequence[str], file: Mapping[str, str], text: str) -> tuple[str, ...]:
    """Return who reads what was written; a file system of the network may show it a little late."""
    found: set[str] = set()
    for pause_s in (0.0, 0.5, 1.5):
        if set(hosts) - found:
            time.sleep(pause_s)
            asked = {host: {"type": "read", **file} for host in hosts if host not in found}
            replies = hub.question(asked, ANSWER_S)
            found |= {host for host, reply in replies.items() if reply["text"] == text}
    return tuple(host for host in hosts if host in found)
