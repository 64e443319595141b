"""What came of a drill: every way in which detection or recovery can be missing is told."""

import dataclasses
import math

import pytest

from shardwise.diagnosis.drill.faults import KINDS, FaultMark
from shardwise.diagnosis.drill.judge import DrillEvidence, judge
from shardwise.diagnosis.run.facts import Event

REFERENCE = {step: 2.0 / (step + 1) for step in range(10)}
FAULT = 100.0
SAID = {
    "kill": "rank 1 failed first: SIGKILL (usually the kernel when host memory runs out, or kill -9)",
    "freeze": "rank 0 waits in all_reduce #9 (sum, float32[4]) at a.py:8 for 3 s; rank 1 is stopped by a signal (kill"
    " -CONT continues it); stacks are in runs/a/stacks",
    "slow": "rank 1 is slow: the others wait for it 48% of the time, most in all_reduce at a.py:8 (24.4 ms each time)",
    "mismatch": "ranks differ in the dtype at the same call: rank 0: all_reduce #9 (sum, float32[4]) at a.py:8;"
    " rank 1: all_reduce #9 (sum, int32[4]) at a.py:8",
    "link": "rank 0 failed first: RuntimeError: [gloo/transport/tcp/pair.cc:553] Connection closed by peer [::1]:9",
    "checkpoint": "passed over: runs/a/checkpoints/step-00000004/rank-00000.safetensors: model/a has another checksum",
    "disk": "not saved: saving c/step-00000006 failed on rank 0 (vm): c/.tmp/x: No space left on device: free space",
}
AGAIN = ("kill", "mismatch", "link", "checkpoint")
"""Drills after which ranks are started again."""


def event(at, kind, rank=None, **fields):
    return Event(at, kind, rank, fields)


def published(at, first, losses):
    return event(at, "steps", 0, first=first, losses=losses)


def evidence(kind, *, said=None, said_at=101.0, resumed=None, losses=None, **more):
    """What a drill leaves behind in which all goes well, save for what is said otherwise."""
    losses = losses or list(REFERENCE.values())
    mark = FaultMark(at=FAULT, rank=1, pid=9, step=5, saved=4, file="step-00000004" if kind == "checkpoint" else "")
    text = SAID[kind] if said is None else said
    events = [event(90.0, "attempt", ranks={"0": 8, "1": 9}), published(99.0, 0, losses[:5])]
    if kind in AGAIN:
        came_from = resumed or (2 if kind == "checkpoint" else 4)
        note = f"resumed from runs/a/checkpoints/step-0000000{came_from} at step {came_from}; fine"
        events += [
            event(said_at, "restart", cause=text),
            event(102.0, "attempt", ranks={"0": 10, "1": 11}),
            event(103.0, "note", 0, text=note),
            published(104.0, came_from, losses[came_from:]),
        ]
    else:
        events += [event(said_at, "verdict", text=text), published(104.0, 5, losses[5:])]
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
def test_a_fault_of_which_nobody_speaks_fails(kind):
    result = judge(kind, evidence(kind, said="all is well"), REFERENCE)
    assert result.detected_s is None
    assert "it was not reported that" in result.problems[0]


@pytest.mark.parametrize("kind", ["kill", "freeze", "slow", "mismatch"])
def test_another_rank_that_is_blamed_is_no_detection(kind):
    said = SAID[kind].replace("rank 1", "rank 2")
    assert "it was not reported that" in problems(kind, said=said)


def test_what_was_said_before_the_fault_is_no_detection():
    assert "it was not reported that" in problems("freeze", said_at=99.0)


def test_another_error_that_ends_a_rank_is_no_cut_link():
    assert "it was not reported that" in problems("link", said="rank 0 failed first: ValueError: no")


@pytest.mark.parametrize("kind", KINDS)
def test_a_loss_that_is_another_fails(kind):
    losses = [*list(REFERENCE.values())[:7], 0.9, *list(REFERENCE.values())[8:]]
    assert "the loss of step 7 is 0.9, undisturbed 0.25" in problems(kind, losses=losses)


def test_a_loss_that_became_no_number_fails():
    assert "the loss of step 9 is nan" in problems("kill", losses=[*list(REFERENCE.values())[:9], None])


def test_losses_that_are_no_numbers_without_a_fault_either_are_equal():
    losses = dict.fromkeys(range(10), math.nan)
    assert judge("freeze", evidence("freeze", losses=[None] * 10), losses).passed


def test_steps_that_are_missing_at_the_end_fail():
    assert problems("kill", losses=list(REFERENCE.values())[:9]) == "step 9 is missing"


def test_a_run_that_did_not_end_well_fails():
    assert "it did not come to its end: rank 0 failed first" in problems("kill", failure="rank 0 failed first")


def test_going_on_from_an_older_checkpoint_than_the_newest_whole_one_fails():
    assert "it resumed from step 2, though step 4 was saved" in problems("kill", resumed=2)


def test_taking_the_damaged_checkpoint_fails():
    assert "it took the damaged checkpoint of step 4" in problems("checkpoint", resumed=4)


def test_a_restart_that_begins_anew_fails():
    given = evidence("kill")
    anew = [each for each in given.events if "resumed" not in str(each.fields.get("text"))]
    result = judge("kill", dataclasses.replace(given, events=anew), REFERENCE)
    assert result.problems == ("it began anew, though step 4 was saved",)


@pytest.mark.parametrize(
    ("kind", "as_if", "words"),
    [("kill", "freeze", "it was not restarted"), ("freeze", "kill", "it was restarted, and should have continued")],
)
def test_coming_back_another_way_than_documented_fails(kind, as_if, words):
    given = dataclasses.replace(evidence(as_if, said=SAID[kind]))
    assert words in " ".join(judge(kind, given, REFERENCE).problems)


def test_processes_that_live_on_fail():
    assert problems("kill", left=(41, 42)) == "processes were left running: 41, 42"


def test_a_torn_checkpoint_that_is_the_newest_fails():
    assert "a torn checkpoint is the newest: step-9 lacks" in problems("kill", damages=("step-9 lacks a file",))


def test_an_older_checkpoint_that_a_full_disk_took_fails():
    assert "the checkpoint of step 4, saved before, is gone" in problems("disk", sound=(2, 10))


def test_saving_no_more_after_a_fault_fails():
    assert "no whole checkpoint was saved after step 5" in problems("disk", sound=(2, 4))


def test_a_fault_that_never_came_fails():
    result = judge("kill", dataclasses.replace(evidence("kill"), mark=None), REFERENCE)
    assert "the fault never came" in result.problems[0]


@pytest.mark.parametrize("kind", ["kill", "freeze"])
def test_a_script_is_judged_without_losses_by_its_end(kind):
    given = dataclasses.replace(evidence(kind), sound=())
    result = judge(kind, given, None)
    assert result.problems == ()
    assert result.recovered_s == 5.0
    assert result.recovery == ("restarted" if kind == "kill" else "continued")
