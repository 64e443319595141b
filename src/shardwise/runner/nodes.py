"""One node of a training run that a launcher on each of several hosts starts: its plan, its inputs and its ranks.

Every node resolves the plan, but that of node 0 applies on all of them: other nodes may predict another one, because
their GPUs, their calibration or the runs in their history differ. Node 0 sends it to each node that joins.
"""

from __future__ import annotations

import hashlib
from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING

from shardwise.launcher.nodes.node import join_run, node_facts
from shardwise.launcher.nodes.rounds import launch_nodes
from shardwise.parallel.support import check_device
from shardwise.plans.toml import plan_from_toml, plan_to_toml
from shardwise.runner.local import has_inputs, open_run, worker_launch, write_run_inputs
from shardwise.runner.observers import following, start_guard
from shardwise.runs import share_run
from shardwise.runs.console import echo_error

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from contextlib import AbstractContextManager
    from pathlib import Path

    from shardwise.job import JobReference
    from shardwise.launcher.local.attempts import Launched, LocalLaunch
    from shardwise.launcher.local.supervise import Observer
    from shardwise.launcher.nodes.node import HubLink, NodesSpec
    from shardwise.monitor.sinks import SinkSpec
    from shardwise.planner.settle import LocalDevice
    from shardwise.plans import Plan
    from shardwise.runner.observers import Follower
    from shardwise.runs import RunDirectory
    from shardwise.training.spec import TrainSpec


@dataclass(frozen=True, kw_only=True)
class NodeInputs:
    """What one node of a run trains, as its own command line says."""

    spec: TrainSpec
    reference: JobReference
    plan: Plan
    """The plan that this node has resolved for the maximum number of nodes; workers refit it to those that joined."""
    overrides: Mapping[str, str]
    """The --set options for the plan."""
    device: LocalDevice

    @property
    def asked(self) -> str:
        """The plan as the user asked for it, which must be the same on every node: a digest, except for auto."""
        if self.spec.plan == "auto":
            return " ".join(["auto", *(f"{key}={value}" for key, value in sorted(self.overrides.items()))])
        return hashlib.sha256(plan_to_toml(self.plan).encode()).hexdigest()[:12]

    def plan_of_run(self, decided: str) -> Plan:
        """Return the plan that node 0 has decided; raises PlanError if this node's device does not support it."""
        plan = plan_from_toml(decided, "node 0")
        if plan == self.plan:
            return self.plan
        echo_error("note: the plan of node 0 applies; this node would have chosen another one")
        if self.device.capability:
            check_device(plan, self.device.name, self.device.capability)
        return plan


def run_on_nodes(
    given: NodeInputs,
    nodes: NodesSpec,
    *,
    sinks: Sequence[SinkSpec],
    variables: Mapping[str, str],
    started_at: float,
) -> tuple[Launched, RunDirectory, bool]:
    """Run one node of a run on several; return the outcome, the run directory, and whether this is node 0.

    Node 0 mirrors the run to the sinks.
    """
    spec, reference = given.spec, given.reference
    nproc = spec.nproc or 1
    if not nodes.node_rank or spec.plan != "auto":
        for fewer in range(nodes.least, nodes.most):
            given.plan.refit(fewer * nproc)  # raises an error now instead of after the loss of a node
    facts = {**node_facts(nodes, reference.name), "job file": reference.digest[:12], "plan": given.asked}

    def make_run(named: Path | None, decided: str) -> RunDirectory:
        if named is None:
            run, plan = open_run(spec, reference), given.plan
        else:
            run, plan = share_run(spec.run_dir or named), given.plan_of_run(decided)
        # Node 0 writes the inputs of this command; other nodes do if their disk is not shared.
        if named is None or not has_inputs(run, reference, plan):
            write_run_inputs(run, reference, plan, spec=spec, started_at=started_at)
        return run

    with join_run(nodes, facts, make_run, echo_error, decides=plan_to_toml(given.plan)) as (link, run):
        local = worker_launch(spec, run, nproc=nproc, added=variables)
        return _launch(local, nodes, link, run, spec=spec, sinks=sinks), run, link.node == 0


def _launch(
    local: LocalLaunch,
    nodes: NodesSpec,
    link: HubLink,
    run: RunDirectory,
    *,
    spec: TrainSpec,
    sinks: Sequence[SinkSpec],
) -> Launched:
    """Start the ranks of this node together with the other nodes; node 0 shows the progress."""
    shown: AbstractContextManager[list[Follower]] = nullcontext([])
    if link.node == 0:
        shown = following(run, sinks)
    with shown as followers:
        note = followers[0].line if followers else echo_error
        guards = start_guard(run, spec.hang, range(0), exchange=link, note=note)

        def follow(placed: range) -> None:
            for guard in guards:
                guard.follow(placed)

        observers: list[Observer] = [*followers, *guards]
        return launch_nodes(local, nodes, link, run, observers=observers, on_assigned=follow, note=echo_error)
