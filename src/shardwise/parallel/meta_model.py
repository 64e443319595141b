"""The meta model (a model with parameters on the meta device), its units, and the source of its initial values.

A large model is not built on every rank. Values are read from a checkpoint, computed per parameter with the
operations of `init_weights` and a seed per parameter name, or computed on rank 0 and broadcast tensor by tensor. The
invariant: training starts from the same values at any world size. torchtitan also builds models on the meta device.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from shardwise.errors import JobError, some_of
from shardwise.hardware import available_memory
from shardwise.job.generators import seed_generators
from shardwise.parallel.recompute import block_of, find_blocks
from shardwise.parallel.skeleton import Skeleton, differing_values, generator_states, second_references, skeleton
from shardwise.parallel.weights import BuiltWeights, FileWeights, InitializedWeights, StreamedWeights, open_weights
from shardwise.torch_private.dispatch import own_parameters

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from shardwise.parallel.weights import Weights

Specs = tuple[tuple[str, Tensor], ...]
"""(name, full meta tensor) pairs, in the same order on every rank."""

_HOST_SHARE = 0.25
"""Share of the available host memory that the models built by all ranks of a host may use."""


@dataclass(frozen=True, kw_only=True)
class Unit:
    """Parameters that are materialized and sharded together: one repeated block, or all other parameters (name "")."""

    name: str
    parameters: Specs


@dataclass(frozen=True, kw_only=True)
class MetaModel:
    """A model whose parameters are materialized and sharded later."""

    module: nn.Module
    """The model; its parameters are on the meta device unless the model is already built."""
    weights: Weights | None
    """Source of the parameters' values; None if the module already has its values, equal on every rank."""
    units: tuple[Unit, ...]
    buffers: Specs
    """Buffers whose values `weights` provides; all other buffers already have their values."""
    tensor_rules: Mapping[str, str] = field(default_factory=dict)
    """Module name pattern -> tensor-parallel style; empty without tensor parallelism."""
    float8: frozenset[str] | None = None
    """Linear layers of all pipeline stages that compute in float8; None selects them in `module`."""


def job_meta_model(
    make_model: Callable[[], nn.Module],
    *,
    seed: int,
    weights: str | None,
    rank: int,
    size: int,
    dtype: torch.dtype,
    local_size: int = 1,
    agree: Callable[[bool], bool] = bool,
) -> MetaModel:
    """Return the meta model of a job, with parameters of `dtype`; call on every rank.

    Values come from a file, from recorded initialization, or from building the model. Every rank builds the model if
    the host has enough memory for its `local_size` ranks; otherwise only rank 0 builds it. A model that would lose
    state on the meta device is built in host memory; JobError is raised if it is too large. `agree` communicates and
    returns whether a condition is true on all ranks.
    """
    found = structure(make_model, seed)
    module = found.module
    module = in_dtype(module, dtype)
    parameters, buffers = _specs(module.named_parameters()), _specs(module.named_buffers())
    source: Weights | None = None
    if weights is not None:
        source, buffers = _from_file(Path(weights), module, buffers)
    elif found.recipes is not None:
        source, buffers = InitializedWeights(found.recipes, seed), ()
    num_bytes = sum(spec.numel() * spec.element_size() for _, spec in parameters + buffers)
    fits = agree(num_bytes * local_size <= _HOST_SHARE * available_memory())
    lost: tuple[str, ...] = ()
    if source is not None or not fits:
        lost = (*found.lost, *_sampled(found, make_model, seed))
    if fits and (source is None or lost):
        return _built_for_real(make_model, seed, source, buffers, dtype=dtype)
    if lost:
        raise JobError(
            f"the model of {num_bytes / 1e9:.1f} GB is too large to build on every rank, but on the meta device it"
            f" loses {some_of(lost)}",
            code="model.meta-loses-state",
            fix="create this state outside Job.model, register it as a buffer, or use a host with more memory",
        )
    if source is None:
        source = StreamedWeights(lambda: _real_values(make_model, seed), num_bytes=num_bytes, rank=rank, size=size)
    return MetaModel(module=module, weights=source, units=find_units(module), buffers=buffers)


def _built_for_real(
    make_model: Callable[[], nn.Module], seed: int, source: Weights | None, buffers: Specs, *, dtype: torch.dtype
) -> MetaModel:
    """Return the model built in host memory, which keeps hooks, parameter classes and sampled attributes."""
    module = build_model(make_model, seed)
    module = in_dtype(module, dtype)
    named = dict([*module.named_parameters(), *module.named_buffers()])
    if source is not None:
        wanted = [*_specs(module.named_parameters()), *buffers]
        with torch.no_grad():
            for name, spec in wanted:
                value = source.value(name, spec, named[name].device, wanted=True)
                if value is not None:
                    named[name].copy_(value)
    real = BuiltWeights({name: tensor.detach() for name, tensor in named.items()}, source)
    if source is None:
        buffers = ()
    return MetaModel(module=module, weights=real, units=find_units(module), buffers=buffers)


def in_dtype(module: nn.Module, dtype: torch.dtype) -> nn.Module:
    """Return a module with fp64 parameters and buffers, or with its fp32 parameters in bf16; fp32 changes nothing.

    Buffers stay in fp32 in the latter case: rotary frequencies and statistics need the precision.
    """
    if dtype == torch.float64:
        return module.double()
    if dtype == torch.bfloat16:
        for parameter in module.parameters():
            if parameter.dtype == torch.float32:
                parameter.data = parameter.data.to(dtype)
    return module


def build_model(make_model: Callable[[], nn.Module], seed: int) -> nn.Module:
    """Build the model in host memory with the job's function and seed."""
    seed_generators(seed)
    module = _checked(make_model())
    for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
        if is_lazy(tensor):
            raise JobError(
                f"parameter {name} is uninitialized, because its lazy module has not received an input",
                code="model.lazy-parameter",
                fix="run the model once on a sample in Job.model",
            )
        if tensor.is_meta:
            raise JobError(
                f"parameter {name} is on the meta device and has no value",
                code="model.meta-parameter",
                fix="build the model on the CPU, or define init_weights() to initialize every parameter",
            )
    return module


def _sampled(found: Skeleton, make_model: Callable[[], nn.Module], seed: int) -> list[str]:
    """Return the attributes, except weights, that the constructor samples, detected by building with two seeds."""
    if not found.sampled:
        return []
    seed_generators(seed + 1)
    other = skeleton(make_model).module
    return [f"{name}, sampled while it is built" for name in differing_values(found.module, other)]


def built_meta_model(module: nn.Module) -> MetaModel:
    """Return the meta model of a module that already has its values."""
    return MetaModel(module=module, weights=None, units=find_units(module), buffers=())


def find_units(module: nn.Module) -> tuple[Unit, ...]:
    """Return one unit per repeated block, then a unit of all other parameters and of blocks with tied parameters."""
    parameters = _specs(module.named_parameters())
    block_owners: dict[int, set[str]] = {}
    blocks = find_blocks(module)
    for name, parameter in module.named_parameters(remove_duplicate=False):
        block_owners.setdefault(id(parameter), set()).add(block_of(name, blocks))
    shared: set[str] = set()
    for owners in block_owners.values():
        if len(owners) > 1:
            shared |= owners
    own: dict[str, list[tuple[str, Tensor]]] = {block: [] for block in blocks if block not in shared}
    rest: list[tuple[str, Tensor]] = []
    for name, spec in parameters:
        own.get(block_of(name, blocks), rest).append((name, spec))
    units = [Unit(name=block, parameters=tuple(specs)) for block, specs in own.items()]
    return (*units, Unit(name="", parameters=tuple(rest)))


def structure(make_model: Callable[[], nn.Module], seed: int) -> Skeleton:
    """Build a model with its parameters on the meta device, and record how its weights are initialized."""
    seed_generators(seed)
    before = generator_states()
    try:
        found = skeleton(make_model)
    except Exception:  # noqa: BLE001 - a model may raise anything on meta; the real build below raises genuine errors
        found = None
    if found is not None:
        _checked(found.module)
        return found._replace(sampled=generator_states() != before)
    # Some constructors read the weights. In this case every rank builds the full model and discards its values.
    module = build_model(make_model, seed)
    references = tuple(second_references(module))
    forgotten = {id(old): nn.Parameter(old.to("meta"), old.requires_grad) for old in module.parameters()}
    for submodule in module.modules():
        for name, old in own_parameters(submodule).items():
            if old is not None:
                own_parameters(submodule)[name] = forgotten[id(old)]
    lost = ("values computed from weights in the constructor",)
    return Skeleton(module, None, lost, references=references)


def _checked(model: object) -> nn.Module:
    if not isinstance(model, nn.Module):
        kind = type(model)
        raise JobError(
            f"Job.model must return a torch.nn.Module, got a {kind.__module__}.{kind.__qualname__}",
            code="job.model-not-of-engine",
            fix='return a torch.nn.Module, or use Job(engine="mlx") for an mlx.nn.Module',
        )
    return model


def _real_values(make_model: Callable[[], nn.Module], seed: int) -> dict[str, Tensor]:
    model = build_model(make_model, seed)
    return dict(model.named_parameters()) | dict(model.named_buffers())


def _from_file(path: Path, module: nn.Module, buffers: Specs) -> tuple[FileWeights, Specs]:
    values = open_weights(path)
    first_name = {id(parameter): name for name, parameter in module.named_parameters()}
    # A tied weight may be saved under any of its names; it is read by its first name.
    aliases = {name: first_name.get(id(value), name) for name, value in module.state_dict(keep_vars=True).items()}
    saved: dict[str, str] = {}
    extra = []
    for name in values:
        if name in aliases:
            saved[aliases[name]] = name
        else:
            extra.append(name)
    extra.sort()
    missing = sorted(set(aliases.values()) - set(saved))
    if missing or extra:
        raise JobError(
            f"Job.weights {path} does not match the model: missing {missing}, unexpected {extra}",
            code="model.weights-keys-mismatch",
            fix="set Job(weights=...) to a state dict of this model",
        )
    return FileWeights(values, saved, path), tuple((name, spec) for name, spec in buffers if name in saved)


def _specs(named: object) -> Specs:
    return tuple((name, tensor.detach().to("meta")) for name, tensor in named)  # type: ignore[attr-defined]
