"""Explains collectives, point-to-point calls and parallel strategies with the values of real ranks that run them."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from shardwise.dist import world as open_world
from shardwise.errors import InputError, nearest
from shardwise.measurement.explain_cases import CASES
from shardwise.measurement.explain_strategies import STRATEGIES
from shardwise.measurement.report import rank_device

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from torch import Tensor, nn

    from shardwise.dist import World
    from shardwise.measurement.explain_cases import ExplainedCall
    from shardwise.measurement.explain_strategies import ExplainedMoment

DDP = "ddp"
ALL = "all"
NAMES = (*CASES, DDP, *STRATEGIES)
OPERATIONS = ("SUM", "AVG", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR")
RATE = 0.1
_SMALL_BUCKET_MB = 1e-5
"""Ten bytes, so that a model of seven parameters has several buckets."""


@dataclass(frozen=True, kw_only=True)
class Column:
    """A column of values, one for each rank."""

    title: str
    values: tuple[str, ...]
    """By rank."""


@dataclass(frozen=True, kw_only=True)
class ExplainedPart:
    """Columns that are shown side by side."""

    columns: tuple[Column, ...]
    title: str = ""
    note: str = ""


@dataclass(frozen=True, kw_only=True)
class Explanation:
    """The explanation of a call: a description, its code, and the values of all ranks."""

    name: str
    description: str
    call: str
    parts: tuple[ExplainedPart, ...]
    corrected: str = ""


def check_names(name: str, op: str | None, size: int) -> tuple[str, ...]:
    """Return the names to explain on `size` ranks, one or all; raise InputError for invalid names and operations."""
    if name not in (*NAMES, ALL):
        raise InputError(
            f"collective or strategy {name!r} does not exist",
            code="bench.unknown-explanation",
            fix=nearest(name, (*NAMES, ALL)),
        )
    if op is not None and op not in OPERATIONS:
        raise InputError(
            f"reduce operation {op!r} does not exist",
            code="bench.unknown-operation",
            fix=nearest(op, OPERATIONS),
        )
    if name == ALL:
        return tuple(one for one in NAMES if one not in CASES or size >= CASES[one].least)
    if name in CASES:
        reduces, least = CASES[name].reduces, CASES[name].least
    else:
        reduces, least = False, 1
    if op is not None and not reduces:
        raise InputError(
            f"{name} does not have a reduce operation, got {op}",
            code="bench.operation-not-applicable",
            fix="omit --ops",
        )
    if size < least:
        raise InputError(
            f"{name} needs {least} ranks, got {size}", code="bench.too-few-ranks", fix=f"use --nproc {least}"
        )
    return (name,)


def default_nproc(name: str) -> int:
    """Return the default number of ranks for `name`."""
    if name in CASES:
        return CASES[name].nproc
    return 4 if name == ALL else 2


def explain_on_ranks(
    names: tuple[str, ...], op: str, device: str | None = None, backend: str | None = None
) -> list[Explanation]:
    """Open a world and return explanations, equal on all ranks. Communicates over the world; call on every rank."""
    with open_world(device=rank_device(device, backend), backend=backend) as world:
        return [explain_in(world, name, op) for name in names]


def explain_in(world: World, name: str, op: str = "SUM") -> Explanation:
    """Run one call and return its explanation, equal on all ranks. Communicates over the world; call on every rank."""
    if name == DDP:
        return explain_step(world.gather(record_step(world)))
    if name in STRATEGIES:
        return _explain_strategy(name, world.gather(STRATEGIES[name].run(world)))
    case = CASES[name]
    try:
        values = case.run(world, op)
    except RuntimeError as error:
        reason = str(error).splitlines()[0]
        raise InputError(
            f"{world.backend} on {world.device.type} does not support {name} with {op} ({reason})",
            code="bench.backend-unsupported",
            fix="use another --backend or --ops",
        ) from error
    return _explain_call(name, case, op, world.gather(values))


def shown(value: Any) -> str:
    """Return a rank's value as text: [1, 2], [[1,2], [3,4]], or - for None."""
    if value is None:
        return "-"
    if isinstance(value, torch.Tensor):
        return shown(value.tolist())
    if isinstance(value, list) and value and isinstance(value[0], list):
        rows = [",".join(shown(element) for element in row) for row in value]
        return f"[{', '.join(f'[{row}]' for row in rows)}]"
    if isinstance(value, list):
        return f"[{', '.join(shown(element) for element in value)}]"
    return value if isinstance(value, str) else f"{value:.4g}"


def _explain_call(name: str, case: ExplainedCall, op: str, values: list[tuple[Any, Any]]) -> Explanation:
    before, after = zip(*values, strict=True)
    afters = [shown(value) for value in after]
    if name == "reduce_scatter":
        afters = [f"{text}   ({op} of index {rank})" for rank, text in enumerate(afters)]
    title = f"After {name}({op})" if case.reduces else f"After {name}"
    columns = (
        Column(title=case.before, values=tuple(shown(value) for value in before)),
        Column(title=title, values=tuple(afters)),
    )
    note = _arithmetic(op, before, after[0]) if name in ("all_reduce", "reduce") else ""
    return Explanation(
        name=name,
        description=case.description,
        call=case.call.format(op=op),
        parts=(ExplainedPart(columns=columns, note=note),),
        corrected=case.corrected,
    )


_SIGNS = {"SUM": "+", "PRODUCT": "x", "BAND": " & ", "BOR": " | ", "BXOR": " ^ "}


def _arithmetic(op: str, inputs: Iterable[list[float]], result: list[float]) -> str:
    """Return the computation of each element: (1+3=4, 2+4=6)."""
    terms = []
    for elements, end in zip(zip(*inputs, strict=True), result, strict=True):
        texts = [shown(element) for element in elements]
        if op in _SIGNS:
            left = _SIGNS[op].join(texts)
        elif op == "AVG":
            left = f"({'+'.join(texts)})/{len(texts)}"
        else:
            left = f"{op.lower()}({', '.join(texts)})"
        terms.append(f"{left}={shown(end)}")
    return f"({', '.join(terms)})"


def _explain_strategy(name: str, records: list[tuple[list[ExplainedMoment], bool]]) -> Explanation:
    """Return the explanation of a strategy, with the values of all ranks at each moment of a step."""
    parts = []
    for moments in zip(*(moments for moments, _ in records), strict=True):
        titles = [title for title, _ in moments[0].values]
        columns = [_column(title, [moment.values[at][1] for moment in moments]) for at, title in enumerate(titles)]
        parts.append(ExplainedPart(title=moments[0].title, columns=tuple(columns), note=moments[0].note))
    verdict = f"(the updated weights are {'' if all(equal for _, equal in records) else 'NOT '}those of one process)"
    case, done = STRATEGIES[name], (*parts[:-1], replace(parts[-1], note=verdict))
    return Explanation(name=name, description=case.sentence, call=case.call, parts=done, corrected=case.corrected)


def explain_step(records: list[StepRecord]) -> Explanation:
    """Return the five stages of a DDP step from the records of all ranks."""
    size, first = len(records), records[0]
    same = all(_close(record.gradients, first.alone) for record in records)
    equal = all(record.updated == first.updated for record in records)
    buckets = [
        ExplainedPart(
            title=f"4. all-reduce of bucket {bucket.index}: {', '.join(bucket.names)}",
            columns=(
                _column("local", [record.buckets[number].local for record in records]),
                _column(f"summed, divided by {size}", [record.buckets[number].averaged for record in records]),
            ),
        )
        for number, bucket in enumerate(first.buckets)
    ]
    forward = [f"batch {shown(r.batch)} -> output {shown(r.output)}, loss {shown(r.loss)}" for r in records]
    return Explanation(
        name=DDP,
        description="One step of DistributedDataParallel: every rank has the same weights and its own batch.",
        call="model = DDP(module); loss = model(batch).mean(); loss.backward(); optimizer.step()",
        parts=(
            ExplainedPart(
                title="1. construct: rank 0's parameters are broadcast",
                columns=(
                    _column("as initialized", [_parameters(r.own) for r in records]),
                    _column("after DDP(module)", [_parameters(r.constructed) for r in records]),
                ),
            ),
            ExplainedPart(title="2. forward: each rank on its own batch", columns=(_column("", forward),)),
            ExplainedPart(
                title="3. backward: gradients of the local batch",
                columns=(_column("", [_parameters(_local_gradients(r)) for r in records]),),
                note=f"(the first backward had {first.first_buckets} bucket; afterwards buckets follow the order in"
                " which gradients are computed, and are reduced while backward continues)",
            ),
            *buckets,
            ExplainedPart(
                title=f"5. update: weight - {RATE:g} x averaged gradient",
                columns=(
                    _column("averaged gradients", [_parameters(r.gradients) for r in records]),
                    _column("updated", [_parameters(r.updated) for r in records]),
                ),
                note=f"(weights of all ranks are {'equal' if equal else 'NOT equal'}; the gradients are"
                f" {'' if same else 'NOT '}equal to those of one process with all {size} batches)",
            ),
        ),
    )


def _column(title: str, values: Iterable[Any]) -> Column:
    return Column(title=title, values=tuple(shown(value) for value in values))


def _parameters(values: Mapping[str, Any]) -> str:
    return "  ".join(f"{name.replace('.weight', '')} {shown(value)}" for name, value in values.items())


def _local_gradients(record: StepRecord) -> dict[str, list[float]]:
    """Return this rank's local gradients, sliced from the buckets before the all-reduce."""
    found = {}
    for bucket in record.buckets:
        rest = bucket.local
        for name in bucket.names:
            count = len(_flat(record.own[name]))
            found[name], rest = rest[:count], rest[count:]
    return {name: found[name] for name in record.own}


def _close(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Whether gradients are equal up to the order of a sum."""
    pairs = [pair for name in one for pair in zip(_flat(one[name]), _flat(other[name]), strict=True)]
    return all(math.isclose(left, right, rel_tol=1e-5) for left, right in pairs)


def _flat(value: Any) -> list[float]:
    if not isinstance(value, list):
        return [value]
    return [number for part in value for number in _flat(part)]


@dataclass(frozen=True, kw_only=True)
class BucketRecord:
    """One bucket of one backward pass, on one rank."""

    index: int
    names: tuple[str, ...]
    """Names of the parameters whose gradients are in the bucket, in its order."""
    local: list[float]
    """Content of the bucket before the all-reduce."""
    averaged: list[float]
    """Content of the bucket after the all-reduce."""


@dataclass(frozen=True, kw_only=True)
class StepRecord:
    """The values of a DDP step on one rank; dictionaries are by parameter name."""

    own: Mapping[str, Any]
    """The initial parameters of the rank."""
    constructed: Mapping[str, Any]
    """The parameters after DDP was constructed."""
    batch: list[Any]
    output: list[Any]
    loss: float
    first_buckets: int
    """Number of buckets of the first backward, before DDP knows the order of gradients."""
    buckets: tuple[BucketRecord, ...]
    gradients: Mapping[str, Any]
    updated: Mapping[str, Any]
    alone: Mapping[str, Any]
    """The gradients that one process computes from the batches of all ranks."""


@dataclass
class _Recorder:
    """A communication hook that averages like DDP's default and records the content of the buckets."""

    names: Mapping[int, str]
    size: int
    kept: list[BucketRecord] = field(default_factory=list)

    def average(
        self,
        group: dist.ProcessGroup,
        bucket: dist.GradBucket,  # type: ignore[name-defined]
    ) -> torch.futures.Future[Tensor]:
        """Average the bucket over all ranks; communicates over `group`."""
        buffer = bucket.buffer()
        local = buffer.tolist()
        dist.all_reduce(buffer, group=group)
        buffer /= self.size
        names = tuple(self.names[id(parameter)] for parameter in bucket.parameters())
        self.kept.append(BucketRecord(index=bucket.index(), names=names, local=local, averaged=buffer.tolist()))
        done: torch.futures.Future[Tensor] = torch.futures.Future()
        done.set_result(buffer)
        return done


def record_step(world: World) -> StepRecord:
    """Run one DDP step of a tiny model and record its values. Communicates over the world; call on every rank."""
    module = tiny_model(world)
    own = _values(module)
    model = DistributedDataParallel(module, bucket_cap_mb=_SMALL_BUCKET_MB)
    constructed = _values(module)
    recorder = _Recorder(names={id(p): name for name, p in module.named_parameters()}, size=world.size)
    # DDP refuses a hook whose annotations are strings; a lambda has none.
    model.register_comm_hook(dist.group.WORLD, lambda group, bucket: recorder.average(group, bucket))  # noqa: PLW0108
    batch = batch_of(world.rank, world.device)
    alone = _alone(module, world)
    # In the first backward DDP learns the order of gradients, from which it rebuilds its buckets.
    model(batch).mean().backward()
    module.zero_grad()
    first_buckets = len(recorder.kept)
    recorder.kept.clear()
    output = model(batch)
    loss = output.mean()
    loss.backward()
    gradients = _gradients(module)
    torch.optim.SGD(module.parameters(), lr=RATE).step()
    return StepRecord(
        own=own,
        constructed=constructed,
        batch=batch.tolist(),
        output=output.tolist(),
        loss=loss.item(),
        first_buckets=first_buckets,
        buckets=tuple(recorder.kept),
        gradients=gradients,
        updated=_values(module),
        alone=alone,
    )


def tiny_model(world: World) -> nn.Module:
    """Return two layers with integer weights, different on every rank."""
    module = torch.nn.Sequential()
    module.add_module("hidden", torch.nn.Linear(2, 2, bias=False))
    module.add_module("out", torch.nn.Linear(2, 1))
    numbers = {"hidden.weight": [[1.0, 2.0], [3.0, 4.0]], "out.weight": [[1.0, -1.0]], "out.bias": [0.0]}
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            parameter.copy_(torch.tensor(numbers[name]) + 10 * world.rank)
    return module.to(world.device)


def batch_of(rank: int, device: torch.device) -> Tensor:
    """Return a rank's batch, one row: [1, 2] on rank 0, [3, 4] on rank 1."""
    return (torch.arange(2.0, device=device) + 1 + 2 * rank).unsqueeze(0)


def _alone(module: nn.Module, world: World) -> dict[str, Any]:
    """Return the gradients that one process computes from the batches of all ranks."""
    batches = torch.cat([batch_of(rank, world.device) for rank in range(world.size)])
    parameters = dict(module.named_parameters())
    gradients = torch.autograd.grad(module(batches).mean(), list(parameters.values()))
    return {name: gradient.tolist() for name, gradient in zip(parameters, gradients, strict=True)}


def _values(module: nn.Module) -> dict[str, Any]:
    return {name: parameter.tolist() for name, parameter in module.named_parameters()}


def _gradients(module: nn.Module) -> dict[str, Any]:
    return {name: p.grad.tolist() for name, p in module.named_parameters() if p.grad is not None}
