import pytest

from shardwise.layout import Layout
from shardwise.planner.cost.events import (
    Span,
    Task,
    pipeline_actions,
    pipeline_floor,
    pipeline_span,
    pipeline_spans,
    run_pipeline,
    run_streams,
)
from shardwise.planner.cost.stages import PipelineShape, stages_per_rank
from shardwise.plans import Pipeline, Plan

SCHEDULES = ("gpipe", "1f1b", "looped_bfs", "interleaved_1f1b")


def piped(schedule, pp=4, micro_batches=8):
    return Plan(layout=Layout(pp=pp), accumulation=micro_batches, pipeline=Pipeline(schedule=schedule))


def even(schedule, pp=4):
    """Seconds of stages that together take 1 s forward and 2 s backward on each rank."""
    chunks = 1 if schedule in {"gpipe", "1f1b"} else 2
    return [1 / chunks] * (pp * chunks), [2 / chunks] * (pp * chunks), [stage % pp for stage in range(pp * chunks)]


def test_a_task_waits_for_its_stream_and_for_what_it_needs():
    spans = run_streams(
        [Task("compute", "a", 2), Task("wire", "b", 3), Task("wire", "c", 1), Task("compute", "d", 1, (2,))]
    )
    assert spans == [
        Span("compute", "a", 0, 2),
        Span("wire", "b", 0, 3),
        Span("wire", "c", 3, 4),
        Span("compute", "d", 4, 5),
    ]


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize(("pp", "micro_batches"), [(2, 2), (4, 8), (4, 12), (3, 6)])
def test_every_stage_sees_every_micro_batch_once_each_way(schedule, pp, micro_batches):
    chunks = 1 if schedule in {"gpipe", "1f1b"} else 2
    for rank in range(pp):
        actions = pipeline_actions(schedule, rank, pp=pp, chunks=chunks, micro_batches=micro_batches)
        assert len(set(actions)) == len(actions) == 2 * chunks * micro_batches


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_one_stage_a_rank_idles_for_one_pass_of_every_other_stage(schedule):
    forward, backward, ranks = even(schedule)
    assert pipeline_span(piped(schedule), forward, backward, ranks, 0.0) == pytest.approx((8 + 3) * 3)


def test_interleaving_two_stages_halves_the_bubble():
    forward, backward, ranks = even("interleaved_1f1b")
    span = pipeline_span(piped("interleaved_1f1b"), forward, backward, ranks, 0.0)
    assert span == pytest.approx(8 * 3 + 3 * 3 / 2)


def test_split_backward_fills_the_bubble():
    forward, backward, ranks = even("zbv")
    assert pipeline_span(piped("zbv"), forward, backward, ranks, 0.0) < 8 * 3 + 3 * 3 / 2


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_slow_link_between_stages_is_waited_for(schedule):
    forward, backward, ranks = even(schedule)
    quick = pipeline_span(piped(schedule), forward, backward, ranks, 0.0)
    assert pipeline_span(piped(schedule), forward, backward, ranks, 0.5) >= quick + 2 * 3 * 0.5


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_many_rounds_take_as_long_as_when_all_are_simulated(schedule):
    plan = piped(schedule, micro_batches=40)
    forward, backward, ranks = even(schedule)
    whole = pipeline_spans(plan, forward, backward, 0.0, micro_batches=40)
    assert pipeline_span(plan, forward, backward, ranks, 0.0) == pytest.approx(max(action[-1].end for action in whole))


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_the_floor_of_uneven_stages_is_never_above_their_span(schedule):
    forward, backward, ranks = even(schedule)
    forward, backward = [seconds * (1 + i / 3) for i, seconds in enumerate(forward)], [*backward[:-1], 3.0]
    seconds = [f + b for f, b in zip(forward, backward, strict=True)]
    busy = [sum(s for s, rank in zip(seconds, ranks, strict=True) if rank == r) for r in range(4)]
    span = pipeline_span(piped(schedule), forward, backward, ranks, 0.0)
    assert span / 1.6 < pipeline_floor(busy, seconds, 8) <= span


@pytest.mark.parametrize("micro_batches", [7, 9, 11, 27])
def test_any_number_of_micro_batches_comes_to_an_end(micro_batches):
    forward, backward, ranks = even("zbv")
    plan = piped("zbv", micro_batches=micro_batches)
    assert pipeline_span(plan, forward, backward, ranks, 0.0) >= 3 * micro_batches


def test_turns_that_wait_for_each_other_are_noticed():
    actions = [pipeline_actions("1f1b", rank, pp=2, chunks=1, micro_batches=2)[::-1] for rank in range(2)]
    with pytest.raises(AssertionError, match="deadlock"):
        run_pipeline(actions, [1, 1], [1, 1], lambda _: 0.0)


@pytest.mark.parametrize("pp", range(2, 7))
@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "interleaved_1f1b"])
def test_micro_batches_in_flight_are_those_of_the_schedule(schedule, pp):
    chunks = stages_per_rank(schedule, pp)
    for number in range(pp, 4 * pp):
        if schedule == "interleaved_1f1b" and number % max(1, number // pp):
            continue  # torch refuses it
        actions = PipelineShape(pp, schedule, number, chunks)
        for rank in range(pp):
            resident = 0
            most = 0
            for action in pipeline_actions(schedule, rank, pp=pp, chunks=chunks, micro_batches=number):
                resident += 1 if action.kind == "F" else -1
                most = max(most, resident)
            assert sum(actions.in_flight(rank, chunk) for chunk in range(chunks)) == most, (number, rank)
