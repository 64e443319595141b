"""A model described without weights: counts are exact, and what it holds is what a real step holds."""

import dataclasses

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

import shardwise as sw
from jobs import Tokens
from refusals import refuses
from shardwise.hardware.calibration import default_calibration
from shardwise.hardware.cluster import parse_cluster
from shardwise.launcher.local.function import run_forked
from shardwise.layout import Layout
from shardwise.measurement.memory import LiveBytes
from shardwise.planner.cost.memory import predict_memory
from shardwise.planner.search.question import Question
from shardwise.planner.search.search import search
from shardwise.planner.search.subject import job_subject
from shardwise.planner.trace.rehearsal import TracedModel
from shardwise.planner.trace.trace import context_degrees, describe, head_of, trace
from shardwise.planner.trace.trace import described as described_in
from shardwise.plans import Communication, Offload, Plan, Precision
from shardwise.testing import fake_world

GPT = {"num_layers": 4, "width": 128, "num_heads": 4, "vocab_size": 500, "context": 64}


LORA = sw.Lora(targets=("qkv", "out", "up", "down"), rank=4)


def decoder_job(name="gpt2", batch_size=8, lora=None, **shape):
    shape = {**GPT, **shape}
    return sw.Job(
        model=lambda: sw.models.decoder(name, **shape),
        data=lambda split: Tokens(64, shape["context"], shape["vocab_size"]),
        loss=sw.losses.token_cross_entropy,
        optimizer=sw.adamw(lr=1e-3),
        batch_size=batch_size,
        steps=3,
        lora=lora,
    )


def test_parameters_and_blocks_are_counted_once():
    shape = trace(decoder_job(), compute="fp32", gathered=False)
    model = sw.models.decoder("gpt2", **GPT)
    assert shape.numel == sum(parameter.numel() for parameter in model.parameters())  # the head is tied
    assert [(part.kind, part.count) for part in shape.parts] == [("first", 1), ("block", 4), ("last", 1)]
    assert shape.tokens_per_sample == GPT["context"]
    assert shape.tp_degrees == (1, 2, 4)


@pytest.mark.parametrize("compute", ["bf16", "fp32", "fp64"])
def test_sequences_are_split_by_heads_whose_attention_has_no_fused_kernel(compute):
    shape = trace(decoder_job("llama-tiny", num_kv_heads=2), compute=compute, gathered=False)
    assert shape.cp_degrees == (1, 2, 4)


def test_work_is_what_torch_counts():
    shape = trace(decoder_job("llama-tiny", mlp_width=256, num_kv_heads=4), compute="bf16", gathered=False)
    model = sw.models.decoder("llama-tiny", **{**GPT, "mlp_width": 256, "num_kv_heads": 4})
    with FlopCounterMode(display=False) as counter:
        model(torch.zeros(1, GPT["context"], dtype=torch.long))
    attention = sum(item.flops for part in shape.parts for item in part.work.attentions) * 4
    matmuls = shape.flops_per_sample - attention
    assert matmuls == counter.get_total_flops()  # torch does not count attention on the CPU
    assert attention == 4 * 4 * GPT["context"] ** 2 * GPT["width"] / 2


def test_tensor_parallelism_shards_what_lies_between_column_and_row():
    block = trace(decoder_job(), compute="fp32", gathered=False).parts[1]
    saved = block.footprints["none"].saved
    width, tokens = GPT["width"], GPT["context"]
    # Of one sample in fp32: the hidden layer before and after its activation (4 x width each), queries, keys and
    # values, and what attention mixed, with a number per head and token (in rows of 32).
    assert saved.split == pytest.approx(4 * tokens * (2 * 4 * width + 3 * width + width + GPT["num_heads"]))
    split = {weight.name.rpartition("blocks.0.")[2] for weight in block.weights if weight.split}
    assert split == {
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
    with refuses("model.trace-failed"):
        trace(job, compute="fp32", gathered=False)


def test_a_frozen_model_is_refused_as_train_refuses_it():
    job = dataclasses.replace(decoder_job(), model=lambda: torch.nn.Linear(2, 2).requires_grad_(False))
    with refuses("model.no-trainable-parameter"):
        TracedModel.of(job, "fp32", gathered=False)


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


def test_adapters_are_all_that_is_trained():
    first, *blocks, last = trace(decoder_job(lora=LORA), compute="fp32", gathered=False).parts
    assert not any(weight.trained for part in (first, last) for weight in part.weights)
    for block in blocks:
        assert {weight.trained for weight in block.weights if "lora" in weight.name} == {True}
        assert {weight.trained for weight in block.weights if "lora" not in weight.name} == {False}
        # Each of four frozen products gets two thin trained ones.
        trained = {own: sum(item.count for item in block.work.matmuls if item.trained == own) for own in (True, False)}
        assert trained == {True: 8, False: 4}
    assert [block.count for block in blocks] == [1, 3]  # the first one's input has no gradient


def test_slices_and_a_fused_loss_are_distinguished_from_models_that_allow_neither():
    shape = trace(decoder_job(), compute="fp32", gathered=False)
    assert shape.cp_degrees == (1, 2, 4)
    assert (shape.head.vocab_size, shape.head.width, shape.head.rows) == (
        GPT["vocab_size"],
        GPT["width"],
        GPT["context"],
    )
    assert shape.head.split

    def smoothed(output, batch):
        return torch.nn.functional.cross_entropy(output.flatten(0, 1), batch[-1].flatten(), label_smoothing=0.1)

    by_sample = sw.Loss(sum=smoothed, count="samples")
    shape = trace(dataclasses.replace(decoder_job(), loss=by_sample), compute="fp32", gathered=False)
    assert shape.cp_degrees == (1,)
    assert shape.head is None


def cross_entropy(output, batch, **options):
    return torch.nn.functional.cross_entropy(output.flatten(0, 1), batch[-1].flatten(), **options)


def one_hot_entropy(output, batch):
    likely = torch.nn.functional.one_hot(batch[-1].flatten(), GPT["vocab_size"]).float()
    return torch.nn.functional.cross_entropy(output.flatten(0, 1), likely, reduction="sum")


UNFUSED = {
    "z-loss": lambda output, batch: cross_entropy(output, batch) + 1e-4 * output.logsumexp(-1).square().sum(),
    "targets that are no numbers of classes": one_hot_entropy,
    "smoothing": lambda output, batch: cross_entropy(output, batch, label_smoothing=0.1),
    "class weights": lambda output, batch: cross_entropy(output, batch, weight=torch.ones(GPT["vocab_size"])),
    "no sum": lambda output, batch: cross_entropy(output, batch, reduction="none").sum(),
    "more than two dimensions": lambda output, batch: torch.nn.functional.cross_entropy(
        output.transpose(1, 2), batch[-1]
    ),
}


@pytest.mark.parametrize(
    ("total", "fuses"),
    [(cross_entropy, True), *((total, False) for total in UNFUSED.values())],
    ids=["plain", *UNFUSED],
)
def test_a_loss_that_does_more_with_its_logits_is_not_fused(total, fuses):
    subject = TracedModel.of(dataclasses.replace(decoder_job(), loss=sw.Loss(sum=total)), "fp32", gathered=False)
    assert (head_of(subject) is not None) == fuses


def llama_job(**parts):
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=500,
    )
    sample = {"input_ids": torch.arange(64), "labels": torch.arange(64), **parts}
    return dataclasses.replace(
        decoder_job(),
        model=lambda: transformers.LlamaForCausalLM(config),
        data=lambda split: [sample] * 8,
        forward=sw.losses.without_labels,
        loss=sw.losses.next_token,
    )


@pytest.mark.parametrize(
    ("parts", "degrees"),
    [
        ({}, (1, 2, 4)),
        ({"attention_mask": torch.ones(64, dtype=torch.long)}, (1, 2, 4)),
        ({"attention_mask": (torch.arange(64) < 60).long()}, (1,)),
        ({"labels": torch.arange(60)}, (1,)),
    ],
    ids=["labels one on", "mask of nothing", "padding", "labels of another length"],
)
def test_sequences_are_split_where_the_feed_can_split_them(parts, degrees):
    subject = TracedModel.of(llama_job(**parts), "fp32", gathered=False)
    assert context_degrees(subject, 4) == degrees


def test_a_job_with_adapters_is_planned_with_what_it_trains(described, adapted):
    where = parse_cluster("8xH100")

    def best(model, lora):
        subject = job_subject(decoder_job(batch_size=64, lora=lora), where, lambda *_: model, accepts=lambda _: None)
        calibration = default_calibration(where.node)
        question = Question(model=subject.model, cluster=where, calibration=calibration, batch_size=64)
        return search(question).families["ddp"]

    whole, tuned = best(described, None), best(adapted, LORA)
    assert tuned.memory.at_peak["optimizer states"] < 0.05 * whole.memory.at_peak["optimizer states"]
    assert tuned.time.parts["update"] < 0.05 * whole.time.parts["update"]


def test_a_decoder_of_transformers_is_described_with_its_adapters():
    job = dataclasses.replace(llama_job(), lora=sw.Lora(targets=("q_proj", "v_proj"), rank=4))
    shape = trace(job, compute="bf16", gathered=False)
    assert sum(weight.numel * part.count for part in shape.parts for weight in part.weights if weight.trained) == 3 * (
        4 * (64 + 64) + 4 * (64 + 32)
    )
    assert (shape.heads, shape.tokens_per_sample, shape.cp_degrees) == (4, 64, (1, 2, 4))
    assert (shape.head.vocab_size, shape.head.width, shape.head.trained) == (500, 64, False)
    # Autocast casts frozen matrices as well as trained ones.
    assert all(weight.cast for part in shape.parts for weight in part.weights if "proj" in weight.name)


def test_a_head_with_an_adapter_is_not_fused():
    lora = dataclasses.replace(LORA, targets=("head",))
    assert trace(decoder_job(lora=lora, tie_head=False), compute="fp32", gathered=False).head is None


class TokenStream(torch.utils.data.IterableDataset):
    """The rows of a dataset, as a stream of unknown length."""

    def __init__(self, rows):
        self.rows = rows

    def __iter__(self):
        return iter(self.rows[index] for index in range(len(self.rows)))


def own_loss(output, batch):
    return sw.losses.token_cross_entropy.sum_of(output, batch)


def test_a_graph_of_a_whole_model_overwrites_the_logits_only_if_training_can_separate_the_head(tmp_path):
    tokens = decoder_job(vocab_size=4097, tie_head=False)
    jobs = {
        "tokens": tokens,
        "adapters": dataclasses.replace(tokens, lora=LORA),
        "own loss": dataclasses.replace(tokens, loss=sw.Loss(sum=own_loss, count=tokens.loss.count)),
        "stream": dataclasses.replace(tokens, data=lambda split: TokenStream(tokens.data(split))),
    }
    plan = Plan(micro_batch=8, compile="model", precision=Precision(compute="bf16"))
    peaks = {}
    for name, job in jobs.items():
        model = described_in(job, "bf16", tmp_path)  # from one cache
        assert model.plain.head.is_separable == (name == "tokens")
        peaks[name] = predict_memory(model.for_plan(plan), plan).at_peak["logits and loss"]
    logits = 8 * GPT["context"] * 4097 * 2
    assert peaks["own loss"] - peaks["tokens"] > logits / 2  # a copy of them, less the gradient of the weight


def test_frozen_weights_in_the_compute_dtype_are_stored_in_it():
    whole = Plan(precision=Precision(compute="bf16"))
    offload = dataclasses.replace(
        whole, layout=Layout(shard=2), zero=3, offload=Offload(parameters="cpu", optimizer="cpu")
    )

    def resident(dtype):
        job = dataclasses.replace(decoder_job(lora=LORA), model=lambda: sw.models.decoder("gpt2", **GPT).to(dtype))
        shape = trace(job, compute="bf16", gathered=False)
        here, on_host = (predict_memory(shape, plan, context=0.0) for plan in (whole, offload))
        return here.at_peak["parameters"], on_host.host

    (wide, wide_host), (narrow, narrow_host) = resident(torch.float32), resident(torch.bfloat16)
    frozen = sum(parameter.numel() for parameter in sw.models.decoder("gpt2", **GPT).parameters())
    assert wide - narrow == 2 * frozen
    assert wide_host - narrow_host == frozen  # each of two ranks has half of them


@pytest.fixture(scope="module")
def described():
    return describe(decoder_job(), "fp32")


@pytest.fixture(scope="module")
def adapted():
    return describe(decoder_job(lora=LORA), "fp32")


def measured(described, name, ranks, micro_batch, lora=None, **changes):
    """Return predicted and measured peak of rank 0 in a fake world, in a process of its own."""

    def body(_):
        torch.set_num_threads(1)
        accumulation = changes.pop("accumulation", 1)
        dp = Plan.preset(name, ranks).layout.dp
        batch_size = dp * micro_batch * accumulation
        job = decoder_job(batch_size=batch_size, lora=lora)
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
    ("cp2", 2, 8, {}),
    pytest.param("cp4", 4, 8, {"recompute": "full"}, marks=pytest.mark.prove),
    pytest.param("shard2.cp2", 4, 8, {}, marks=pytest.mark.prove),
    ("one", 1, 8, {"fused_loss": True}),
    pytest.param("ddp", 4, 8, {"communication": Communication(sync_every=2)}, marks=pytest.mark.prove),
    pytest.param("ddp", 4, 8, {"fused_loss": True, "accumulation": 2}, marks=pytest.mark.prove),
    pytest.param("zero3", 4, 8, {"fused_loss": True}, marks=pytest.mark.prove),
    pytest.param("tp4", 4, 8, {"fused_loss": True}, marks=pytest.mark.prove),
    pytest.param("cp2", 2, 8, {"fused_loss": True}, marks=pytest.mark.prove),
    ("ddp", 4, 8, {"recompute": "full", "recompute_blocks": 2}),
    ("zero3", 4, 8, {"recompute": "full", "recompute_blocks": 3}),
    ("ddp", 4, 8, {"recompute": "selective", "recompute_blocks": 1}),
]


@pytest.mark.representative(
    "one-1-4-changes0",
    "ddp-4-8-changes3",
    "zero1-4-2-changes4",
    "zero2-4-4-changes6",
    "zero3-4-4-changes9",
    "replicate2.shard2-4-4-changes10",
    "tp4-4-4-changes11",
    "cp2-2-8-changes12",
    "one-1-8-changes15",
    "ddp-4-8-changes21",
    "zero3-4-8-changes22",
)
@pytest.mark.parametrize(("name", "ranks", "micro_batch", "changes"), CASES)
def test_predicted_memory_is_what_a_step_holds(described, name, ranks, micro_batch, changes):
    predicted, peak = measured(described, name, ranks, micro_batch, **changes)
    assert predicted == pytest.approx(peak, rel=0.025)


@pytest.mark.parametrize(
    ("name", "ranks", "changes"),
    [
        ("one", 1, {}),
        ("zero3", 4, {}),
        pytest.param("ddp", 4, {"recompute": "full"}, marks=pytest.mark.prove),
        pytest.param("tp4", 4, {}, marks=pytest.mark.prove),
    ],
)
def test_predicted_memory_of_adapters_is_what_a_step_holds(adapted, name, ranks, changes):
    predicted, peak = measured(adapted, name, ranks, 4, LORA, **changes)
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
