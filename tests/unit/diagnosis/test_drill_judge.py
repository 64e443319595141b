"""The judgement of a drill: every missing detection and every failed recovery is reported."""

import dataclasses
import math

import pytest

from shardwise.diagnosis.drill.faults import KINDS, FaultMark
from shardwise.diagnosis.drill.judge import DrillEvidence, judge
from shardwise.diagnosis.run.facts import Event

REFERENCE = {step: 2.0 / (step + 1) for step in range(10)}
FAULT = 100.0
REPORTS = {
    "kill": "rank 1 failed first: SIGKILL (usually the kernel when host memory runs out, or kill -9)",
    "freeze": "rank 0 waits in all_reduce #9 (sum, float32[4]) at a.py:8 for 3 s; rank 1 is stopped by a signal (kill"
    " -CONT continues it); stacks are in runs/a/stacks",
    "slow": "rank 1 is slow: other ranks wait for it 48% of the time, most in all_reduce at a.py:8 (24.4 ms each time)",
    "mismatch": "ranks differ in the dtype at the same call: rank 0: all_reduce #9 (sum, float32[4]) at a.py:8;"
    " rank 1: all_reduce #9 (sum, int32[4]) at a.py:8",
    "link": "rank 0 failed first: RuntimeError: [gloo/transport/tcp/pair.cc:553] Connection closed by peer [::1]:9",
    "checkpoint": "skipped checkpoint: runs/a/checkpoints/step-00000004/rank-00000.safetensors: model/a has another"
    " checksum",
    "disk": "checkpoint not saved: saving c/step-00000006 failed on rank 0 (vm): c/.tmp/x: No space left on device:"
    " free space",
}
AGAIN = ("kill", "mismatch", "link", "checkpoint")
"""Drills after which ranks are restarted."""


def event(at, kind, rank=None, **fields):
    return Event(at, kind, rank, fields)


def published(at, first, losses):
    return event(at, "steps", 0, first=first, losses=losses)


def evidence(kind, *, report=None, reported_at=101.0, resumed=None, losses=None, **more):
    """Return the evidence of a successful drill, with the given changes."""
    losses = losses or list(REFERENCE.values())
    mark = FaultMark(at=FAULT, rank=1, pid=9, step=5, saved=4, file="step-00000004" if kind == "checkpoint" else "")
    text = REPORTS[kind] if report is None else report
    events = [event(90.0, "attempt", ranks={"0": 8, "1": 9}), published(99.0, 0, losses[:5])]
    if kind in AGAIN:
        came_from = resumed or (2 if kind == "checkpoint" else 4)
        note = f"resumed from runs/a/checkpoints/step-0000000{came_from} at step {came_from}; fine"
        events += [
            event(reported_at, "restart", cause=text),
            event(102.0, "attempt", ranks={"0": 10, "1": 11}),
            event(103.0, "note", 0, text=note),
            published(104.0, came_from, losses[came_from:]),
        ]
    else:
        events += [event(reported_at, "verdict", text=text), published(104.0, 5, losses[5:])]
    events.append(event(105.0, "finish", state="finished"))
    return dataclasses.replace(DrillEvidence(mark=mark, events=events, sound=(2, 4, 10)), **more)


def problems(kind, **more):
    return " | ".join(judge(kind, evidence(kind, **more), REFERENCE).problems)


@pytest.mark.parametrize("kind", KINDS)
def test_a_fault_that_is_named_and_survived_passes(kind):
    result = judge(kind, evidence(kind), REFERENCE)
    assert result.problems == ()
    assert result.passed
    assert result.who == {"link": "rank 0", "disk": "rank 0", "checkpoint": "step-00000004"}.get(kind, "rank 1")
    assert (result.detected_s, result.recovered_s) == (1.0, 4.0)
    assert result.recovery.startswith("restarted, resumed at step" if kind in AGAIN else "continued")


@pytest.mark.parametrize("kind", KINDS)
def test_an_unreported_fault_fails(kind):
    result = judge(kind, evidence(kind, report="all is well"), REFERENCE)
    assert result.detected_s is None
    assert "the fault was not reported" in result.problems[0]


@pytest.mark.parametrize("kind", ["kill", "freeze", "slow", "mismatch"])
def test_naming_the_wrong_rank_is_not_a_detection(kind):
    report = REPORTS[kind].replace("rank 1", "rank 2")
    assert "the fault was not reported" in problems(kind, report=report)


def test_a_message_before_the_fault_is_not_a_detection():
    assert "the fault was not reported" in problems("freeze", reported_at=99.0)


def test_an_unrelated_error_is_not_a_closed_connection():
    assert "the fault was not reported" in problems("link", report="rank 0 failed first: ValueError: no")


@pytest.mark.parametrize("kind", KINDS)
def test_a_different_loss_fails(kind):
    losses = [*list(REFERENCE.values())[:7], 0.9, *list(REFERENCE.values())[8:]]
    assert "the loss of step 7 is 0.9, expected 0.25" in problems(kind, losses=losses)


def test_a_loss_that_became_nan_fails():
    assert "the loss of step 9 is nan" in problems("kill", losses=[*list(REFERENCE.values())[:9], None])


def test_losses_that_are_nan_without_a_fault_are_equal():
    losses = dict.fromkeys(range(10), math.nan)
    assert judge("freeze", evidence("freeze", losses=[None] * 10), losses).passed


def test_steps_that_are_missing_at_the_end_fail():
    assert problems("kill", losses=list(REFERENCE.values())[:9]) == "step 9 is missing"


def test_a_run_that_did_not_complete_fails():
    assert "the run did not complete: rank 0 failed first" in problems("kill", failure="rank 0 failed first")


def test_resuming_from_an_older_checkpoint_fails():
    assert "the run resumed from step 2, although step 4 was saved" in problems("kill", resumed=2)


def test_loading_the_damaged_checkpoint_fails():
    assert "the run loaded the damaged checkpoint of step 4" in problems("checkpoint", resumed=4)


def test_a_restart_from_the_beginning_fails():
    given = evidence("kill")
    anew = [each for each in given.events if "resumed" not in str(each.fields.get("text"))]
    result = judge("kill", dataclasses.replace(given, events=anew), REFERENCE)
    assert result.problems == ("the run restarted from the beginning, although step 4 was saved",)


@pytest.mark.parametrize(
    ("kind", "as_if", "text"),
    [
        ("kill", "freeze", "the ranks were not restarted"),
        ("freeze", "kill", "the ranks were restarted, but should have continued"),
    ],
)
def test_an_undocumented_recovery_fails(kind, as_if, text):
    given = dataclasses.replace(evidence(as_if, report=REPORTS[kind]))
    assert text in " ".join(judge(kind, given, REFERENCE).problems)


def test_remaining_processes_fail():
    assert problems("kill", left=(41, 42)) == "processes are still running: 41, 42"


def test_a_damaged_newest_checkpoint_fails():
    assert "the newest checkpoint is damaged: step-9 lacks" in problems("kill", damages=("step-9 lacks a file",))


def test_an_older_checkpoint_lost_on_a_full_disk_fails():
    assert "the checkpoint of step 4, saved before the fault, is missing" in problems("disk", sound=(2, 10))


def test_not_saving_after_a_fault_fails():
    assert "no undamaged checkpoint was saved after step 5" in problems("disk", sound=(2, 4))


def test_a_fault_that_was_not_injected_fails():
    result = judge("kill", dataclasses.replace(evidence("kill"), mark=None), REFERENCE)
    assert "the fault was never injected" in result.problems[0]


@pytest.mark.parametrize("kind", ["kill", "freeze"])
def test_a_script_is_judged_without_losses_by_its_end(kind):
    given = dataclasses.replace(evidence(kind), sound=())
    result = judge(kind, given, None)
    assert result.problems == ()
    assert result.recovered_s == 5.0
    assert result.recovery == ("restarted" if kind == "kill" else "continued")
