"""Compute time of each part of a model on one device, by class of operator.

Matrix products and attention run at the measured or catalogued rate for their shape, all other operators at memory
bandwidth; each operator also takes host time for its launch, which adds time where the device waits for the host.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

from shardwise.hardware.calibration import is_aligned
from shardwise.plans.rules import FLOAT8_LEAST_WIDTH, gains_from_float8

if TYPE_CHECKING:
    from collections.abc import Iterator

    from shardwise.hardware.calibration import Calibration, Figure
    from shardwise.planner.model.shape import Amount, Matmul, Part, Recompute
    from shardwise.plans.plan import Plan


@dataclass(frozen=True, kw_only=True)
class Assumptions:
    """Assumptions of the time model for quantities that cannot be measured beforehand, each with its reason."""

    compiled_moved: float = 0.5
    """Bytes that a compiled block moves, as a fraction of eager: chains of elementwise operators become one kernel.
    Measured on an H200: a 1.26B Llama shape went from 283 to 242 ms a step, a 124M GPT-2 from 94 to 62."""
    compiled_operators: float = 0.35
    """Kernels that a compiled block launches, as a fraction of eager; counted in the same two models."""
    shard_operators: tuple[int, int] = (50, 70)
    """Host time of FSDP2's hooks for a unit, forward and backward, in operator launches: 0.53 and 0.70 ms where a
    Linear took 0.011 (torch 2.13, fake world)."""
    sustained: float = 0.92
    """Rate of matrix products and attention in a training run, as a fraction of the catalogue's rate, which is the best
    of many shapes in a short test. Fitted to 190 published runs (benchmarks/plan_published.py); SemiAnalysis measured
    0.91 on H100 (720 of 794.5 TFLOP/s in bf16, 1,280 of 1,402.6 in fp8). Measured rates are used as they are."""
    contention: float = 0.12
    """Fraction of its speed that compute loses on a GPU while a collective runs: NCCL uses up to 16 of 132 SMs."""
    contention_moved: float = 1.0
    """Bytes that a collective writes to device memory for each byte that it receives; compute loses that share of the
    memory bandwidth, too. Together 0.25 on an H100's NVLink, and little more than the SMs on slow networks."""
    jitter: float = 0.007
    """Fraction of a step that ranks wait for the slowest one, for every doubling of the number of nodes: torchtitan's
    8B lost 2.7, 2.3 and 1.8 % from one node to 16, LLM-foundry's 1B 1.8 % from 4 nodes to 8."""
    exchange_operators: int = 15
    """Host time of one tensor-parallel exchange in operator launches: DTensor's redistribution, the collective, its
    wait, and the copies around it (assumption)."""
    tensor_exchanges: float = 1.0
    """Tensor-parallel communication, as a multiple of one gather and one reduction around each pair of layers."""
    host_contention: float = 1.0
    """Fraction of its speed that compute loses on a CPU, where collectives run on the same cores."""
    selective_matmuls: float = 0.0
    """Fraction of the matrix products that selective recompute repeats; the native policy saves all of them."""
    matmul_dtype: str | None = None
    """Dtype of the matrix products of blocks if it is not the compute dtype (fp8)."""
    quantized_backward: float = 1.0
    """Rate of the backward matrix products in `matmul_dtype`, as a fraction of the forward rate."""
    quantized_width: int = 0
    """Smallest dimension of a product in `matmul_dtype`; products with a smaller one stay in the compute dtype."""
    quantized_bytes: float = 0.0
    """Bytes moved per element of inputs and output gradients to cast them to `matmul_dtype`."""
    gather_bytes: float | None = None
    """Bytes per parameter that an all-gather of shards sends if its dtype is not the compute dtype (fp8)."""
    attention_speed: float = 1.0
    """Rate of the attention kernel in use, as a fraction of the measured kernel's rate."""
    overlapped_tensor: float = 0.0
    """Fraction of tensor-parallel communication that overlaps with adjacent matrix products (async TP)."""

    def in_float8(self, least_width: int = 0) -> Assumptions:
        """Return these assumptions with block products in float8, by factors that fit torchtitan's published table."""
        return replace(
            self, matmul_dtype="fp8", quantized_backward=0.87, quantized_bytes=7.0, quantized_width=least_width
        )


class Seconds(NamedTuple):
    """Time of one forward or backward pass of one part, by class of operator."""

    matmul: float = 0.0
    attention: float = 0.0
    memory: float = 0.0
    """Operators bound by memory bandwidth: norms, activations, sums, casts."""
    launch: float = 0.0
    """Idle time of the device while the host launches operators."""
    doubt: float = 0.0
    """Uncertainty of the total, in seconds."""
    host: float = 0.0
    """Host time of all launches; it overlaps with the kernels of a GPU, and adds to the time on a CPU."""

    @property
    def total(self) -> float:
        """Seconds of all classes together."""
        return self.matmul + self.attention + self.memory + self.launch

    def plus(self, other: Seconds, times: float = 1.0) -> Seconds:
        """Return the sum of this time and `times` x another time."""
        return Seconds(*(mine + times * theirs for mine, theirs in zip(self, other, strict=True)))


class PartCost(NamedTuple):
    """Compute time of one micro-batch on one part."""

    forward: Seconds
    backward: Seconds
    """Without recompute."""
    selective: Seconds
    """Time of the operators that selective recompute repeats in backward."""

    def again(self, recompute: Recompute) -> Seconds:
        """Return the time that a recompute policy adds to backward."""
        return {"none": Seconds(), "selective": self.selective, "full": self.forward}[recompute]


class ComputeModel:
    """Compute time of parts on one kind of device in one dtype; each result is cached."""

    def __init__(self, calibration: Calibration, dtype: str, assumptions: Assumptions) -> None:
        self.calibration = calibration
        self.assumptions = assumptions
        self._dtype = dtype
        self._known: dict[tuple[object, ...], PartCost] = {}
        self._products_known: dict[tuple[tuple[int, int, int], str, bool], float] = {}
        self._doubts = (
            calibration.matmul(4096, 4096, 4096, dtype).uncertainty,
            calibration.attention(2048, 128, dtype).uncertainty,
        )

    @property
    def on_host(self) -> bool:
        """Whether the device is a CPU, on which launches and operators alternate instead of overlapping."""
        return self.calibration.device.kind == "cpu"

    def cost(self, part: Part, samples: int, *, tp: int, sequence_parallel: bool, compiled: bool) -> PartCost:
        """Return the compute time of one micro-batch on one instance of a part, on one rank."""
        key = (id(part), samples, tp, sequence_parallel, compiled)
        if key not in self._known:
            self._known[key] = self._cost(part, samples, tp, sequence_parallel, compiled)
        return self._known[key]

    def _cost(self, part: Part, samples: int, tp: int, sequence: bool, compiled: bool) -> PartCost:  # noqa: FBT001
        work, given = part.work, self.assumptions
        moved_share, operators_share = 1.0, 1.0
        if compiled:
            moved_share, operators_share = given.compiled_moved, given.compiled_operators
        casts = self._casts(part, samples, tp)

        def other(moved: Amount, operators: float) -> tuple[float, float]:
            """Return device and host seconds of operators that are bound by memory bandwidth."""
            calibration, launched = self.calibration, operators_share * operators
            num_bytes = moved_share * moved.at(samples, tp=tp, sequence_parallel=sequence)
            busy = num_bytes / calibration.memory_bandwidth.value + launched * calibration.kernel_s.value
            return busy, launched * calibration.operator_s.value

        ahead = back = 0.0
        for matmul in work.matmuls:
            is_quantized = self._is_quantized(matmul, part, tp)
            dtype = given.matmul_dtype if is_quantized else None
            product, input_gradient, weight_gradient = self._products(matmul, samples, tp, dtype or self._dtype)
            ahead += product
            back += (input_gradient + weight_gradient) / (self._quantized_backward if is_quantized else 1.0)
        attention = self._attention(part, samples, tp, backward=False)
        forward = self._seconds(ahead, attention, other(work.moved, work.kernels)).plus(casts)
        attention = self._attention(part, samples, tp, backward=True)
        memory_bound = other(work.moved_backward, work.kernels_backward)
        backward = self._seconds(back, attention, memory_bound).plus(casts)
        share = given.selective_matmuls
        selective = self._seconds(share * forward.matmul, 0.0, other(work.moved, work.kernels)).plus(casts, share)
        return PartCost(forward, backward, selective)

    def _is_quantized(self, matmul: Matmul, part: Part, tp: int) -> bool:
        """Return whether a product runs in `matmul_dtype`: in a block, and with a shard that gains from it."""
        given = self.assumptions
        if given.matmul_dtype in {None, self._dtype} or part.kind != "block":
            return False
        inner, columns = _shard(matmul, tp)
        return gains_from_float8(columns, inner, given.quantized_width)

    @cached_property
    def _quantized_backward(self) -> float:
        """Rate of the backward products in `matmul_dtype` relative to forward; measured points contain the ratio."""
        is_measured = (
            self.calibration.matmul(4096, 4096, 4096, self.assumptions.matmul_dtype or "").origin == "measured"
        )
        return 1.0 if is_measured else self.assumptions.quantized_backward

    def _casts(self, part: Part, samples: int, tp: int) -> Seconds:
        """Return the time to cast the operands of a part's matrix products to `matmul_dtype` in one pass."""
        elements = 0.0
        for matmul in part.work.matmuls:
            if not self._is_quantized(matmul, part, tp):
                continue
            ranks = tp if matmul.split != "none" else 1
            elements += samples * matmul.count * matmul.rows * (matmul.inner + matmul.columns) / ranks
        moved = elements / 2 * self.assumptions.quantized_bytes
        return Seconds(memory=moved / self.calibration.memory_bandwidth.value)

    def _products(self, matmul: Matmul, samples: int, tp: int, dtype: str) -> tuple[float, float, float]:
        """Return seconds of a product, of its input gradient and of its weight gradient (0 for a frozen weight)."""
        rows = matmul.rows * samples
        inner, columns = _shard(matmul, tp)
        shapes = ((rows, columns, inner), (rows, inner, columns), (inner, columns, rows))
        aligned = is_aligned(inner, dtype) and is_aligned(columns, dtype)
        first, second, third = (matmul.count * self._product(shape, dtype, aligned=aligned) for shape in shapes)
        return first, second, third if matmul.trained else 0.0

    def _product(self, shape: tuple[int, int, int], dtype: str, *, aligned: bool) -> float:
        key = (shape, dtype, aligned)
        if key not in self._products_known:
            rate = self._in_training(self.calibration.matmul(*shape, dtype, aligned=aligned))
            self._products_known[key] = 2.0 * math.prod(shape) / rate
        return self._products_known[key]

    def _attention(self, part: Part, samples: int, tp: int, *, backward: bool) -> float:
        seconds = 0.0
        for item in part.work.attentions:
            figure = self.calibration.attention(item.keys, item.head_width, self._dtype, backward=backward)
            rate = self._in_training(figure)
            seconds += samples * item.flops * (2.5 if backward else 1.0) / tp / rate
        return seconds / self.assumptions.attention_speed

    def _in_training(self, figure: Figure) -> float:
        """Return the FLOP/s of a kernel in a long run; the catalogue's rates are those of short tests."""
        if figure.origin == "measured" or self.on_host:
            return figure.value
        return figure.value * self.assumptions.sustained

    def _seconds(self, matmul: float, attention: float, other: tuple[float, float]) -> Seconds:
        memory, host = other
        launch = host if self.on_host else max(0.0, host - matmul - attention - memory)
        calibration = self.calibration
        doubt = (
            matmul * self._doubts[0]
            + attention * self._doubts[1]
            + memory * calibration.memory_bandwidth.uncertainty
            + launch * calibration.operator_s.uncertainty
        )
        return Seconds(matmul, attention, memory, launch, doubt, host)

    def hooked(self, seconds: Seconds, operators: float) -> Seconds:
        """Return the time of a pass in which the host launches `operators` more operators."""
        more = operators * self.calibration.operator_s.value
        idle = more if self.on_host else max(0.0, seconds.host + more - seconds.total)
        return seconds._replace(launch=seconds.launch + idle, host=seconds.host + more)


def _shard(matmul: Matmul, tp: int) -> tuple[int, int]:
    """Return the inner dimension and the columns of a product on one tensor-parallel rank."""
    inner = max(1, matmul.inner // tp) if matmul.split == "inner" else matmul.inner
    columns = max(1, matmul.columns // tp) if matmul.split == "columns" else matmul.columns
    return inner, columns


# Linear layers in float8: those of which each shard is large enough, and the width from which they gain, measured.


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
