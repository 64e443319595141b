"""Closed forms against the modules they describe, run for real on small shapes."""

import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.flop_counter import FlopCounterMode

from refusals import refuses
from shardwise import models
from shardwise.measurement.memory import LiveBytes
from shardwise.models.transformer import Block, Decoder, rotary_tables
from shardwise.parallel.recompute import recompute_block
from shardwise.parallel.tensor_rules import split_dim, styles_by_name
from shardwise.planner.model import operators
from shardwise.planner.model.decoder_parts import PUBLISHED, decoder_shape, published
from shardwise.planner.model.t5_parts import resnet_shape, t5_shape
from shardwise.plans.catalogue import BYT5_COMMON, BYT5_SIZES, RESNETS, SIZES, T5_COMMON, T5_SIZES, DecoderConfig

ROWS, LENGTH, VOCABULARY = 4, 64, 999
GPT2 = DecoderConfig(
    family="gpt2", vocab_size=VOCABULARY, context=LENGTH, width=64, num_layers=2, num_heads=4, tie_head=True
)
LLAMA = replace(GPT2, family="llama", tie_head=False, mlp_width=176)
GROUPED = replace(LLAMA, num_kv_heads=2)
FAMILIES = pytest.mark.parametrize("config", [GPT2, LLAMA, GROUPED], ids=["gpt2", "llama", "grouped"])
POLICIES = pytest.mark.parametrize("policy", ["none", "selective", "full"])


class FusedNorm(torch.autograd.Function):
    """Keeps what CUDA's fused rms_norm keeps; the CPU has none."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight, torch.ones(x.shape[:-1]))
        return torch.ones_like(x)

    @staticmethod
    def backward(ctx, _):
        x, weight, _ = ctx.saved_tensors
        return torch.ones_like(x), torch.ones_like(weight)


class FusedAttention(torch.autograd.Function):
    """Keeps what a fused attention with a learned bias keeps; the CPU has none."""

    @staticmethod
    def forward(ctx, q, k, v, bias):
        batch, heads, tokens, width = q.shape
        out = torch.ones(batch, tokens, heads, width).transpose(1, 2)
        ctx.save_for_backward(q, k, v, bias, out, torch.ones(batch, heads, tokens))
        return out

    @staticmethod
    def backward(ctx, _):
        q, k, v, bias, *_ = ctx.saved_tensors
        grads = [torch.ones_like(x) for x in (q, k, v)]
        if not ctx.needs_input_grad[3]:
            return *grads, None
        by_sample = torch.ones(len(q), *bias.shape[1:])
        return *grads, by_sample.sum(0, keepdim=True)


def block_of(config):
    """A block with CUDA's norm, and what it is called with beside its input."""
    block = Block(config)
    for norm in block.modules():
        if isinstance(norm, nn.RMSNorm):
            norm.forward = lambda x, norm=norm: FusedNorm.apply(x, norm.weight)
    tables = () if config.family == "gpt2" else rotary_tables(config, torch.arange(LENGTH), torch.empty(0))
    return block, tables


def measure(forward, x, standing):
    """Bytes that `forward(x)` leaves, holds at most, and holds at most in backward, beside what was there before."""
    with LiveBytes(x.device) as live:
        live.watch("before", [x, *standing])
        before = live.current_bytes
        live.reset_peak()
        output = forward(x)
        left, highest = live.current_bytes - before, live.peak_bytes - before
        gradients = [torch.ones_like(output)]
        edge = torch.autograd.graph.get_gradient_edge(output)
        del output
        live.reset_peak()
        torch.autograd.backward([edge], [gradients.pop()])
        return left, highest, live.peak_bytes - before


def saved_by(footprint, rows=ROWS, *, tp=1):
    backward = max(moment.resident.at(rows, tp=tp) + 4 * moment.gradients / tp for moment in footprint.backward)
    return footprint.saved.at(rows, tp=tp), footprint.forward.at(rows, tp=tp), backward


def whole_step(shape, rows):
    """What the parts keep together, and the highest moment of backward with the gradients made until then."""
    parts = [part for part in shape.parts for _ in range(part.count)]
    saved = [part.footprints["none"].saved.at(rows) for part in parts]
    highest, done = 0.0, 0
    for index in reversed(range(len(parts))):
        for moment in parts[index].footprints["none"].backward:
            highest = max(highest, sum(saved[:index]) + moment.resident.at(rows) + 4 * (done + moment.gradients))
        done += parts[index].numel
    return sum(saved), highest


@FAMILIES
@POLICIES
def test_decoder_block_holds_what_the_module_holds(config, policy):
    block, tables = block_of(config)
    if policy != "none":
        recompute_block(block, selective=policy == "selective")
    x = torch.randn(ROWS, LENGTH, config.width, requires_grad=True)
    measured = measure(lambda x: block(x, tables or None), x, [*block.parameters(), *tables])
    part = decoder_shape("", config, LENGTH, compute="fp32", gathered=False).parts[1]
    assert saved_by(part.footprints[policy]) == pytest.approx(measured, rel=0.001)


@FAMILIES
@POLICIES
def test_decoder_block_keeps_under_autocast_what_the_module_keeps(config, policy):
    block, tables = block_of(config)
    if policy != "none":
        recompute_block(block, selective=policy == "selective")
    x = torch.randn(ROWS, LENGTH, config.width, requires_grad=True)
    part = decoder_shape("", config, LENGTH, compute="bf16", gathered=False).parts[1]
    # Autocast's copies of the matrices live until their backward; recompute makes them anew.
    casts = sum(2 * weight.numel for weight in part.weights if weight.cast) if policy == "none" else 0
    forward = torch.autocast("cpu", torch.bfloat16)(lambda x: block(x, tables or None))
    left, _, _ = measure(forward, x, [*block.parameters(), *tables])
    assert part.footprints[policy].saved.at(ROWS) + casts == pytest.approx(left, rel=0.005)


def test_gathered_block_holds_what_a_module_in_bf16_holds(monkeypatch):
    monkeypatch.setattr(operators, "rms_norm_is_wide", lambda: False)
    block, tables = block_of(LLAMA)
    block.bfloat16()
    tables = tuple(table.bfloat16() for table in tables)
    x = torch.randn(ROWS, LENGTH, LLAMA.width, requires_grad=True, dtype=torch.bfloat16)
    forward = torch.autocast("cpu", torch.bfloat16)(lambda x: block(x, tables))
    measured = measure(forward, x, block.parameters())
    footprint = decoder_shape("", LLAMA, LENGTH, compute="bf16", gathered=True).parts[1].footprints["none"]
    assert saved_by(footprint)[:2] == pytest.approx(measured[:2], rel=0.01)


@FAMILIES
def test_a_rank_of_two_has_half_of_what_is_sharded(config):
    block, tables = block_of(config)
    attention, mlp, width = block.attn, block.mlp, config.width
    bias = config.family == "gpt2"
    attention.qkv = nn.Linear(width, attention.qkv.out_features // 2, bias=bias)
    attention.out = nn.Linear(width // 2, width, bias=bias)
    mlp.up = nn.Linear(width, config.hidden_width // 2, bias=bias)
    mlp.gate = mlp.gate and nn.Linear(width, config.hidden_width // 2, bias=False)
    mlp.down = nn.Linear(config.hidden_width // 2, width, bias=bias)
    x = torch.randn(ROWS, LENGTH, width, requires_grad=True)
    measured = measure(lambda x: block(x, tables or None), x, [*block.parameters(), *tables])
    part = decoder_shape("", config, LENGTH, compute="fp32", gathered=False).parts[1]
    assert saved_by(part.footprints["none"], tp=2) == pytest.approx(measured, rel=0.01)


class Adapted(nn.Module):
    """A frozen linear module with adapters beside it."""

    def __init__(self, base, rank):
        super().__init__()
        self.base = base.requires_grad_(requires_grad=False)
        self.down = nn.Linear(base.in_features, rank, bias=False)
        self.up = nn.Linear(rank, base.out_features, bias=False)

    def forward(self, x):
        return self.base(x) + self.up(self.down(x)) * 2.0


def adapted_block(config, rank):
    block, tables = block_of(config)
    block.requires_grad_(requires_grad=False)
    for owner, names in ((block.attn, ("qkv", "out")), (block.mlp, ("gate", "up", "down"))):
        for name in names:
            if isinstance(getattr(owner, name), nn.Linear):
                setattr(owner, name, Adapted(getattr(owner, name), rank))
    return block, tables


@FAMILIES
@POLICIES
def test_a_block_with_adapters_holds_what_the_module_holds(config, policy):
    block, tables = adapted_block(config, 4)
    if policy != "none":
        recompute_block(block, selective=policy == "selective")
    x = torch.randn(ROWS, LENGTH, config.width, requires_grad=True)
    measured = measure(lambda x: block(x, tables or None), x, [*block.parameters(), *tables])
    part = decoder_shape("", config, LENGTH, compute="fp32", gathered=False, lora=4).parts[1]
    assert saved_by(part.footprints[policy]) == pytest.approx(measured, rel=0.01)
    assert sum(weight.numel for weight in part.weights if weight.trained) == sum(
        parameter.numel() for parameter in block.parameters() if parameter.requires_grad
    )


@FAMILIES
def test_a_block_with_adapters_keeps_under_autocast_what_the_module_keeps(config):
    block, tables = adapted_block(config, 4)
    x = torch.randn(ROWS, LENGTH, config.width, requires_grad=True)
    part = decoder_shape("", config, LENGTH, compute="bf16", gathered=False, lora=4).parts[1]
    casts = sum(2 * weight.numel for weight in part.weights if weight.cast)
    forward = torch.autocast("cpu", torch.bfloat16)(lambda x: block(x, tables or None))
    left, _, _ = measure(forward, x, [*block.parameters(), *tables])
    assert part.footprints["none"].saved.at(ROWS) + casts == pytest.approx(left, rel=0.01)


@pytest.mark.parametrize("config", [GPT2, LLAMA], ids=["gpt2", "llama"])
def test_head_and_loss_hold_what_the_modules_hold(config):
    block, _ = block_of(config)
    norm, head = block.mlp_norm, Decoder(config).head
    targets = torch.zeros(ROWS * LENGTH, dtype=torch.long)
    x = torch.randn(ROWS, LENGTH, config.width, requires_grad=True)
    measured = measure(
        lambda x: functional.cross_entropy(head(norm(x)).flatten(0, 1), targets, reduction="sum"),
        x,
        [targets, head.weight, *norm.parameters()],
    )
    part = decoder_shape("", config, LENGTH, compute="fp32", gathered=False).parts[2]
    assert saved_by(part.footprints["none"]) == pytest.approx(measured, rel=0.001)


@pytest.mark.parametrize("name", ["resnet-18", "resnet-50"])
def test_resnet_step_holds_what_the_module_holds(name):
    model = built(name)
    images = torch.empty(2, 3, 64, 64, device="meta")
    targets = torch.empty(2, dtype=torch.long, device="meta")
    standing = [targets, *model.parameters(), *model.buffers()]
    left, _, backward = measure(
        lambda images: functional.cross_entropy(model(images), targets, reduction="sum"), images, standing
    )
    bottleneck, num_blocks = RESNETS[name]
    shape = resnet_shape(name, num_blocks, 64, bottleneck=bottleneck, compute="fp32", gathered=False)
    saved, highest = whole_step(shape, 2)
    assert (saved, highest) == pytest.approx((left, backward), rel=0.005)
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(images)
    assert shape.flops_per_sample * 2 == counter.get_total_flops()


@pytest.mark.parametrize(
    ("build", "settings"),
    [(models.t5, T5_COMMON | T5_SIZES["t5-tiny"]), (models.byt5, BYT5_COMMON | BYT5_SIZES["byt5-tiny"])],
    ids=["t5", "byt5"],
)
def test_t5_step_holds_what_the_module_holds(build, settings, monkeypatch):
    pytest.importorskip("transformers")
    # Without dropout, whose mask has a byte for each number on CUDA and four on the CPU.
    model = build(f"{build.__name__}-tiny", dropout_rate=0.0, num_layers=4).train()
    monkeypatch.setattr(
        functional,
        "scaled_dot_product_attention",
        lambda q, k, v, attn_mask, **_: FusedAttention.apply(q, k, v, attn_mask),
    )
    inputs, labels = torch.ones(2, LENGTH, dtype=torch.long), torch.ones(2, LENGTH // 4, dtype=torch.long)
    left, _, backward = measure(lambda inputs: model(input_ids=inputs, labels=labels).loss, inputs, model.parameters())
    settings = settings | {"dropout_rate": 0, "num_layers": 4}
    shape = t5_shape("", settings, LENGTH, compute="fp32", gathered=False)
    saved, highest = whole_step(shape, 2)
    assert saved == pytest.approx(left, rel=0.005)
    assert highest == pytest.approx(backward, rel=0.03)
    assert shape.numel == sum(parameter.numel() for parameter in model.parameters())


def built(name):
    with torch.device("meta"):
        if name in SIZES:
            return models.decoder(name)
        if name in RESNETS:
            return getattr(models, name.replace("-", ""))()
        return (models.byt5 if name.startswith("byt5") else models.t5)(name)


SMALL = [name for name in PUBLISHED if name not in {"resnet-101", "resnet-152"} and not name.endswith(("-xxl", "-11b"))]


@pytest.mark.parametrize("name", SMALL)
def test_parameters_are_those_of_the_module(name):
    shape = published(name, compute="bf16", gathered=False)
    assert shape.numel == sum(parameter.numel() for parameter in built(name).parameters())


@pytest.mark.parametrize(
    ("name", "millions"), [("resnet-101", 44.55), ("resnet-152", 60.19), ("t5-11b", 11_307.3), ("byt5-xxl", 12_905.1)]
)
def test_parameters_are_those_of_the_paper(name, millions):
    assert published(name, compute="bf16", gathered=False).numel == pytest.approx(1e6 * millions, rel=2e-4)


@pytest.mark.parametrize("name", ["gpt2-tiny", "llama-tiny"])
def test_weights_are_sharded_by_the_tensor_rules(name):
    model = models.decoder(name)
    styles = styles_by_name(model, model.tensor_rules())
    expected = {}
    for path, module in model.named_modules():
        for kind, parameter in module.named_parameters(recurse=False):
            if not path.startswith("blocks") or path.startswith("blocks.0"):
                is_sharded = split_dim(module, styles.get(path), kind) is not None
                expected[f"{path}.{kind}".removeprefix("blocks.0.")] = (
                    *parameter.shape[:1],
                    parameter.numel(),
                    is_sharded,
                )
    shape = published(name, compute="bf16", gathered=False)
    assert {w.name: (w.rows, w.numel, w.split) for part in shape.parts for w in part.weights} == expected


@pytest.mark.parametrize("config", [GPT2, GROUPED], ids=["gpt2", "llama"])
def test_matrix_products_are_those_of_the_module(config):
    shape = decoder_shape("", config, LENGTH, compute="fp32", gathered=False)
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        Decoder(config)(torch.zeros(ROWS, LENGTH, dtype=torch.long))
    counted = {str(operator): flops for operator, flops in counter.get_flop_counts()["Global"].items()}
    products = sum(item.flops * part.count for part in shape.parts for item in part.work.matmuls)
    assert products * ROWS == sum(flops for operator, flops in counted.items() if operator.endswith("mm"))


def test_attention_counts_half_of_the_square_where_it_is_causal():
    block = decoder_shape("", GPT2, LENGTH, compute="fp32", gathered=False).parts[1]
    assert sum(item.flops for item in block.work.attentions) == 2 * GPT2.width * LENGTH**2


def test_parts_outside_the_blocks_are_not_recomputed():
    first, block, last = published("gpt2", compute="bf16", gathered=False).parts
    for part in (first, last):
        assert part.footprints["full"] == part.footprints["none"]
    assert block.footprints["full"].saved == block.output


def test_every_published_model_is_described_without_torch():
    program = (
        "import sys\n"
        "from shardwise.planner.model.decoder_parts import PUBLISHED, published\n"
        "for name in PUBLISHED:\n"
        "    assert published(name, compute='bf16', gathered=True).num_blocks\n"
        "assert 'torch' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


def test_unknown_model_is_refused_with_the_nearest():
    with refuses("model.unknown-name", "'llama3-70b'"):
        published("llama-3-70b", compute="bf16", gathered=False)


@pytest.mark.parametrize(("length", "code"), [(0, "plan.sample-length-invalid"), (2048, "model.context-exceeded")])
def test_length_without_positions_is_refused(length, code):
    with refuses(code, length):
        published("gpt2", compute="bf16", gathered=False, length=length)
