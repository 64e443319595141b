"""A model described without weights: counts are exact, and what it holds is what a real step holds."""

import dataclasses

import pytest
import torch
from torch.utils.data import Dataset
from torch.utils.flop_counter import FlopCounterMode

import shardwise as sw
from shardwise.bench.memory import LiveBytes
from shardwise.errors import JobError
from shardwise.launch import run_forked
from shardwise.plan import Plan
from shardwise.plan.cost.memory import predict_memory
from shardwise.step.described import described as described_in
from shardwise.step.trace import describe, trace
from shardwise.testing import fake_world

GPT = {"num_layers": 4, "width": 128, "num_heads": 4, "vocab_size": 500, "context": 64}


class Tokens(Dataset):
    def __init__(self, vocab_size, length):
        self.vocab_size, self.length = vocab_size, length

    def __len__(self):
        return 64

    def __getitem__(self, index):
        row = torch.randint(0, self.vocab_size, (self.length + 1,), generator=torch.Generator().manual_seed(index))
        return row[:-1], row[1:]


def decoder_job(name="gpt2", batch_size=8, **shape):
    shape = {**GPT, **shape}
    return sw.Job(
        model=lambda: sw.models.decoder(name, **shape),
        data=lambda split: Tokens(shape["vocab_size"], shape["context"]),
        loss=sw.losses.token_cross_entropy,
        optimizer=sw.adamw(lr=1e-3),
        batch_size=batch_size,
        steps=3,
    )


def test_parameters_and_blocks_are_counted_once():
    shape = trace(decoder_job(), compute="fp32", gathered=False)
    model = sw.models.decoder("gpt2", **GPT)
    assert shape.numel == sum(parameter.numel() for parameter in model.parameters())  # the head is tied
    assert [(part.kind, part.count) for part in shape.parts] == [("first", 1), ("block", 4), ("last", 1)]
    assert shape.tokens_per_sample == GPT["context"]
    assert shape.tp_degrees == (1, 2, 4)


def test_work_is_what_torch_counts():
    shape = trace(decoder_job("llama-tiny", mlp_width=256, num_kv_heads=4), compute="bf16", gathered=False)
    model = sw.models.decoder("llama-tiny", **{**GPT, "mlp_width": 256, "num_kv_heads": 4})
    with FlopCounterMode(display=False) as counter:
        model(torch.zeros(1, GPT["context"], dtype=torch.long))
    attention = sum(item.flops for part in shape.parts for item in part.work.attentions) * 4
    matmuls = shape.flops_per_sample - attention
    assert matmuls == counter.get_total_flops()  # torch does not count attention on the CPU
    assert attention == 4 * 4 * GPT["context"] ** 2 * GPT["width"] / 2


def test_tensor_parallelism_cuts_what_lies_between_column_and_row():
    block = trace(decoder_job(), compute="fp32", gathered=False).parts[1]
    saved = block.footprints["none"].saved
    width, tokens = GPT["width"], GPT["context"]
    # Of one sample in fp32: the hidden layer before and after its activation (4 x width each), queries, keys and
    # values, and what attention mixed, with a number per head and token (in rows of 32).
    assert saved.cut == pytest.approx(4 * tokens * (2 * 4 * width + 3 * width + width + GPT["num_heads"]))
    cut = {weight.name.rpartition("blocks.0.")[2] for weight in block.weights if weight.cut}
    assert cut == {
        "attn.qkv.weight",
        "attn.qkv.bias",
        "attn.out.weight",
        "mlp.up.weight",
        "mlp.up.bias",
        "mlp.down.weight",
    }
    assert block.num_exchanges == 2


def test_recomputed_blocks_keep_their_output_alone():
    block = trace(decoder_job(), compute="fp32", gathered=False).parts[1]
    assert block.footprints["full"].saved.at(3) == block.output.at(3) == 3 * 4 * GPT["context"] * GPT["width"]
    none, selective, full = (block.footprints[policy].saved.at(1) for policy in ("none", "selective", "full"))
    assert full < selective < none


def test_gathered_weights_make_a_stream_of_the_compute_dtype():
    model = describe(decoder_job(), "bf16")
    plain, gathered = (shape.parts[1].output.at(1) for shape in (model.plain, model.gathered))
    assert plain == 2 * gathered
    assert {weight.name for weight in model.plain.parts[1].weights if not weight.cast} == {
        f"blocks.0.{norm}.{kind}" for norm in ("attn_norm", "mlp_norm") for kind in ("weight", "bias")
    }


def test_a_model_that_reads_what_it_computed_is_refused():
    class Reads(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = torch.nn.Linear(4, 4)

        def forward(self, x):
            return self.linear(x) if self.linear(x).sum().item() > 0 else x

    job = sw.Job(
        model=Reads,
        data=lambda split: [(torch.ones(4), torch.tensor(0))] * 8,
        loss=sw.losses.cross_entropy,
        optimizer=sw.adamw(lr=1e-3),
        batch_size=4,
        steps=1,
    )
    with pytest.raises(JobError, match="cannot be traced"):
        trace(job, compute="fp32", gathered=False)


def test_batch_norms_tie_samples_together():
    def job(norm):
        return sw.Job(
            model=lambda: torch.nn.Sequential(torch.nn.Linear(4, 6), norm(6), torch.nn.Linear(6, 4)),
            data=lambda split: [(torch.ones(4), torch.tensor(0))] * 8,
            loss=sw.losses.cross_entropy,
            optimizer=sw.sgd(lr=0.1),
            batch_size=4,
            steps=1,
        )

    assert trace(job(torch.nn.BatchNorm1d), compute="fp32", gathered=False).ties_samples
    assert not trace(job(torch.nn.LayerNorm), compute="fp32", gathered=False).ties_samples


def test_a_model_without_blocks_is_one_part():
    job = sw.Job(
        model=lambda: torch.nn.Linear(8, 3),
        data=lambda split: [(torch.ones(8), torch.tensor(0))] * 8,
        loss=sw.losses.cross_entropy,
        optimizer=sw.adamw(lr=1e-3),
        batch_size=4,
        steps=1,
    )
    shape = trace(job, compute="fp32", gathered=False)
    assert shape.numel == 27
    assert not shape.stages


@pytest.fixture(scope="module")
def described():
    return describe(decoder_job(), "fp32")


def measured(described, name, ranks, micro_batch, **changes):
    """Return predicted and measured peak of rank 0 in a fake world, in a process of its own."""

    def body(_):
        torch.set_num_threads(1)
        accumulation = changes.pop("accumulation", 1)
        readers = Plan.preset(name, ranks).layout.dp
        batch_size = readers * micro_batch * accumulation
        job = decoder_job(batch_size=batch_size)
        plan = Plan.preset(name, ranks, batch_size=batch_size, accumulation=accumulation)
        plan = dataclasses.replace(plan, **changes)
        predicted = predict_memory(described.for_plan(plan), plan, context=0.0).peak
        with fake_world(ranks, device="cpu") as world:
            step = sw.build_step(job, plan, world)
            with LiveBytes("cpu") as live:
                live.watch("parameters", [parameter for _, parameter in step.named_parameters()])
                for batch in step.feed:
                    if step(batch).number == 0:
                        live.reset_peak()
        return predicted, live.peak_bytes

    return run_forked(body, 1, timeout_s=100)[0]


CASES = [
    ("one", 1, 4, {}),
    ("ddp", 4, 4, {}),
    ("ddp", 4, 8, {"recompute": "selective"}),
    ("ddp", 4, 8, {"recompute": "full"}),
    ("zero1", 4, 2, {}),
    ("zero2", 4, 4, {}),
    ("zero2", 4, 4, {"accumulation": 2}),
    ("zero3", 4, 4, {}),
    ("zero3", 8, 2, {"recompute": "full"}),
    ("zero3", 4, 4, {"accumulation": 2}),
    ("replicate2.shard2", 4, 4, {}),
    ("tp4", 4, 4, {}),
]


@pytest.mark.parametrize(("name", "ranks", "micro_batch", "changes"), CASES)
def test_predicted_memory_is_what_a_step_holds(described, name, ranks, micro_batch, changes):
    predicted, peak = measured(described, name, ranks, micro_batch, **changes)
    assert predicted == pytest.approx(peak, rel=0.04)


def test_a_description_is_kept_by_content(tmp_path):
    first = described_in(decoder_job(), "bf16", tmp_path)
    [path] = tmp_path.iterdir()
    path.write_bytes(path.read_bytes().replace(b'"Decoder"', b'"Kept"'))
    assert first.plain.name == "Decoder"
    assert described_in(decoder_job(), "bf16", tmp_path).plain.name == "Kept"
    assert described_in(decoder_job(num_layers=3), "bf16", tmp_path).plain.num_blocks == 3
    path.write_bytes(b"{")
    assert described_in(decoder_job(), "bf16", tmp_path) == first
