"""Which layers a pipeline stage runs, and which pipelines are refused before anything starts."""

import itertools
import subprocess
import sys
from typing import get_args

import pytest

from refusals import refuses
from shardwise.layout import Layout
from shardwise.plans import Plan
from shardwise.plans.pipeline import SCHEDULES, ScheduleName, balanced_bounds, check_pipeline, split_layers
from shardwise.plans.sections import Pipeline


def a_plan(schedule="1f1b", pp=4, accumulation=8, split=(), **changes):
    pipeline = Pipeline(schedule=schedule, split=split)
    return Plan(layout=Layout(pp=pp), pipeline=pipeline, micro_batch=2, accumulation=accumulation, **changes)


def sizes(plan, num_layers):
    split = split_layers(plan, num_layers)
    return [len(split.layers(stage)) for stage in range(split.num_stages)]


def test_layers_are_split_evenly_and_the_last_stage_never_gets_one_more():
    assert sizes(a_plan(), 8) == [2, 2, 2, 2]
    assert sizes(a_plan(), 9) == [2, 3, 2, 2]
    assert sizes(a_plan(), 10) == [2, 3, 3, 2]
    assert sizes(a_plan(), 11) == [3, 3, 3, 2]


def test_split_of_the_plan_is_taken_as_it_is():
    assert sizes(a_plan(split=(1, 2, 6)), 8) == [1, 1, 4, 2]


def test_looped_schedules_deal_stages_round_and_v_shaped_ones_go_back():
    assert split_layers(a_plan("interleaved_1f1b", pp=2), 4).ranks == (0, 1, 0, 1)
    assert split_layers(a_plan("zbv", pp=2), 4).ranks == (0, 1, 1, 0)
    assert split_layers(a_plan("looped_bfs", pp=2, split=(1, 2, 3, 4, 5)), 6).ranks == (0, 1, 0, 1, 0, 1)


def test_every_layer_has_one_stage_and_every_stage_one_rank():
    split = split_layers(a_plan("dualpipev", pp=2), 7)
    assert [split.stage_of(layer) for layer in range(7)] == sorted(split.stage_of(layer) for layer in range(7))
    assert sorted(stage for rank in range(2) for stage in split.stages_of(rank)) == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("plan", "num_layers", "refusal"),
    [
        (a_plan(), 3, ("plan.pipeline-too-many-stages", 4, 3, "pp = 2", "pp2.replicate2")),
        (a_plan(pp=3), 2, ("plan.pipeline-too-many-stages", 3, 2, "or pp = 1")),
        (a_plan(pp=6, accumulation=6), 5, ("plan.pipeline-too-many-stages", 6, 5, "pp = 3")),
        (a_plan("zbv", pp=2), 3, ("plan.pipeline-too-many-stages", 4, 3, "1f1b")),
        (a_plan(split=(1, 1, 2)), 8, ("plan.pipeline-split-invalid", "split = [2, 4, 6]")),
        (a_plan(split=(1, 2, 8)), 8, ("plan.pipeline-split-invalid", 8, "1 to 7")),
        (a_plan(split=(1, 2)), 8, ("plan.pipeline-split-count", 3, "3 boundaries")),
        (a_plan("interleaved_1f1b", pp=2, split=(1, 2)), 8, ("plan.pipeline-split-count", 3, "3 boundaries")),
        (a_plan(accumulation=2), 8, ("plan.pipeline-accumulation", "accumulation = 4 with micro_batch = 1")),
        (a_plan(accumulation=1), 8, ("plan.pipeline-accumulation", "accumulation = 4", "batch_size 4")),
        (a_plan("interleaved_1f1b", pp=2, accumulation=5), 8, ("plan.pipeline-accumulation", "accumulation = 2 with")),
        (
            a_plan("dualpipev", pp=2, accumulation=3),
            8,
            ("plan.pipeline-accumulation", "accumulation = 6 with micro_batch = 1"),
        ),
        (
            a_plan("zbv", pp=2, compile="blocks"),
            8,
            ("support.split-backward-option", 'compile = "none"', "interleaved_1f1b"),
        ),
        (a_plan("zbv", pp=2, recompute="full"), 8, ("support.split-backward-option", 'recompute = "none"')),
        (a_plan(compile="model"), 8, ("support.pipeline-whole-compile", 'compile = "blocks"')),
        (a_plan(gradient_sync="every"), 8, ("support.pipeline-gradient-sync", 'gradient_sync = "last"')),
    ],
)
def test_pipeline_that_cannot_run_is_refused_with_the_nearest_that_can(plan, num_layers, refusal):
    with refuses(*refusal):
        check_pipeline(plan, num_layers)


BALANCED = [
    (4, [1.0] * 32, 0.0, 2.4, [8, 9, 9, 6]),  # a head of 2.4 blocks
    (4, [1.0] * 10, 0.0, 0.1, [2, 3, 3, 2]),
    (3, [1.0] * 9, 2.0, 0.0, [1, 4, 4]),  # an embedding of two blocks
    (2, [1.0, 1.0, 3.0, 3.0], 0.0, 0.0, [3, 1]),
    (4, [1.0] * 4, 0.0, 50.0, [1, 1, 1, 1]),
    (1, [1.0] * 3, 1.0, 1.0, [3]),
]


@pytest.mark.parametrize(("num_stages", "blocks", "first", "last", "expected"), BALANCED)
def test_balanced_stages_take_blocks_off_the_stages_with_embedding_and_head(num_stages, blocks, first, last, expected):
    bounds = balanced_bounds(blocks, first, last, num_stages=num_stages)
    assert [end - start for start, end in itertools.pairwise(bounds)] == expected


@pytest.mark.parametrize("schedule", ["interleaved_zero_bubble", "zbv", "dualpipev"])
def test_split_backward_on_sharded_stages_is_refused(schedule):
    plan = Plan(layout=Layout(pp=2, shard=2), zero=2, accumulation=4, pipeline=Pipeline(schedule=schedule))
    with refuses("support.split-backward-sharded", "interleaved_1f1b"):
        check_pipeline(plan)


def test_plan_without_pipeline_is_left_alone():
    check_pipeline(Plan(gradient_sync="every"), num_layers=0)


def test_the_table_has_every_schedule_that_a_plan_may_name():
    assert tuple(SCHEDULES) == get_args(ScheduleName)
    assert [name for name, schedule in SCHEDULES.items() if schedule.is_searched] == ["1f1b", "interleaved_1f1b", "zbv"]


def test_check_needs_no_torch():
    code = "import sys, shardwise.plans.pipeline; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
