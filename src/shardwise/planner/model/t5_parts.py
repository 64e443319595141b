"""The parts of T5, ByT5 and residual networks in closed form."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from shardwise.planner.model import operators as op
from shardwise.planner.model.shape import Amount, AttentionWork, Matmul, ModelShape, Part, Weight
from shardwise.planner.model.tape import NOTHING, WIDE, Describer, Tape
from shardwise.units import ELEMENT_BYTES

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from shardwise.planner.model.tape import Value
    from shardwise.plans.sections import DType

BUCKETS = 32
"""Buckets of relative positions."""


def t5_shape(
    name: str, settings: Mapping[str, Any], length: int, *, compute: DType, gathered: bool, lora: int = 0
) -> ModelShape:
    """Return the description of an encoder-decoder on inputs of `length` tokens and a quarter as many labels."""
    model = _T5(settings=settings, length=length, num_labels=-(-length // 4))
    describe = Describer(compute=compute, gathered=gathered, lora=lora)
    width = Tape(compute, gathered).weight_width
    encoder, decoder = _layer_counts(settings)
    states = partial(Tape.outside, elements=model.elements(length), width=width)
    labels = partial(Tape.outside, elements=model.elements(model.num_labels), width=width)
    tokens = partial(Tape.outside, elements=NOTHING, width=op.INDEX, requires_grad=False)

    def blocks(stack: str, count: int, given: Any) -> list[Part]:
        """Return the first block of a stack, which has the relative attention bias, and the others."""
        decodes, parts = stack == "decoder", []
        for which, makes_bias, number in (("first", True, 1), ("others", False, count - 1)):
            if not number:
                continue
            forward = partial(model.block, decodes=decodes, makes_bias=makes_bias)
            weights = model.block_weights(decodes=decodes, makes_bias=makes_bias)
            parts.append(describe("block", f"{stack} {which}", forward, given, weights, count=number))
        return parts

    return ModelShape(
        name=name,
        compute=compute,
        gathered=gathered,
        parts=(
            describe("first", "embeddings", model.first, tokens, model.first_weights()),
            *blocks("encoder", encoder, states),
            *blocks("decoder", decoder, labels),
            describe("last", "head and loss", model.last, labels, model.last_weights()),
        ),
        input=Amount(whole=op.INDEX * (length + model.num_labels)),
        tokens_per_sample=length,
        stages=False,
    )


def _layer_counts(settings: Mapping[str, Any]) -> tuple[int, int]:
    encoder = settings["num_layers"]
    return encoder, settings["num_decoder_layers"] or encoder


@dataclass(frozen=True, kw_only=True)
class _T5:
    """Forward passes of T5's parts on a tape, and their weights."""

    settings: Mapping[str, Any]
    length: int
    num_labels: int

    @property
    def width(self) -> int:
        return int(self.settings["d_model"])

    @property
    def hidden(self) -> int:
        return int(self.settings["d_ff"])

    @property
    def heads(self) -> int:
        return int(self.settings["num_heads"])

    @property
    def inner(self) -> int:
        return int(self.heads * self.settings["d_kv"])

    @property
    def gated(self) -> bool:
        return bool(self.settings["feed_forward_proj"] == "gated-gelu")

    def elements(self, num_tokens: int) -> Amount:
        return Amount(whole=num_tokens * self.width)

    def drop(self, tape: Tape, x: Value) -> Value:
        return op.dropout(tape, x, self.settings["dropout_rate"])

    # Forward passes.

    def first(self, tape: Tape, _: Value) -> Value:
        """Record the embeddings of both stacks, and the encoder's last norm, which the decoder's blocks use."""
        vocabulary = self.settings["vocab_size"] * self.width
        x = self.drop(tape, op.embed(tape, self.elements(self.length + self.num_labels), vocabulary))
        states = self.drop(tape, self.norm(tape, tape.outside(self.elements(self.length), x.width)))
        # The decoder's matrix products save the states themselves, unless autocast casts them.
        return op.depend(tape, x, states, keeps=states.width == tape.width)

    def block(self, tape: Tape, x: Value, *, decodes: bool, makes_bias: bool) -> Value:
        """Record self-attention, cross-attention in the decoder, and the feed-forward layer."""
        num_tokens = self.num_labels if decodes else self.length
        if makes_bias:
            bias = self.make_bias(tape, num_tokens)
        else:
            square = Amount(fixed=self.heads * num_tokens**2)
            bias = tape.outside(square, tape.weight_width, requires_grad=not tape.frozen)
        if decodes:
            bias = op.choose(tape, bias, Amount(fixed=num_tokens**2))
        x = self.attention(tape, x, self.norm(tape, x), op.copy(tape, bias), num_tokens)
        if decodes:
            states = tape.outside(self.elements(self.length), tape.weight_width)
            zeros = Amount(fixed=self.heads * num_tokens * self.length)
            bias = tape.outside(zeros, tape.width, requires_grad=False)
            if makes_bias:
                bias = replace(bias, storage=tape.store(bias.size))
            x = self.attention(tape, x, self.norm(tape, x), bias, self.length, states)
        return op.add(tape, x, self.drop(tape, self.feed_forward(tape, self.norm(tape, x))))

    def last(self, tape: Tape, x: Value) -> Value:
        """Record the last norm, the head and the loss."""
        x = self.drop(tape, self.norm(tape, x))
        if self.settings["tie_word_embeddings"]:  # transformers always ties; this setting marks T5 1.0, which scales
            x = op.scale_by_number(tape, x)
        columns = self.settings["vocab_size"]
        matmul = Matmul(rows=self.num_labels, inner=self.width, columns=columns)
        return op.cross_entropy(tape, op.linear(tape, x, Amount(whole=self.num_labels * columns), matmul))

    def norm(self, tape: Tape, x: Value) -> Value:
        """Record an RMS norm of separate operators, the first of them in fp32."""
        rows = x.elements * (1 / self.width)
        variance = op.mean(tape, op.power(tape, x), rows)
        scale = op.keep_result(tape, op.add_number(tape, variance))
        x = op.multiply_rows(tape, x, scale)
        if tape.gathered:
            x = op.cast(tape, x, tape.width)
        return op.multiply_by_weight(tape, x, self.width)

    def make_bias(self, tape: Tape, num_tokens: int) -> Value:
        """Record the relative attention bias: an embedding lookup by bucket that saves int64 indices for backward."""
        distances = tape.store(Amount(fixed=op.INDEX * num_tokens**2))
        numel = BUCKETS * self.heads
        return op.embed(tape, Amount(fixed=self.heads * num_tokens**2), numel, indices=distances)

    def attention(  # noqa: PLR0917 - one call's tensors
        self, tape: Tape, x: Value, normed: Value, bias: Value, num_keys: int, states: Value | None = None
    ) -> Value:
        num_queries = round(x.elements.whole / self.width)
        source = normed if states is None else states
        q = self.project(tape, normed, num_queries)
        k, v = self.project(tape, source, num_keys), self.project(tape, source, num_keys)
        attention = AttentionWork(
            heads=self.heads,
            kv_heads=self.heads,
            head_width=self.settings["d_kv"],
            queries=num_queries,
            keys=num_keys,
            causal=False,
        )
        mixed = op.attend(tape, q, k, v, attention, bias=bias)
        back = Matmul(rows=num_queries, inner=self.inner, columns=self.width)
        out = op.linear(tape, mixed, self.elements(num_queries), back)
        return op.add(tape, x, self.drop(tape, out))

    def project(self, tape: Tape, x: Value, num_tokens: int) -> Value:
        matmul = Matmul(rows=num_tokens, inner=self.width, columns=self.inner)
        return op.linear(tape, x, Amount(whole=num_tokens * self.inner), matmul)

    def feed_forward(self, tape: Tape, x: Value) -> Value:
        num_tokens = round(x.elements.whole / self.width)
        elements = Amount(whole=num_tokens * self.hidden)
        there = Matmul(rows=num_tokens, inner=self.width, columns=self.hidden)
        if self.gated:
            gate = gelu(tape, op.linear(tape, x, elements, there))
            hidden = op.multiply(tape, gate, op.linear(tape, x, elements, there))
        else:
            hidden = op.relu(tape, op.linear(tape, x, elements, there), in_place=False)
        hidden = op.cast(tape, self.drop(tape, hidden), tape.weight_width)
        back = Matmul(rows=num_tokens, inner=self.hidden, columns=self.width)
        return op.linear(tape, hidden, self.elements(num_tokens), back)

    # Weights.

    def first_weights(self) -> list[Weight]:
        """Return the weights of the shared embedding and of the norm between the stacks."""
        rows = self.settings["vocab_size"]
        shared = Weight(name="shared.weight", rows=rows, numel=rows * self.width, cast=False)
        return [shared, self.norm_weight("encoder.final_layer_norm")]

    def last_weights(self) -> list[Weight]:
        """Return the weights of the last norm and of the head."""
        rows = self.settings["vocab_size"]
        head = Weight(name="lm_head.weight", rows=rows, numel=rows * self.width, tied=True)
        return [self.norm_weight("decoder.final_layer_norm"), head]

    def block_weights(self, *, decodes: bool, makes_bias: bool) -> list[Weight]:
        """Return the weights of one block, in the order of its module."""
        attentions = ["SelfAttention", "EncDecAttention"] if decodes else ["SelfAttention"]
        weights = []
        for index, kind in enumerate(attentions):
            place = f"layer.{index}.{kind}"
            weights += [_matrix(f"{place}.{name}", self.inner, self.width) for name in "qkv"]
            weights += [_matrix(f"{place}.o", self.width, self.inner)]
            if makes_bias and index == 0:
                bias = f"{place}.relative_attention_bias.weight"
                weights.append(Weight(name=bias, rows=BUCKETS, numel=BUCKETS * self.heads, cast=False))
            weights.append(self.norm_weight(f"layer.{index}.layer_norm"))
        place = f"layer.{len(attentions)}"
        inner = ["wi_0", "wi_1"] if self.gated else ["wi"]
        weights += [_matrix(f"{place}.DenseReluDense.{name}", self.hidden, self.width) for name in inner]
        weights.append(_matrix(f"{place}.DenseReluDense.wo", self.width, self.hidden))
        return [*weights, self.norm_weight(f"{place}.layer_norm")]

    def norm_weight(self, name: str) -> Weight:
        return Weight(name=f"{name}.weight", rows=self.width, numel=self.width, cast=False)


def gelu(tape: Tape, x: Value) -> Value:
    """Record the tanh form of gelu as transformers' separate operators; the power casts to fp32."""
    inside = op.add(tape, x, op.scale_by_number(tape, op.power(tape, x)))
    bend = op.add_number(tape, op.keep_result(tape, op.scale_by_number(tape, inside)))
    return op.multiply(tape, op.scale_by_number(tape, x), bend)


def _matrix(name: str, rows: int, columns: int) -> Weight:
    return Weight(name=f"{name}.weight", rows=rows, numel=rows * columns)


WIDTHS = (64, 128, 256, 512)
CHANNELS = 3
CLASSES = 1000


class Conv(NamedTuple):
    """One convolution without bias, followed by a batch norm."""

    name: str
    norm: str
    channels: int
    out_channels: int
    size: int
    """Pixels per side of its kernel."""
    side: int
    """Pixels per side of its output."""

    @property
    def elements(self) -> Amount:
        """Elements of its output."""
        return Amount(whole=self.out_channels * self.side**2)

    @property
    def weights(self) -> tuple[Weight, ...]:
        """Weights of the convolution and its norm."""
        numel, rows = self.channels * self.out_channels * self.size**2, self.out_channels
        return (
            Weight(name=f"{self.name}.weight", rows=rows, numel=numel),
            Weight(name=f"{self.norm}.weight", rows=rows, numel=rows, cast=False),
            Weight(name=f"{self.norm}.bias", rows=rows, numel=rows, cast=False),
        )

    def __call__(self, tape: Tape, x: Value) -> Value:
        """Record the convolution and its norm."""
        matmul = Matmul(rows=self.side**2, inner=self.channels * self.size**2, columns=self.out_channels)
        x = op.linear(tape, x, self.elements, matmul, flattens=False)
        return op.batch_norm(tape, x, self.out_channels)


class ResidualShape(NamedTuple):
    """A residual block: its convolutions, and one on the shortcut if the shape changes."""

    body: tuple[Conv, ...]
    shortcut: Conv | None

    @property
    def weights(self) -> tuple[Weight, ...]:
        """Weights of all its convolutions and norms."""
        convs = self.body if self.shortcut is None else (*self.body, self.shortcut)
        return tuple(weight for conv in convs for weight in conv.weights)

    def __call__(self, tape: Tape, x: Value) -> Value:
        """Record the block."""
        change = x
        for conv in self.body[:-1]:
            change = op.relu(tape, conv(tape, change), in_place=True)
        change = self.body[-1](tape, change)
        around = x if self.shortcut is None else self.shortcut(tape, x)
        return op.relu(tape, op.add(tape, change, around), in_place=True)


def resnet_shape(
    name: str, num_blocks: tuple[int, ...], side: int, *, bottleneck: bool, compute: DType, gathered: bool
) -> ModelShape:
    """Return the description of a residual network on square images of `side` pixels and 1,000 classes."""
    describe = Describer(compute=compute, gathered=gathered)
    width = ELEMENT_BYTES[compute]
    stem = Conv("conv", "norm", CHANNELS, WIDTHS[0], 7, _half(side))
    image = Amount(whole=CHANNELS * side**2)

    def images(tape: Tape) -> Value:
        return tape.outside(image, WIDE, requires_grad=False)

    parts = [describe("first", "stem", partial(_stem, stem), images, stem.weights)]
    out = Conv("", "", 0, WIDTHS[0], 3, _half(stem.side))
    for where, block, count in _blocks(num_blocks, out.side, bottleneck=bottleneck):
        given = partial(Tape.outside, elements=out.elements, width=width)
        parts.append(describe("block", where, block.__call__, given, block.weights, count=count))
        out = block.body[-1]
    head = [
        Weight(name="head.weight", rows=CLASSES, numel=CLASSES * out.out_channels),
        Weight(name="head.bias", rows=CLASSES, numel=CLASSES),
    ]
    given = partial(Tape.outside, elements=out.elements, width=width)
    parts.append(describe("last", "head and loss", partial(_head, out.out_channels), given, head))
    return ModelShape(
        name=name,
        compute=compute,
        gathered=gathered,
        parts=tuple(parts),
        input=image * WIDE + Amount(whole=op.INDEX),
        ties_samples=True,
    )


def _blocks(num_blocks: tuple[int, ...], side: int, *, bottleneck: bool) -> Iterator[tuple[str, ResidualShape, int]]:
    """Yield the first block of each stage, then one that represents all other blocks of the stage."""
    channels = WIDTHS[0]
    for stage, (width, number) in enumerate(zip(WIDTHS, num_blocks, strict=True)):
        out_side = side if stage == 0 else _half(side)
        body = _bottleneck if bottleneck else _basic
        convs = body(channels, width, side, out_side)
        out_channels = convs[-1].out_channels
        changes = channels != out_channels or side != out_side
        around = Conv("shortcut.conv", "shortcut.norm", channels, out_channels, 1, out_side) if changes else None
        yield f"stage {stage} first", ResidualShape(convs, around), 1
        channels, side = out_channels, out_side
        if number > 1:
            yield f"stage {stage} others", ResidualShape(body(channels, width, side, side), None), number - 1


def _basic(channels: int, width: int, _: int, out_side: int) -> tuple[Conv, ...]:
    return (
        Conv("body.conv1", "body.norm1", channels, width, 3, out_side),
        Conv("body.conv2", "body.norm2", width, width, 3, out_side),
    )


def _bottleneck(channels: int, width: int, side: int, out_side: int) -> tuple[Conv, ...]:
    return (
        Conv("body.conv1", "body.norm1", channels, width, 1, side),
        Conv("body.conv2", "body.norm2", width, width, 3, out_side),
        Conv("body.conv3", "body.norm3", width, 4 * width, 1, out_side),
    )


def _stem(conv: Conv, tape: Tape, x: Value) -> Value:
    x = op.relu(tape, conv(tape, x), in_place=True)
    return op.max_pool(tape, x, Amount(whole=conv.out_channels * _half(conv.side) ** 2))


def _head(channels: int, tape: Tape, x: Value) -> Value:
    matmul = Matmul(rows=1, inner=channels, columns=CLASSES)
    features = op.mean(tape, x, Amount(whole=channels))
    return op.cross_entropy(tape, op.linear(tape, features, Amount(whole=CLASSES), matmul, bias=True))


def _half(side: int) -> int:
    """Return the pixels per side after a stride of two."""
    return -(-side // 2)
