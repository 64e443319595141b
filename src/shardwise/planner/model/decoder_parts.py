"""The parts of a decoder (GPT-2, Llama and their relatives) in closed form, and published models by name."""

from __future__ import annotations

import dataclasses
import math
from functools import partial
from typing import TYPE_CHECKING, Any

from shardwise.errors import PlanError, nearest
from shardwise.planner.model import operators as op
from shardwise.planner.model.decoder_form import DOWN, GATE, OUT, QKV, UP, form_of
from shardwise.planner.model.shape import Amount, AttentionWork, Head, Matmul, ModelShape, Weight
from shardwise.planner.model.t5_parts import resnet_shape, t5_shape
from shardwise.planner.model.tape import WIDE, Describer, Tape
from shardwise.plans.catalogue import BYT5_COMMON, BYT5_SIZES, RESNETS, SIZES, T5_COMMON, T5_SIZES
from shardwise.units import ELEMENT_BYTES

if TYPE_CHECKING:
    from collections.abc import Callable

    from shardwise.planner.model.decoder_form import DecoderForm
    from shardwise.planner.model.shape import Part
    from shardwise.planner.model.tape import Storage, Value
    from shardwise.plans.catalogue import DecoderConfig
    from shardwise.plans.sections import DType


def decoder_shape(
    name: str, config: DecoderConfig, length: int, *, compute: DType, gathered: bool, lora: int = 0
) -> ModelShape:
    """Return the description of a decoder on samples of `length` tokens, trained with token cross entropy."""
    form = form_of(config)
    describe = Describer(compute=compute, gathered=gathered, lora=lora)
    narrow, stream_width = ELEMENT_BYTES[compute], Tape(compute, gathered).weight_width
    stream = Amount(stream=length * form.width)
    summed = Amount(whole=length * form.width)

    def tokens(tape: Tape) -> Value:
        return tape.outside(Amount(whole=length), op.INDEX, requires_grad=False)

    def given(tape: Tape) -> Value:
        return tape.outside(stream, stream_width)

    return ModelShape(
        name=name,
        compute=compute,
        gathered=gathered,
        parts=(
            describe(
                "first",
                "embedding",
                partial(_first, form, length),
                tokens,
                first_weights(form),
                exchanged=[summed * stream_width],
            ),
            describe(
                "block",
                "blocks",
                partial(_block, form, length),
                given,
                block_weights(form),
                count=form.num_layers,
                exchanged=[summed * narrow] * 2,
            ),
            describe(
                "last",
                "head and loss",
                partial(_last, form, length),
                given,
                last_weights(form),
                exchanged=[Amount(whole=length * form.vocab_size * narrow)],
            ),
        ),
        input=Amount(whole=2 * length * op.INDEX),
        tokens_per_sample=length,
        tp_degrees=_tp_degrees(form),
        cp_degrees=_divisors(math.gcd(form.num_heads, length)),
        head=_head(form, length, describe, given),
    )


def _head(form: DecoderForm, length: int, describe: Describer, given: Callable[[Tape], Value]) -> Head:
    tape = Tape(describe.compute, describe.gathered)
    return Head(
        vocab_size=form.vocab_size,
        width=form.width,
        rows=length,
        hidden_bytes=_norm(form, length, tape, given(tape)).width,
        split=True,
        trained=describe.lora == 0,
        before=describe.footprint(partial(_norm, form, length), given),
    )


def _first(form: DecoderForm, length: int, tape: Tape, _: Value) -> Value:
    stream = Amount(stream=length * form.width)
    x = op.embed(tape, stream, form.vocab_size * form.width)
    if form.rotary_share == 0:
        positions = op.embed(tape, Amount(fixed=length * form.width), form.context * form.width)
        x = op.add_to_each(tape, x, positions)
    return x


def _block(form: DecoderForm, length: int, tape: Tape, x: Value) -> Value:
    if form.parallel:
        attended = _attention(form, length, tape, _norm(form, length, tape, x))
        change = _mlp(form, length, tape, _norm(form, length, tape, x))
        return op.add(tape, op.add(tape, change, attended), x)
    if form.norm_after:
        x = op.add(tape, x, _norm(form, length, tape, _attention(form, length, tape, x)))
        change = _norm(form, length, tape, _mlp(form, length, tape, x))
        return op.add(tape, x, change)
    x = op.add(tape, x, _attention(form, length, tape, _norm(form, length, tape, x)))
    change = _mlp(form, length, tape, _norm(form, length, tape, x))
    return op.add(tape, x, change)


def _last(form: DecoderForm, length: int, tape: Tape, x: Value) -> Value:
    matmul = Matmul(rows=length, inner=form.width, columns=form.vocab_size, split="columns")
    logits = op.linear(tape, _norm(form, length, tape, x), Amount(whole=length * form.vocab_size), matmul)
    return op.cross_entropy(tape, logits)


def _norm(form: DecoderForm, length: int, tape: Tape, x: Value) -> Value:
    """Record a norm that outputs all tokens: column-parallel layers need them even under sequence parallelism."""
    elements = Amount(whole=length * form.width)
    return op.norm(tape, x, elements, form.width, kind="layer" if form.family == "gpt2" else "rms")


def _attention(form: DecoderForm, length: int, tape: Tape, x: Value) -> Value:
    """Record attention with the references that the module's forward keeps: views keep the output of qkv alive."""
    q, k, v = _grouped(form, length, tape, x) if form.qk_norm is None else _normed(form, length, tape, x)
    if form.rotary_share:
        table = _table(form, length, tape)
        q, k = _rotate_share(form, tape, q, table), _rotate_share(form, tape, k, table)
    attention = AttentionWork(
        heads=form.num_heads, kv_heads=form.kv_heads, head_width=form.head_width, queries=length, keys=length
    )
    mixed = op.attend(tape, q, k, v, attention)
    if 0 < form.rotary_share < 1:
        mixed = op.copy(tape, mixed)  # a concatenated q is ordered by head, and so is the result of attention
    back = Matmul(rows=length, inner=form.query_width, columns=form.width, split="inner")
    return op.linear(tape, mixed, Amount(whole=length * form.width), back, bias=OUT in form.biases)


def _grouped(form: DecoderForm, length: int, tape: Tape, x: Value) -> tuple[Value, Value, Value]:
    """Record queries, keys and values as views of one product."""
    width, kv_width = form.query_width, form.kv_heads * form.head_width
    rows = width + 2 * kv_width
    columns = Matmul(rows=length, inner=form.width, columns=rows, split="columns")
    groups = op.linear(tape, x, Amount(split=length * rows), columns, bias=QKV in form.biases)
    q = op.narrow(tape, groups, Amount(split=length * width))
    if form.num_heads > form.kv_heads:
        q = op.copy(tape, q)  # flattening copies, since the heads of a group are not contiguous
    k = op.narrow(tape, groups, Amount(split=length * kv_width))
    v = op.narrow(tape, groups, Amount(split=length * kv_width))
    return q, k, v


def _normed(form: DecoderForm, length: int, tape: Tape, x: Value) -> tuple[Value, Value, Value]:
    """Record the three products of models with norms of queries and keys, which save their inputs."""

    def project(width: int) -> Value:
        columns = Matmul(rows=length, inner=form.width, columns=width, split="columns")
        return op.linear(tape, x, Amount(split=length * width), columns, bias=QKV in form.biases)

    width, kv_width = form.query_width, form.kv_heads * form.head_width
    q = _head_norm(form, tape, project(width), width)
    k = _head_norm(form, tape, project(kv_width), kv_width)
    return q, k, project(kv_width)


def _head_norm(form: DecoderForm, tape: Tape, heads: Value, width: int) -> Value:
    """Record the RMS norm of queries or keys, with one statistic per head or per token."""
    row = form.head_width if form.qk_norm == "head" else width
    return op.norm(tape, heads, heads.elements, row, kind="rms")


def _table(form: DecoderForm, length: int, tape: Tape) -> Storage | None:
    """Return the rotary table of one block if FSDP casts its inputs; None if all blocks share an fp32 table."""
    if not tape.gathered or tape.width >= WIDE:
        return None
    return tape.store(Amount(fixed=length * form.rotary_width * tape.width))


def _rotate_share(form: DecoderForm, tape: Tape, heads: Value, table: Storage | None) -> Value:
    """Record the rotation of the first elements of each head; the others pass through a concatenation."""
    share = form.rotary_width / form.head_width
    if share == 1:
        return _rotate(tape, heads, table)
    turned = op.narrow(tape, heads, heads.elements * share)
    passed = op.narrow(tape, heads, heads.elements * (1 - share))
    return op.join(tape, _rotate(tape, turned, table), passed)


def _rotate(tape: Tape, heads: Value, table: Storage | None) -> Value:
    width = WIDE if table is None else tape.width
    first, second = op.halves(tape, heads)
    turned = op.join(
        tape,
        op.subtract(tape, op.scale(tape, first, table, width), op.scale(tape, second, table, width)),
        op.add(tape, op.scale(tape, second, table, width), op.scale(tape, first, table, width)),
    )
    return op.cast(tape, turned, heads.width)


def _mlp(form: DecoderForm, length: int, tape: Tape, x: Value) -> Value:
    width, hidden_width = form.width, form.hidden_width
    elements = Amount(split=length * hidden_width)
    columns = Matmul(rows=length, inner=width, columns=hidden_width, split="columns")
    up = op.linear(tape, x, elements, columns, bias=UP in form.biases)
    if form.family == "gpt2":
        hidden = op.activation(tape, up)
    else:
        gate_bias = GATE in form.biases
        hidden = op.multiply(tape, op.activation(tape, op.linear(tape, x, elements, columns, bias=gate_bias)), up)
    back = Matmul(rows=length, inner=hidden_width, columns=width, split="inner")
    return op.linear(tape, hidden, Amount(whole=length * width), back, bias=DOWN in form.biases)


def first_weights(form: DecoderForm) -> tuple[Weight, ...]:
    """Return the weights before the blocks."""
    embed = Weight(
        name="embed.weight", rows=form.vocab_size, numel=form.vocab_size * form.width, split=True, cast=False
    )
    if form.rotary_share:
        return (embed,)
    positions = form.context * form.width
    return embed, Weight(name="positions.weight", rows=form.context, numel=positions, cast=False)


def block_weights(form: DecoderForm) -> tuple[Weight, ...]:
    """Return the weights of one block, in the order of its module."""
    width, hidden = form.width, form.hidden_width
    rows = (form.num_heads + 2 * form.kv_heads) * form.head_width
    gate = _matrix(form, GATE, hidden, width) if form.family == "llama" else ()
    return (
        *norm_weights(form, "attn_norm"),
        *_matrix(form, QKV, rows, width),
        *_head_norm_weights(form),
        *_matrix(form, OUT, width, form.query_width, split_bias=False),
        *norm_weights(form, "mlp_norm"),
        *gate,
        *_matrix(form, UP, hidden, width),
        *_matrix(form, DOWN, width, hidden, split_bias=False),
    )


def _head_norm_weights(form: DecoderForm) -> tuple[Weight, ...]:
    """Return the weights of the norms of queries and keys, which tensor parallelism replicates."""
    widths = {
        None: {},
        "head": {"q": form.head_width, "k": form.head_width},
        "all": {"q": form.query_width, "k": form.kv_heads * form.head_width},
    }[form.qk_norm]
    return tuple(Weight(name=f"attn.{name}_norm.weight", rows=n, numel=n, cast=False) for name, n in widths.items())


def last_weights(form: DecoderForm) -> tuple[Weight, ...]:
    """Return the weights after the blocks."""
    rows = form.vocab_size
    head = Weight(name="head.weight", rows=rows, numel=rows * form.width, split=True, tied=form.tie_head)
    return *norm_weights(form, "norm"), head


def norm_weights(form: DecoderForm, name: str) -> tuple[Weight, ...]:
    """Return the weight of a norm, and its bias if it is a layer norm."""
    kinds = ("weight", "bias") if form.family == "gpt2" else ("weight",)
    return tuple(Weight(name=f"{name}.{kind}", rows=form.width, numel=form.width, cast=False) for kind in kinds)


def _matrix(form: DecoderForm, name: str, rows: int, columns: int, *, split_bias: bool = True) -> tuple[Weight, ...]:
    weight = Weight(name=f"{name}.weight", rows=rows, numel=rows * columns, split=True)
    if name not in form.biases:
        return (weight,)
    return weight, Weight(name=f"{name}.bias", rows=rows, numel=rows, split=split_bias)


def _tp_degrees(form: DecoderForm) -> tuple[int, ...]:
    """Return the degrees that split heads and MLP evenly; only 1 if a norm reads all heads: ranks would gather them."""
    if form.qk_norm == "all":
        return (1,)
    return _divisors(math.gcd(form.num_heads, form.kv_heads, form.hidden_width))


def _divisors(number: int) -> tuple[int, ...]:
    return tuple(degree for degree in range(1, number + 1) if number % degree == 0)


# Published models by name, in closed form and without torch.


PUBLISHED: tuple[str, ...] = (*RESNETS, *SIZES, *T5_SIZES, *BYT5_SIZES)
"""Names that `published` accepts."""

IMAGE_SIDE = 224
T5_LENGTH, BYT5_LENGTH = 512, 1024


def published(
    name: str,
    *,
    compute: DType,
    gathered: bool,
    length: int | None = None,
    lora: int = 0,
    config: DecoderConfig | None = None,
) -> ModelShape:
    """Return the description of a published model trained in `compute`; `gathered` if FSDP gathers its weights.

    `config` describes a decoder that is not in the catalogue.
    `length` is tokens per sample (None: the model's context; T5's labels are a quarter as long), or an image's side
    in pixels. `lora` is the rank of adapters on every matrix of the blocks; all other weights are frozen, and stored
    in `compute` if that is half precision, which is how checkpoints are loaded for fine-tuning.
    """
    is_narrow = lora > 0 and compute in {"bf16", "fp16"}
    options = {"compute": compute, "gathered": gathered or is_narrow, "lora": lora}
    shape = _published(name, length, options, config or SIZES.get(name))
    if is_narrow:
        parts = tuple(_store_frozen_narrow(part) for part in shape.parts)
        return dataclasses.replace(shape, name=f"{name} in {compute} + LoRA {lora}", parts=parts)
    return dataclasses.replace(shape, name=f"{name} + LoRA {lora}") if lora else shape


def _store_frozen_narrow(part: Part) -> Part:
    """Return a part whose frozen weights are stored in the compute dtype, so that autocast does not cast them."""
    weights = [
        weight if weight.trained else dataclasses.replace(weight, narrow=True, cast=False) for weight in part.weights
    ]
    return dataclasses.replace(part, weights=tuple(weights))


def _published(name: str, length: int | None, options: dict[str, Any], config: DecoderConfig | None) -> ModelShape:
    if length is not None and length < 1:
        raise PlanError(
            f"the length of samples must be positive, got {length}",
            code="plan.sample-length-invalid",
            fix="use an integer of at least 1",
        )
    if config is not None:
        length = config.context if length is None else length
        if form_of(config).rotary_share == 0 and length > config.context:
            raise PlanError(
                f"{name} has {config.context} positions, but samples have {length} tokens",
                code="model.context-exceeded",
                fix=f"use --length {config.context} or less",
            )
        return decoder_shape(name, config, length, **options)
    if name in RESNETS:
        if options.pop("lora"):
            raise PlanError(
                f"LoRA supports linear modules only, but {name} has convolutions",
                code="model.no-linear-modules",
                fix="remove --lora, or pass a decoder",
            )
        bottleneck, num_blocks = RESNETS[name]
        side = length or IMAGE_SIDE
        return resnet_shape(name, num_blocks, side, bottleneck=bottleneck, **options)
    if name in T5_SIZES:
        settings = T5_COMMON | T5_SIZES[name]
        return t5_shape(name, settings, length or T5_LENGTH, **options)
    if name in BYT5_SIZES:
        settings = BYT5_COMMON | BYT5_SIZES[name]
        return t5_shape(name, settings, length or BYT5_LENGTH, **options)
    raise PlanError(f"unknown published model {name!r}", code="model.unknown-name", fix=nearest(name, PUBLISHED))
