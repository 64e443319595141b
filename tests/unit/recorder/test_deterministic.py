"""--deterministic in a rank: seeds, variables, and operations without a deterministic form refused by name."""

import os
import random
import subprocess
import sys

import numpy as np
import torch
from torch.nn.parallel import DistributedDataParallel

from shardwise.recorder.imports import RecorderOptions, be_deterministic, deterministic_variables
from shardwise.recorder.start import record_variables
from shardwise.testing import run_ranks

CODE = """
import os, random
import numpy, torch
print(random.random(), numpy.random.rand(), float(torch.rand(())))
print(os.environ["CUBLAS_WORKSPACE_CONFIG"], os.environ["NCCL_ALGO"], "SHARDWISE_DETERMINISTIC" in os.environ)
print(torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark)
try:
    torch.zeros(3).put_(torch.tensor([0]), torch.ones(1))
except RuntimeError as error:
    print(error)
"""


def run(folder, rank):
    environ = {**os.environ, "RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    options = RecorderOptions(deterministic=True).variables()
    environ = {**environ, **options, "NCCL_ALGO": "Tree", **record_variables(environ, folder)}
    done = subprocess.run([sys.executable, "-c", CODE], env=environ, capture_output=True, text=True, check=True)
    return done.stdout.splitlines()


def test_a_fresh_rank_is_seeded_by_its_rank_and_names_what_has_no_deterministic_form(tmp_path):
    drawn, environ, cudnn, refusal = run(tmp_path, rank=1)
    torchs = torch.rand((), generator=torch.Generator().manual_seed(1))
    assert drawn == f"{random.Random(1).random()} {np.random.RandomState(1).rand()} {float(torchs)}"
    assert environ == ":4096:8 Tree False"
    assert cudnn == "True False"
    assert "put_ does not have a deterministic implementation" in refusal


def drawn_and_trained(world):
    be_deterministic(seed=world.rank)
    model = DistributedDataParallel(torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Dropout()))
    model(torch.randn(8, 4)).square().mean().backward()
    return [parameter.grad for parameter in model.parameters()]


def test_two_runs_of_forked_ranks_are_equal_to_the_bit():
    first, again = (run_ranks(drawn_and_trained, 2) for _ in range(2))
    for one, other in zip(first[0], again[0], strict=True):
        assert torch.equal(one, other)


def test_the_users_own_variables_stay():
    assert deterministic_variables({"CUBLAS_WORKSPACE_CONFIG": ":16:8"}).keys() == {"NCCL_ALGO", "PYTHONHASHSEED"}


def test_a_rank_that_is_asked_for_nothing_gets_no_variables():
    assert RecorderOptions().variables() == {}
    assert RecorderOptions(check_replicas=5).variables() == {"SHARDWISE_CHECK_REPLICAS": "5"}
