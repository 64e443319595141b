"""AdamW in one kernel for each parameter, also for bf16 parameters with fp32 masters and moments in bf16 or 8 bits.

torch's AdamW keeps moments in the dtype of their parameter, and a bf16 parameter that is updated in place loses every
change below 1/256 of its value. Here the moments have a dtype of their own, and the update is computed in fp32 and
stored once: into an fp32 master copy, from which the bf16 parameter is rounded, or directly into the parameter.

Values in bf16 that change a little in every step (moments, and parameters without masters) are rounded stochastically:
the rounded value equals the exact one on average, so small changes accumulate. The invariant: the random bits of an
element are a hash of the parameter's name, the step and the element's index in the full tensor. Therefore a run is
equal under any sharding and after any resume. 8-bit moments (torchao) have one scale per block of 256 elements of a
shard, so they depend on the sharding.

See Zamirai et al., "Revisiting BFloat16 Training" (2020), and Dettmers et al., "8-bit Optimizers via Block-wise
Quantization" (2022).
"""

from __future__ import annotations

import functools
import hashlib
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from shardwise.checkpoint.manifest import box_of
from shardwise.errors import MissingExtraError
from shardwise.parallel.counter_random import MIX_A, MIX_B
from shardwise.parallel.gradsync import local
from shardwise.torch_private.dispatch import add_to_all, take_step_hooks
from shardwise.torch_private.dynamo import fix_size

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from shardwise.plans import Precision

_LOW_16 = 0xFFFF
_LARGEST_INT32 = 0x7FFFFFFF
_MOMENTS = ("exp_avg", "exp_avg_sq")
_BLOCK = 256
"""Elements of an 8-bit moment with a common scale."""
_ROW = 16
"""Elements of a row in which compiled kernels view contiguous shards."""
_LEAST_QUANTIZED = 4096
"""Elements below which a moment stays in fp32, as in torchao: norms and biases take no memory but lose precision."""


class MixedAdamW(torch.optim.Optimizer):
    """AdamW whose parameters or moments may be stored below fp32; it computes every update in fp32."""

    _step_supports_amp_scaling = True
    """Like torch's fused optimizers, `step` is skipped on the device if `found_inf` is set."""
    saved_as = "AdamW"
    """Class name in checkpoints, since the states are those of AdamW."""

    def __init__(
        self, source: torch.optim.AdamW, named: Sequence[tuple[str, nn.Parameter]], precision: Precision
    ) -> None:
        """Take over the parameter groups of `source`; `named` are its parameters with their names in the model."""
        super().__init__([dict(group) for group in source.param_groups], dict(source.defaults))
        self.defaults |= {"fused": False, "foreach": False, "compiled": named[0][1].is_cuda}
        take_step_hooks(self, source)
        self._state_dtype = precision.optimizer
        self._keys = {parameter: _key(name, local(parameter).device) for name, parameter in named}
        self._places = {parameter: _place(name, parameter, precision) for name, parameter in named}
        self.masters: dict[nn.Parameter, Tensor] = {}
        """fp32 copies of the bf16 parameters; their values are those of checkpoints."""
        for _, parameter in named:
            # The model was initialized in bf16, so masters start from rounded weights, unless a checkpoint follows.
            if precision.has_masters and parameter.dtype == torch.bfloat16:
                self.masters[parameter] = parameter.detach().to(torch.float32, copy=True)

    def masters_of(self, named: Sequence[tuple[str, nn.Parameter]]) -> dict[str, Tensor]:
        """Return the master copies by the names of their parameters."""
        return {name: self.masters[parameter] for name, parameter in named if parameter in self.masters}

    def publish(self) -> None:
        """Round the master copies to the parameters, after other code changed the masters."""
        with torch.no_grad():
            for parameter, master in self.masters.items():
                local(parameter).copy_(local(master))

    def store_states(self) -> None:
        """Convert moments, such as those of a checkpoint saved in another precision, to the dtype of this optimizer."""
        for parameter, state in self.state.items():
            if "step" in state:
                state["step"] = state["step"].to(local(parameter).device)
            for name in _MOMENTS:
                # A tensor that has the dtype is kept: snapshots refer to it, and its codes stay as they are.
                if name in state and _stored_dtype(state[name]) != self._moment_dtype(parameter):
                    dense = dense_state(state[name], parameter)
                    state[name] = self._zeros(name, parameter)
                    _fill(local(state[name]), local(dense))

    def _moment_dtype(self, parameter: Tensor) -> torch.dtype:
        values = local(parameter)
        is_quantizable = values.numel() >= _LEAST_QUANTIZED and values.numel() % _BLOCK == 0
        if self._state_dtype == "int8" and is_quantizable:
            return torch.int8
        return torch.bfloat16 if self._state_dtype == "bf16" else torch.promote_types(values.dtype, torch.float32)

    def _zeros(self, name: str, parameter: Tensor) -> Tensor:
        dtype = self._moment_dtype(parameter)
        if dtype == torch.int8:
            return quantized_zeros(local(parameter), is_signed=name == "exp_avg")
        return torch.zeros_like(parameter, dtype=dtype, requires_grad=False)

    def _initialize(self, parameter: nn.Parameter) -> dict[str, Any]:
        state: dict[str, Any] = self.state[parameter]
        if "step" not in state:
            state["step"] = torch.zeros((), device=local(parameter).device)
        for name in _MOMENTS:
            if name not in state:
                state[name] = self._zeros(name, parameter)
        return state

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Update every parameter that has a gradient; skipped on the device if `found_inf` is not zero."""
        del closure
        overflow: Tensor | None = getattr(self, "found_inf", None)
        for group in self.param_groups:
            members = [parameter for parameter in group["params"] if parameter.grad is not None]
            if not members:
                continue
            states = [self._initialize(parameter) for parameter in members]
            device = local(members[0]).device
            skipped = torch.zeros((), device=device) if overflow is None else overflow
            counts = [state["step"] for state in states]
            add_to_all(counts, 1 - skipped)
            factors = update_factors(torch.stack(counts), group, skipped)
            factors = factors.to(torch.promote_types(members[0].dtype, torch.float32))
            for parameter, state, factor in zip(members, states, factors.unbind(), strict=True):
                self._update(parameter, state, factor, group)

    def _update(self, parameter: nn.Parameter, state: dict[str, Any], factors: Tensor, group: dict[str, Any]) -> None:
        values = local(parameter.detach())  # dynamo would compile a kernel for each shape of an nn.Parameter
        if parameter.grad is None or not values.numel():
            return
        gradient = local(parameter.grad)
        master = self.masters.get(parameter)
        first, second = local(state["exp_avg"]), local(state["exp_avg_sq"])
        shard = Shard(values, gradient, first, second, None if master is None else local(master))
        place = self._places[parameter]
        if place.view is not None:
            shard = shard.viewed(place.view)
        update = _compiled_update(has_rows=place.view == _IN_ROWS) if values.is_cuda else adamw_update
        counter = Counter(self._keys[parameter], place.coordinates, state["step"])
        update(shard, counter, factors, betas=group["betas"], eps=group["eps"])


class Shard(NamedTuple):
    """This rank's values of one parameter, its gradient, its moments and its master copy."""

    parameter: Tensor
    gradient: Tensor
    first: Tensor
    second: Tensor
    master: Tensor | None

    def viewed(self, shape: tuple[int, ...]) -> Shard:
        """Return views of this shape, with which one compiled kernel serves parameters of all shapes."""
        master = None if self.master is None else self.master.view(shape)
        gradient = self.gradient.reshape(shape)
        return Shard(self.parameter.view(shape), gradient, self.first.view(shape), self.second.view(shape), master)


class Counter(NamedTuple):
    """What the random bits of a shard depend on."""

    key: Tensor
    """int32 [2]: a hash of the parameter's name."""
    place: Tensor
    """int64 [2, dims]: the offsets of the shard and the strides of the full tensor, in the dims of the shard's view."""
    step: Tensor


class Place(NamedTuple):
    """Where a shard is in its full tensor."""

    coordinates: Tensor
    """`Counter.place`."""
    view: tuple[int, ...] | None
    """The shape in which the shard is updated; None for its own."""


_FLAT = (-1,)
_IN_ROWS = (-1, _ROW)


def update_factors(counts: Tensor, group: Mapping[str, Any], skipped: Tensor) -> Tensor:
    """Return [parameters, 4]: step size, weight decay, the correction of the second moment, and the overflow flag.

    They are computed here for all parameters of a group, because powers and roots of every element would take longer
    than its memory accesses. A row of four is aligned to 16 bytes, as compiled kernels require.
    """
    counts = counts.to(torch.float64)  # 0.999^n of a small n needs more bits than fp32 has next to 1
    beta1, beta2 = group["betas"]
    rate = group["lr"]
    if not isinstance(rate, Tensor):
        rate = torch.full((), rate, dtype=torch.float64, device=counts.device)
    rate = rate.to(torch.float64).expand_as(counts)
    size = rate / (1 - beta1**counts)
    correction = (1 - beta2**counts).rsqrt()
    return torch.stack(
        (size, rate * group["weight_decay"], correction, skipped.to(counts.dtype).expand_as(counts)), dim=1
    )


def adamw_update(shard: Shard, counter: Counter, factors: Tensor, *, betas: tuple[float, float], eps: float) -> None:
    """Update one parameter and its moments in place, elementwise, so that inductor compiles it to a single kernel.

    `factors` is a row of `update_factors`.
    """
    parameter, gradient, first, second, master = shard
    dtype = torch.promote_types(parameter.dtype, torch.float32)
    size, decay, correction, skipped = factors.to(dtype).unbind()
    beta1, beta2 = betas
    before = parameter.to(dtype) if master is None else master
    gradient = gradient.to(dtype)
    old_first, old_second = _dense(first).to(dtype), _dense(second).to(dtype)
    new_first = old_first + (gradient - old_first) * (1 - beta1)
    new_second = old_second * beta2 + gradient * gradient * (1 - beta2)
    after = before * (1 - decay) - size * new_first / (new_second.sqrt() * correction + eps)
    is_kept = skipped == 0
    bits = None
    if torch.bfloat16 in {first.dtype, second.dtype} or (master is None and parameter.dtype == torch.bfloat16):
        bits = random_bits(parameter.shape, counter)
    _store(first, torch.where(is_kept, new_first, old_first), bits)
    _store(second, torch.where(is_kept, new_second, old_second), None if bits is None else bits >> 16)
    after = torch.where(is_kept, after, before)
    if master is None:
        _store(parameter, after, None if bits is None else bits ^ (bits >> 16))
    else:
        master.copy_(after)
        parameter.copy_(after)


def adamw_update_rows(
    shard: Shard, counter: Counter, factors: Tensor, *, betas: tuple[float, float], eps: float
) -> None:
    """Update a shard that is viewed in rows of `_ROW` elements.

    The compiler makes the length of a row a constant. Otherwise it does not know that the number of elements is a
    multiple of 8, and its kernel reads and writes single elements instead of 16 bytes at a time: on an H200 it takes
    1.1 times as long with masters as one with rows of 1024, and 1.9 times without masters.
    """
    fix_size(shard.parameter.shape[1], _ROW)
    adamw_update(shard, counter, factors, betas=betas, eps=eps)


def _store(target: Tensor, values: Tensor, bits: Tensor | None) -> None:
    """Write values into a tensor; into bf16 with stochastic rounding by the low 16 of `bits`."""
    if target.dtype == torch.bfloat16 and bits is not None:
        values = round_stochastically(values.to(torch.float32), bits)
    target.copy_(values)


def round_stochastically(values: Tensor, bits: Tensor) -> Tensor:
    """Round fp32 values to one of the two nearest bf16 values; the probability of each is its closeness.

    The lower half of an fp32 number is what bf16 lacks: adding 16 random bits carries into the upper half with the
    probability of that remainder. Infinity, NaN and representable values stay unchanged.
    """
    raw = values.view(torch.int32) + (bits & _LOW_16)
    rounded = (raw & ~_LOW_16).view(torch.float32)
    # The sum carries from the NaN of CUDA (0x7FFFFFFF) into the sign, and the result would be -0.
    return torch.where(values.isnan(), values, rounded).to(torch.bfloat16)


def random_bits(shape: torch.Size, counter: Counter) -> Tensor:
    """Return 32 random bits (int32) for each element of a shard, by its index in the full tensor.

    The hash is computed in int32, which wraps around: elements 2^32 apart share their bits, which does no harm.
    """
    key, place, step = counter
    last = len(shape) - 1
    # 64-bit products take several instructions on a GPU, and their upper half is discarded below. With several dims,
    # inductor (torch 2.11) computes a dynamic int32 index in 64 bits without a cast back.
    dtype = torch.int32 if last == 0 and shape[0] <= _LARGEST_INT32 else torch.int64
    place = place.to(dtype)
    index = torch.arange(shape[last], device=key.device, dtype=dtype) + place[0, last]
    for dim in range(last):
        rows = (torch.arange(shape[dim], device=key.device, dtype=dtype) + place[0, dim]) * place[1, dim]
        index = rows.view(-1, *[1] * (last - dim)) + index
    # Right shifts extend the sign, so their upper bits are masked off.
    bits = index.to(torch.int32) ^ ((step.to(torch.int32) * MIX_B) ^ key[0])
    bits = (bits ^ ((bits >> 16) & _LOW_16)) * MIX_A
    bits = ((bits ^ ((bits >> 13) & 0x7FFFF)) + key[1]) * MIX_B
    return bits ^ ((bits >> 16) & _LOW_16)


@functools.cache
def _compiled_update(*, has_rows: bool) -> Callable[..., None]:
    """Return the update as one CUDA kernel for tensors of any size: 25 operators would each pass over the memory."""
    return torch.compile(adamw_update_rows if has_rows else adamw_update, dynamic=True)


def _key(name: str, device: torch.device) -> Tensor:
    digest = hashlib.blake2b(name.encode(), digest_size=8).digest()
    halves = [int.from_bytes(half, "little", signed=True) for half in (digest[:4], digest[4:])]
    return torch.tensor(halves, dtype=torch.int32, device=device)


def _place(name: str, parameter: nn.Parameter, precision: Precision) -> Place:
    """Return where this rank's shard is in the full tensor."""
    box = box_of(name, parameter)
    strides = [1] * parameter.ndim
    for dim in range(parameter.ndim - 2, -1, -1):
        strides[dim] = strides[dim + 1] * parameter.shape[dim + 1]
    has_whole_rows = list(box.sizes)[1:] == list(parameter.shape)[1:]
    is_flat = local(parameter).is_contiguous() and precision.optimizer != "int8"  # 8-bit moments have no flat view
    view = None
    coordinates = [list(box.offsets), strides]
    if has_whole_rows and (is_flat or not parameter.ndim):
        first = box.offsets[0] * strides[0] if parameter.ndim else 0
        is_divisible = local(parameter).numel() % _ROW == 0
        view = _IN_ROWS if is_divisible else _FLAT
        coordinates = [[0, first], [_ROW, 1]] if is_divisible else [[first], [1]]
    return Place(torch.tensor(coordinates, dtype=torch.int64, device=local(parameter).device), view)


# 8-bit moments.


def quantized_zeros(like: Tensor, *, is_signed: bool) -> Tensor:
    """Return an 8-bit moment of zeros; raises MissingExtraError without torchao."""
    try:
        from torchao.optim.subclass_8bit import OptimState8bit
    except ImportError as error:
        raise MissingExtraError.of('precision.optimizer = "int8"', "float8") from error
    zeros: Tensor = OptimState8bit.zeros(like.shape, is_signed, _BLOCK, like.device, dtype=torch.float32)
    return zeros


def _dense(value: Tensor) -> Tensor:
    return value.dequantize() if hasattr(value, "codes") else value


def stored_tensors(value: Tensor) -> tuple[Tensor, ...]:
    """Return the tensors that contain an optimizer state: the codes and scales of an 8-bit moment, or the state."""
    if not hasattr(value, "codes"):
        return (value,)
    codes: Tensor = value.codes
    scales: Tensor = value.scale  # type: ignore[attr-defined]
    return codes, scales


def _stored_dtype(value: Tensor) -> torch.dtype:
    return torch.int8 if hasattr(value, "codes") else value.dtype


def _fill(state: Any, dense: Tensor) -> None:
    """Copy a moment that a checkpoint stored in fp32; an 8-bit moment gets its old codes back.

    torchao's code of the most negative value is -0.993, not -1. Without a correction, a block with such a maximum would
    shrink by 0.7 % with every resume.
    """
    if hasattr(state, "codes"):
        blocks = dense.reshape(-1, _BLOCK)
        is_lowest = blocks == -blocks.abs().amax(-1, keepdim=True)
        dense = torch.where(is_lowest, blocks / state.qmap.min().abs(), blocks).view_as(dense)
    state.copy_(dense)


def dense_state(value: Tensor, parameter: Tensor) -> Tensor:
    """Return an optimizer state as checkpoints store it: 8-bit moments in fp32, sharded like their parameter."""
    dense = _dense(value)
    if dense is value or not isinstance(parameter, DTensor):
        return dense
    mesh, placements = parameter.device_mesh, parameter.placements
    return DTensor.from_local(
        dense, mesh, placements, run_check=False, shape=parameter.shape, stride=parameter.stride()
    )


def accumulate_in_fp32(named: Sequence[tuple[str, nn.Parameter]]) -> None:
    """Make backward accumulate gradients of bf16 parameters in fp32, because a bf16 sum loses its small addends."""
    for _, parameter in named:
        if parameter.dtype == torch.bfloat16:
            parameter.grad_dtype = torch.float32
