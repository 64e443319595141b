"""Context parallelism: attention over slices is attention over whole sequences, and activations fall as 1/cp."""

import pytest
import torch
from torch import nn
from torch.nn import functional

import shardwise as sw
from jobs import Tokens, train_split
from refusals import refuses
from shardwise.parallel.context import context_parallel, full_attention
from shardwise.testing import run_ranks

ROWS, HEADS, LENGTH, WIDTH = 2, 4, 8, 3


def inputs(kv_heads):
    generator = torch.Generator().manual_seed(kv_heads)

    def draw(heads):
        return torch.randn(ROWS, heads, LENGTH, WIDTH, generator=generator, dtype=torch.float64)

    return draw(HEADS), draw(kv_heads), draw(kv_heads)


def attended(attend, tensors, weight, **options):
    """Output and gradients of a weighted sum of it."""
    leaves = [tensor.clone().requires_grad_() for tensor in tensors]
    output = attend(*leaves, enable_gqa=leaves[1].shape[1] != HEADS, **options)
    (output * weight).sum().backward()
    return [output.detach(), *(leaf.grad for leaf in leaves)]


@pytest.mark.parametrize("size", [2, 4])
def test_attention_over_slices_is_attention_over_whole_sequences(size):
    cases = [(kv_heads, causal) for kv_heads in (4, 2, 1) for causal in (True, False)]
    weight = torch.randn(ROWS, HEADS, LENGTH, WIDTH, dtype=torch.float64)

    def body(world):
        mine = slice(world.rank * LENGTH // size, (world.rank + 1) * LENGTH // size)
        attend = lambda *args, **options: full_attention(torch.distributed.group.WORLD, *args, **options)  # noqa: E731
        return [
            attended(attend, [each[:, :, mine] for each in inputs(kv_heads)], weight[:, :, mine], is_causal=causal)
            for kv_heads, causal in cases
        ]

    by_rank = run_ranks(body, size)
    for number, (kv_heads, causal) in enumerate(cases):
        whole = attended(functional.scaled_dot_product_attention, inputs(kv_heads), weight, is_causal=causal)
        for kind, wanted in enumerate(whole):
            joined = torch.cat([found[number][kind] for found in by_rank], dim=2)
            torch.testing.assert_close(joined, wanted, rtol=1e-12, atol=1e-12)


def job(length=256):
    return sw.Job(
        model=lambda: sw.models.decoder("llama-tiny", vocab_size=512, context=length, width=32, num_kv_heads=4),
        data=train_split(Tokens(2, length, 512)),
        loss=sw.losses.token_cross_entropy,
        optimizer=sw.adamw(lr=1e-3),
        batch_size=2,
        steps=1,
    )


def saved_bytes(world):
    """What forward keeps for backward beside parameters, each memory once."""
    plan = sw.Plan.preset("cp", world.size, batch_size=2)
    step = sw.build_step(job(), plan, world)
    own = {parameter.untyped_storage().data_ptr() for parameter in step.model.parameters()}
    kept = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        (batch,) = [step(batch) for batch in step.feed]
    return sum(kept.values()), float(batch.loss_sum)


def test_activations_fall_as_one_over_cp():
    ((whole, loss),) = run_ranks(saved_bytes, 1)
    for size in (2, 4):
        ranks = run_ranks(saved_bytes, size)
        for kept, _ in ranks:
            assert kept == pytest.approx(whole / size, rel=0.1)
        assert sum(share for _, share in ranks) == pytest.approx(loss, rel=1e-5)


class Net(nn.Module):
    def __init__(self, attend):
        super().__init__()
        self.linear, self.attend = nn.Linear(4, 4), attend

    def forward(self, x, position_ids=None):  # noqa: ARG002 - what context parallelism hands in
        heads = self.linear(x).unflatten(-1, (2, 2)).transpose(1, 2)
        return self.attend(heads)


REFUSED = {
    "no attention": (lambda x: x, ("support.cp-without-sdpa", "Net")),
    "attention by hand": (lambda x: (x @ x.mT).softmax(-1) @ x, ("support.cp-without-sdpa", "Net")),
    "mask": (
        lambda x: functional.scaled_dot_product_attention(x, x, x, attn_mask=torch.ones(2, 2)),
        ("support.cp-attention-mask",),
    ),
    "heads": (
        lambda x: functional.scaled_dot_product_attention(x[:, :1], x, x),
        ("plan.cp-heads-not-divisible", "cp=2", "1 attention heads", "cp to 1"),
    ),
}


def test_attention_that_is_not_found_or_not_known_is_refused_in_forward():
    def body(world):
        for attend, refusal in REFUSED.values():
            model = context_parallel(Net(attend), torch.distributed.group.WORLD)
            with refuses(*refusal):
                model(torch.ones(1, 2, 4))
        return True

    assert run_ranks(body, 2) == [True, True]


class Beside(nn.Module):
    """Attends in its blocks, and once more outside of them."""

    def __init__(self, attend):
        super().__init__()
        self.blocks = nn.ModuleList([Net(lambda x: functional.scaled_dot_product_attention(x, x, x))])
        self.heads, self.attend = nn.MultiheadAttention(4, 2, batch_first=True), attend

    def forward(self, x, position_ids=None):  # noqa: ARG002 - what context parallelism hands in
        x = self.blocks[0](x).transpose(1, 2).flatten(2)
        return self.attend(self, x)


BESIDE = {
    "scaled_dot_product_attention": lambda _, x: functional.scaled_dot_product_attention(x, x, x),
    "multi_head_attention_forward": lambda self, x: self.heads(x, x, x),
}


@pytest.mark.parametrize("name", BESIDE)
def test_attention_outside_of_the_blocks_is_refused(name):
    def body(world):
        model = context_parallel(Beside(BESIDE[name]), torch.distributed.group.WORLD)
        with refuses("support.cp-attention-outside-blocks", "Beside", name):
            model(torch.ones(1, 2, 4))
        plain = context_parallel(Beside(lambda _, x: x), torch.distributed.group.WORLD)
        return plain(torch.ones(1, 2, 4)).shape

    assert run_ranks(body, 2) == [(1, 2, 4)] * 2


def test_a_slice_knows_its_positions_and_the_context_of_the_whole():
    class Positions(nn.Module):
        config = type("Config", (), {"context": 6})

        def forward(self, tokens, position_ids=None):
            return functional.scaled_dot_product_attention(
                *[tokens.view(1, 1, -1, 1).expand(1, 2, -1, 1)] * 3
            ), position_ids

    def body(world):
        model = context_parallel(Positions(), torch.distributed.group.WORLD)
        found = model(torch.ones(1, 3))[1].tolist()
        given = model(torch.ones(1, 3), position_ids=torch.tensor([[7, 8, 9]]))[1].tolist()
        with refuses("model.context-exceeded", "8 tokens", "6"):
            model(torch.ones(1, 4))
        return found, given

    assert run_ranks(body, 2) == [([[0, 1, 2]], [[7, 8, 9]]), ([[3, 4, 5]], [[7, 8, 9]])]
