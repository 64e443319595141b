"""`--plan auto` on GPUs compiles and captures where that saves time, and says why where it does not."""

import dataclasses

import torch

import shardwise as sw
from jobs import Pooled, points_job, sentences_job
from shardwise.hardware.cluster import parse_cluster
from shardwise.planner.search.search import search
from shardwise.planner.search.speed import best_with_speed_options, count_steps, with_speed_options
from shardwise.planner.search.subject import job_subject


def settled(job, cluster="1xH100"):
    """Return the plan of a search on a cluster with its speed options."""
    found = parse_cluster(cluster)
    question = job_subject(job, found).question(found)
    return best_with_speed_options(job, question, search(question).best.plan)


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
