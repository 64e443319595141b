"""Operators on a tape: the tensors that eager torch saves, casts and allocates under CUDA's autocast rules."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING

from shardwise.planner.model.shape import Amount, AttentionWork, Matmul
from shardwise.planner.model.tape import NOTHING, WIDE

if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Literal

    from shardwise.planner.model.tape import Storage, Tape, Value

INDEX = 8
"""Bytes of an int64."""
FIRST, BOTH = frozenset({0}), frozenset({0, 1})


def cast(tape: Tape, x: Value, width: int) -> Value:
    """Return x, or a copy of x that is cast to `width` bytes per element."""
    return x if x.width == width else tape.apply([x], x.elements, width)


def linear(
    tape: Tape, x: Value, elements: Amount, matmul: Matmul, *, bias: bool = False, flattens: bool = True
) -> Value:
    """Record a matrix product with a weight [columns, inner], or a convolution, in the compute dtype.

    A frozen weight gets LoRA adapters if the tape has a LoRA rank. A convolution does not flatten its rows.
    """
    numel = (matmul.inner + bias) * matmul.columns
    if not tape.frozen:
        return _product(tape, x, elements, matmul, numel, flattens=flattens)
    out = _frozen_product(tape, x, elements, replace(matmul, trained=False), numel)
    return add(tape, out, _adapters(tape, x, elements, matmul)) if tape.rank else out


def _product(tape: Tape, x: Value, elements: Amount, matmul: Matmul, numel: int, *, flattens: bool = True) -> Value:
    """Record a product with a trained weight, which saves its input for the weight's gradient."""
    x = cast(tape, x, tape.width)
    _count(tape, matmul)
    return tape.apply(
        [x],
        elements,
        tape.width,
        saved=[x.storage],
        expensive=True,
        numel=numel,
        casts_weights=tape.casts_weights,
        flattens=flattens,
    )


def _frozen_product(tape: Tape, x: Value, elements: Amount, matmul: Matmul, numel: int) -> Value:
    """Record a product with a frozen weight, which saves only the weight."""
    x = cast(tape, x, tape.width)
    _count(tape, matmul)
    if tape.casts_weights and not tape.repeats:
        tape.count_cast(0, numel)
    return tape.apply([x], elements, tape.width, expensive=True, flattens=True)


def _adapters(tape: Tape, x: Value, elements: Amount, matmul: Matmul) -> Value:
    """Record the two low-rank matmuls of a LoRA adapter and its scaling; each saves its input for backward."""
    down = replace(matmul, columns=tape.rank, split="inner" if matmul.split == "inner" else "none")
    up = replace(matmul, inner=tape.rank, split="columns" if matmul.split == "columns" else "none")
    thin = Amount(whole=matmul.rows * tape.rank)
    inside = _product(tape, x, thin, down, tape.rank * matmul.inner)
    return scale_by_number(tape, _product(tape, inside, elements, up, tape.rank * matmul.columns))


def _count(tape: Tape, matmul: Matmul) -> None:
    if not tape.repeats:
        tape.matmuls.append(matmul)


def add(tape: Tape, a: Value, b: Value) -> Value:
    """Record the sum of two tensors of one shape in the wider dtype; the gradient is cast for the narrower tensor."""
    width = max(a.width, b.width)
    passes_on = frozenset(index for index, value in enumerate((a, b)) if value.width == width)
    return tape.apply([a, b], a.elements, width, passes_on=passes_on)


def add_to_each(tape: Tape, a: Value, b: Value) -> Value:
    """Record a sum that broadcasts `b` over the samples of `a`; the gradient of `b` is summed over samples."""
    return tape.apply([a, b], a.elements, a.width, passes_on=FIRST)


def subtract(tape: Tape, a: Value, b: Value) -> Value:
    """Record a difference of two tensors of one shape and dtype."""
    return tape.apply([a, b], a.elements, a.width, passes_on=FIRST)


def multiply(tape: Tape, a: Value, b: Value) -> Value:
    """Record an elementwise product of two tensors of one shape; each is saved for the other's gradient."""
    width = max(a.width, b.width)
    wide = sum((value.elements * width for value in (a, b) if value.width < width), NOTHING)
    return tape.apply([a, b], a.elements, width, saved=[a.storage, b.storage], temporaries=wide)


def multiply_rows(tape: Tape, x: Value, rows: Value) -> Value:
    """Record a product with one factor per row; both are saved, and a factor's gradient sums a full-size product."""
    width = max(x.width, rows.width)
    num_copies = 1 if x.width == width else 2
    temporaries = x.elements * (num_copies * width)
    return tape.apply([x, rows], x.elements, width, saved=[x.storage, rows.storage], temporaries=temporaries)


def multiply_by_weight(tape: Tape, x: Value, numel: int) -> Value:
    """Record a product with a weight as long as a row, in the wider dtype; x is saved for the weight's gradient."""
    width = max(x.width, tape.weight_width)
    if tape.frozen:
        return tape.apply([x], x.elements, width)
    return tape.apply([x], x.elements, width, saved=[x.storage], temporaries=x.elements * width, numel=numel)


def choose(tape: Tape, x: Value, condition: Amount) -> Value:
    """Record a `where` with x and a scalar; the condition, one byte per element, is saved."""
    return tape.apply([x], x.elements, x.width, saved=[tape.store(condition)])


def scale(tape: Tape, x: Value, factor: Storage | None, width: int) -> Value:
    """Multiply by a constant table with `width` bytes per element; only the table is saved for backward."""
    width = max(x.width, width)
    wide = x.elements * width if x.width < width else NOTHING
    return tape.apply([x], x.elements, width, saved=[factor], temporaries=wide)


def depend(tape: Tape, x: Value, other: Value, *, keeps: bool) -> Value:
    """Return x such that backward also reaches `other`, an output that later parts use, and save if `keeps`."""
    saved = [other.storage] if keeps else []
    return tape.apply([x, other], x.elements, x.width, saved=saved, place=x.storage, free=True, passes_on=FIRST)


def dropout(tape: Tape, x: Value, rate: float) -> Value:
    """Record dropout in x's dtype; the mask is saved, one byte per element."""
    if rate == 0:
        return x
    mask = tape.store(x.elements)
    return tape.apply([x], x.elements, x.width, saved=[mask])


def scale_by_number(tape: Tape, x: Value) -> Value:
    """Record a product with a scalar, which saves nothing."""
    return tape.apply([x], x.elements, x.width)


def add_number(tape: Tape, x: Value) -> Value:
    """Record a sum with a scalar; the gradient passes through."""
    return tape.apply([x], x.elements, x.width, passes_on=FIRST)


def power(tape: Tape, x: Value) -> Value:
    """Record an integer power in fp32; backward computes the next lower power and scales it."""
    x = cast(tape, x, max(x.width, WIDE))
    return tape.apply([x], x.elements, x.width, saved=[x.storage], temporaries=x.size * 2)


def keep_result(tape: Tape, x: Value) -> Value:
    """Record tanh or rsqrt in x's dtype, which save their result."""
    return tape.apply([x], x.elements, x.width, saves_result=True)


def activation(tape: Tape, x: Value) -> Value:
    """Record gelu or silu in x's dtype, which save their input."""
    return tape.apply([x], x.elements, x.width, saved=[x.storage])


def relu(tape: Tape, x: Value, *, in_place: bool) -> Value:
    """Record relu, which saves its result; in place, the result is in x's storage."""
    return tape.apply([x], x.elements, x.width, saves_result=True, place=x.storage if in_place else None)


def norm(tape: Tape, x: Value, elements: Amount, width: int, *, kind: Literal["layer", "rms"]) -> Value:
    """Record a layer or RMS norm over rows of `width` elements, which saves input and statistics.

    Autocast runs both in fp32, an RMS norm only since torch 2.12.
    """
    if kind == "layer" or rms_norm_is_wide():
        x = cast(tape, x, max(x.width, WIDE))
    num_statistics, num_weights = (2, 2) if kind == "layer" else (1, 1)
    statistics = tape.store(x.elements * (WIDE * num_statistics / width))
    numel = 0 if tape.frozen else num_weights * width
    return tape.apply([x], elements, x.width, saved=[x.storage, statistics], numel=numel)


@cache
def rms_norm_is_wide() -> bool:
    """Whether autocast runs rms_norm in fp32, as torch does since 2.12; earlier it ran in its input's dtype."""
    try:
        major, minor = (int(part) for part in version("torch").split(".")[:2])
    except PackageNotFoundError:
        return True
    return (major, minor) >= (2, 12)


def batch_norm(tape: Tape, x: Value, channels: int) -> Value:
    """Record a batch norm in x's dtype, which saves its input, and statistics in fp32."""
    statistics = tape.store(Amount(fixed=2 * channels * WIDE))
    numel = 0 if tape.frozen else 2 * channels
    return tape.apply([x], x.elements, x.width, saved=[x.storage, statistics], numel=numel)


def max_pool(tape: Tape, x: Value, elements: Amount) -> Value:
    """Record a max pool, which saves its input, and the index of each maximum as int64."""
    where = tape.store(elements * INDEX)
    return tape.apply([x], elements, x.width, saved=[x.storage, where])


def mean(tape: Tape, x: Value, elements: Amount) -> Value:
    """Record a mean over some dims, which saves nothing."""
    return tape.apply([x], elements, x.width)


def narrow(tape: Tape, x: Value, elements: Amount) -> Value:
    """Record a narrow view of x; backward allocates a gradient as large as x, which is zero outside the view."""
    return tape.apply([x], elements, x.width, place=x.storage, free=True)


def copy(tape: Tape, x: Value) -> Value:
    """Record a contiguous copy; the gradient passes through."""
    return tape.apply([x], x.elements, x.width, passes_on=FIRST)


def halves(tape: Tape, x: Value) -> tuple[Value, Value]:
    """Record two halves of x as views; backward concatenates their gradients in a new tensor."""
    first = tape.apply([x], x.elements * 0.5, x.width, place=x.storage, free=True)
    return first, replace(first, slot=1)


def join(tape: Tape, a: Value, b: Value) -> Value:
    """Record a concatenation; the gradients of a and b are views of its gradient."""
    return tape.apply([a, b], a.elements + b.elements, a.width, passes_on=BOTH)


def attend(tape: Tape, q: Value, k: Value, v: Value, attention: AttentionWork, *, bias: Value | None = None) -> Value:
    """Record fused scaled dot-product attention in the compute dtype, which saves q, k, v, its result and logsumexp.

    Backward accumulates q's gradient in fp32, and computes that of a broadcast `bias` for every sample.
    """
    inputs = [cast(tape, x, tape.width) for x in (q, k, v, bias) if x is not None]
    if not tape.repeats:
        tape.attentions.append(replace(attention, copied=_copied(inputs[:3])))
    log_sums = q.elements * (WIDE / attention.head_width)
    temporaries = q.elements * WIDE + log_sums if tape.width < WIDE else NOTHING
    if bias is not None and bias.node is not None:
        temporaries += Amount(whole=bias.elements.fixed * tape.width)
    sums = tape.store(log_sums, expensive=True)
    return tape.apply(
        inputs,
        q.elements,
        tape.width,
        saved=[*(x.storage for x in inputs), sums],
        saves_result=True,
        expensive=True,
        temporaries=temporaries,
    )


def _copied(inputs: Sequence[Value]) -> int:
    """Return the elements per sample of the inputs that neither a product nor another attention wrote."""
    copied = 0.0
    for x in inputs:
        if x.storage is not None and not x.storage.is_expensive:
            copied += x.elements.at(1) - x.elements.fixed
    return round(copied)


def embed(tape: Tape, elements: Amount, numel: int, indices: Storage | None = None) -> Value:
    """Record an embedding, which saves its indices (None: they are in the batch); the gradient is a dense table."""
    return tape.apply([], elements, tape.weight_width, saved=[indices], numel=0 if tape.frozen else numel)


def cross_entropy(tape: Tape, logits: Value) -> Value:
    """Record cross entropy: log-softmax in the logits' dtype saves its result, nll_loss in fp32 its input."""
    log_probabilities = tape.apply([logits], logits.elements, logits.width, saves_result=True)
    wide = cast(tape, log_probabilities, max(logits.width, WIDE))
    return tape.apply([wide], Amount(fixed=1), WIDE, saved=[wide.storage])
