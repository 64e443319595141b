"""verify on jobs in MLX: replicas equal one process in every number, resumes too, and what MLX lacks is reported."""

from pathlib import Path

import pytest

pytest.importorskip("mlx.core")

import mlx.core as mx
from mlx import nn

from shardwise.engines.engine import engine_named
from shardwise.engines.mlx import step
from shardwise.parity.verify import verify

JOBS = Path(__file__).parent / "mlx_jobs.py"


@pytest.fixture(autouse=True)
def _nothing_is_compiled(request, monkeypatch):
    """A CPU's kernels take seconds each to compile: only those that ask for it wait for that."""
    if "compiled" not in request.node.name:
        monkeypatch.setenv("MLX_DISABLE_COMPILE", "1")


def report_on(plans, job="job", nproc=2, **options):
    return verify(f"{JOBS}:{job}", plans, nproc=nproc, **{"steps": 4, **options})


def test_replicas_accumulation_and_a_short_last_step_equal_one_process_in_fp64():
    report = report_on(["ddp", "ddp+accumulation=2"])
    assert [verdict.status for verdict in report.verdicts] == ["passed"] * 2, report
    assert all(verdict.measure == "every value within 1e-09 in fp64" for verdict in report.verdicts)


def test_tokens_are_weighed_by_how_many_count_in_the_whole_batch():
    (verdict,) = report_on(["ddp"], job="tokens", nproc=4).verdicts
    assert verdict.status == "passed", verdict
    assert verdict.worst.relative < 1e-10


def test_where_mlx_has_no_fp64_noise_is_measured_in_fp32_and_a_note_reports_it():
    report = report_on(["ddp"], job="convolution", steps=2)
    (verdict,) = report.verdicts
    assert verdict.status == "passed", verdict
    assert verdict.measure == "every value within 4 noise floors in fp32"
    assert report.precision == "fp32"
    assert any("MLX does not train this model in fp64" in note for note in report.notes)


def test_a_killed_run_resumes_exactly_on_another_number_of_ranks():
    (verdict,) = report_on(["ddp"], resume=True, steps=5).verdicts
    assert verdict.status == "passed", verdict
    assert verdict.measure.endswith("then as ddp on 1 rank")
    assert verdict.worst.relative < 1e-10


@pytest.mark.prove
def test_ranks_that_do_not_sum_are_found_out(monkeypatch):
    monkeypatch.setattr(step, "sum_over", lambda *_: lambda gradients: gradients)
    (verdict,) = report_on(["ddp"]).verdicts
    assert verdict.status == "failed"
    assert verdict.first.kind == "gradient"
    assert verdict.findings[0].cause == "not known"


@pytest.mark.prove
def test_what_mlx_cannot_do_does_not_apply_and_is_not_a_failure():
    report = report_on("all", nproc=2, steps=1)
    found = {verdict.plan: verdict.status for verdict in report.verdicts}
    assert report.exit_code == 0, report
    passed = [name for name, status in found.items() if status == "passed"]
    assert passed == ["ddp", "ddp+accumulation=2", "ddp+precision=bf16"]
    assert {status for name, status in found.items() if name not in passed} == {"does not apply"}


@pytest.mark.prove
@pytest.mark.parametrize("nproc", [2, 4])
@pytest.mark.parametrize("job", ["job", "tokens", "convolution"])
def test_the_compiled_step_equals_one_process(job, nproc):
    plans = ["ddp", "ddp+accumulation=2", "ddp+precision=bf16"]
    plans += ["ddp+batch_norm=local"] if nproc == 2 else []  # on four, a rank has one row alone in the short step
    report = report_on(plans, job=job, nproc=nproc, steps=7)
    assert report.exit_code == 0, report


def test_dropout_of_mlx_is_silenced():
    layer = nn.Dropout(0.9)
    engine_named("mlx").silence_dropout(layer)
    assert mx.array_equal(layer(mx.ones(8)), mx.ones(8))
