"""The parts of a residual network with batch norm in closed form; mirrors `models/resnet.py`."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from shardwise.planner.model import operators as op
from shardwise.planner.model.shape import Amount, Matmul, ModelShape, Weight
from shardwise.planner.model.tape import WIDE, Describer, Tape
from shardwise.units import ELEMENT_BYTES

if TYPE_CHECKING:
    from collections.abc import Iterator

    from shardwise.planner.model.tape import Value
    from shardwise.plans.plan import DType

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
    """Pixels per side of its window."""
    side: int
    """Pixels per side of its output."""

    @property
    def elements(self) -> Amount:
        """Numbers in its output."""
        return Amount(whole=self.out_channels * self.side**2)

    @property
    def weights(self) -> tuple[Weight, ...]:
        """Its own and its norm's."""
        numel, rows = self.channels * self.out_channels * self.size**2, self.out_channels
        return (
            Weight(name=f"{self.name}.weight", rows=rows, numel=numel),
            Weight(name=f"{self.norm}.weight", rows=rows, numel=rows, cast=False),
            Weight(name=f"{self.norm}.bias", rows=rows, numel=rows, cast=False),
        )

    def __call__(self, tape: Tape, x: Value) -> Value:
        """Run it and its norm."""
        matmul = Matmul(rows=self.side**2, inner=self.channels * self.size**2, columns=self.out_channels)
        x = op.linear(tape, x, self.elements, matmul, flattens=False)
        return op.batch_norm(tape, x, self.out_channels)


class ResidualShape(NamedTuple):
    """A residual block: convolutions, and one around them where the shape changes."""

    body: tuple[Conv, ...]
    shortcut: Conv | None

    @property
    def weights(self) -> tuple[Weight, ...]:
        """Of all its convolutions and norms."""
        convs = self.body if self.shortcut is None else (*self.body, self.shortcut)
        return tuple(weight for conv in convs for weight in conv.weights)

    def __call__(self, tape: Tape, x: Value) -> Value:
        """Run it."""
        change = x
        for conv in self.body[:-1]:
            change = op.relu(tape, conv(tape, change), in_place=True)
        change = self.body[-1](tape, change)
        around = x if self.shortcut is None else self.shortcut(tape, x)
        return op.relu(tape, op.add(tape, change, around), in_place=True)


def resnet_shape(
    name: str, num_blocks: tuple[int, ...], side: int, *, bottleneck: bool, compute: DType, gathered: bool
) -> ModelShape:
    """Describe a residual network on square images of `side` pixels, trained with cross entropy on 1000 classes."""
    describe = Describer(compute=compute, gathered=gathered)
    width = ELEMENT_BYTES[compute]
    stem = Conv("conv", "norm", CHANNELS, WIDTHS[0], 7, _half(side))
    image = Amount(whole=CHANNELS * side**2)

    def images(tape: Tape) -> Value:
        return tape.outside(image, WIDE, wants_gradient=False)

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
    """Yield the first block of each stage, then one that represents all its others."""
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
    """Pixels left by a stride of two with the padding in use."""
    return -(-side // 2)
