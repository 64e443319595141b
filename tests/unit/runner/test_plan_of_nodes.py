"""Nodes whose predictions differ train by the plan of node 0."""

import dataclasses
import socket
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from jobs import token_job_text
from refusals import refuses
from shardwise.job import refer
from shardwise.launcher.nodes.node import NodesSpec
from shardwise.planner.settle import LocalDevice
from shardwise.plans import Plan
from shardwise.plans.toml import read_plan
from shardwise.runner import nodes as nodes_module
from shardwise.runner.nodes import NodeInputs, run_on_nodes
from shardwise.training.spec import TrainSpec

PLANS = (Plan.preset("ddp", 2, batch_size=8, compile="blocks"), Plan.preset("zero3", 2, batch_size=8))
V100 = LocalDevice(kind="cuda", name="V100", capability=(7, 0))


def given(folder, node, *, plan="auto", overrides=None, device=None):
    """Return the inputs of a node that resolves PLANS[node], with a disk of its own."""
    return NodeInputs(
        spec=TrainSpec.of("job.py", plan=plan, run_dir=str(folder / f"run{node}"), hang_after=0),
        reference=refer(str(folder / "job.py"), {}),
        plan=PLANS[node],
        overrides=overrides or {},
        device=device or LocalDevice(),
    )


@pytest.fixture
def run_two(tmp_path, monkeypatch):
    """Return a function that runs two nodes on this machine, whose ranks only wait for each other."""
    (tmp_path / "job.py").write_text(token_job_text())
    both = threading.Barrier(2, timeout=60)

    def launch(local, nodes, link, run, **_):
        both.wait()
        return link.node

    def run(*inputs):
        with socket.create_server(("127.0.0.1", 0)) as server:
            port = server.getsockname()[1]
        spec = NodesSpec(least=2, most=2, host="127.0.0.1", port=port, join_s=60.0)
        placed = [dataclasses.replace(spec, node_rank=rank) for rank in range(2)]
        with ThreadPoolExecutor(2) as pool:
            options = {"sinks": (), "variables": {}, "started_at": 0.0}
            ended = [
                pool.submit(run_on_nodes, each, nodes, **options) for each, nodes in zip(inputs, placed, strict=True)
            ]
            try:
                return [each.result() for each in reversed(ended)]
            finally:
                both.abort()

    monkeypatch.setattr(nodes_module, "launch_nodes", launch)
    return run


def test_nodes_with_unequal_predictions_train_by_the_plan_of_node_0(tmp_path, run_two, capsys):
    other, first = run_two(given(tmp_path, 0), given(tmp_path, 1))
    assert [(node, is_first) for node, _, is_first in (first, other)] == [(0, True), (1, False)]
    assert [read_plan(run.plan) for _, run, _ in (first, other)] == [PLANS[0], PLANS[0]]
    assert capsys.readouterr().err.count("the plan of node 0 applies") == 1


def test_device_that_does_not_support_the_plan_of_node_0_is_refused_before_ranks_start(tmp_path, run_two, monkeypatch):
    narrow = dataclasses.replace(PLANS[0], precision=dataclasses.replace(PLANS[0].precision, compute="bf16"))
    monkeypatch.setattr(nodes_module, "plan_from_toml", lambda *_: narrow)
    with refuses("support.bf16-device", "V100"):
        run_two(given(tmp_path, 0), given(tmp_path, 1, device=V100))


@pytest.mark.parametrize("asked", [{"plan": "fsdp"}, {"overrides": {"compile": "none"}}])
def test_nodes_that_are_asked_for_different_plans_are_refused(tmp_path, run_two, asked):
    with refuses("rendezvous.nodes-differ", "plan"):
        run_two(given(tmp_path, 0), given(tmp_path, 1, **asked))
