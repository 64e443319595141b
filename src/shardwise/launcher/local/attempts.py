"""One launch: attempts of all ranks together, each with a store of its own, until they are done or given up."""

from __future__ import annotations

import contextlib
import shlex
import socket
import sys
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING

from shardwise.environment import base_environment, rank_environment
from shardwise.errors import LaunchError
from shardwise.hardware import usable_cores
from shardwise.launcher.explain import UNCAUGHT, find_mismatch, gather_evidence, read_exception, unwritable, verdict
from shardwise.launcher.local.processes import compile_cache
from shardwise.launcher.local.starters import ForkStarter, Output, PlainStarter, Starter
from shardwise.launcher.local.supervise import Observer, Outcome, supervise
from shardwise.launcher.local.target import Program, Target
from shardwise.launcher.policy import Decision, Finish, GiveUp, RankExit, Restart, decide
from shardwise.runs.console import describe_exit
from shardwise.runs.events import LaunchLog, launch_log
from shardwise.runs.failure import read_failure, write_variables

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from shardwise.launcher.local.processes import RankProcess
    from shardwise.runs import RunDirectory
    from shardwise.runs.failure import Failure

LOOPBACK = "127.0.0.1"


@dataclass(frozen=True, kw_only=True)
class LocalLaunch:
    """What to launch on this machine, settled."""

    target: Target
    nproc: int
    max_restarts: int = 0
    run_id: str = "none"
    port: int = 0
    """Of the first attempt's store; 0 takes a free one."""
    fork: bool = True
    """Whether ranks may be forked from one parent that has imported torch."""
    on_terminal: tuple[tuple[bool, bool], ...] = ()
    """By rank, whether (standard output, standard error) stay on the terminal; none by default."""
    grace_s: float = 30.0
    """Between asking ranks to stop and killing them."""
    preload: tuple[str, ...] = ("torch",)
    """Modules that the fork parent imports; never the user's."""
    record: bool = False
    """Whether ranks record their collectives in the run directory, for observers."""
    variables: Mapping[str, str] = field(default_factory=dict)
    """What ranks get beside the user's own variables: those of a preset."""


@dataclass(frozen=True, kw_only=True)
class Launched:
    """How a launch ended."""

    decision: Decision
    outcome: Outcome
    """Of the last attempt."""
    restarts: int


def launch(
    spec: LocalLaunch,
    run: RunDirectory,
    *,
    observers: Sequence[Observer] = (),
    note: Callable[[str], None] = lambda _: None,
    starter: Starter | None = None,
) -> Launched:
    """Run the target on all ranks, again after failures as the spec allows; nothing is left running after.

    `starter` serves several launches and is left open; without one, this launch starts its own.
    """
    environ = node_environment(spec)
    write_variables(run, environ)
    with contextlib.ExitStack() as stack:
        log = stack.enter_context(launch_log(run))
        if starter is None:
            starter = stack.enter_context(starter_for(spec, environ, note))
        restarts = 0
        while True:
            outcome = _attempt(spec, run, starter, log, restarts=restarts, observers=observers)
            decision = decide(
                outcome.exits,
                max_restarts=spec.max_restarts,
                restarts=restarts,
                stop_requested=bool(outcome.interrupted),
                by_verdict=outcome.by_verdict,
            )
            if not isinstance(decision, Restart):
                launched = Launched(decision=decision, outcome=outcome, restarts=restarts)
                write_end(log, launched)
                return launched
            restarts = decision.attempt
            log.restart(restarts, spec.max_restarts, verdict(outcome))
            note(f"{decision.why}; restart {restarts} of {spec.max_restarts}")


def node_environment(spec: LocalLaunch) -> dict[str, str]:
    """Return what all ranks of this machine share."""
    return {**base_environment(local_world_size=spec.nproc, cores=usable_cores()), **spec.variables}


def write_end(log: LaunchLog, launched: Launched) -> None:
    """Record how a launch ended, and why if it failed."""
    decision = launched.decision
    if isinstance(decision, GiveUp):
        log.verdict(verdict(launched.outcome) or "the ranks were stopped before they were done")
        state = "failed"
    else:
        state = "stopped" if launched.outcome.interrupted or decision != Finish() else "finished"
    log.finish(state, restarts=launched.restarts)


@contextlib.contextmanager
def starter_for(spec: LocalLaunch, environ: Mapping[str, str], note: Callable[[str], None]) -> Iterator[Starter]:
    """Choose how ranks are started, and note where it is not by fork."""
    if not sys.platform.startswith("linux"):
        yield PlainStarter()
        return
    if spec.fork and not isinstance(spec.target, Program):
        with ForkStarter.start(environ, spec.preload) as forking:
            refusal = forking.wait_until_ready()
            if not refusal:
                yield forking
                return
            note(f"ranks are started one by one, not forked: {refusal}")
    # Fresh processes are started by a fork parent too: it takes them along when this process is killed.
    with ForkStarter.start(environ, (), fresh=True) as starting:
        starting.wait_until_ready()
        yield starting


def _attempt(
    spec: LocalLaunch,
    run: RunDirectory,
    starter: Starter,
    log: LaunchLog,
    *,
    restarts: int,
    observers: Sequence[Observer],
) -> Outcome:
    """Start a store and all ranks, and wait until the last has ended."""
    # A fresh server on a fresh port for every attempt: keys of a dead attempt cannot be read by the next.
    with loopback_listener(spec.port if restarts == 0 else 0) as listener:
        port = listener.getsockname()[1]
        store = starter.start_store(listener)
    try:
        assignment = NodeAssignment(world_size=spec.nproc, store_host=LOOPBACK, store_port=port, restarts=restarts)
        ranks = start_ranks(spec, run, starter, assignment)
        write_start(log, spec, assignment, ranks)
        outcome = supervise(
            ranks,
            failure_of=partial(find_failure, run),
            ended=partial(write_exit, log),
            observers=observers,
            lost=lambda: describe_lost(starter, store),
            grace_s=spec.grace_s,
        )
    finally:
        store.end()
    exits = gather_evidence(outcome.exits, run)
    return replace(outcome, exits=exits, mismatch=find_mismatch(exits))


@dataclass(frozen=True, kw_only=True)
class NodeAssignment:
    """Which ranks of the world of one attempt this node has, and where its store is."""

    world_size: int
    store_host: str
    store_port: int
    restarts: int
    first_rank: int = 0
    node: int = 0
    num_nodes: int = 1
    variables: Mapping[str, str] = field(default_factory=dict)
    """Further variables of the ranks, such as which interface to use."""


def start_ranks(
    spec: LocalLaunch, run: RunDirectory, starter: Starter, assignment: NodeAssignment
) -> list[RankProcess]:
    """Start the ranks of this node."""
    shared = {
        "MASTER_ADDR": assignment.store_host,
        "MASTER_PORT": str(assignment.store_port),
        "GROUP_RANK": str(assignment.node),
        "GROUP_WORLD_SIZE": str(assignment.num_nodes),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": str(assignment.restarts),
        "TORCHELASTIC_MAX_RESTARTS": str(spec.max_restarts),
        "TORCHELASTIC_RUN_ID": spec.run_id,
        **assignment.variables,
        **spec.variables,
    }
    ranks = []
    for local_rank in range(spec.nproc):
        rank = assignment.first_rank + local_rank
        environ = rank_environment(
            rank=rank,
            world_size=assignment.world_size,
            local_rank=local_rank,
            local_world_size=spec.nproc,
            cores=usable_cores(),
            extra=shared,
        )
        environ |= compile_cache(environ)
        if "NCCL_DEBUG" in environ:  # beside the output of the rank, not in it, and never in one file with its peers
            environ.setdefault("NCCL_DEBUG_FILE", run.nccl_log(rank))
        run.error(rank).unlink(missing_ok=True)
        out, err = spec.on_terminal[local_rank] if spec.on_terminal else (False, False)
        output = Output(
            stdout=None if out else run.stdout(rank),
            stderr=None if err else run.stderr(rank),
            record=run.path.absolute() if spec.record and not isinstance(spec.target, Program) else None,
        )
        ranks.append(starter.start_rank(rank, spec.target, environ, output=output, failure=run.error(rank)))
    return ranks


def write_start(log: LaunchLog, spec: LocalLaunch, assignment: NodeAssignment, ranks: Sequence[RankProcess]) -> None:
    """Record which ranks this node has started."""
    typed = spec.target.typed()
    log.attempt(
        assignment.restarts,
        {process.rank: process.pid for process in ranks},
        target=shlex.join(typed[: len(typed) - len(spec.target.arguments)]),  # arguments may hold secrets
        world_size=assignment.world_size,
        nodes=assignment.num_nodes,
    )


def write_exit(log: LaunchLog, exit_: RankExit) -> None:
    """Record how a rank ended."""
    log.exit(exit_.rank, exit_.returncode, stopped=exit_.stopped, failure=exit_.failure)


def find_failure(run: RunDirectory, rank: int, returncode: int) -> Failure | None:
    """Return what a rank that ended left behind: its own record, else the exception at the end of its log.

    A rank that could write neither, since the disk is full, failed of that.
    """
    written = read_failure(run.error(rank))
    if written is not None or returncode not in UNCAUGHT:
        return written
    return read_exception(run.stderr(rank), rank) or unwritable(run, rank, returncode)


def describe_lost(starter: Starter, store: RankProcess | None) -> str:
    """Report which process ended that ranks cannot continue without; empty while all are there.

    A fork parent that is killed takes the store along, so the store is polled first: a fork parent that ends between
    the two looks is still named as the cause. `store` is None where another node holds it.
    """
    returncode = store.poll() if store is not None else None
    store_end = "" if returncode is None else f"the store of this attempt ended with {describe_exit(returncode)}"
    return starter.lost or store_end


@contextlib.contextmanager
def loopback_listener(port: int) -> Iterator[socket.socket]:
    """Bind the attempt's port on loopback only; TCPStore by itself would listen on every interface."""
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((LOOPBACK, port))
        except OSError as error:
            raise LaunchError(
                f"port {port} is taken ({error.strerror})",
                code="launch.port-in-use",
                fix="leave --master-port out, or name another",
            ) from None
        listener.listen(2048)
        yield listener
