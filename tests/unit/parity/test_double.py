"""fp64 that stays fp64 inside models that cast."""

import pytest
import torch
from torch.nn import functional

from shardwise.parity.reference import true_double

CASTS = {
    "float": lambda x: x.float(),
    "to": lambda x: x.to(torch.float32),
    "type": lambda x: x.type(torch.float32),
    "softmax": lambda x: functional.softmax(x, dim=-1, dtype=torch.float32),
    "softmax by names": lambda x: functional.softmax(input=x, dim=-1, dtype=torch.float32),
    "tensor softmax": lambda x: x.softmax(-1, dtype=torch.float32),
}


@pytest.mark.parametrize("cast", CASTS.values(), ids=CASTS)
def test_casts_of_fp64_do_nothing_inside_and_come_back_after(cast):
    x = torch.zeros(3, dtype=torch.float64)
    with true_double():
        assert cast(x).dtype == torch.float64
        assert cast(x.half()).dtype == torch.float32
    assert cast(x).dtype == torch.float32


def test_a_fully_masked_row_gives_no_nan():
    masked = torch.full((2,), torch.finfo(torch.float64).min, dtype=torch.float64)
    with true_double():
        assert functional.softmax(masked, dim=-1, dtype=torch.float32).tolist() == [0.5, 0.5]
