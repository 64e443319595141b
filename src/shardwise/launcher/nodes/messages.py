"""Messages between the nodes and the hub of a run; every message about ranks names its round."""

from __future__ import annotations

import time
from dataclasses import replace
from signal import Signals  # noqa: TC003 - read at run time by msgspec
from typing import TYPE_CHECKING

import msgspec

from shardwise.launcher.nodes.authentication import Challenge, Proof
from shardwise.launcher.policy import RankExit  # noqa: TC001 - read at run time by msgspec

if TYPE_CHECKING:
    from collections.abc import Iterable


class Hello(msgspec.Struct, frozen=True, tag="hello"):
    """Let me be a node of this run."""

    host: str
    node_rank: int | None
    """The --node-rank of the user."""
    facts: dict[str, str]
    """What must be the same on every node, by what it is: versions, command."""
    is_host: bool = False
    """This node runs the hub and will hold the stores."""


class Welcome(msgspec.Struct, frozen=True, tag="welcome"):
    """You are node `node` of this run, which the first node records in `run`."""

    node: int
    run: str


class Refused(msgspec.Struct, frozen=True, tag="refused"):
    """You are not: one sentence and what to type."""

    fact: str
    fix: str
    code: str = "rendezvous.node-refused"
    """A hub of an older version sends none."""


class Beat(msgspec.Struct, frozen=True, tag="beat"):
    """I am here."""


class NodeReady(msgspec.Struct, frozen=True, tag="ready"):
    """This node can start ranks at once."""


class Opened(msgspec.Struct, frozen=True, tag="opened"):
    """The store of this round listens at this port of node 0."""

    round: int
    port: int


class Admit(msgspec.Struct, frozen=True, tag="admit"):
    """To node 0: the nodes of the run have these addresses, and no other machine needs to reach the store."""

    addresses: tuple[str, ...]


class JoinRound(msgspec.Struct, frozen=True, tag="join"):
    """Join the others at the store of this round, by torch's rendezvous."""

    round: int
    port: int
    least: int
    most: int
    last_call_s: float
    restarts: int


class RoundJoined(msgspec.Struct, frozen=True, tag="joined"):
    """These nodes joined, in the order of their ranks."""

    round: int
    nodes: tuple[int, ...]


class Failing(msgspec.Struct, frozen=True, tag="failing"):
    """A rank of this node failed."""

    round: int
    certain: bool
    """No other rank's end could explain it."""


class Leaving(msgspec.Struct, frozen=True, tag="leaving"):
    """This node's launcher got a signal to stop."""

    signal: Signals


class NodeEnded(msgspec.Struct, frozen=True, tag="ended"):
    """All ranks of this node have ended; or could not be started, for the reason in `lost`."""

    round: int
    exits: tuple[RankExit, ...]
    """Their times are seconds ago; see `rebased`."""
    lost: str = ""
    by_verdict: bool = False
    """`lost` is a verdict for which the ranks were stopped."""
    out_of_memory: bool = False


class Stop(msgspec.Struct, frozen=True, tag="stop"):
    """Stop the ranks of this round: at once because of a fault, or gracefully by `signal`."""

    round: int
    reason: str
    signal: int = 0


class Note(msgspec.Struct, frozen=True, tag="note"):
    """Show this to the user."""

    text: str


class Again(msgspec.Struct, frozen=True, tag="again"):
    """The next round begins."""

    round: int


class Over(msgspec.Struct, frozen=True, tag="over"):
    """The run is over, for the node that receives this."""

    exit_code: int = 0
    failed: bool = False
    exits: tuple[RankExit, ...] = ()
    """The root cause and all that failed after it; times are seconds ago."""
    cause: RankExit | None = None
    lost: str = ""
    interrupted: int = 0
    out_of_memory: bool = False
    mismatch: str = ""
    """Which collectives of the ranks did not match, if that ended them."""


class RelayMessage(msgspec.Struct, frozen=True, tag="relay"):
    """What the observers of nodes send each other, and the hub does not read: to node 0, or from it to all."""

    body: str
    to_all: bool = False


FromNode = Proof | Hello | Beat | NodeReady | Opened | RoundJoined | Failing | Leaving | NodeEnded | RelayMessage
FromHub = Challenge | Proof | Welcome | Refused | Beat | Admit | JoinRound | Stop | Note | Again | Over | RelayMessage


def rebased(exits: Iterable[RankExit]) -> tuple[RankExit, ...]:
    """Turn times of this machine's clocks into seconds ago, and seconds ago into times: clocks of machines differ."""
    now, clock = time.monotonic(), time.time()
    return tuple(
        replace(
            exit_,
            at=now - exit_.at,
            failure=exit_.failure and msgspec.structs.replace(exit_.failure, at=clock - exit_.failure.at),
        )
        for exit_ in exits
    )
