"""Cross entropy from hidden states: the numbers of torch's own, and never the logits of all tokens."""

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from shardwise.parallel.linear_cross_entropy import VocabularyShard, linear_cross_entropy
from shardwise.planner.model.forms import chunk_rows
from shardwise.testing import run_ranks

TOKENS, WIDTH, VOCABULARY = 37, 8, 51


class Largest(TorchDispatchMode):
    """Watches for the largest tensor that any operator makes; views of what there was do not count."""

    numbers = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        before = {tensor.untyped_storage().data_ptr() for tensor in tensors((args, kwargs))}
        sizes = [tensor.numel() for tensor in tensors(made) if tensor.untyped_storage().data_ptr() not in before]
        self.numbers = max(self.numbers, *sizes, 0)
        return made


def tensors(tree):
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def draw(dtype=torch.float64, *, bias=False):
    torch.manual_seed(0)
    head = nn.Linear(WIDTH, VOCABULARY, bias=bias).to(dtype)
    hidden = torch.randn(TOKENS, WIDTH, dtype=dtype, requires_grad=True)
    targets = torch.randint(0, VOCABULARY, (TOKENS,)).masked_fill(torch.arange(TOKENS) % 5 == 0, -100)
    return hidden, head, targets


def fused(hidden, head, targets, **options):
    return linear_cross_entropy(hidden, head.weight, head.bias, targets, ignore=-100, **options)


def plain(hidden, head, targets):
    return functional.cross_entropy(head(hidden), targets, reduction="sum")


def gradients(loss, hidden, head, weight=0.3):
    return torch.autograd.grad(loss, [hidden, *head.parameters()], torch.tensor(weight, dtype=loss.dtype))


@pytest.mark.parametrize("chunk", [10, None])
@pytest.mark.parametrize("bias", [False, True])
def test_sum_and_gradients_are_those_of_torch(bias, chunk):
    hidden, head, targets = draw(bias=bias)
    expected, found = plain(hidden, head, targets), fused(hidden, head, targets, chunk=chunk)
    torch.testing.assert_close(found, expected, rtol=1e-13, atol=0)
    torch.testing.assert_close(
        gradients(found, hidden, head), gradients(expected, hidden, head), rtol=1e-12, atol=1e-15
    )


def test_under_autocast_its_error_is_at_most_that_of_torch():
    hidden, head, targets = draw(torch.float32)
    truth = gradients(plain(hidden, head, targets), hidden, head)
    with torch.autocast("cpu", torch.bfloat16):
        losses = {"plain": plain(hidden, head, targets), "fused": fused(hidden, head, targets, chunk=16)}
    assert losses["fused"].dtype == torch.float32
    errors = {
        name: [float((got - true).norm() / true.norm()) for got, true in zip(found, truth, strict=True)]
        for name, found in ((name, gradients(loss, hidden, head)) for name, loss in losses.items())
    }
    for mine, torchs in zip(errors["fused"], errors["plain"], strict=True):
        assert mine < 1.3 * torchs < 0.03


def test_the_weight_of_the_mean_is_not_rounded_to_the_dtype_of_the_gradients():
    hidden, head, targets = draw(torch.bfloat16)
    third = gradients(fused(hidden, head, targets), hidden, head, 1 / 3)
    whole = gradients(fused(hidden, head, targets), hidden, head, 1.0)
    share = [float(part.double().norm() / full.double().norm()) for part, full in zip(third, whole, strict=True)]
    assert share == pytest.approx([1 / 3] * 2, rel=3e-4)  # 1/3 in bf16 is 1.3e-3 off


def test_logits_of_all_tokens_are_never_there():
    hidden, head, targets = draw()
    with Largest() as watched:
        gradients(plain(hidden, head, targets), hidden, head)
    assert watched.numbers == TOKENS * VOCABULARY
    with Largest() as watched:
        gradients(fused(hidden, head, targets, chunk=9), hidden, head)
    assert watched.numbers == 9 * VOCABULARY


def test_a_frozen_head_gets_no_gradient_and_no_memory_for_one():
    hidden, head, targets = draw()
    expected = gradients(plain(hidden, head, targets), hidden, head)[0]
    head.requires_grad_(requires_grad=False)
    with Largest() as watched:
        (found,) = torch.autograd.grad(
            fused(hidden, head, targets, chunk=1), [hidden], torch.tensor(0.3, dtype=torch.float64)
        )
    torch.testing.assert_close(found, expected)
    assert watched.numbers < VOCABULARY * WIDTH


def test_only_ignored_targets_give_zero():
    hidden, head, targets = draw()
    loss = fused(hidden, head, torch.full_like(targets, -100))
    assert loss.item() == 0
    assert all(not grad.any() for grad in gradients(loss, hidden, head))


def test_asking_for_gradients_twice_is_an_error_not_a_wrong_number():
    hidden, head, targets = draw()
    loss = fused(hidden, head, targets)
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_a_vocabulary_sharded_unevenly_over_ranks_gives_the_numbers_of_the_whole():
    hidden, head, targets = draw(bias=True)
    expected = plain(hidden, head, targets)
    grads = gradients(expected, hidden, head)

    def body(world):
        own = slice(0, 26) if world.rank == 0 else slice(26, VOCABULARY)
        shard = VocabularyShard(group=torch.distributed.group.WORLD, first=own.start, vocabulary=VOCABULARY)
        weight, bias = (each.detach()[own].requires_grad_() for each in (head.weight, head.bias))
        loss = linear_cross_entropy(hidden, weight, bias, targets, ignore=-100, shard=shard, chunk=10)
        torch.testing.assert_close(loss, expected)
        found = torch.autograd.grad(loss, [hidden, weight, bias], torch.tensor(0.3, dtype=torch.float64))
        for got, whole, rows_of_rank in zip(found, grads, (slice(None), own, own), strict=True):
            torch.testing.assert_close(got, whole[rows_of_rank], rtol=1e-12, atol=1e-15)

    run_ranks(body, 2)


def test_a_target_outside_a_sharded_vocabulary_raises_as_it_does_outside_a_whole_one():
    hidden, head, _ = draw()
    outside = torch.full((TOKENS,), VOCABULARY)
    with pytest.raises(RuntimeError, match="out of bounds"):
        fused(hidden, head, outside)

    def body(_):
        shard = VocabularyShard(group=torch.distributed.group.WORLD, first=0, vocabulary=VOCABULARY)
        with pytest.raises(RuntimeError, match="out of bounds"):
            fused(hidden, head, outside, shard=shard)

    run_ranks(body, 1)


@pytest.mark.parametrize(
    ("tokens", "vocab_size", "rows"), [(16384, 128256, 2048), (65536, 32000, 8192), (2100, 128256, 1152), (5, 32, 5)]
)
def test_chunks_are_nearly_equal_and_of_whole_tiles(tokens, vocab_size, rows):
    assert chunk_rows(tokens, vocab_size) == rows
