"""Seconds that a part of a model keeps one device busy, by class of operator."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from shardwise.hardware.calibration import is_aligned

if TYPE_CHECKING:
    from shardwise.hardware.calibration import Calibration
    from shardwise.planner.model.shape import Amount, Matmul, Part, Recompute


@dataclass(frozen=True, kw_only=True)
class Assumptions:
    """Assumptions of the time model where nothing can be measured beforehand, each with its reason."""

    compiled_moved: float = 0.5
    """Of the bytes that eager operators move, what a compiled block still moves: chains of elementwise operators become
    one kernel. From the H200: a 1.26B Llama shape went from 283 to 242 ms a step, a 124M GPT-2 from 94 to 62."""
    compiled_operators: float = 0.35
    """Of the operators that are started one by one, those left after fusion; counted in the same two models."""
    shard_operators: tuple[int, int] = (50, 70)
    """Operators' worth of host time that FSDP2's hooks take for a unit, forward and backward: 0.53 and 0.70 ms where a
    Linear took 0.011 (torch 2.13, fake world)."""
    contention: float = 0.12
    """Of its speed, what compute loses on a GPU while a collective runs: NCCL keeps up to 16 of 132 SMs busy."""
    host_contention: float = 1.0
    """The same on a CPU, where collectives run on the cores that would compute."""
    selective_matmuls: float = 0.0
    """Of the matrix products, those that selective recompute makes again; this engine keeps them all."""
    matmul_dtype: str | None = None
    """What the matrix products of blocks are computed in when it is not the compute dtype (fp8)."""
    quantized_backward: float = 1.0
    """Of the rate of products in `matmul_dtype`, what those of backward reach."""
    quantized_bytes: float = 0.0
    """Bytes moved per number of inputs, and of gradients of outputs, to bring them into `matmul_dtype`."""
    gather_bytes: float | None = None
    """Bytes per parameter on the wire when shards are gathered, where it is not the compute dtype (fp8)."""
    attention_speed: float = 1.0
    """Of the rate of the attention kernel that was measured, what the one in use reaches."""
    overlapped_tensor: float = 0.0
    """Of the exchanges of tensor parallelism, what hides behind the matrix products next to them (async TP)."""


class Seconds(NamedTuple):
    """Time of one pass over one part, by class."""

    matmul: float = 0.0
    attention: float = 0.0
    memory: float = 0.0
    """Operators that wait for memory: norms, activations, sums, casts."""
    launch: float = 0.0
    """The device idle because the host is not fast enough to launch operators."""
    doubt: float = 0.0
    """How wrong the sum may be, in seconds."""
    host: float = 0.0
    """Host time of all launches, concurrent with the device or, on a CPU, before it."""

    @property
    def total(self) -> float:
        """All of it."""
        return self.matmul + self.attention + self.memory + self.launch

    def plus(self, other: Seconds, times: float = 1.0) -> Seconds:
        """Return the sum with `times` as much of another."""
        return Seconds(*(mine + times * theirs for mine, theirs in zip(self, other, strict=True)))


class PartCost(NamedTuple):
    """Compute of one micro-batch on one part."""

    forward: Seconds
    backward: Seconds
    """Without recomputing."""
    selective: Seconds
    """What selective recompute makes again."""

    def again(self, recompute: Recompute) -> Seconds:
        """Return what a recompute policy adds to backward."""
        return {"none": Seconds(), "selective": self.selective, "full": self.forward}[recompute]


class ComputeModel:
    """Costs of parts on one kind of device, each worked out once."""

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
        """Whether the host computes: then it launches operators in between, not ahead."""
        return self.calibration.device.kind == "cpu"

    def cost(self, part: Part, samples: int, *, tp: int, sequence_parallel: bool, compiled: bool) -> PartCost:
        """Return the cost of one micro-batch on one of the part, on one rank."""
        key = (id(part), samples, tp, sequence_parallel, compiled)
        if key not in self._known:
            self._known[key] = self._cost(part, samples, tp, sequence_parallel, compiled)
        return self._known[key]

    def _cost(self, part: Part, samples: int, tp: int, sequence: bool, compiled: bool) -> PartCost:  # noqa: FBT001
        work, given = part.work, self.assumptions
        dtype = given.matmul_dtype if given.matmul_dtype and part.kind == "block" else self._dtype
        fused = (given.compiled_moved, given.compiled_operators) if compiled else (1.0, 1.0)

        def other(moved: Amount, operators: float) -> tuple[float, float]:
            """Return device and host seconds of operators that wait for memory."""
            calibration = self.calibration
            num_bytes = fused[0] * moved.at(samples, tp=tp, sequence_parallel=sequence)
            busy = num_bytes / calibration.memory_bandwidth.value + fused[1] * operators * calibration.kernel_s.value
            return busy, fused[1] * operators * calibration.operator_s.value

        products = [self._products(matmul, samples, tp, dtype) for matmul in work.matmuls]
        asked = [self._attention(part, samples, tp, backward=backward) for backward in (False, True)]
        casts = self._casts(part, samples, tp) if dtype != self._dtype else Seconds()
        forward = self._seconds(sum(p[0] for p in products), asked[0], other(work.moved, work.kernels)).plus(casts)
        slower = given.quantized_backward if dtype != self._dtype else 1.0
        backward = self._seconds(
            sum(p[1] + p[2] for p in products) / slower, asked[1], other(work.moved_backward, work.kernels_backward)
        ).plus(casts)
        share = given.selective_matmuls
        selective = self._seconds(share * forward.matmul, 0.0, other(work.moved, work.kernels)).plus(casts, share)
        return PartCost(forward, backward, selective)

    def _casts(self, part: Part, samples: int, tp: int) -> Seconds:
        """Return what bringing the operands of a part's products into another dtype takes in each pass."""
        numbers = samples * sum(
            matmul.count * matmul.rows * (matmul.inner + matmul.columns) / (tp if matmul.split != "none" else 1)
            for matmul in part.work.matmuls
        )
        moved = numbers / 2 * self.assumptions.quantized_bytes
        return Seconds(memory=moved / self.calibration.memory_bandwidth.value)

    def _products(self, matmul: Matmul, samples: int, tp: int, dtype: str) -> tuple[float, float, float]:
        """Return seconds of the product itself, of its input's gradient and of its weight's, which frozen ones lack."""
        rows = matmul.rows * samples
        inner = max(1, matmul.inner // tp) if matmul.split == "inner" else matmul.inner
        columns = max(1, matmul.columns // tp) if matmul.split == "columns" else matmul.columns
        shapes = ((rows, columns, inner), (rows, inner, columns), (inner, columns, rows))
        is_even = is_aligned(inner, dtype) and is_aligned(columns, dtype)
        first, second, third = (matmul.count * self._product(shape, dtype, is_even=is_even) for shape in shapes)
        return first, second, third if matmul.trained else 0.0

    def _product(self, shape: tuple[int, int, int], dtype: str, *, is_even: bool) -> float:
        key = (shape, dtype, is_even)
        if key not in self._products_known:
            rate = self.calibration.matmul(*shape, dtype, is_even=is_even).value
            self._products_known[key] = 2.0 * math.prod(shape) / rate
        return self._products_known[key]

    def _attention(self, part: Part, samples: int, tp: int, *, backward: bool) -> float:
        seconds = 0.0
        for item in part.work.attentions:
            rate = self.calibration.attention(item.keys, item.head_width, self._dtype, backward=backward).value
            seconds += samples * item.flops * (2.5 if backward else 1.0) / tp / rate
        return seconds / self.assumptions.attention_speed

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

    def hooked(self, seconds: Seconds, operators: int) -> Seconds:
        """Return a pass for which the host launches so many operators more."""
        more = operators * self.calibration.operator_s.value
        idle = more if self.on_host else max(0.0, seconds.host + more - seconds.total)
        return seconds._replace(launch=seconds.launch + idle, host=seconds.host + more)
