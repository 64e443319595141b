"""A launch on one host: attempts that start all ranks with a new store, until one succeeds or restarts are used up."""

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
    """The resolved settings of a launch on this host."""

    target: Target
    nproc: int
    max_restarts: int = 0
    run_id: str = "none"
    port: int = 0
    """Port of the first attempt's store; 0 selects a free port."""
    fork: bool = True
    """Whether ranks may be forked from one parent that has imported torch."""
    on_terminal: tuple[tuple[bool, bool], ...] = ()
    """Per rank, whether (stdout, stderr) are attached to the terminal; empty if none is."""
    grace_s: float = 30.0
    """Seconds from SIGTERM to SIGKILL when ranks are stopped."""
    preload: tuple[str, ...] = ("torch",)
    """Modules that the fork parent imports; never the user's modules."""
    record: bool = False
    """Whether ranks record their collectives in the run directory for observers."""
    variables: Mapping[str, str] = field(default_factory=dict)
    """Environment variables of the ranks in addition to the user's, such as those of a preset."""


@dataclass(frozen=True, kw_only=True)
class Launched:
    """The result of a launch: the final decision, the last outcome and the number of restarts."""

    decision: Decision
    outcome: Outcome
    """Outcome of the last attempt."""
    restarts: int


def launch(
    spec: LocalLaunch,
    run: RunDirectory,
    *,
    observers: Sequence[Observer] = (),
    note: Callable[[str], None] = lambda _: None,
    starter: Starter | None = None,
) -> Launched:
    """Run the target on all ranks and restart them after failures, up to `max_restarts`; no process outlives the call.

    `starter` may be shared by several launches and is not closed; without one, the launch creates a starter.
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
    """Return the environment that all ranks of this host share."""
    return {**base_environment(local_world_size=spec.nproc, cores=usable_cores()), **spec.variables}


def write_end(log: LaunchLog, launched: Launched) -> None:
    """Log the final state of a launch, and the root cause if it failed."""
    decision = launched.decision
    if isinstance(decision, GiveUp):
        log.verdict(verdict(launched.outcome) or "the ranks were stopped before they finished")
        state = "failed"
    elif launched.outcome.interrupted or decision != Finish():
        state = "stopped"
    else:
        state = "finished"
    log.finish(state, restarts=launched.restarts)


@contextlib.contextmanager
def starter_for(spec: LocalLaunch, environ: Mapping[str, str], note: Callable[[str], None]) -> Iterator[Starter]:
    """Yield a starter that forks ranks if that is safe, else starts new interpreters; `note` receives the reason."""
    if not sys.platform.startswith("linux"):
        yield PlainStarter()
        return
    if spec.fork and not isinstance(spec.target, Program):
        with ForkStarter.start(environ, spec.preload) as forking:
            refusal = forking.wait_until_ready()
            if not refusal:
                yield forking
                return
            note(f"ranks are started as new interpreters instead of by fork: {refusal}")
    # The fork parent starts new interpreters too, because it kills them if this process is killed.
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
    """Start a store and all ranks, and wait until the last rank has exited."""
    # Each attempt has a new server on a new port, so that it cannot read keys of an earlier attempt.
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
    """The ranks of this node in the world of one attempt, and the address of the attempt's store."""

    world_size: int
    store_host: str
    store_port: int
    restarts: int
    first_rank: int = 0
    node: int = 0
    num_nodes: int = 1
    cores: int | None = None
    """CPU cores of this node's ranks; None means all usable cores."""
    variables: Mapping[str, str] = field(default_factory=dict)
    """Additional environment variables of the ranks, such as the network interface."""


def start_ranks(
    spec: LocalLaunch, run: RunDirectory, starter: Starter, assignment: NodeAssignment
) -> list[RankProcess]:
    """Start the ranks of this node and return their processes."""
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
            cores=assignment.cores or usable_cores(),
            extra=shared,
        )
        environ |= compile_cache(environ)
        if "NCCL_DEBUG" in environ:  # by default NCCL would log to the rank's standard output
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
    """Log the ranks that this node has started."""
    typed = spec.target.typed()
    log.attempt(
        assignment.restarts,
        {process.rank: process.pid for process in ranks},
        target=shlex.join(typed[: len(typed) - len(spec.target.arguments)]),  # arguments may contain secrets
        world_size=assignment.world_size,
        nodes=assignment.num_nodes,
    )


def write_exit(log: LaunchLog, exit_: RankExit) -> None:
    """Log the exit of a rank."""
    log.exit(exit_.rank, exit_.returncode, stopped=exit_.stopped, failure=exit_.failure)


def find_failure(run: RunDirectory, rank: int, returncode: int) -> Failure | None:
    """Return the failure that a rank recorded, else the exception at the end of its log; None if it has neither.

    If neither exists because the disk is full, the returned failure states this.
    """
    written = read_failure(run.error(rank))
    if written is not None or returncode not in UNCAUGHT:
        return written
    return read_exception(run.stderr(rank), rank) or unwritable(run, rank, returncode)


def describe_lost(starter: Starter, store: RankProcess | None) -> str:
    """Return how the fork parent or the store exited, as text; empty while both run.

    A killed fork parent also ends the store. The store is polled first, so that a fork parent that exits between the
    two polls is still reported as the cause. `store` is None if the store runs on a different node.
    """
    returncode = store.poll() if store is not None else None
    store_end = "" if returncode is None else f"the store of this attempt ended with {describe_exit(returncode)}"
    return starter.lost or store_end


@contextlib.contextmanager
def loopback_listener(port: int) -> Iterator[socket.socket]:
    """Yield a socket that listens on loopback only; TCPStore would listen on every interface."""
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((LOOPBACK, port))
        except OSError as error:
            raise LaunchError(
                f"port {port} is in use ({error.strerror})",
                code="launch.port-in-use",
                fix="remove --master-port, or pass a different port",
            ) from None
        listener.listen(2048)
        yield listener
