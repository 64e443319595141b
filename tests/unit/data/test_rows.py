"""Batches as trees: what they hold besides tensors."""

import dataclasses
from collections import UserDict

import torch

from shardwise.data.rows import non_tensors


@dataclasses.dataclass
class Pair:
    x: torch.Tensor
    name: str


def test_leaves_that_are_no_tensors_are_found_wherever_tensors_may_be():
    x = torch.zeros(2)
    tree = UserDict(x=x, pair=Pair(x, "a"), rest=[(x, None), {"n": 3, "names": ["b", "c"]}])
    assert non_tensors(tree) == ["a", 3, "b", "c"]
