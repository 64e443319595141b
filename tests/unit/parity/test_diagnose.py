"""Hypotheses over made-up evidence: each names its own bug and stays silent about others'."""

import dataclasses

import msgspec
import pytest
import torch

from shardwise.layout import Layout
from shardwise.parity.capture import Traced
from shardwise.parity.compare import Comparison
from shardwise.parity.diagnose import diagnose
from shardwise.parity.evidence import Cell, Evidence
from shardwise.parity.masks import Mask, compare_masks, recorded_masks
from shardwise.parity.progress import Pulse
from shardwise.parity.spec import Gap
from shardwise.plans import Plan

COUNTS = [[3, 5], [7, 2]]
"""By data-parallel rank and micro-batch."""


def tensor(seed):
    return torch.randn(8, 4, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def gap(kind="gradient", name="w", step=0):
    return Gap(kind=kind, name=name, step=step, relative=0.1, limit=1e-9)


def traced(rank):
    prints = {"w": (1.0, 2.0), "v": (3.0, 4.0)}
    return Traced(
        rank=rank,
        losses=[1.0, 1.0],
        norms=[2.0, 2.0],
        rows=[[f"{rank}"], [f"{rank}"]],
        gradients=[prints, prints],
        parameters=[prints] * 3,
        buffers={"b": (1.0, 1.0)},
    )


def evidence(**changes):
    """Two data-parallel ranks with two micro-batches each, whose gradient is right unless changed."""
    cells = [
        [
            Cell(gradients={"w": tensor(10 * r + a), "v": tensor(100 + 10 * r + a)}, count=count)
            for a, count in enumerate(row)
        ]
        for r, row in enumerate(COUNTS)
    ]
    total = sum(map(sum, COUNTS))
    wanted = {name: sum(cell.gradients[name] for row in cells for cell in row) / total for name in ("w", "v")}
    weights = {"w": tensor(1), "v": tensor(2)}
    fields = {
        "plan": dataclasses.replace(Plan.preset("ddp", 2, batch_size=8), accumulation=2, micro_batch=2),
        "comparison": Comparison(worst=gap(), first=gap(), deviating=("w",), largest={}),
        "tolerance": 1e-9,
        "step": 0,
        "traced": [traced(0), traced(1)],
        "again": [traced(0), traced(1)],
        "expected": Traced(rank=0, rows=[["0", "1"]] * 2, norms=[2.0, 2.0], buffers={"b": (1.0, 1.0)}),
        "start": weights,
        "expected_start": weights,
        "before": weights,
        "expected_before": weights,
        "gradients": wanted,
        "expected_gradients": wanted,
        "locals": [wanted, wanted],
        "micro_batches": 2,
        "cells": cells,
    }
    return Evidence(**{**fields, **changes})


def with_gradient(**values):
    base = evidence()
    gradients = {**base.gradients, **values}
    return evidence(gradients=gradients, locals=[gradients, gradients])


def cause(given):
    (finding,) = diagnose(given)
    return finding.cause


def test_a_gradient_that_nothing_explains_has_an_unknown_cause_and_names_what_was_ruled_out():
    (finding,) = diagnose(with_gradient(w=tensor(77)))
    assert finding.cause == "unknown cause"
    assert "initial weights and batches are equal" in finding.evidence
    assert (finding.parameter, finding.step) == ("w", 0)


@pytest.mark.parametrize("factor", [2.0, 0.5, 65536.0, 3.7])
def test_one_factor_on_everything_is_double_scaling(factor):
    base = evidence()
    given = with_gradient(**{name: value * factor for name, value in base.gradients.items()})
    (finding,) = diagnose(given)
    assert finding.cause == "double loss scaling"
    assert f"{factor:.6g} times" in finding.evidence
    assert ("the data-parallel size" in finding.evidence) == (factor in (2.0, 0.5))


def test_a_parameter_without_gradient_is_named():
    base = evidence()
    gradients = {"w": base.gradients["w"] * 2}
    (finding,) = diagnose(evidence(gradients=gradients, locals=[gradients, gradients]))
    assert (finding.cause, finding.parameter) == ("no gradient", "v")


def test_one_factor_on_one_parameter_is_a_scaled_gradient_of_that_one():
    (finding,) = diagnose(with_gradient(w=evidence().gradients["w"] * 2))
    assert (finding.cause, finding.parameter) == ("scaled gradient", "w")
    assert "2 times" in finding.evidence


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_a_sum_in_lower_precision_is_found_after_it_and_before_it(dtype):
    base = evidence()
    after = {name: value.to(dtype).double() for name, value in base.gradients.items()}
    total = sum(map(sum, COUNTS))
    before = {
        name: sum((sum(cell.gradients[name] for cell in row) / total).to(dtype).double() for row in base.cells)
        for name in "wv"
    }
    for gradient in (after, before):
        (finding,) = diagnose(with_gradient(**gradient))
        assert finding.cause == "gradients in lower precision"
        assert {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}[dtype] in finding.evidence


def test_a_tied_weight_that_one_of_its_modules_trains_is_named():
    right, embed = evidence().gradients["w"], tensor(9)
    base = with_gradient(w=embed)
    given = dataclasses.replace(base, uses={"w": [embed, right - embed]}, tied={"w": ("head.weight",)})
    (finding,) = diagnose(given)
    assert (finding.cause, finding.parameter) == ("tied weight trained apart", "w")


def test_buffers_that_differ_by_rank_explain_a_loss_that_parts_later():
    first = gap(kind="loss", name="", step=1)
    ranks = [traced(0), traced(1)]
    ranks[1].buffers = {"b": (1.5, 1.0)}
    comparison = Comparison(worst=first, first=first, deviating=("",), largest={})
    (finding,) = diagnose(evidence(traced=ranks, again=ranks, step=1, comparison=comparison))
    assert (finding.cause, finding.parameter, finding.ranks) == ("local buffers", "b", (0, 1))


def test_a_skipped_micro_batch_is_found_with_either_divisor():
    cells = [row[0] for row in evidence().cells]
    for divisor in (3 + 7, 3 + 5 + 7 + 2):
        given = with_gradient(**{name: sum(c.gradients[name] for c in cells) / divisor for name in ("w", "v")})
        assert cause(given) == "skipped last micro-batch"


def test_means_of_means_are_distinguished():
    rows = evidence().cells
    by_rank = {n: sum(sum(c.gradients[n] for c in row) / sum(c.count for c in row) for row in rows) / 2 for n in "wv"}
    columns = list(zip(*rows, strict=True))
    by_place = {
        n: sum(sum(c.gradients[n] for c in col) / sum(c.count for c in col) for col in columns) / 2 for n in "wv"
    }
    by_cell = {n: sum(c.gradients[n] / c.count for row in rows for c in row) / 4 for n in "wv"}
    for gradient, expected in ((by_rank, "over ranks"), (by_place, "over micro-batches,"), (by_cell, "of all ranks")):
        (finding,) = diagnose(with_gradient(**gradient))
        assert finding.cause == "mean of means"
        assert expected in finding.evidence


def test_a_plain_average_of_equal_counts_is_not_a_mean_of_means():
    base = evidence()
    cells = [[dataclasses.replace(cell, count=4) for cell in row] for row in base.cells]
    average = {n: sum(c.gradients[n] for row in cells for c in row) / 16 for n in "wv"}
    whole_batch = {"w": tensor(50), "v": tensor(51)}  # a loss that is not a sum over rows
    given = dataclasses.replace(with_gradient(**average), cells=cells, expected_gradients=whole_batch)
    assert cause(given) != "mean of means"


def test_ranks_that_together_have_the_gradient_miss_an_all_reduce():
    right = evidence().gradients
    share = tensor(5)
    own = [{**right, "v": share}, {**right, "v": 2 * right["v"] - share}]
    (finding,) = diagnose(evidence(gradients=own[0], locals=own))
    assert (finding.cause, finding.parameter) == ("missing all-reduce", "v")


def test_ranks_that_simply_differ_do_not():
    right = evidence().gradients
    own = [{**right, "v": tensor(5)}, {**right, "v": tensor(6)}]
    assert cause(evidence(gradients=own[0], locals=own)) == "unknown cause"


def test_one_use_of_a_tied_weight_in_the_wrong_place():
    right, embed = evidence().gradients["w"], tensor(9)
    head = right - embed
    base = with_gradient(w=embed + head.roll(4, 0))
    given = dataclasses.replace(base, uses={"w": [embed, head]}, tied={"w": ("head.weight",)})
    (finding,) = diagnose(given)
    assert (finding.cause, finding.parameter) == ("wrong shard of a tied weight", "w")
    assert "head.weight" in finding.evidence


def test_weights_that_part_before_the_step_are_a_matter_of_the_update():
    first = gap(kind="loss", name="", step=1)
    weights = {"w": tensor(1) + 1e-3, "v": tensor(2)}
    comparison = Comparison(worst=first, first=first, deviating=("",), largest={})
    (finding,) = diagnose(evidence(before=weights, step=1, comparison=comparison))
    assert (finding.cause, finding.parameter, finding.step) == ("different updates", "w", 0)


def masks(rank, *, same_mask, same_input):
    return [
        Mask(
            module="blocks.0.drop",
            operator="native_dropout",
            digest="same" if same_mask else f"rank {rank}",
            input=(1.0, 1.0) if same_input else (float(rank), 1.0),
        )
    ]


@pytest.mark.parametrize(
    ("same_input", "same_mask", "cause"),
    [
        (False, True, "equal dropout seeds across tensor-parallel ranks"),
        (True, False, "different dropout seeds outside the sharded region"),
    ],
)
def test_masks_must_differ_inside_the_sharded_region_and_agree_outside(same_input, same_mask, cause):
    by_rank = [masks(rank, same_mask=same_mask, same_input=same_input) for rank in range(2)]
    (finding,) = compare_masks(by_rank, Layout(tp=2)).findings
    assert (finding.cause, finding.parameter, finding.ranks) == (cause, "blocks.0.drop", (0, 1))


@pytest.mark.parametrize("axis", ["replicate", "shard", "cp"])
def test_ranks_with_other_samples_or_tokens_must_not_drop_the_same_in_every_call(axis):
    equal = [masks(rank, same_mask=True, same_input=False) * 2 for rank in range(2)]
    (finding,) = compare_masks(equal, Layout(**{axis: 2})).findings
    assert finding.cause == "equal dropout seeds across data-parallel ranks"
    once = [
        [*masks(rank, same_mask=True, same_input=False), *masks(rank, same_mask=False, same_input=False)]
        for rank in (0, 1)
    ]
    assert compare_masks(once, Layout(**{axis: 2})).findings == ()


@pytest.mark.parametrize(("rate", "is_mask"), [(0.0, False), (0.5, True)])
def test_a_dropout_that_drops_nothing_has_no_mask(rate, is_mask):
    dropout = torch.nn.Dropout(rate)
    with recorded_masks(dropout, Pulse()) as seen:
        dropout(torch.ones(64))
    assert any(mask.digest for mask in seen) == is_mask


def test_dropout_that_is_off_on_one_rank_only_is_found():
    on, off = (
        Mask(module="blocks.0.drop", operator="native_dropout", digest=digest, input=(1.0, 1.0))
        for digest in ("some", "")
    )
    (finding,) = compare_masks([[on], [off]], Layout(tp=2)).findings
    assert finding.parameter == "blocks.0.drop"
    assert compare_masks([[off], [off]], Layout(tp=2)).findings == ()


@pytest.mark.parametrize("same", [True, False])
def test_sound_masks_are_not_accused(same):
    by_rank = [masks(rank, same_mask=same, same_input=same) for rank in range(2)]
    assert compare_masks(by_rank, Layout(tp=2)).findings == ()


def test_a_gradient_that_is_not_finite_in_one_process_is_not_a_fault_of_the_plan():
    nothing = {"w": tensor(1) * torch.nan, "v": tensor(2)}
    (finding,) = diagnose(evidence(gradients=nothing, expected_gradients=nothing))
    assert finding.cause == "not finite in one process"
    assert finding.parameter == "w"


def test_a_buffer_that_counts_forward_passes_is_named_as_such():
    counted = [msgspec.structs.replace(traced(rank), buffers={"b": (6.0, 6.0)}) for rank in range(2)]
    expected = msgspec.structs.replace(evidence().expected, buffers={"b": (3.0, 3.0)})
    parted = Comparison(worst=gap("buffer", "b"), first=gap("buffer", "b"), deviating=("b",), largest={})
    (finding,) = diagnose(evidence(comparison=parted, traced=counted, again=counted, expected=expected))
    assert finding.cause == "state between forward passes"
    assert "buffer b grew 2 times as much as in one process" in finding.evidence
