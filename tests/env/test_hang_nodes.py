"""A hang across machines: hosts are namespaces, and one verdict names the rank on the other host."""

import re

import pytest

from env.namespaces import hosts, why_not
from env.nodes import LAUNCH, start, wait_until

pytestmark = [
    pytest.mark.skipif(bool(why_not()), reason=why_not() or "never"),
    pytest.mark.prove,
    pytest.mark.timeout(300),
]
SCRIPT = """
import os, sys, time, torch, torch.distributed as dist

def stuck():
    time.sleep(1000)

dist.init_process_group("gloo")
rank = dist.get_rank()
for step in range(40):
    time.sleep(0.1)
    if rank == 3 and step == 5 and sys.argv[1] == "sleep":
        stuck()
    if rank == 3 and step == 5 and sys.argv[1] == "operation":
        dist.barrier()
    if rank == 1 and step == 5 and sys.argv[1] == "dtype":
        dist.all_reduce(torch.ones(4, dtype=torch.int32))
    elif rank == 1 and step == 5 and sys.argv[1] == "reduce":
        dist.all_reduce(torch.ones(4), op=dist.ReduceOp.MAX)
    else:
        dist.all_reduce(torch.ones(4))
    if rank == 3 and step == 5 and sys.argv[1] == "once" and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        stuck()
"""


def run(folder, fault, *more, code=1):
    """Run the script on two hosts with two ranks each; return what both launchers printed."""
    (folder / "train.py").write_text(SCRIPT)
    how = ["--nproc=2", "--nnodes=2", "--master-addr=10.77.0.1", "--hang-after=2", "--on-hang=stop", *more]
    with hosts(2, shared=folder) as made:
        nodes = [
            start(
                host, folder, [*LAUNCH, *how, f"--node-rank={number}", "--run-dir", f"run{number}", "train.py", fault]
            )
            for number, host in enumerate(made)
        ]
        codes = [node.wait(100) for node in nodes]
        assert codes == [code, code], [node.output() for node in nodes]
        return [node.output() for node in nodes]


def test_a_rank_that_sleeps_on_another_host_is_named_by_both_launchers_and_its_stack_is_there(tmp_path):
    verdict = r"ranks 0-2 wait in all_reduce #6 .*train.py:20 .*; rank 3 on \S+ is in stuck at \S*train.py:5"
    outputs = run(tmp_path, "sleep")
    assert all(re.search(verdict, output) for output in outputs), outputs
    for number, output in enumerate(outputs):
        assert re.search(rf"stacks of this node are in {tmp_path}/run{number}/stacks on \S+", output)
    assert "line 5 in stuck" in (tmp_path / "run1" / "stacks" / "rank3.txt").read_text()


def test_another_operation_on_another_host_is_named(tmp_path):
    first, _ = run(tmp_path, "operation")
    assert re.search(
        r"differ in the operation .*all_reduce #6 .*train.py:20; rank 3: barrier #6 .*train.py:14", first
    ), first


@pytest.mark.parametrize(
    ("fault", "pattern"),
    [
        (
            "dtype",
            r"differ in the dtype .*sum, float32\[4\]\) at \S*train.py:20; rank 1: .*int32\[4\]\) at \S*train.py:16",
        ),
        ("reduce", r"differ in the reduce operation .*train.py:20; rank 1: all_reduce #6 \(max, .*train.py:18"),
    ],
)
def test_a_mismatch_with_a_rank_on_another_host_is_named_with_both_lines(tmp_path, fault, pattern):
    first, _ = run(tmp_path, fault, "--nproc=1")
    assert re.search(pattern, first), first


def test_a_hang_across_hosts_that_is_stopped_is_a_failure_from_which_all_start_again(tmp_path):
    first, second = run(tmp_path, "once", "--max-restarts=1", code=0)
    assert "the guard stopped the ranks; restart 1 of 1" in first
    assert "the guard stopped the ranks; restart 1 of 1" in second


PARTED = """
import pathlib, time, torch, torch.distributed as dist
dist.init_process_group("gloo")
step = 0
while not pathlib.Path("enough").exists():
    time.sleep(0.05)
    dist.all_reduce(torch.ones(4))
    step += 1
    pathlib.Path(f"step.{dist.get_rank()}").write_text(str(step))
    enough = torch.tensor(float(pathlib.Path("enough").exists()))
    dist.all_reduce(enough, op=dist.ReduceOp.MAX)
    if enough:
        break
"""


def test_two_nodes_that_lose_each_other_and_both_reach_node_0_are_named_and_continue_when_the_link_is_back(tmp_path):
    (tmp_path / "train.py").write_text(PARTED)
    how = ["--nproc=1", "--nnodes=3", "--master-addr=10.77.0.1", "--hang-after=3", "--run-dir", "run"]
    with hosts(3, shared=tmp_path) as made:
        nodes = [
            start(host, tmp_path, [*LAUNCH, *how, f"--node-rank={number}", "train.py"])
            for number, host in enumerate(made)
        ]

        def outputs():
            return [node.output() for node in nodes]

        _, one, two = made
        wait_until((tmp_path / "step.2").exists, 100, outputs)
        for verb in ("-A", "-D"):
            for here, there in ((one, two), (two, one)):
                here.run(["iptables", verb, "INPUT", "-s", there.address, "-j", "DROP"])
            if verb == "-A":
                wait_until(lambda: "gets no answer" in nodes[0].output(), 60, outputs)
        wait_until(lambda: "the ranks that waited continue" in nodes[0].output(), 60, outputs)
        (tmp_path / "enough").touch()
        assert [node.wait(60) for node in nodes] == [0, 0, 0], outputs()
        first = nodes[0].output()
    pair = rf"node 1 \({one.name}, {one.address}\) gets no answer from node 2 \({two.name}, {two.address}\)"
    other = rf"node 2 \({two.name}, {two.address}\) gets no answer from node 1 \({one.name}, {one.address}\)"
    assert re.search(rf"ranks? [0-9-]+ waits? in all_reduce #\d+ .*({pair}|{other})", first), first
    # Once, or twice where rank 0, which reaches both, is one collective ahead of the ranks that wait.
    assert first.count("gets no answer") in (1, 2)
