"""Gaps between two sets of tensors, and pieces in the wrong place."""

import math

import torch

from shardwise.layout import Layout
from shardwise.parity.capture import Traced
from shardwise.parity.compare import losses_of, relative_gaps
from shardwise.parity.evidence import misplaced_pieces, misplaced_use
from shardwise.parity.reference import regroup


def test_gap_is_relative_to_the_largest_value_of_the_tensor():
    gaps = relative_gaps({"a": torch.tensor([2.0, 10.5])}, {"a": torch.tensor([2.0, 10.0])})
    assert gaps == {"a": 0.05}


def test_a_tensor_of_rounding_errors_is_measured_against_the_others():
    wanted = {"large": torch.tensor([1.0]), "zero": torch.tensor([1e-18])}
    found = {"large": torch.tensor([1.0]), "zero": torch.tensor([-1e-18])}
    assert relative_gaps(found, wanted)["zero"] < 1e-14


def test_what_is_missing_extra_misshapen_or_nan_is_infinitely_far():
    wanted = {"a": torch.ones(2), "b": torch.ones(2), "c": torch.ones(2)}
    found = {"b": torch.ones(3), "c": torch.tensor([1.0, math.nan]), "d": torch.ones(1)}
    assert relative_gaps(found, wanted) == dict.fromkeys("abcd", math.inf)


def test_equal_zeros_are_equal():
    assert relative_gaps({"a": torch.zeros(2)}, {"a": torch.zeros(2)}) == {"a": 0.0}


def test_loss_comes_from_the_last_stage_and_the_first_tensor_rank():
    layout = Layout(pp=2, tp=2)
    traced = [Traced(rank=rank, losses=[float(rank)]) for rank in range(4)]
    assert losses_of(traced, layout) == [2.0]


def test_pieces_that_changed_places_are_found():
    wanted = torch.arange(24.0).view(8, 3)
    assert "1 at 0, 0 at 1 of 2 along dim 0" in misplaced_pieces(wanted.roll(4, 0), wanted, [2, 4])


def test_a_tensor_in_its_place_or_simply_wrong_is_not_a_misplaced_shard():
    wanted = torch.arange(24.0).view(8, 3)
    assert misplaced_pieces(wanted, wanted, [2, 4]) is None
    assert misplaced_pieces(wanted * 2, wanted, [2, 4]) is None
    assert misplaced_pieces(torch.zeros(8, 3), torch.cat([torch.zeros(4, 3), torch.ones(4, 3)]), [2]) is None


def test_one_use_of_a_shared_weight_in_the_wrong_place_is_found():
    embed, head = torch.randn(8, 3).double(), torch.randn(8, 3).double()
    assert "along dim 0" in misplaced_use(embed + head.roll(2, 0), [embed, head], [4])
    assert misplaced_use(embed + head, [embed, head], [4]) is None


def test_rows_are_grouped_by_the_data_parallel_ranks_of_a_plan():
    assert regroup(8, dp_size=2, accumulation=2) == [[0, 1, 4, 5], [2, 3, 6, 7]]
    assert regroup(3, dp_size=2, accumulation=2) == [[1], [0, 2]]
