"""Sequences split over ranks give the values of one process, in fp64 to 1e-9."""

from pathlib import Path

import pytest

from shardwise.parallel import context
from shardwise.parity.verify import verify

JOBS = Path(__file__).parent / "context_jobs.py"

PLANS = (
    "cp",
    "cp+zero=1",
    "cp+zero=3+recompute=full",
    "cp+recompute=selective",
    "cp+accumulation=2+gradient_sync=every",
    "cp+fused_loss=true",
    "shard2.cp2+accumulation=2",
    "shard2.cp2+zero=1",
    "shard2.cp2+compile=blocks",
    "replicate2.cp2",
    "replicate2.cp2+zero=3",
    "cp2.tp2",
    "cp2.tp2+zero=3+sequence_parallel=true+recompute=full",
)


def verdicts(job, plans, nproc, **options):
    report = verify(f"{JOBS}:{job}", plans, nproc=nproc, **options)
    return [(verdict.plan, verdict.status, verdict.reason) for verdict in report.verdicts]


def passed(plans):
    return [(plan, "passed", "") for plan in plans]


def test_grouped_heads_on_four_slices_equal_one_process():
    plans = ["cp", "replicate2.cp2", "cp+zero=3+recompute=full"]
    assert verdicts("two_groups", plans, 4) == passed(plans)


def test_transformers_llama_on_slices_equals_one_process():
    pytest.importorskip("transformers")
    assert verdicts("transformers_llama", ["cp"], 2) == passed(["cp"])


def test_positions_that_every_slice_counts_from_zero_are_found_out(monkeypatch):
    monkeypatch.setattr(context, "_with_positions", lambda module, _: module.forward)
    ((_, status, _),) = verdicts("learned", ["cp"], 2)
    assert status == "failed"


@pytest.mark.prove
def test_compiled_blocks_equal_one_process_with_a_cold_and_with_a_warm_cache(monkeypatch, tmp_path):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    plans = ["cp+compile=blocks", "cp+compile=model"]
    assert verdicts("two_groups", plans, 2) == passed(plans)
    assert verdicts("two_groups", plans, 2) == passed(plans)


@pytest.mark.prove
@pytest.mark.parametrize("job", ["one_group", "two_groups", "learned", "transformers_llama", "transformers_loss"])
def test_every_combination_equals_one_process(job):
    plans = [plan for plan in PLANS if job != "one_group" or "tp" not in plan]  # tp does not divide one group
    assert verdicts(job, plans, 4) == passed(plans)


@pytest.mark.prove
def test_slices_resume_from_checkpoints_of_others_and_others_from_theirs():
    plans = ["cp", "shard2.cp2", "ddp"]
    assert verdicts("learned", plans, 4, steps=6, resume=True) == passed(plans)
