import msgspec

from shardwise.runs import create_run
from shardwise.runs.failure import recorded_variables, write_variables

PLAIN = {"CUDA_VISIBLE_DEVICES": "0", "NCCL_DEBUG": "INFO", "OMP_NUM_THREADS": "2", "SLURM_JOB_ID": "7", "RANK": "0"}
SECRET = {
    "AWS_SECRET_ACCESS_KEY": "hunter2",
    "TORCH_HUB_TOKEN": "hunter2",
    "NCCL_PASSWORD": "hunter2",
    "TORCH_PROXY": "http://me:hunter2@host:80",
    "HOME": "/home/hunter2",
    "SLURM_JOB_COMMENT": "hunter2",
}


def test_only_listed_variables_are_reported():
    assert recorded_variables({**PLAIN, **SECRET}) == PLAIN


def test_planted_secret_is_nowhere_in_the_run_directory(tmp_path):
    run = create_run(tmp_path / "run", "x")
    write_variables(run, {**PLAIN, **SECRET})
    assert msgspec.json.decode(run.environment.read_bytes()) == PLAIN
    assert not any(b"hunter2" in path.read_bytes() for path in run.path.rglob("*") if path.is_file())
