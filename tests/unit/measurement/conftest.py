"""The job that `bench` measures in these tests, as a job file and as a Job."""

import pytest

from jobs import token_job_text


@pytest.fixture
def num_blocks():
    """Number of blocks between embedding and head; a module whose tests need some overrides it."""
    return 0


@pytest.fixture
def job_file(tmp_path, num_blocks):
    """The path of the job file."""
    path = tmp_path / "job.py"
    path.write_text(token_job_text(num_blocks))
    return path


@pytest.fixture
def job(num_blocks):
    """The job of the job file."""
    space = {}
    exec(token_job_text(num_blocks), space)
    return space["job"]
