"""verify --resume: sound resumes pass, and bugs planted in forked ranks are named."""

import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from refusals import refuses
from shardwise.data import loaders
from shardwise.parity import progress
from shardwise.parity.kill import Kill, choose_kills
from shardwise.parity.resume import other_worlds
from shardwise.parity.spec import settle_plan
from shardwise.parity.verify import verify
from shardwise.training import saving
from shardwise.training.step import plain

JOBS = Path(__file__).parent / "jobs.py"


def report_on(plans, job="job", nproc=2, **options):
    return verify(f"{JOBS}:{job}", plans, nproc=nproc, resume=True, **{"steps": 5, **options})


def finding_on(plan="ddp", **options):
    (verdict,) = report_on([plan], **options).verdicts
    assert verdict.status == "failed", verdict
    (finding,) = verdict.findings
    return finding


def test_sound_resumes_pass_under_the_next_plan_on_other_ranks():
    report = report_on(["zero3", "zero1"], nproc=2)
    assert report.exit_code == 0, report
    for verdict, following in zip(report.verdicts, ("zero1", "zero3"), strict=True):
        assert (verdict.status, verdict.findings) == ("passed", ())
        assert verdict.worst.relative < 1e-11
        assert verdict.measure.endswith(f"resumed on 2 ranks, then as {following} on 1 rank")
    assert report.to_text().splitlines()[-1] == "jobs: 2 passed; 5 steps on 2 ranks, compared with an uninterrupted run"


@pytest.mark.parametrize(
    ("nproc", "plans", "last"),
    [
        (2, ["fsdp", "tp"], "tp on 2 ranks"),
        (2, ["tp", "fsdp"], "fsdp on 1 rank"),
        (2, ["tp"], "tp on 1 rank"),
        (4, ["fsdp", "tp"], "tp on 2 ranks"),
    ],
)
def test_the_next_plan_keeps_its_ranks_only_if_one_rank_would_shard_nothing(nproc, plans, last):
    runner = SimpleNamespace(batch_size=8, framework="torch")
    plan = settle_plan(plans[0], batch_size=8, nproc=nproc)
    (label, _), *_ = other_worlds(runner, plans[0], plan, plans, has_batch_norm=False)
    assert label == last


def test_keyed_masks_are_the_same_on_other_ranks():
    (verdict,) = report_on(["ddp"], job="keyed_dropout").verdicts
    assert verdict.status == "passed", verdict
    assert verdict.measure.endswith("then as ddp on 1 rank")


@pytest.mark.prove
def test_a_plan_of_fixed_ranks_is_refitted():
    (verdict,) = report_on(["shard2.tp2"], job="untied", nproc=4, steps=4).verdicts
    assert verdict.status == "passed", verdict
    assert verdict.measure.endswith("then as shard2.tp2 on 2 ranks")


def test_fp32_stays_within_the_measured_noise():
    (verdict,) = report_on(["ddp"], precision="fp32", steps=4).verdicts
    assert verdict.status == "passed", verdict
    assert 0 < verdict.worst.relative < verdict.worst.limit < 1e-3


@pytest.mark.parametrize(
    ("plan", "job", "expected"),
    [
        ("ddp+precision=bf16", "job", "computes in bf16"),
        ("ddp+accumulation=2", "batch_norm", "depend on the micro-batches"),
        ("tp", "batch_norm", "--propose-rules"),
    ],
)
def test_plans_that_cannot_be_proven_are_refused(plan, job, expected):
    report = report_on([plan], job=job)
    assert report.verdicts[0].status == "refused"
    assert expected in report.verdicts[0].reason
    assert report.exit_code == 2


def test_a_table_as_long_as_a_micro_batch_is_not_part_of_its_rows():
    (verdict,) = report_on(["ddp"], job="tabled", steps=4).verdicts
    assert verdict.status == "passed", verdict


def test_too_few_steps_are_refused_before_any_process_starts():
    with refuses("verify.too-few-steps", "--steps 4"):
        report_on(["ddp"], steps=3)


def test_kills_are_seeded_and_leave_something_to_resume_from():
    assert choose_kills("ddp", 6) == choose_kills("ddp", 6)
    moments = set()
    for steps in range(4, 30):
        first, second = choose_kills("zero3", steps)
        assert first.moment == "step"
        assert first.step >= 1
        assert first.step + 2 <= second.step <= steps - 1
        moments.add(second.moment)
    assert moments == {"open", "os.rename"}
    assert str(Kill(moment="open", step=4)) == "at the start of the save of step 4"


def after_resume(monkeypatch, bug):
    """Have `bug(step)` done to every resumed step after its state was restored."""
    right = saving.Saving.resume

    def planted(self, build):
        step = right(self, build)
        if step is not None:
            bug(step)
        return step

    monkeypatch.setattr(saving.Saving, "resume", planted)


def test_a_cursor_off_by_one_batch(monkeypatch):
    right = loaders.IndexLoader.__init__

    def late(self, *args, first_step, **options):
        right(self, *args, first_step=first_step + bool(first_step), **options)

    monkeypatch.setattr(loaders.IndexLoader, "__init__", late)
    finding = finding_on()
    assert finding.cause == "other samples"
    assert f"step {finding.step + 1} trained on the rows of step {finding.step + 2}" in finding.evidence


def test_an_optimizer_that_is_not_restored(monkeypatch):
    after_resume(monkeypatch, lambda step: step.optimizer.state.clear())
    finding = finding_on("zero3")
    assert finding.cause == "optimizer not restored"
    assert "zero3 on 2 ranks, resumed" in finding.evidence


def test_an_optimizer_that_is_not_restored_on_other_ranks_only(monkeypatch):
    after_resume(monkeypatch, lambda step: step.optimizer.state.clear() if dist.get_world_size() == 1 else None)
    finding = finding_on("zero3")
    assert finding.cause == "optimizer not restored"
    assert "zero3 on 1 rank" in finding.evidence


@torch.no_grad()
def disturb(step):
    for _, parameter in step.named_parameters():
        parameter.mul_(1 + 1e-6)


def test_weights_that_are_not_restored(monkeypatch):
    after_resume(monkeypatch, disturb)
    assert finding_on().cause == "weights not restored"


def test_random_numbers_that_are_not_restored_in_a_job_without_dropout(monkeypatch):
    after_resume(monkeypatch, lambda step: torch.manual_seed(5))
    finding = finding_on()
    assert finding.cause == "random numbers not restored"
    assert finding.ranks == (0, 1)


def test_a_learning_rate_that_begins_anew(monkeypatch):
    after_resume(monkeypatch, lambda step: setattr(step, "base_rates", [rate / 2 for rate in step.base_rates]))
    assert finding_on().cause == "learning rate not restored"


def test_batch_statistics_that_are_not_restored(monkeypatch):
    after_resume(monkeypatch, lambda step: [buffer.zero_() for buffer in step.model.buffers()])
    finding = finding_on(job="batch_norm")
    assert finding.cause == "buffers not restored"
    assert finding.parameter.startswith("1.")


def test_a_run_that_starts_again_instead(monkeypatch):
    monkeypatch.setattr(saving.Saving, "resume", lambda self, build: None)
    finding = finding_on()
    assert finding.cause == "not resumed"
    assert finding.step == 0


def test_saves_that_never_happen_fail_the_plan(monkeypatch):
    monkeypatch.setattr("shardwise.parity.kill.SAVE_S", 0.5)
    monkeypatch.setattr(saving.Saving, "is_due", lambda self, number: False)
    (verdict,) = report_on(["ddp"]).verdicts
    assert verdict.status == "failed"
    assert "no checkpoint of step" in verdict.reason


def test_a_plan_that_is_off_by_itself_is_blamed_and_not_resume(monkeypatch):
    right = plain.PlainStep._backward

    def scaled(self, micro_batch, weight):
        return right(self, micro_batch, weight * (2 if dist.get_world_size() == 1 else 1))

    monkeypatch.setattr(plain.PlainStep, "_backward", scaled)
    finding = finding_on()
    assert finding.cause == "another plan, other numbers"
    assert "ddp on 1 rank differs even without a kill" in finding.evidence


def test_a_job_that_draws_random_numbers_is_distinguished():
    finding = finding_on(job="noisy")
    assert finding.cause == "random numbers"
    assert "--set masks=keyed" in finding.evidence


def test_a_job_that_differs_each_time_is_distinguished():
    assert finding_on(job="restless").cause == "non-deterministic operation"


def hang_on_rank_1(right, *args):
    if dist.get_world_size() > 1 and dist.get_rank() == 1:
        time.sleep(3600)
    return right(*args)


@pytest.mark.parametrize("moment", ["after a resume", "in a step"])
def test_a_rank_that_hangs_ends_its_plan_and_is_located(monkeypatch, moment):
    monkeypatch.setattr(progress, "LEAST_S", 2.0)
    if moment == "in a step":
        right = plain.PlainStep._accumulate
        monkeypatch.setattr(plain.PlainStep, "_accumulate", lambda self, *args: hang_on_rank_1(right, self, *args))
        label = "ddp on 2 ranks"
    else:
        after_resume(monkeypatch, lambda step: hang_on_rank_1(lambda: None))
        label = "ddp on 2 ranks, resumed"
    finding = finding_on(timeout_s=120.0)
    assert (finding.cause, finding.ranks) == ("hang", (0, 1))
    assert finding.evidence.startswith(f"{label}: ranks made no progress for")
    assert f"rank 1 is at {__file__}" in finding.evidence
    assert "hang_on_rank_1" in finding.evidence
