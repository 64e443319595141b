"""Drift, from fingerprints to one sentence."""

import pytest

from shardwise.runs.drift import Cause, Copies, Drift, DriftEvidence, decide, find_drift


def copies(*prints, name="weight"):
    return Copies(name=name, prints=dict(enumerate(prints)))


def test_the_ranks_that_differ_from_most_are_the_odd_ones():
    assert copies(7, 5, 5, 5).odd_ranks == (0,)
    assert copies(5, 6, 5, 7).odd_ranks == (1, 3)


def test_without_a_majority_the_lowest_rank_is_right():
    assert copies(5, 6).odd_ranks == (1,)
    assert copies(6, 5, 5, 6).odd_ranks == (1, 2)


def test_the_first_tensor_is_named_and_the_others_are_counted_once():
    pair, other_pair = (0, 1), (2, 3)
    prints = {
        0: {("equal", pair): 1, ("a", pair): 1, ("b", pair): 3},
        1: {("equal", pair): 1, ("a", pair): 2, ("b", pair): 4},
        2: {("b", other_pair): 5, ("alone", (2, 9)): 7},
        3: {("b", other_pair): 6},
    }
    evidence = DriftEvidence(gradients_equal=True, settings_equal=False)
    assert find_drift(12, 10, prints, lambda _: evidence) == Drift(
        step=12, last_equal=10, copies=copies(1, 2, name="a"), others=1, cause=Cause.SETTINGS
    )
    assert find_drift(12, 10, {0: prints[0], 2: prints[2]}, pytest.fail) is None


EVIDENCE = {
    "start": (DriftEvidence(at_start=True), Cause.START),
    "settings": (DriftEvidence(gradients_equal=True, settings_equal=False), Cause.SETTINGS),
    "not summed": (DriftEvidence(gradients_equal=False), Cause.BATCHES),
    "not summed, and shaky": (DriftEvidence(gradients_equal=False, unsteady_gradient=frozenset({0})), Cause.BATCHES),
    "shaky": (
        DriftEvidence(gradients_equal=False, same_samples=True, unsteady_gradient=frozenset({0})),
        Cause.OPERATION,
    ),
    "steady": (DriftEvidence(gradients_equal=False, same_samples=True, is_step_cleared=True), Cause.OUTSIDE),
    "shaky update": (DriftEvidence(gradients_equal=True, unsteady_update=frozenset({1})), Cause.UPDATE),
    "shaky buffer": (DriftEvidence(unsteady_update=frozenset({1})), Cause.OPERATION),
    "buffer": (DriftEvidence(is_step_cleared=True), Cause.BUFFER),
    "elsewhere": (DriftEvidence(gradients_equal=True, is_step_cleared=True), Cause.OUTSIDE),
    "nobody knows": (DriftEvidence(gradients_equal=True), Cause.UNKNOWN),
}


@pytest.mark.parametrize("name", EVIDENCE)
def test_evidence_leaves_one_cause(name):
    evidence, cause = EVIDENCE[name]
    assert decide(evidence) is cause


def test_a_drift_is_one_sentence():
    drift = Drift(step=12, last_equal=10, copies=copies(1, 1, 2, 2, 1), others=1, cause=Cause.SETTINGS)
    assert str(drift) == (
        "replicas differ after step 12 (equal after step 10): weight of ranks 2-3 differs from that of ranks 0-1, 4,"
        f" and 1 more tensor; {Cause.SETTINGS.value}"
    )
