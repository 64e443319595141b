"""Jobs in MLX on several hosts: the ring uses addresses that reach each other, or names the pair without one."""

import json
import sys

import pytest

pytest.importorskip("mlx.core")

from e2e.mlx_jobs import POINTS
from env.namespaces import hosts, why_not
from env.nodes import start

pytestmark = [pytest.mark.prove, pytest.mark.skipif(bool(why_not()), reason=why_not())]


def train_on(both, folder, *variables):
    """Start the job on two hosts, a rank each; returns their nodes."""
    argv = [
        "env",
        "MLX_DISABLE_COMPILE=1",
        "LOG=rows",
        *variables,
        sys.executable,
        "-m",
        "shardwise",
        "train",
        "job.py",
    ]
    options = ["--run-dir", str(folder / "run"), "--nproc", "1", "--nnodes", "2", "--master-addr", both[0].address]
    return [start(host, folder, [*argv, *options, "--node-rank", str(rank)]) for rank, host in enumerate(both)]


def test_two_hosts_train_over_a_ring_of_their_own_addresses(tmp_path):
    (tmp_path / "job.py").write_text(POINTS)
    with hosts(2, shared=tmp_path) as both:
        nodes = train_on(both, tmp_path)
        assert [node.wait(120) for node in nodes] == [0, 0], [node.output() for node in nodes]
    report = json.loads((tmp_path / "run" / "report.json").read_text())
    assert report["result"]["steps"] == 18


def test_a_host_that_does_not_answer_is_named_with_its_rank_and_address(tmp_path):
    (tmp_path / "job.py").write_text(POINTS)
    with hosts(2, shared=tmp_path) as both:
        # Each can listen there, and none can be reached there by the other.
        ring = [[f"{both[0].address}:25101"], ["127.0.0.1:25102"]]
        (tmp_path / "hosts.json").write_text(json.dumps(ring))
        nodes = train_on(both, tmp_path, f"MLX_HOSTFILE={tmp_path / 'hosts.json'}")
        codes = [node.wait(120) for node in nodes]
        assert all(codes), codes
        message = f"rank 0 on {both[0].name} cannot reach rank 1 at 127.0.0.1:25102 for MLX's ring: Connection refused"
        assert codes[0] == 2, [node.output() for node in nodes]
        assert message in nodes[0].output()
        assert not any(host.processes() for host in both)
