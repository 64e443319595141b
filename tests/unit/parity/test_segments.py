"""Segments of a killed training beside an uninterrupted run: each way to diverge has its name."""

import dataclasses
import math

import pytest

from shardwise.layout import Layout
from shardwise.parity.resume import SeenSamples, Segment, find_divergence, loss_gaps, name_values
from shardwise.parity.spec import Gap

STEPS = 6


def seen(step, rank=0, ranks=2, **changes):
    rows = tuple(f"row {number}" for number in range(4 * step, 4 * step + 4) if number % ranks == rank)
    fields = {"loss": (1 + step) / ranks, "rows": rows, "rate": 0.1 * (step + 1), "draw": step + rank / 10}
    return SeenSamples(step=step, **{**fields, **changes})


def life(begins=0, stop=STEPS, ranks=2, changes=None, **fields):
    """A sound life, or one in which `changes` gives {step: {field: value}} on every rank."""
    lines = [
        [seen(step, rank, ranks, **(changes or {}).get(step, {})) for step in range(begins, stop)]
        for rank in range(ranks)
    ]
    made = Segment(label=f"ddp on {ranks} ranks", layout=Layout(replicate=ranks), begins=begins, ranks=lines)
    return dataclasses.replace(made, **fields)


def divergence(second=None, last=None, *, first=None, drawn_by=""):
    lives = [first or life(stop=3), second or life(2, 4), last or life(3, ranks=4)]
    return find_divergence(life(), lives, 1e-9, drawn_by=drawn_by)


def cause(**lives):
    return divergence(**lives).finding.cause


def test_sound_lives_do_not_part():
    assert divergence() is None


def test_a_rank_that_saw_a_step_more_before_it_died_is_not_a_difference():
    ranks = life(stop=3).ranks
    assert divergence(first=life(ranks=2, stop=3)) is None
    assert divergence(first=dataclasses.replace(life(), ranks=[ranks[0], ranks[1][:2]])) is None


def test_rows_of_the_next_step_are_recognised():
    shifted = {step: {"rows": seen(step + 1, ranks=1).rows} for step in (2, 3)}
    found = divergence(second=life(2, 4, changes=shifted)).finding
    assert found.cause == "other samples"
    assert found.evidence == "ddp on 2 ranks: step 3 trained on the rows of step 4"
    assert found.step == 2


def test_rows_left_out_and_taken_instead_are_counted():
    found = divergence(last=life(3, ranks=4, changes={4: {"rows": ("row 16", "row 17", "row 99")}})).finding
    assert found.evidence.endswith("step 5 skipped 2 of its 4 rows and used 1 others")


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({2: {"rate": 0.5}}, "learning rate not restored"),
        ({3: {"draw": 0.5}}, "random numbers not restored"),
        ({2: {"loss": 1.500001}}, "weights not restored"),
        ({3: {"loss": 2.000001}}, "optimizer not restored"),
        ({2: {"loss": None}}, "weights not restored"),
        ({2: {"draw": 0.5, "loss": 9.0}}, "random numbers not restored"),
    ],
)
def test_what_was_not_restored_is_named_by_the_step_that_shows_it(changes, expected):
    assert cause(second=life(2, 4, changes=changes)) == expected


def test_random_numbers_of_another_layout_are_not_compared():
    assert divergence(last=life(3, ranks=4, changes={3: {"draw": 0.5}})) is None


def test_a_model_that_draws_is_excused_on_another_layout_only():
    off = {3: {"loss": 9.0}}
    assert cause(last=life(3, ranks=4, changes=off), drawn_by="layer") == "random numbers"
    assert cause(second=life(2, 4, changes=off), drawn_by="layer") == "optimizer not restored"


def test_the_first_life_that_differs_is_not_resumes_fault():
    assert cause(first=life(stop=3, changes={1: {"loss": 9.0}})) == "non-deterministic operation"


def test_a_life_that_began_elsewhere_is_named():
    fresh = dataclasses.replace(life(0, 4), begins=2)
    assert cause(second=fresh) == "not resumed"
    torn = dataclasses.replace(life(4, ranks=4), begins=3)
    assert cause(last=torn) == "resumed from another checkpoint"
    assert cause(second=dataclasses.replace(life(2, 4), ranks=[[], []])) == "not resumed"


def test_a_life_that_ends_early_or_late_is_named():
    assert cause(last=life(3, 5, ranks=4)) == "steps missing"
    assert cause(last=life(3, 7, ranks=4)) == "steps added"


def test_losses_that_are_no_numbers_in_both_agree():
    broken = life(changes={5: {"loss": None}})
    gaps = loss_gaps(broken, [life(3, ranks=4, changes={5: {"loss": None}})], 1e-9)
    assert [gap.relative for gap in gaps] == [0.0, 0.0, 0.0]
    assert loss_gaps(broken, [life(5)], 1e-9)[0].relative == math.inf


def gap(kind, relative):
    return Gap(kind=kind, name=f"a {kind}", step=None, relative=relative, limit=1e-9)


def test_final_values_that_differ_are_named_by_kind():
    assert name_values([gap("parameter", 1e-12), gap("buffer", 1e-12)]) is None
    assert name_values([gap("parameter", 1e-12), gap("buffer", 1e-3)]).cause == "buffers not restored"
    found = name_values([gap("parameter", 1e-2), gap("buffer", 1e-3)])
    assert (found.cause, found.parameter) == ("weights not restored", "a parameter")
