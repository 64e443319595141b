"""Collectives on a GPU: NCCL with a world of one, and gloo's ranks that share it, by the same command."""

import json

import pytest

from shardwise.cli.main import main
from shardwise.measurement.comm.spec import KINDS

pytestmark = pytest.mark.gpu


def sweep(capsys, *arguments):
    code = main(["bench", "comm", "--sizes", "4KiB:1MiB:16", "--seconds", "2", "--async", "--json", *arguments])
    return code, json.loads(capsys.readouterr().out)


def test_nccl_with_a_world_of_one_runs_every_collective(capsys):
    code, found = sweep(capsys, "--nproc", "1")
    assert code == 0, [check for check in found["checks"] if check["wrong"]]
    assert (found["backend"], found["world_size"]) == ("nccl", 1)
    assert {row["collective"] for row in found["rows"]} == set(KINDS)
    has = {
        (check["collective"], check["operation"], check["dtype"]) for check in found["checks"] if check["wrong"] == 0
    }
    for operation in ("SUM", "AVG", "PRODUCT", "MIN", "MAX"):
        assert ("all_reduce", operation, "float32") in has
    assert all(check["wrong"] in (0, None) for check in found["checks"])


def test_gloo_ranks_that_share_a_gpu_run_every_collective(capsys):
    code, found = sweep(capsys, "--nproc", "2", "--device", "cuda", "--backend", "gloo")
    assert code == 0
    assert (found["backend"], found["world_size"]) == ("gloo", 2)
    assert found["device"] != "CPU"
    assert {row["collective"] for row in found["rows"]} == set(KINDS)
    assert found["ceilings"]["world"]["is_measured"]


def test_more_nccl_ranks_than_gpus_and_sizes_over_the_gpus_memory_are_refused(capsys):
    assert main(["bench", "comm", "--nproc", "64"]) == 2
    assert "--nproc 64 exceeds the" in capsys.readouterr().err
    assert main(["bench", "comm", "all_reduce", "--nproc", "1", "--sizes", "1TiB"]) == 2
    assert "[bench.not-enough-memory]" in capsys.readouterr().err
