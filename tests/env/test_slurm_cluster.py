"""The SLURM cluster of these tests: nodes run tasks and show their GPUs, job states are reported, nothing is left."""

from pathlib import Path

import pytest

from env import slurm

pytestmark = pytest.mark.skipif(bool(slurm.why_not()), reason=slurm.why_not() or "never")


def test_nodes_run_tasks_and_show_their_gpus(tmp_path):
    with slurm.cluster(2, shared=tmp_path, gpus=2) as cluster:
        shown = cluster.run(["srun", "-N2", "--gpus-per-node=2", "sh", "-c", "echo $(hostname) $CUDA_VISIBLE_DEVICES"])
        assert sorted(shown.stdout.splitlines()) == ["host0 0,1", "host1 0,1"]
        assert cluster.left_on_nodes() == []
        daemons = [pid for host in [*cluster.nodes, cluster.login] for pid in host.processes()]
        assert len(daemons) >= 3
    assert not any(Path(f"/proc/{pid}").exists() for pid in daemons)


def test_the_state_of_a_failed_job_is_reported(tmp_path):
    with slurm.cluster(1, shared=tmp_path) as cluster:
        job = cluster.run(["sbatch", "--parsable", "--wrap", "exit 3"]).stdout.strip()
        assert cluster.wait(job, "COMPLETED", "FAILED") == "FAILED"
