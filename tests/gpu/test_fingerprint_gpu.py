"""Fingerprints on a GPU: every bit counts there too, and a look costs less than an update."""

import pytest
import torch

from shardwise.recorder.fingerprint import fingerprints

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def test_one_bit_of_a_large_tensor_shows():
    tensor = torch.randn(9_000_001, device="cuda")
    [before] = fingerprints([tensor])
    tensor.view(torch.int32)[8_500_000] ^= 1
    [after, small] = fingerprints([tensor, torch.ones((), device="cuda", dtype=torch.bfloat16)])
    assert before != after
    assert [small] == fingerprints([torch.ones(1, device="cuda", dtype=torch.bfloat16)])


def seconds(fn):
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    fn()
    begin.record()
    fn()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) / 1e3


def test_a_look_at_all_weights_takes_no_longer_than_ten_updates():
    weights = [torch.randn(2048, 8192, device="cuda", requires_grad=True) for _ in range(64)]
    for weight in weights:
        weight.grad = torch.zeros_like(weight)
    optimizer = torch.optim.AdamW(weights, fused=True)
    assert seconds(lambda: fingerprints(weights)) < 10 * seconds(optimizer.step)
