"""Muon beside AdamW: equal to torch.optim.Muon in one process, and to one process under every strategy."""

import pytest
import torch
from torch import nn
from training.test_strategies import check_equal, trained

import shardwise as sw
from jobs import sentences_job
from shardwise.testing import run_ranks

MUON = sw.muon(lr=0.02, adamw_lr=1e-2)
PLANS = [
    (2, "ddp", {}),
    (2, "zero1", {}),
    (3, "zero1", {}),
    (2, "zero2", {}),
    (2, "zero3", {"accumulation": "2"}),
    (4, "hsdp", {}),
    (2, "tp", {}),
    (4, "shard2.tp2", {}),
    (4, "replicate2.shard2", {"zero": "1"}),
    (2, "pp", {}),
    (4, "shard2.pp2", {}),
    (2, "cp", {}),
]


def job_of(**changes):
    return sentences_job("llama-tiny", optimizer=MUON, **changes)


@pytest.fixture(scope="module")
def alone():
    return {size: run_ranks(trained, 1, job_of(batch_size=size), "ddp", {})[0] for size in (6, 8)}


@pytest.mark.parametrize(
    ("nproc", "name", "overrides"), PLANS, ids=[f"{n}-{name}-{'-'.join(over.values())}" for n, name, over in PLANS]
)
def test_muon_under_a_plan_equals_one_process(alone, nproc, name, overrides):
    batch_size = 8 if 8 % nproc == 0 else 6
    check_equal(job_of(batch_size=batch_size), nproc, name, overrides, alone[batch_size])
