"""The bed itself: nodes run tasks, GPUs are counted, a lost node is seen, nothing is left."""

from pathlib import Path

import pytest

from env import slurm as bed

pytestmark = pytest.mark.skipif(bool(bed.why_not()), reason=bed.why_not() or "never")


def test_nodes_run_tasks_and_show_their_gpus(tmp_path):
    with bed.cluster(2, shared=tmp_path, gpus=2) as slurm:
        shown = slurm.run(["srun", "-N2", "--gpus-per-node=2", "sh", "-c", "echo $(hostname) $CUDA_VISIBLE_DEVICES"])
        assert sorted(shown.stdout.splitlines()) == ["host0 0,1", "host1 0,1"]
        assert slurm.left_on_nodes() == []
        daemons = [pid for host in [*slurm.nodes, slurm.login] for pid in host.processes()]
        assert len(daemons) >= 3
    assert not any(Path(f"/proc/{pid}").exists() for pid in daemons)


def test_job_ends_as_it_should_and_its_state_is_told(tmp_path):
    with bed.cluster(1, shared=tmp_path) as slurm:
        job = slurm.run(["sbatch", "--parsable", "--wrap", "exit 3"]).stdout.strip()
        assert slurm.wait(job, "COMPLETED", "FAILED") == "FAILED"
