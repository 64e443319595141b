"""Verdicts: passed, failed, refused, does not apply; in fp64, in fp32 and by loss band."""

import inspect
from pathlib import Path

import msgspec
import pytest

import shardwise as sw
from refusals import refuses
from shardwise.errors import TrainingError
from shardwise.job import load_job, refer
from shardwise.parallel import apply
from shardwise.parity.spec import VerifyReport, VerifySpec, markdown_table
from shardwise.parity.verify import verify
from shardwise.training import build

JOBS = Path(__file__).parent / "jobs.py"


def report_on(plans, job="job", nproc=2, **options):
    return verify(f"{JOBS}:{job}", plans, nproc=nproc, **options)


def test_sound_plans_pass_and_nobody_is_accused():
    report = report_on(["ddp", "ddp+accumulation=2", "zero1", "zero2", "zero3"])
    assert report.exit_code == 0
    for verdict in report.verdicts:
        assert (verdict.status, verdict.findings, verdict.first) == ("passed", (), None)
        assert verdict.worst.relative < 1e-11


def test_batch_norm_is_compared_with_one_process_that_groups_its_rows_alike():
    report = report_on(["ddp", "ddp+accumulation=5"], job="batch_norm")
    assert [verdict.status for verdict in report.verdicts] == ["passed", "passed"]


def test_elements_whose_gradient_is_noise_are_left_out_and_counted():
    report = report_on(["ddp", "zero3"], job="amplified")
    for verdict in report.verdicts:
        assert (verdict.status, verdict.left_out) == ("passed", 16)  # both biases before batch normalization
        assert "16 of 187 elements of parameters excluded" in verdict.measure


def test_keyed_masks_are_compared_with_dropout_on():
    report = report_on(["ddp", "zero3+accumulation=2", "ddp+compile=blocks"], job="keyed_dropout")
    assert [verdict.status for verdict in report.verdicts] == ["passed", "passed", "refused"]
    assert report.notes == ("dropout is on, because its masks are keyed",)


def test_whatever_a_model_draws_is_compared_where_masks_are_keyed():
    report = report_on(["ddp", "zero3+accumulation=2"], job="keyed_draws")
    assert [(verdict.status, verdict.findings) for verdict in report.verdicts] == [("passed", ())] * 2


def test_a_fault_of_every_plan_is_found_since_the_reference_is_plain_pytorch(monkeypatch):
    real = build.make_optimizer

    def too_fast(factory, named, **options):
        optimized = real(factory, named, **options)
        for group in optimized.param_groups:
            group["lr"] *= 1.5
        return optimized

    monkeypatch.setattr(build, "make_optimizer", too_fast)
    (verdict,) = report_on(["ddp"], nproc=1).verdicts
    assert verdict.status == "failed"
    assert (verdict.first.kind, verdict.first.step) == ("loss", 1)


def test_gradient_hooks_and_drawn_attributes_are_those_of_plain_pytorch():
    passed, refused = report_on(["ddp", "zero3"], job="pruned").verdicts
    assert (passed.status, passed.findings) == ("passed", ())
    assert (refused.status, "gradient hooks, but parameter 0.weight" in refused.reason) == ("refused", True)


def test_fp32_stays_within_the_measured_noise():
    (verdict,) = report_on(["ddp"], precision="fp32").verdicts
    assert verdict.status == "passed"
    assert "noise" in verdict.measure
    assert 1e-8 < verdict.worst.relative < verdict.worst.limit < 1e-3


@pytest.mark.parametrize(
    ("job", "note"), [("single_table", "does not train this model in fp64"), ("single_output", "its loss is float32")]
)
def test_a_model_that_fp64_does_not_reach_is_compared_in_fp32_with_a_note(job, note):
    report = report_on(["ddp"], job=job)
    assert (report.precision, report.verdicts[0].status) == ("fp32", "passed")
    assert "compared in fp32" in report.notes[1]
    assert note in report.notes[1]


def test_a_model_that_rounds_inside_is_compared_in_fp32_and_the_verdict_gives_the_reason():
    (verdict,) = report_on(["ddp"], job="rounding").verdicts
    assert verdict.status == "passed"
    assert "in fp32" in verdict.measure
    assert "the model casts to a lower precision" in verdict.measure


def test_a_plan_that_changes_numbers_is_judged_by_a_band():
    (verdict,) = report_on(["ddp+precision=bf16"]).verdicts
    assert verdict.status == "passed"
    assert verdict.measure.startswith("losses within 3%")
    assert 1e-6 < verdict.worst.relative < 0.03


@pytest.mark.parametrize(
    ("plan", "code"),
    [
        ("ddp+accumulation=7", "plan.batch-not-divisible"),
        ("zero3+communication.compression=bf16", "support.compression-without-ddp"),
    ],
)
def test_a_plan_named_that_can_never_be_is_refused_before_any_process_starts(plan, code):
    with refuses(code):
        report_on(["ddp", plan])


def test_a_plan_named_that_does_not_fit_the_job_is_refused():
    report = report_on(["tp"], job="batch_norm")
    (verdict,) = report.verdicts
    assert verdict.status == "refused"
    assert "--propose-rules" in verdict.reason
    assert report.exit_code == 2


def test_a_plan_that_was_not_applied_fails_although_its_numbers_are_right(monkeypatch):
    monkeypatch.setattr(apply, "tensor_parallel", lambda module, *_, **__: module)
    (verdict,) = report_on(["tp"]).verdicts
    assert (verdict.status, verdict.first) == ("failed", None)
    assert verdict.findings[0].cause == "plan not applied"
    assert "tp is 2" in verdict.findings[0].evidence


def test_a_rank_that_dies_fails_its_plan_and_the_next_is_still_seen(monkeypatch):
    def broken(*_, **__):
        raise RuntimeError("no such thing")

    monkeypatch.setattr(apply, "shard_unit", broken)
    report = report_on(["zero3", "ddp"])
    assert [verdict.status for verdict in report.verdicts] == ["failed", "passed"]
    assert "RuntimeError: no such thing" in report.verdicts[0].reason
    assert "test_verify.py" in report.verdicts[0].reason
    assert report.exit_code == 3


def test_a_job_that_one_process_cannot_train_is_reported_as_such():
    with refuses("verify.reference-failed", kind=TrainingError):
        report_on(["ddp"], job="broken")


def test_a_report_notes_that_no_full_step_followed_the_short_one():
    assert report_on(["ddp"], nproc=1, steps=2).notes[1].startswith("no full step followed a partial one")


def test_report_survives_json_and_has_its_tables():
    report = report_on(["ddp"])
    assert msgspec.json.decode(report.to_json(), type=VerifyReport) == report
    table, *_, summary = report.to_text().splitlines()
    assert table.split() == ["plan", "result", "worst", "gap"]
    assert summary == "jobs: 1 passed; 4 steps on 2 ranks, compared with one process"
    assert report.to_markdown() == markdown_table([report])
    assert report.to_markdown().splitlines()[0] == "| plan | jobs x 2 |"
    assert report.to_markdown().splitlines()[2].startswith("| `ddp` | ")


def test_a_job_object_is_verified_and_the_signature_shows_every_option():
    report = sw.verify(load_job(refer(f"{JOBS}:job", {})), plans="ddp", nproc=2, steps=1)
    assert (report.job, [verdict.status for verdict in report.verdicts]) == ("job", ["passed"])
    parameters = inspect.signature(sw.verify).parameters
    assert next(iter(parameters)) == "job"
    assert parameters.keys() >= {"plans", "steps", "nproc", "precision", "backend", "resume", "shrink", "set"}
    with refuses("verify.settings-of-job-object", "batch_size=8"):
        sw.verify(load_job(refer(f"{JOBS}:job", {})), set=["batch_size=8"])


def test_the_spec_is_json_both_ways_and_holds_the_defaults():
    spec = VerifySpec(job="job.py", plans=["ddp", "zero3"], resume=True)
    assert VerifySpec.from_json(spec.to_json()) == spec
    assert (spec.num_steps, VerifySpec(job="job.py").num_steps, spec.replace(steps=9).num_steps) == (6, 4, 9)
    with refuses("spec.value-invalid", "nccl", "gloo, mpi"):
        VerifySpec(job="job.py", backend="nccl")


@pytest.mark.parametrize(
    ("job", "cause", "evidence"),
    [
        ("counting", "state between forward passes", "runs 2 micro-batches a step where one process runs 1"),
        ("contrastive", "loss over the whole batch", "duplicated rows multiply Loss.sum and Loss.count"),
        ("centered", "model or loss over the whole batch", "depends on the other rows of its micro-batch"),
    ],
)
def test_a_job_that_no_split_of_the_batch_gives_is_named_as_such(job, cause, evidence):
    report = report_on(["ddp+accumulation=2"], job=job, steps=1)
    (finding,) = report.verdicts[0].findings
    assert finding.cause == cause
    assert evidence in finding.evidence
    assert any("duplicated rows multiply Loss.sum" in note for note in report.notes) == (job == "contrastive")


@pytest.mark.parametrize(("plan", "passes"), [("ddp+accumulation=2", 2), ("pp+accumulation=4", 4)])
def test_a_buffer_that_counts_forward_passes_is_not_noise_of_the_job(plan, passes):
    (finding,) = report_on([plan], job="counted_layers", steps=2).verdicts[0].findings
    assert (finding.cause, finding.parameter) == ("state between forward passes", "layers.0.passes")
    assert f"grew {passes} times as much as in one process" in finding.evidence


@pytest.mark.parametrize(
    ("job", "refusal"),
    [
        ("uncounted", ("loss.count-zero",)),
        ("averaged", ("loss.sum-is-mean", 'reduction="sum"')),
    ],
)
def test_a_loss_that_cannot_be_right_is_refused_before_any_plan_is_tried(job, refusal):
    with refuses(*refusal):
        report_on("all", job=job, steps=1)
