"""`--plan auto` on GPUs compiles and captures where that saves time, and gives the reason where it does not."""

import dataclasses

import torch

import shardwise as sw
from jobs import Pooled, points_job, sentences_job
from shardwise.hardware.cluster import parse_cluster
from shardwise.planner.search.question import FixedFields
from shardwise.planner.search.search import search
from shardwise.planner.search.speed import (
    best_with_speed_options,
    count_steps,
    gains_of_memory_options,
    with_speed_options,
)
from shardwise.planner.search.subject import job_subject
from shardwise.plans import Plan
from shardwise.plans.sections import Precision


def settled(job, cluster="1xH100"):
    """Return the plan of a search on a cluster with its speed options."""
    found = parse_cluster(cluster)
    question = job_subject(job, found).question(found)
    return best_with_speed_options(job, question, search(question).best.plan)


def searched(job, cluster="1xH100", **fixed):
    """Return the plan that the search chooses with fixed fields."""
    given = FixedFields(plan=Plan(**fixed), names=frozenset(fixed))
    found = parse_cluster(cluster)
    subject = job_subject(job, found)
    if "precision" in fixed:
        subject = subject.in_precision(fixed["precision"])
    question = dataclasses.replace(subject.question(found), fixed=given)
    answer = search(question)
    assert search(question, exhaustive=True).best.plan == answer.best.plan
    return best_with_speed_options(job, question, answer.best.plan)


def test_the_search_chooses_the_other_fields_for_those_that_are_fixed():
    job = sentences_job(steps=100_000)
    plan = searched(job)
    assert (plan.micro_batch, plan.recompute, plan.fused_loss, plan.compile) == (8, "none", False, "model")
    plan = searched(job, fused_loss=True)  # which compiles the blocks
    assert (plan.fused_loss, plan.compile) == (True, "blocks")
    plan = searched(job, recompute="full", micro_batch=2, compile="none")
    assert (plan.recompute, plan.recompute_blocks, plan.micro_batch, plan.accumulation) == ("full", 0, 2, 4)
    assert (plan.compile, "compile" in plan.sources) == ("none", False)
    plan = searched(job, "8xH100", recompute_blocks=1, recompute="selective", gradient_sync="every")
    assert (plan.recompute_blocks, plan.gradient_sync) == (1, "every")


def test_memory_of_the_fixed_precision_decides():
    job, cluster = sentences_job(steps=100_000), parse_cluster("1xH100")
    question = job_subject(job, cluster).question(cluster)
    whole = question.memory_of(search(question).best.plan).total
    narrow = Precision(compute="bf16", parameter="bf16", optimizer="bf16", master="none")
    fixed = FixedFields(plan=Plan(precision=narrow), names=frozenset({"precision"}))
    narrowed = dataclasses.replace(job_subject(job, cluster).in_precision(narrow).question(cluster), fixed=fixed)
    plan = search(narrowed).best.plan
    assert plan.precision == narrow
    assert narrowed.memory_of(plan).total < whole


def test_start_report_has_the_predicted_gain_of_each_memory_option():
    job, cluster = sentences_job(steps=100_000), parse_cluster("1xH100")
    question = job_subject(job, cluster).question(cluster)
    plan = search(question).best.plan
    seconds = question.time_model().predict(question.model.for_plan(plan), plan).seconds

    def ratio(**changes):
        other = dataclasses.replace(plan, **changes)
        return question.time_model().predict(question.model.for_plan(other), other).seconds / seconds

    found = gains_of_memory_options(question, plan)
    assert set(found) == {"recompute", "fused_loss", "micro_batch", "accumulation"}
    assert (
        found["recompute"]
        == f"auto: {ratio(recompute='selective'):.2f}x the speed of recompute = selective (predicted)"
    )
    halves = ratio(micro_batch=4, accumulation=2)
    assert found["micro_batch"] == f"auto: {halves:.2f}x the speed of micro_batch = 4 (predicted)"
    tight = dataclasses.replace(question, max_bytes=1)
    split = dataclasses.replace(plan, micro_batch=4, accumulation=2)
    assert gains_of_memory_options(tight, split)["micro_batch"].startswith("auto: micro_batch = 8 would need ")


def test_a_long_job_on_one_gpu_is_compiled_whole_and_captured():
    plan = settled(sentences_job(steps=100_000))
    assert (plan.compile, plan.capture) == ("model", "step")
    assert "of a step saved" in plan.source("compile")
    assert "of a step saved" in plan.source("capture")
    assert settled(sentences_job(steps=100_000, optimizer=sw.muon(lr=0.1))).capture == "none"


def test_several_ranks_compile_their_blocks():
    plan = settled(sentences_job(steps=100_000), cluster="8xH100")
    assert (plan.compile, plan.capture) == ("blocks", "none")


def test_a_short_job_stays_eager_and_the_plan_has_the_reason():
    plan = settled(sentences_job(steps=5))
    assert plan.compile == "none"
    assert plan.source("compile").startswith("auto: eager, since 5 steps save 0 s, less than")


def test_keyed_dropout_is_neither_compiled_nor_captured():
    plan = settled(sentences_job(steps=100_000, masks="keyed"))
    assert (plan.compile, plan.capture) == ("none", "none")
    assert plan.source("compile").startswith("auto: eager, since counter-based dropout")


def truncated(samples):
    """Collate rows to a length that depends on the label of the first one."""
    length = 4 + int(samples[0][1] == 0)
    return torch.stack([x[:length] for x, _ in samples]), torch.stack([y for _, y in samples])


def test_batches_of_changing_shape_are_neither_compiled_nor_captured():
    job = points_job(Pooled, steps=100_000, batch_size=4, collate=truncated)
    plan = settled(job)
    assert (plan.compile, plan.capture) == ("none", "none")
    assert plan.source("compile") == "auto: eager, since the shapes of batches change"


def test_blocks_are_compiled_before_a_fused_loss():
    job, cluster = sentences_job(steps=100_000), parse_cluster("1xH100")
    question = job_subject(job, cluster).question(cluster)
    plan = dataclasses.replace(search(question).best.plan, fused_loss=True)
    assert with_speed_options(job, plan, question).compile == "blocks"


def test_steps_are_counted_from_epochs():
    assert count_steps(sentences_job(steps=None, epochs=3)) == 9  # 22 samples in batches of 8
