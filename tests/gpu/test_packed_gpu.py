"""Packed rows on a GPU: blocks compute what the mask computes, in one graph for all documents, and are captured."""

import dataclasses

import pytest
import torch
from torch.utils.data import TensorDataset

import shardwise as sw
from shardwise.errors import JobError
from shardwise.models import documents
from shardwise.plans import Plan, Precision
from shardwise.training.step.captured import CapturedStep

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

LENGTH = 640
BF16 = Precision(compute="bf16")


def ids_of(rows, seed):
    """Return document ids [rows, LENGTH] with documents of random lengths, some of one token."""
    generator = torch.Generator().manual_seed(seed)
    starts = torch.rand(rows, LENGTH, generator=generator) < 0.01 * (1 + seed)
    return starts.cumsum(dim=1).cuda()


def heads(rows, number, dtype=torch.bfloat16):
    return torch.randn(rows, number, LENGTH, 64, device="cuda", dtype=dtype, requires_grad=True)


def with_gradients(attended, inputs, slope):
    return [attended, *torch.autograd.grad(attended, inputs, slope)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kv_heads", [8, 2])
def test_blocks_equal_the_mask_in_forward_and_backward(kv_heads, dtype):
    torch.manual_seed(0)
    inputs = query, key, value = heads(3, 8, dtype), heads(3, kv_heads, dtype), heads(3, kv_heads, dtype)
    slope = torch.randn_like(query)
    for seed in range(3):
        blocks = documents.restrict(ids_of(3, seed), query.transpose(1, 2).flatten(2))
        assert isinstance(blocks, documents.BlockMask)
        mask = documents.document_mask(documents.number_documents(ids_of(3, seed)))
        gqa = kv_heads != 8
        found = with_gradients(documents.attend(*inputs, blocks, enable_gqa=gqa), inputs, slope)
        wide = [each.detach().double().requires_grad_() for each in (query, key, value)]
        expected = with_gradients(documents.attend(*wide, mask, enable_gqa=gqa), wide, slope.double())
        near = with_gradients(documents.attend(*inputs, mask, enable_gqa=gqa), inputs, slope)
        for mine, other, exact in zip(found, near, expected, strict=True):
            # As close to fp64 as the mask in the same dtype, within a factor of two.
            limit = 2 * (other.double() - exact).abs().max() + 1e-3
            assert (mine.double() - exact).abs().max() <= limit


def test_fp32_and_autocast_choose_mask_and_blocks():
    ids, x = ids_of(1, 0), torch.zeros(1, LENGTH, 8, device="cuda")
    assert isinstance(documents.restrict(ids, x), torch.Tensor)
    with torch.autocast("cuda", torch.bfloat16):
        assert isinstance(documents.restrict(ids, x), documents.BlockMask)


def test_a_compiled_block_has_one_graph_for_all_documents():
    block = torch.compile(lambda inputs, blocks: documents.block_attention(*inputs, blocks), fullgraph=True)
    inputs = tuple(heads(2, 4) for _ in range(3))
    for seed in range(4):
        ids = ids_of(2, seed)
        blocks = documents.document_blocks(documents.number_documents(ids))
        with torch.compiler.set_stance("default" if seed == 0 else "fail_on_recompile"):
            found = block(inputs, blocks)
        expected = documents.attend(*inputs, documents.document_mask(documents.number_documents(ids)), enable_gqa=False)
        torch.testing.assert_close(found, expected, rtol=2e-2, atol=2e-2)


def packed_job(**changes):
    tokens = torch.randint(0, 256, (48, LENGTH), generator=torch.Generator().manual_seed(0))
    ids = torch.cat([ids_of(8, seed) for seed in range(6)]).cpu()
    ends = torch.nn.functional.pad(ids.diff(dim=1) != 0, (0, 1), value=True)
    starts = torch.nn.functional.pad(ends[:, :-1], (1, 0), value=True)
    place = torch.arange(LENGTH).expand(48, -1)
    positions = place - torch.where(starts, place, 0).cummax(dim=1).values
    rows = TensorDataset(tokens, positions, ids, torch.where(ends, -100, tokens.roll(-1, dims=1)))
    fields = {
        "model": lambda: sw.models.decoder("llama-tiny", vocab_size=256, context=LENGTH, width=256, num_heads=4),
        "data": {"train": rows}.get,
        "loss": sw.losses.token_cross_entropy,
        "optimizer": sw.adamw(lr=1e-3),
        "batch_size": 8,
        "epochs": 2,
    }
    return sw.Job(**{**fields, **changes})


def losses(plan, **changes):
    notes = []
    with sw.world() as world:
        step = sw.build_step(packed_job(**changes), plan, world, note=notes.append)
        return torch.tensor([float(step(batch).loss_share) for batch in step.feed]), step, notes


@pytest.mark.parametrize(
    "changes",
    [{}, {"compile": "blocks"}, {"compile": "model"}, {"capture": "step"}, {"compile": "blocks", "capture": "step"}],
)
def test_training_by_blocks_has_the_losses_of_the_mask(changes, monkeypatch):
    plan = Plan(micro_batch=8, precision=BF16)
    with monkeypatch.context() as patched:
        patched.setattr(documents, "uses_blocks", lambda _: False)
        expected, _, _ = losses(plan)
    found, step, notes = losses(dataclasses.replace(plan, **changes))
    torch.testing.assert_close(found, expected, rtol=1e-2, atol=1e-2)
    assert isinstance(step, CapturedStep) == ("capture" in changes)
    if "capture" in changes:
        assert notes[-1].endswith("runs as one CUDA graph")


class Unmasked(sw.models.Decoder):
    """A decoder that ignores documents."""

    def forward(self, tokens, position_ids=None, _document_ids=None):
        return super().forward(tokens, position_ids)


def test_leak_is_named_on_a_gpu():
    config = sw.models.decoder("gpt2-tiny", vocab_size=256, context=LENGTH).config
    with pytest.raises(JobError) as refused:
        losses(Plan(micro_batch=8, precision=BF16), model=lambda: Unmasked(config))
    assert refused.value.code == "support.packed-attention"


def test_transformers_flex_attention_has_the_losses_of_its_mask():
    transformers = pytest.importorskip("transformers")

    def model(kernel):
        config = transformers.LlamaConfig(
            vocab_size=256,
            hidden_size=256,
            intermediate_size=512,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=4,
            max_position_embeddings=LENGTH,
            attn_implementation=kernel,
        )
        return transformers.LlamaForCausalLM(config)

    plan = Plan(micro_batch=8, precision=BF16)
    by_mask, by_blocks = (
        losses(plan, model=lambda kernel=kernel: model(kernel), forward=sw.losses.packed)[0]
        for kernel in ("sdpa", "flex_attention")
    )
    torch.testing.assert_close(by_blocks, by_mask, rtol=1e-2, atol=1e-2)
