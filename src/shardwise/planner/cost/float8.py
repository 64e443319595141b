"""Which linear layers a plan computes in float8: by the sizes of their shards, and the width from which they gain."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from shardwise.planner.cost.compute import Assumptions
from shardwise.plans.rules import FLOAT8_LEAST_WIDTH, gains_from_float8

if TYPE_CHECKING:
    from collections.abc import Iterator

    from shardwise.hardware.calibration import Calibration
    from shardwise.planner.model.shape import Part
    from shardwise.plans.plan import Plan


def linear_sizes(part: Part, tp: int) -> dict[str, tuple[int, int]]:
    """Return rows and columns of a tensor-parallel shard of each linear layer's weight in a part, by its name."""
    splits = {(item.columns, item.inner): item.split for item in part.work.matmuls}
    sizes = {}
    for weight in part.weights:
        rows, columns = weight.rows, weight.numel // max(1, weight.rows)
        split = splits.get((rows, columns))
        if split is None or not weight.name.endswith(".weight"):  # neither biases, norms nor adapters
            continue
        by_rows, by_columns = tp if split == "columns" else 1, tp if split == "inner" else 1
        sizes[weight.name] = -(-rows // by_rows), -(-columns // by_columns)
    return sizes


def float8_weights(part: Part, plan: Plan) -> frozenset[str]:
    """Return the names of a part's weights whose products the plan computes in float8.

    A weight of one block is that of all equal blocks, so a plan that names the layer of one block names all.
    """
    is_chosen = part.kind == "block" or (part.kind == "last" and plan.float8.head) or plan.float8.modules
    if plan.precision.compute != "float8" or not is_chosen:
        return frozenset()
    wanted = {f"{end}.weight" for name in plan.float8.modules for end in _ends(name)}
    least_width = 0 if wanted else FLOAT8_LEAST_WIDTH[plan.float8.recipe]
    return frozenset(
        name
        for name, size in linear_sizes(part, plan.layout.tp).items()
        if (name in wanted or not wanted) and gains_from_float8(*size, least_width)
    )


def _ends(name: str) -> Iterator[str]:
    """Yield the name of a module and its names in the modules that contain it: "blocks.0.mlp", "0.mlp", "mlp"."""
    parts = name.split(".")
    for start in range(len(parts)):
        yield ".".join(parts[start:])


def float8_least_width(calibration: Calibration, recipe: str) -> int:
    """Return the smallest dimension of a linear layer that gains from float8, by measured rates if there are any.

    The measured products are those of tensorwise scales; other recipes have the width of FLOAT8_LEAST_WIDTH.
    """
    default = FLOAT8_LEAST_WIDTH[recipe]
    squares: dict[int, int] = {}
    for point in calibration.matmuls:
        if point.dtype == "fp8" and point.n == point.k:
            squares[point.n] = max(point.m, squares.get(point.n, 0))
    if recipe != "tensorwise" or not squares:
        return default
    slower = [width for width, tokens in squares.items() if not _is_faster_in_float8(calibration, tokens, width)]
    if not slower:
        return min(default, *squares)
    return min((width for width in squares if width > max(slower)), default=2 * max(squares))


def _is_faster_in_float8(calibration: Calibration, tokens: int, width: int) -> bool:
    """Return whether the three products of a square linear layer and the casts of their operands gain from float8."""
    shapes = ((tokens, width, width), (tokens, width, width), (width, width, tokens))
    seconds = {}
    for dtype in ("bf16", "fp8"):
        seconds[dtype] = sum(2.0 * math.prod(shape) / calibration.matmul(*shape, dtype).value for shape in shapes)
    moved = Assumptions().in_float8().quantized_bytes * tokens * 2 * width  # inputs and output gradients
    return seconds["fp8"] + moved / calibration.memory_bandwidth.value < seconds["bf16"]
