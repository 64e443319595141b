"""What the launcher and its guard on another machine say to each other, one JSON line each."""

from __future__ import annotations

import msgspec

from shardwise.launcher.local.target import Module, Program, Script  # noqa: TC001 - read when messages are decoded

BEAT_S = 1.0
"""Between two signs of life of the launcher."""
SILENCE_S = 8.0
"""A launcher that is silent for so long is gone: the guard ends what it runs. Over ssh, a lost packet costs more
than between nodes, whose own heartbeats are quicker."""
MARK = b"shardwise-guard "
"""Begins every line of a guard, since shells may write something of their own before it starts."""


class Look(msgspec.Struct, frozen=True, tag="look"):
    """Say what is there."""

    target: Script | Module | Program


class Listen(msgspec.Struct, frozen=True, tag="listen"):
    """Listen at this address of yours, port 0 takes a free one, and say `word` to whoever comes."""

    address: str
    port: int
    word: str


class Reach(msgspec.Struct, frozen=True, tag="reach"):
    """Say whether `word` is heard there."""

    address: str
    port: int
    word: str


class Start(msgspec.Struct, frozen=True, tag="start"):
    """Run `shardwise` with these words and variables; from now on your output is its output."""

    words: list[str]
    variables: dict[str, str]
    grace_s: float
    """From a stop request, or the launcher's death, to a kill."""


class Signal(msgspec.Struct, frozen=True, tag="signal"):
    """Pass this signal on."""

    number: int


class Beat(msgspec.Struct, frozen=True, tag="beat"):
    """The launcher is alive."""


class Facts(msgspec.Struct, frozen=True, tag="facts"):
    """What is there."""

    versions: dict[str, str]
    """Of what must be the same on all hosts, by name."""
    addresses: dict[str, str]
    """By interface, loopback left out."""
    own: str = ""
    """Address at which ssh came in; empty on the launcher's own machine."""
    launcher: str = ""
    """Address from which ssh came; empty on the launcher's own machine."""
    refusal: str = ""
    fix: str = ""
    code: str = ""
    """Why the target cannot be started there; empty when it can."""


class Answer(msgspec.Struct, frozen=True, tag="answer"):
    """To Listen (with the port) and Reach: how it went; no refusal is success."""

    port: int = 0
    refusal: str = ""


Order = Look | Listen | Reach | Start | Signal | Beat
Reply = Facts | Answer
