"""A loop over steps: global losses, evaluation, checkpoints, resume and curves, under any plan as in one process."""

import json

import pytest
import torch
from torch.nn import functional

import shardwise as sw
from jobs import SENTENCES, points_job, sentences_job
from refusals import refuses
from shardwise.testing import run_ranks
from shardwise.training.journal import start_report

JOB = sentences_job("llama-tiny")


def make_plan(world, name):
    return sw.Plan.preset(name, world.size, batch_size=JOB.batch_size, precision="fp64")


def run_steps(world, name):
    """Train; return the losses that this rank reads, and the evaluation."""
    step = sw.build_step(JOB, make_plan(world, name), world)
    return [step(batch).loss for batch in step.feed], sw.evaluate(step, SENTENCES)


@pytest.fixture(scope="module")
def one_process():
    return run_ranks(run_steps, 1, "ddp")[0]


@pytest.mark.parametrize(
    ("nproc", "name"), [(2, "ddp"), (2, "zero1"), (2, "fsdp"), (2, "tp"), (2, "pp"), (2, "cp"), (4, "shard2.tp2")]
)
def test_every_rank_reports_the_loss_and_evaluation_of_one_process(one_process, nproc, name):
    losses, evaluation = one_process
    for other_losses, other_evaluation in run_ranks(run_steps, nproc, name):
        assert other_losses == pytest.approx(losses, rel=1e-9)
        assert other_evaluation == pytest.approx(evaluation, rel=1e-9)


def read_on_one_rank(world):
    """Return the losses as rank 1 alone reads them, late, and the shares of all ranks."""
    plan = sw.Plan.preset("ddp", world.size, batch_size=JOB.batch_size, communication={"sync_every": 2})
    step = sw.build_step(JOB, plan, world)
    reports = [step(batch) for batch in step.feed]
    losses = [report.loss for report in reports] if world.rank == 1 else []
    sums = [world.sum({"sum": float(each.loss_sum), "count": each.denominator}) for each in reports]
    return losses, [each["sum"] / each["count"] * world.size for each in sums]


def test_reading_a_loss_communicates_nothing_and_is_global_where_replicas_train_apart():
    (_, wanted), (read, _) = run_ranks(read_on_one_rank, 2)
    assert read == pytest.approx(wanted, rel=1e-6)


def save_two_steps(world, name, folder):
    step = sw.build_step(JOB, make_plan(world, name), world)
    losses = []
    for batch in step.feed:
        losses.append(step(batch).loss)
        if step.number == 2:
            sw.save(folder, step)
            return losses
    return losses


def resume_steps(world, name, folder):
    notes = []
    step = sw.build_step(JOB, make_plan(world, name), world, resume=folder, note=notes.append)
    assert step.number == 2
    assert any(str(folder) in note for note in notes)
    with sw.Curves(step, folder / "run") as curves:
        losses = []
        for batch in step.feed:
            report = step(batch)
            curves.add(report)
            losses.append(report.loss)
        curves.evaluation(sw.evaluate(step, SENTENCES))
    return losses


@pytest.mark.parametrize(("before", "after"), [((2, "zero1"), (1, "ddp")), ((1, "ddp"), (2, "pp"))])
def test_a_step_resumes_under_another_plan_and_writes_its_curves(one_process, tmp_path, before, after):
    first = run_ranks(save_two_steps, *before, tmp_path)[0]
    second = run_ranks(resume_steps, *after, tmp_path)[0]
    assert first + second == pytest.approx(one_process[0], rel=1e-9)
    events = [json.loads(line) for line in (tmp_path / "run" / "events" / "rank0.jsonl").read_text().splitlines()]
    written = [loss for event in events if event["kind"] == "steps" for loss in event["losses"]]
    assert written == pytest.approx(second, rel=1e-9)
    (evaluation,) = [event for event in events if event["kind"] == "evaluation"]
    assert evaluation["values"] == pytest.approx(one_process[1], rel=1e-9)


def mean_loss(output, batch):
    return functional.cross_entropy(output.flatten(0, 1), batch[1].flatten(), ignore_index=-100)


def test_a_loss_from_a_mean_is_the_loss_of_its_sum():
    loss = sw.Loss.from_mean(mean_loss, count=lambda batch: (batch[1] != -100).sum())
    logits = torch.randn(2, 3, 5, generator=torch.Generator().manual_seed(0))
    batch = (torch.zeros(2, 3), torch.tensor([[1, -100, 2], [4, 0, -100]]))
    torch.testing.assert_close(loss.sum_of(logits, batch), sw.losses.token_cross_entropy.sum_of(logits, batch))
    nothing = (batch[0], torch.full((2, 3), -100))
    assert loss.sum_of(logits, nothing) == 0
    by_row = sw.Loss.from_mean(lambda output, batch: functional.mse_loss(output, batch["y"]))
    assert by_row.sum_of(torch.ones(4, 1), {"x": torch.zeros(4, 1), "y": torch.zeros(4, 1)}) == 4


@pytest.mark.parametrize("given", [torch.nn.CrossEntropyLoss(), mean_loss])
def test_a_mean_loss_in_place_of_a_loss_is_refused_with_the_right_call(given):
    with refuses("job.loss-not-a-loss", "sw.Loss.from_mean"):
        sentences_job(loss=given)


def test_a_loss_module_that_takes_a_mean_is_not_a_sum():
    with refuses("loss.sum-is-mean", "CrossEntropyLoss", "sw.Loss.from_mean"):
        sw.Loss(sum=torch.nn.CrossEntropyLoss())


def mean_as_sum(world):
    job = sentences_job(loss=sw.Loss(sum=mean_loss, count=lambda batch: int((batch[1] != -100).sum())))
    step = sw.build_step(job, sw.Plan.preset("ddp", 1, batch_size=8), world)
    with refuses("loss.sum-is-mean", "sw.Loss.from_mean"):
        step(next(iter(step.feed)))


def test_a_function_that_returns_a_mean_is_refused_in_the_first_step():
    run_ranks(mean_as_sum, 1)


def build_in(world, dtype, *, frozen):
    """Return the notes and the precision in the start report for a model whose second layer has another dtype."""
    layers = [torch.nn.Linear(6, 4), torch.nn.Linear(4, 3).to(dtype)]
    layers[1].requires_grad_(not frozen)
    job = points_job(lambda: torch.nn.Sequential(*layers))
    notes = []
    plan = sw.Plan.preset("ddp", world.size, batch_size=job.batch_size)
    step = sw.build_step(job, plan, world, note=notes.append)
    return notes, {name: text for name, text, _ in start_report(job, plan, world, step)["facts"]}["precision"]


def norms_in(world, name, norm):
    """Return the line on batch norms in the start report of a model whose first stage has `norm`; None without one."""

    def model():
        return torch.nn.Sequential(torch.nn.Linear(6, 4), norm(4), torch.nn.Linear(4, 4), torch.nn.Linear(4, 3))

    job = points_job(model, layers="")
    plan = sw.Plan.preset(name, world.size, batch_size=job.batch_size)
    step = sw.build_step(job, plan, world)
    return {name: text for name, text, _ in start_report(job, plan, world, step)["facts"]}.get("batch norm")


def test_start_report_has_batch_norms_of_models_that_have_some():
    assert run_ranks(norms_in, 2, "pp", torch.nn.BatchNorm1d) == ["sync", "sync"]
    assert run_ranks(norms_in, 1, "ddp", torch.nn.LayerNorm) == [None]


def test_start_report_has_the_dtype_of_a_model_that_is_not_built_in_that_of_the_plan():
    assert run_ranks(build_in, 1, torch.float32, frozen=False) == [([], "fp32 throughout")]
    for frozen in (False, True):
        [(notes, precision)] = run_ranks(build_in, 1, torch.bfloat16, frozen=frozen)
        assert "bfloat16" in precision
        assert "throughout" not in precision
        [note] = notes
        assert "1.weight (bfloat16)" in note
        assert ".float()" in note
