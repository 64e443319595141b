"""Training a described job on many machines: the plan for all of them, one run directory, one worker per rank."""

from __future__ import annotations

import hashlib
from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec

from shardwise.cli.follow import following
from shardwise.cli.join import write_run_inputs
from shardwise.cli.train_options import start_guard
from shardwise.environment import variables as own_variables
from shardwise.launcher.local.attempts import LocalLaunch
from shardwise.launcher.local.target import Module
from shardwise.launcher.nodes.node import join_run, node_facts
from shardwise.launcher.nodes.rounds import launch_nodes
from shardwise.plans.toml import plan_to_toml
from shardwise.recorder.imports import deterministic_variables
from shardwise.runs import create_run, share_run
from shardwise.runs.console import complain

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from contextlib import AbstractContextManager
    from pathlib import Path

    from shardwise.cli.follow import Follower
    from shardwise.doctor.guard.guard import HangLimits
    from shardwise.job import JobReference
    from shardwise.launcher.local.attempts import Launched
    from shardwise.launcher.nodes.node import NodesSpec
    from shardwise.monitor.sinks import SinkSpec
    from shardwise.plans import Plan
    from shardwise.runs import RunDirectory

PRELOAD = ("torch", "torch._dynamo")
"""What every rank would import: torch, and what the first DDP brings in (800 modules, 1.5 s)."""


@dataclass(frozen=True, kw_only=True)
class RanksSpec:
    """How the ranks of one machine are started and looked after."""

    nproc: int
    max_restarts: int
    sinks: Sequence[SinkSpec]
    """Where the run is mirrored to."""
    hang: HangLimits | None
    preset: str | None
    variables: Mapping[str, str]
    """What the preset adds to the user's own."""

    def to_launch(self, order: Mapping[str, Any], run: RunDirectory) -> LocalLaunch:
        """Return what starts the workers with this order."""
        return worker_spec(
            order,
            run,
            nproc=self.nproc,
            max_restarts=self.max_restarts,
            record=self.hang is not None,
            variables=self.variables,
        )


def worker_spec(
    order: Mapping[str, Any],
    run: RunDirectory,
    *,
    nproc: int,
    max_restarts: int,
    record: bool,
    variables: Mapping[str, str] | None = None,
) -> LocalLaunch:
    """Return what starts the workers of one machine, each with the same order and this run directory."""
    text = msgspec.json.encode({**order, "run": str(run.path.resolve())}).decode()
    return LocalLaunch(
        target=Module("shardwise.worker", (text,)),
        nproc=nproc,
        max_restarts=max_restarts,
        preload=PRELOAD,
        record=record,
        variables={
            **(variables or {}),
            **(deterministic_variables(own_variables("")) if order.get("deterministic") else {}),
        },
    )


def train_on_nodes(
    nodes: NodesSpec,
    plan: Plan,
    reference: JobReference,
    order: Mapping[str, Any],
    ranks: RanksSpec,
    *,
    run_dir: Path | None,
) -> tuple[Launched, RunDirectory, bool]:
    """Take part in a training on many machines; return how it ended, where, and whether this is the first of them.

    `plan` is for the most nodes; the workers refit it to those that are there. The first node mirrors the run.
    """
    for fewer in range(nodes.least, nodes.most):
        plan.refit(fewer * ranks.nproc)  # refuses now what it would refuse when a node is lost
    facts = {
        **node_facts(nodes, reference.name),
        "job file": reference.digest[:12],
        "plan": hashlib.sha256(plan_to_toml(plan).encode()).hexdigest()[:12],
    }

    def make_run(named: Path | None) -> RunDirectory:
        run = create_run(run_dir, reference.name) if named is None else share_run(run_dir or named)
        if not run.plan.exists():  # else node 0 has written it to a disk that we share
            write_run_inputs(run, reference, plan)
        return run

    with join_run(nodes, facts, make_run, complain) as (link, run):
        spec = ranks.to_launch(order, run)
        is_first = link.node == 0
        shown: AbstractContextManager[list[Follower]] = following(run, ranks.sinks) if is_first else nullcontext([])
        with shown as followers:
            say = followers[0].line if followers else complain
            guards = start_guard(run, ranks.hang, range(0), exchange=link, say=say)

            def follow(placed: range) -> None:
                for guard in guards:
                    guard.follow(placed)

            launched = launch_nodes(
                spec, nodes, link, run, observers=[*followers, *guards], placed=follow, note=complain
            )
            return launched, run, is_first
