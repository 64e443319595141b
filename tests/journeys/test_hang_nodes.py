"""A hang across machines: hosts are namespaces, and one verdict names the rank on the other host."""

import re

import pytest

from beds.namespaces import hosts, why_not
from journeys.nodes import LAUNCH, start

pytestmark = [
    pytest.mark.skipif(bool(why_not()), reason=why_not() or "never"),
    pytest.mark.prove,
    pytest.mark.timeout(300),
]
SCRIPT = """
import sys, time, torch, torch.distributed as dist

def stuck():
    time.sleep(1000)

dist.init_process_group("gloo")
rank = dist.get_rank()
for step in range(20):
    time.sleep(0.1)
    if rank == 3 and step == 5 and sys.argv[1] == "sleep":
        stuck()
    if rank == 3 and step == 5 and sys.argv[1] == "operation":
        dist.barrier()
    dist.all_reduce(torch.ones(4))
"""


def run(folder, fault):
    (folder / "train.py").write_text(SCRIPT)
    how = ["--nproc=2", "--nnodes=2", "--master-addr=10.77.0.1", "--hang-after=2", "--on-hang=stop"]
    with hosts(2, shared=folder) as made:
        nodes = [
            start(
                host, folder, [*LAUNCH, *how, f"--node-rank={number}", "--run-dir", f"run{number}", "train.py", fault]
            )
            for number, host in enumerate(made)
        ]
        codes = [node.wait(100) for node in nodes]
        assert codes == [1, 1], [node.output() for node in nodes]
        return [node.output() for node in nodes]


def test_a_rank_that_sleeps_on_another_host_is_named_by_both_launchers_and_its_stack_is_there(tmp_path):
    verdict = r"ranks 0-2 wait in all_reduce #6 .*train.py:15 .*; rank 3 is in stuck at \S*train.py:5"
    outputs = run(tmp_path, "sleep")
    assert all(re.search(verdict, output) for output in outputs), outputs
    assert "line 5 in stuck" in (tmp_path / "run1" / "stacks" / "rank3.txt").read_text()


def test_another_operation_on_another_host_is_named(tmp_path):
    first, _ = run(tmp_path, "operation")
    assert re.search(
        r"differ in the operation .*all_reduce #6 .*train.py:15; rank 3: barrier #6 .*train.py:14", first
    ), first
