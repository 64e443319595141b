"""Compares the random numbers that the ranks sample in one training step.

`verify` sets dropout to 0 while it compares losses and gradients, so it checks the seeds in an extra step with dropout
on. A dispatch mode below autograd records every tensor that this step samples. This includes dropout inside
`scaled_dot_product_attention` and stochastic depth, however the model calls them. The invariant: ranks that process
different samples or tokens (data and context parallelism) sample different masks. Tensor-parallel ranks sample the same
mask for the same activation, and different masks for different shards of an activation.
"""

from __future__ import annotations

import dataclasses
import math
from contextlib import contextmanager
from itertools import chain, combinations
from typing import TYPE_CHECKING, Any

import msgspec
import torch
from torch import Tensor

from shardwise.errors import InputError
from shardwise.parallel.collectives import unwrap
from shardwise.parallel.gradsync import local
from shardwise.parity.capture import Print, digest_tensors, fingerprint
from shardwise.parity.prepare import Preparation, prepare_job
from shardwise.parity.progress import PauseLimit, Pulse, watched
from shardwise.parity.spec import Finding
from shardwise.torch_private.dispatch import TorchDispatchMode
from shardwise.training.build import build_step

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

    from torch import nn

    from shardwise.dist import World
    from shardwise.layout import Layout
    from shardwise.plans import Plan

_FEWEST_BITS = 32
"""Smallest entropy, in bits, of masks that are compared; masks with less may be equal by chance."""
_SAMPLERS = frozenset(
    {
        *("bernoulli", "bernoulli_", "binomial", "cauchy_", "exponential_", "geometric_", "log_normal_", "multinomial"),
        *("native_dropout", "normal", "normal_", "poisson", "rand", "rand_like", "randint", "randint_like", "randn"),
        *("randn_like", "random_", "randperm", "uniform_"),
    }
)
"""Operators of torch that return the random tensor itself."""


class Mask(msgspec.Struct, frozen=True, kw_only=True):
    """One call of a random operator."""

    module: str
    """Name of the innermost module that was running."""
    operator: str
    digest: str = ""
    """Digest of the sampled tensor; empty if it has too few bits to compare, or if the operator does not return it."""
    input: Print | None = None
    """Fingerprint of the activation that the sampled tensor was applied to; None if it was not applied to any."""


class MaskReport(msgspec.Struct, frozen=True, kw_only=True):
    """The comparison of all masks of one plan."""

    findings: tuple[Finding, ...] = ()
    """The first wrong mask, if there is one."""
    note: str = ""
    """Modules whose masks could not be compared, and the code to use instead; empty if all masks were compared."""


def without_compile(plan: Plan) -> Plan:
    """Return the plan without compilation, because a dispatch mode cannot record samples inside compiled kernels."""
    return dataclasses.replace(plan, compile="none")


def record_step(
    world: World, preparation: Preparation, plan: Plan, folder: Path, limit: PauseLimit
) -> tuple[list[Mask], InputError | None]:
    """Train one step with dropout on and return its masks. Communicates over the world; call on every rank.

    An InputError of the step is returned with the masks, because different masks may be the reason for it. A rank
    without progress for longer than `limit` writes its location into `folder` and exits.
    """
    pulse = Pulse()
    error = None
    with watched(pulse, limit, world.rank, folder):
        job = prepare_job(msgspec.structs.replace(preparation, dropout=True, steps=1))
        step = build_step(job, plan, world)
        with recorded_masks(unwrap(step.model), pulse) as masks:
            for batch in step.feed:
                pulse.beat()
                try:
                    step(batch)
                except InputError as raised:
                    error = raised
    return masks, error


@contextmanager
def recorded_masks(model: nn.Module, pulse: Pulse) -> Iterator[list[Mask]]:
    """Record every mask that is sampled in this context, and the module of `model` that samples it."""
    path = [""]
    hooks = []

    def leave(*_: Any) -> None:
        path.pop()

    for name, module in model.named_modules():
        hooks.append(module.register_forward_pre_hook(lambda *_, name=name: path.append(name)))
        hooks.append(module.register_forward_hook(leave, always_call=True))
    recorder = _MaskRecorder(path, pulse)
    try:
        with recorder:
            yield recorder.masks
    finally:
        for hook in hooks:
            hook.remove()


class _MaskRecorder(TorchDispatchMode):
    """Records sampled tensors, and follows each one to the activation that it is first combined with."""

    def __init__(self, path: Sequence[str], pulse: Pulse) -> None:
        """Create the recorder; `path` contains the names of the running modules, innermost last."""
        super().__init__()  # type: ignore[no-untyped-call]
        self.masks: list[Mask] = []
        self._path = path
        self._pulse = pulse
        self._unapplied: dict[int, tuple[Tensor, int]] = {}
        """id of a tensor computed only from samples -> the tensor (a reference keeps the id valid) and the index of
        its mask."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if torch.Tag.nondeterministic_seeded not in func.tags:
            result = func(*args, **kwargs)
            if self._unapplied:
                self._follow(func, args, result)
            return result
        generator = kwargs.get("generator") or torch.default_generator
        before = generator.get_state()
        result = func(*args, **kwargs)
        if not torch.equal(before, generator.get_state()):  # attention with dropout_p 0, for example, does not sample
            self._record(func.overloadpacket.__name__, args, result)
        return result

    def _record(self, operator: str, args: tuple[Any, ...], result: Any) -> None:
        self._pulse.beat()
        mask = Mask(module=self._path[-1] or "the model", operator=operator)
        if operator == "native_dropout":
            _, sampled = result
            mask = msgspec.structs.replace(mask, digest=_digest(sampled), input=fingerprint(local(args[0])))
        elif operator in _SAMPLERS:
            mask = msgspec.structs.replace(mask, digest=_digest(result))
            self._unapplied[id(result)] = result, len(self.masks)
        self.masks.append(mask)

    def _follow(self, func: Any, args: tuple[Any, ...], result: Any) -> None:
        """Find the activation of a mask: torch scales a mask first, then multiplies the activation by it."""
        tensors = [each for each in args if isinstance(each, Tensor)]
        if func is torch.ops.aten.copy_.default:
            tensors = tensors[1:]  # copy_ overwrites the values of its target
        for tensor in tensors:
            if id(tensor) not in self._unapplied:
                continue
            _, index = self._unapplied[id(tensor)]
            others = [each for each in tensors if each.ndim and id(each) not in self._unapplied]
            if others:
                self.masks[index] = msgspec.structs.replace(self.masks[index], input=fingerprint(local(others[0])))
                del self._unapplied[id(tensor)]
            elif isinstance(result, Tensor):
                self._unapplied[id(result)] = result, index


def _digest(sampled: Tensor) -> str:
    values = local(sampled).detach()
    distinct = len(values.unique())
    if values.numel() * math.log2(max(1, distinct)) < _FEWEST_BITS:
        return ""
    return digest_tensors([values])


def compare_masks(by_rank: Sequence[Sequence[Mask]], layout: Layout) -> MaskReport:
    """Compare the masks of all ranks with each other and return the first wrong mask."""
    finding = _compare_tensor_parallel(by_rank, layout) or _compare_data_parallel(by_rank, layout)
    not_compared: dict[str, str] = {}
    for mask in chain.from_iterable(by_rank):
        if mask.operator not in _SAMPLERS:
            not_compared[f"{mask.module} samples inside of {mask.operator}"] = _write_instead(mask.operator)
        elif layout.tp > 1 and mask.digest and mask.input is None:
            not_compared[f"{mask.module} calls {mask.operator} without an activation"] = _write_instead(mask.operator)
    note = ""
    for where, line in not_compared.items():
        note += f"; {where}, which was not compared across ranks: {line}"
    return MaskReport(findings=() if finding is None else (finding,), note=note)


def _write_instead(operator: str) -> str:
    if "attention" in operator:
        return "call it under torch.nn.attention.sdpa_kernel(SDPBackend.MATH)"
    return "call torch.nn.functional.dropout(activation, p)"


def _compare_tensor_parallel(by_rank: Sequence[Sequence[Mask]], layout: Layout) -> Finding | None:
    for group in layout.groups("tp"):
        for first, second in combinations(group, 2):
            for one, other in zip(by_rank[first], by_rank[second], strict=True):
                if one.input is None or not (one.digest or other.digest):
                    continue
                is_same_mask = one.digest == other.digest
                if is_same_mask != (one.input == other.input):
                    return _tensor_parallel_finding(one.module, (first, second), is_same_mask=is_same_mask)
    return None


def _tensor_parallel_finding(module: str, ranks: tuple[int, int], *, is_same_mask: bool) -> Finding:
    cause = "different dropout seeds outside the sharded region"
    dropped = "different entries of the same activation, so the ranks diverge"
    if is_same_mask:
        cause = "equal dropout seeds across tensor-parallel ranks"
        dropped = "the same entries of different shards of an activation"
    evidence = f"{module} on ranks {ranks[0]} and {ranks[1]} dropped {dropped}"
    return Finding(cause=cause, evidence=evidence, parameter=module, step=0, ranks=ranks)


def _compare_data_parallel(by_rank: Sequence[Sequence[Mask]], layout: Layout) -> Finding | None:
    """Find two ranks with different samples or tokens whose masks are all equal; a single mask may match by chance."""
    for group in layout.groups("replicate", "shard", "cp"):
        for first, second in combinations(group, 2):
            pairs = []
            for one, other in zip(by_rank[first], by_rank[second], strict=False):
                if one.digest or other.digest:
                    pairs.append((one, other))
            if pairs and all(one.digest == other.digest for one, other in pairs):
                module = pairs[0][0].module
                return Finding(
                    cause="equal dropout seeds across data-parallel ranks",
                    evidence=f"{module} on ranks {first} and {second} dropped the same entries of different samples or"
                    f" tokens, as did all {len(pairs)} calls of random operators in the step",
                    parameter=module,
                    step=0,
                    ranks=(first, second),
                )
    return None
