"""Models of transformers, unchanged, under every strategy that fits them."""

from pathlib import Path

import pytest

from shardwise.parity.verify import verify

JOBS = Path(__file__).resolve().parents[2] / "examples" / "verify" / "architectures.py"
DATA_PARALLEL = ["ddp", "zero3", "zero1", "zero2"]
PLANS = {
    "bert": DATA_PARALLEL,
    "gpt2": [*DATA_PARALLEL, "pp+accumulation=4"],
    "llama": [*DATA_PARALLEL, "tp", "pp+accumulation=4", "pp+accumulation=4+pipeline.schedule=zbv"],
    "t5": DATA_PARALLEL,
    "vit": [*DATA_PARALLEL, "pp+accumulation=4"],
}


def check(name, plans, nproc=2):
    for verdict in verify(f"{JOBS}:{name}", plans, nproc=nproc).verdicts:
        assert verdict.status == "passed", verdict


@pytest.mark.representative("vit-zero3", "gpt2-pp+accumulation=4")
@pytest.mark.slow
@pytest.mark.parametrize(("name", "plan"), [("gpt2", "pp+accumulation=4"), ("llama", "tp"), ("vit", "zero3")])
def test_a_slice_of_architectures_computes_what_one_process_computes(name, plan):
    check(name, [plan])


@pytest.mark.prove
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", PLANS)
def test_every_architecture_computes_what_one_process_computes(name):
    check(name, PLANS[name])


@pytest.mark.prove
@pytest.mark.timeout(600)
def test_products_of_axes_fit_a_model_of_transformers():
    check("llama", ["shard2.tp2", "replicate2.tp2", "pp2.shard2+accumulation=4", "pp2.tp2+accumulation=4"], nproc=4)
