"""The parts of T5 and ByT5 in closed form, as transformers computes them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from shardwise.planner.model import operators as op
from shardwise.planner.model.shape import Amount, AttentionWork, Matmul, ModelShape, Part, Weight
from shardwise.planner.model.tape import NOTHING, Describer, Tape

if TYPE_CHECKING:
    from collections.abc import Mapping

    from shardwise.planner.model.tape import Value
    from shardwise.plans.plan import DType

BUCKETS = 32
"""Distances that a relative position is sorted into."""


def t5_shape(
    name: str, settings: Mapping[str, Any], length: int, *, compute: DType, gathered: bool, lora: int = 0
) -> ModelShape:
    """Describe an encoder-decoder on inputs of `length` tokens and labels of a quarter as many."""
    model = _T5(settings=settings, length=length, num_labels=-(-length // 4))
    describe = Describer(compute=compute, gathered=gathered, lora=lora)
    width = Tape(compute, gathered).weight_width
    encoder, decoder = _layer_counts(settings)
    states = partial(Tape.outside, elements=model.elements(length), width=width)
    answers = partial(Tape.outside, elements=model.elements(model.num_labels), width=width)
    tokens = partial(Tape.outside, elements=NOTHING, width=op.INDEX, wants_gradient=False)

    def blocks(stack: str, count: int, given: Any) -> list[Part]:
        decodes = stack == "decoder"
        kinds = [("first", True, 1), ("others", False, count - 1)]
        return [
            describe(
                "block",
                f"{stack} {which}",
                partial(model.block, decodes=decodes, makes_bias=makes_bias),
                given,
                model.block_weights(decodes=decodes, makes_bias=makes_bias),
                count=number,
            )
            for which, makes_bias, number in kinds
            if number
        ]

    return ModelShape(
        name=name,
        compute=compute,
        gathered=gathered,
        parts=(
            describe("first", "embeddings", model.first, tokens, model.first_weights()),
            *blocks("encoder", encoder, states),
            *blocks("decoder", decoder, answers),
            describe("last", "head and loss", model.last, answers, model.last_weights()),
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
    """Forward passes of its parts on a tape, and their weights."""

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
        """Embeddings of both stacks, and what the encoder's last norm keeps for the decoder's blocks."""
        vocabulary = self.settings["vocab_size"] * self.width
        x = self.drop(tape, op.embed(tape, self.elements(self.length + self.num_labels), vocabulary))
        states = self.drop(tape, self.norm(tape, tape.outside(self.elements(self.length), x.width)))
        # The decoder's matrix products keep the states, unless they keep casts of their own.
        return op.depend(tape, x, states, keeps=states.width == tape.width)

    def block(self, tape: Tape, x: Value, *, decodes: bool, makes_bias: bool) -> Value:
        """Attention, in the decoder also to the encoder's states, and the feed-forward part."""
        num_tokens = self.num_labels if decodes else self.length
        square = Amount(fixed=self.heads * num_tokens**2)
        bias = (
            self.make_bias(tape, num_tokens)
            if makes_bias
            else tape.outside(square, tape.weight_width, wants_gradient=not tape.frozen)
        )
        if decodes:
            bias = op.choose(tape, bias, Amount(fixed=num_tokens**2))
        x = self.attention(tape, x, self.norm(tape, x), op.copy(tape, bias), num_tokens)
        if decodes:
            states = tape.outside(self.elements(self.length), tape.weight_width)
            zeros = Amount(fixed=self.heads * num_tokens * self.length)
            bias = tape.outside(zeros, tape.width, wants_gradient=False)
            if makes_bias:
                bias = replace(bias, storage=tape.store(bias.size))
            x = self.attention(tape, x, self.norm(tape, x), bias, self.length, states)
        return op.add(tape, x, self.drop(tape, self.feed_forward(tape, self.norm(tape, x))))

    def last(self, tape: Tape, x: Value) -> Value:
        """The last norm, the head and the loss."""
        x = self.drop(tape, self.norm(tape, x))
        if self.settings["tie_word_embeddings"]:  # transformers ties always, and takes this for T5's first version
            x = op.scale_by_number(tape, x)
        columns = self.settings["vocab_size"]
        matmul = Matmul(rows=self.num_labels, inner=self.width, columns=columns)
        return op.cross_entropy(tape, op.linear(tape, x, Amount(whole=self.num_labels * columns), matmul))

    def norm(self, tape: Tape, x: Value) -> Value:
        """RMS norm out of single operators, the first of them in fp32."""
        rows = x.elements * (1 / self.width)
        variance = op.mean(tape, op.power(tape, x), rows)
        scale = op.keep_result(tape, op.add_number(tape, variance))
        x = op.multiply_rows(tape, x, scale)
        if tape.gathered:
            x = op.cast(tape, x, tape.width)
        return op.multiply_by_weight(tape, x, self.width)

    def make_bias(self, tape: Tape, num_tokens: int) -> Value:
        """A learned number for each head and distance; the distances are kept as int64."""
        distances = tape.store(Amount(fixed=op.INDEX * num_tokens**2))
        numel = BUCKETS * self.heads
        return op.embed(tape, Amount(fixed=self.heads * num_tokens**2), numel, indices=distances)

    def attention(  # noqa: PLR0917 - one call's tensors
        self, tape: Tape, x: Value, normed: Value, bias: Value, num_keys: int, states: Value | None = None
    ) -> Value:
        num_queries = round(x.elements.whole / self.width)
        asked = normed if states is None else states
        q = self.project(tape, normed, num_queries)
        k, v = self.project(tape, asked, num_keys), self.project(tape, asked, num_keys)
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
        """The embedding that both stacks share, and the norm between them."""
        rows = self.settings["vocab_size"]
        shared = Weight(name="shared.weight", rows=rows, numel=rows * self.width, cast=False)
        return [shared, self.norm_weight("encoder.final_layer_norm")]

    def last_weights(self) -> list[Weight]:
        """The last norm and the head."""
        rows = self.settings["vocab_size"]
        head = Weight(name="lm_head.weight", rows=rows, numel=rows * self.width, tied=True)
        return [self.norm_weight("decoder.final_layer_norm"), head]

    def block_weights(self, *, decodes: bool, makes_bias: bool) -> list[Weight]:
        """One block's weights, in the order of its module."""
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
    """The tanh form of gelu out of single operators, as transformers has it; the power puts it into fp32."""
    inside = op.add(tape, x, op.scale_by_number(tape, op.power(tape, x)))
    bend = op.add_number(tape, op.keep_result(tape, op.scale_by_number(tape, inside)))
    return op.multiply(tape, op.scale_by_number(tape, x), bend)


def _matrix(name: str, rows: int, columns: int) -> Weight:
    return Weight(name=f"{name}.weight", rows=rows, numel=rows * columns)
