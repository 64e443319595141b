"""The fused loss on a GPU: close to the truth in bf16, a fraction of the memory, no waiting, about the same time."""

import pytest
import torch
from torch import nn
from torch.nn import functional

from shardwise.parallel.linear_cross_entropy import linear_cross_entropy
from shardwise.planner.model.forms import chunk_rows

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]

VOCABULARY = 128_256


def draw(tokens, width, vocab_size=VOCABULARY):
    torch.manual_seed(0)
    head = nn.Linear(width, vocab_size, bias=False, device="cuda")
    hidden = torch.randn(tokens, width, device="cuda", requires_grad=True)
    targets = torch.randint(0, vocab_size, (tokens,), device="cuda")
    return hidden, head, targets.masked_fill(torch.arange(tokens, device="cuda") % 7 == 0, -100)


def plain(hidden, head, targets):
    return functional.cross_entropy(head(hidden), targets, reduction="sum")


def fused(hidden, head, targets):
    return linear_cross_entropy(hidden, head.weight, None, targets, ignore=-100)


def trained(loss_of, hidden, head, targets, dtype=torch.bfloat16):
    """Loss and gradients of one step, whose mean has its own weight."""
    weight = torch.full((), 1 / len(targets), device="cuda")
    with torch.autocast("cuda", dtype, enabled=dtype is not None):
        loss = loss_of(hidden, head, targets)
    return loss.detach(), torch.autograd.grad(loss, [hidden, head.weight], weight)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_its_error_is_at_most_that_of_torch(dtype):
    inputs = draw(4096, 512, 32_000)
    loss, truth = trained(plain, *inputs, dtype=None)
    errors = []
    for loss_of in (fused, plain):
        found, grads = trained(loss_of, *inputs, dtype=dtype)
        assert float(found) == pytest.approx(float(loss), rel=1e-4)
        errors.append([float((got - true).norm() / true.norm()) for got, true in zip(grads, truth, strict=True)])
    for mine, torchs in zip(*errors, strict=True):
        assert mine < 1.3 * torchs < 0.05


def peak_of(loss_of, inputs):
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    trained(loss_of, *inputs)
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def test_its_peak_does_not_grow_with_the_logits():
    small, large = draw(4096, 256), draw(16_384, 256)
    assert chunk_rows(16_384, VOCABULARY) == chunk_rows(4096, VOCABULARY) == 2048
    grows = {each.__name__: peak_of(each, large) - peak_of(each, small) for each in (plain, fused)}
    logits = (16_384 - 4096) * VOCABULARY * 4
    assert grows["plain"] > 2 * logits
    assert grows["fused"] < 0.02 * logits


def test_the_host_never_waits_for_it():
    inputs = draw(4096, 256)
    trained(fused, *inputs)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        trained(fused, *inputs)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_it_takes_about_the_time_of_the_plain_loss(capsys):
    inputs = draw(16_384, 2048)
    milliseconds = {plain: [], fused: []}
    for _ in range(8):
        for loss_of, times in milliseconds.items():
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            trained(loss_of, *inputs)
            end.record()
            torch.cuda.synchronize()
            times.append(begin.elapsed_time(end))
    best = {loss_of.__name__: min(times) for loss_of, times in milliseconds.items()}
    with capsys.disabled():
        print(f"\nhead and loss of 16,384 tokens, forward and backward, ms: {best}")
    assert best["fused"] < 1.3 * best["plain"]
