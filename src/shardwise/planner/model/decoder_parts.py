"""The parts of a decoder (GPT-2's and Llama's shape) in closed form; mirrors the decoder of the models room."""

from __future__ import annotations

import math
from functools import partial
from typing import TYPE_CHECKING

from shardwise.planner.model import operators as op
from shardwise.planner.model.shape import ELEMENT_BYTES, Amount, Attention, Head, Matmul, ModelShape, Weight
from shardwise.planner.model.tape import WIDE, Describer, Tape

if TYPE_CHECKING:
    from shardwise.planner.model.tape import Storage, Value
    from shardwise.plans.catalogue import DecoderConfig
    from shardwise.plans.plan import DType


def decoder_shape(
    name: str, config: DecoderConfig, length: int, *, compute: DType, gathered: bool, lora: int = 0
) -> ModelShape:
    """Describe a decoder on samples of `length` tokens, trained with token cross entropy."""
    describe = Describer(compute=compute, gathered=gathered, lora=lora)
    narrow, stream_width = ELEMENT_BYTES[compute], Tape(compute, gathered).weight_width
    stream = Amount(stream=length * config.width)
    summed = Amount(whole=length * config.width)

    def tokens(tape: Tape) -> Value:
        return tape.outside(Amount(whole=length), op.INDEX, wants_gradient=False)

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
                partial(_first, config, length),
                tokens,
                first_weights(config),
                exchanged=[summed * stream_width],
            ),
            describe(
                "block",
                "blocks",
                partial(_block, config, length),
                given,
                block_weights(config),
                count=config.num_layers,
                exchanged=[summed * narrow] * 2,
            ),
            describe(
                "last",
                "head and loss",
                partial(_last, config, length),
                given,
                last_weights(config),
                exchanged=[Amount(whole=length * config.vocab_size * narrow)],
            ),
        ),
        input=Amount(whole=2 * length * op.INDEX),
        tokens_per_sample=length,
        tp_degrees=_divisors(math.gcd(config.num_heads, config.kv_heads, config.hidden_width)),
        cp_degrees=_divisors(math.gcd(config.num_heads, length)),
        head=Head(
            words=config.vocab_size,
            width=config.width,
            rows=length,
            hidden_bytes=_norm(config, length, Tape(compute, gathered), given(Tape(compute, gathered))).width,
            cut=True,
            trained=lora == 0,
            before=describe.footprint(partial(_norm, config, length), given),
        ),
    )


def _first(config: DecoderConfig, length: int, tape: Tape, _: Value) -> Value:
    stream = Amount(stream=length * config.width)
    x = op.embed(tape, stream, config.vocab_size * config.width)
    if config.family == "gpt2":
        positions = op.embed(tape, Amount(fixed=length * config.width), config.context * config.width)
        x = op.add_to_each(tape, x, positions)
    return x


def _block(config: DecoderConfig, length: int, tape: Tape, x: Value) -> Value:
    x = op.add(tape, x, _attention(config, length, tape, _norm(config, length, tape, x)))
    change = _mlp(config, length, tape, _norm(config, length, tape, x))
    return op.add(tape, x, change)


def _last(config: DecoderConfig, length: int, tape: Tape, x: Value) -> Value:
    matmul = Matmul(rows=length, inner=config.width, columns=config.vocab_size, cut="columns")
    logits = op.linear(tape, _norm(config, length, tape, x), Amount(whole=length * config.vocab_size), matmul)
    return op.cross_entropy(tape, logits)


def _norm(config: DecoderConfig, length: int, tape: Tape, x: Value) -> Value:
    """Hand out all tokens, also where the stream is cut by tokens: the columns after it need them."""
    elements = Amount(whole=length * config.width)
    return op.norm(tape, x, elements, config.width, kind="layer" if config.family == "gpt2" else "rms")


def _attention(config: DecoderConfig, length: int, tape: Tape, x: Value) -> Value:
    """Hold what the module's frame holds: the output of qkv lives as long as any view of it."""
    width, kv_width = config.width, config.kv_heads * config.head_width
    bias = config.family == "gpt2"
    rows = width + 2 * kv_width
    columns = Matmul(rows=length, inner=width, columns=rows, cut="columns")
    groups = op.linear(tape, x, Amount(cut=length * rows), columns, bias=bias)
    q = op.narrow(tape, groups, Amount(cut=length * width))
    if config.num_heads > config.kv_heads:
        q = op.copy(tape, q)  # the heads of a group lie apart: flattening them copies
    k = op.narrow(tape, groups, Amount(cut=length * kv_width))
    v = op.narrow(tape, groups, Amount(cut=length * kv_width))
    if config.family == "llama":
        table = _table(config, length, tape)
        q, k = _rotate(tape, q, table), _rotate(tape, k, table)
    attention = Attention(
        heads=config.num_heads, kv_heads=config.kv_heads, head_width=config.head_width, queries=length, keys=length
    )
    mixed = op.attend(tape, q, k, v, attention)
    back = Matmul(rows=length, inner=width, columns=width, cut="inner")
    return op.linear(tape, mixed, Amount(whole=length * width), back, bias=bias)


def _table(config: DecoderConfig, length: int, tape: Tape) -> Storage | None:
    """Cosines and sines: one fp32 pair for all blocks, unless sharding casts each block's inputs."""
    if not tape.gathered or tape.width >= WIDE:
        return None
    return tape.store(Amount(fixed=length * config.head_width * tape.width))


def _rotate(tape: Tape, heads: Value, table: Storage | None) -> Value:
    width = WIDE if table is None else tape.width
    first, second = op.halves(tape, heads)
    turned = op.join(
        tape,
        op.subtract(tape, op.scale(tape, first, table, width), op.scale(tape, second, table, width)),
        op.add(tape, op.scale(tape, second, table, width), op.scale(tape, first, table, width)),
    )
    return op.cast(tape, turned, heads.width)


def _mlp(config: DecoderConfig, length: int, tape: Tape, x: Value) -> Value:
    width, hidden_width = config.width, config.hidden_width
    bias = config.family == "gpt2"
    elements = Amount(cut=length * hidden_width)
    columns = Matmul(rows=length, inner=width, columns=hidden_width, cut="columns")
    up = op.linear(tape, x, elements, columns, bias=bias)
    if config.family == "gpt2":
        hidden = op.activation(tape, up)
    else:
        hidden = op.multiply(tape, op.activation(tape, op.linear(tape, x, elements, columns)), up)
    back = Matmul(rows=length, inner=hidden_width, columns=width, cut="inner")
    return op.linear(tape, hidden, Amount(whole=length * width), back, bias=bias)


def first_weights(config: DecoderConfig) -> tuple[Weight, ...]:
    """What comes before the blocks."""
    embed = Weight(
        name="embed.weight", rows=config.vocab_size, numel=config.vocab_size * config.width, cut=True, cast=False
    )
    if config.family == "llama":
        return (embed,)
    positions = config.context * config.width
    return embed, Weight(name="positions.weight", rows=config.context, numel=positions, cast=False)


def block_weights(config: DecoderConfig) -> tuple[Weight, ...]:
    """One block's weights, in the order of its module."""
    width, hidden = config.width, config.hidden_width
    rows = (config.num_heads + 2 * config.kv_heads) * config.head_width
    gate = _matrix(config, "mlp.gate", hidden, width) if config.family == "llama" else ()
    return (
        *norm_weights(config, "attn_norm"),
        *_matrix(config, "attn.qkv", rows, width),
        *_matrix(config, "attn.out", width, width, cut_bias=False),
        *norm_weights(config, "mlp_norm"),
        *gate,
        *_matrix(config, "mlp.up", hidden, width),
        *_matrix(config, "mlp.down", width, hidden, cut_bias=False),
    )


def last_weights(config: DecoderConfig) -> tuple[Weight, ...]:
    """What comes after the blocks."""
    rows = config.vocab_size
    head = Weight(name="head.weight", rows=rows, numel=rows * config.width, cut=True, tied=config.tie_head)
    return *norm_weights(config, "norm"), head


def norm_weights(config: DecoderConfig, name: str) -> tuple[Weight, ...]:
    """A norm's weight, and its bias in GPT-2's shape."""
    kinds = ("weight", "bias") if config.family == "gpt2" else ("weight",)
    return tuple(Weight(name=f"{name}.{kind}", rows=config.width, numel=config.width, cast=False) for kind in kinds)


def _matrix(config: DecoderConfig, name: str, rows: int, columns: int, *, cut_bias: bool = True) -> tuple[Weight, ...]:
    weight = Weight(name=f"{name}.weight", rows=rows, numel=rows * columns, cut=True)
    if config.family == "llama":
        return (weight,)
    return weight, Weight(name=f"{name}.bias", rows=rows, numel=rows, cut=cut_bias)


def _divisors(number: int) -> tuple[int, ...]:
    return tuple(degree for degree in range(1, number + 1) if number % degree == 0)
