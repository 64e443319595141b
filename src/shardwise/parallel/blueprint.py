"""The blueprint: a model's structure on no memory, the list of its tensors, and where their values come from."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from shardwise.errors import JobError
from shardwise.job.engine import is_mlx
from shardwise.parallel.blocks import find_blocks
from shardwise.parallel.skeleton import skeleton
from shardwise.parallel.weight_files import open_weights
from shardwise.parallel.weights import DrawnWeights, FileWeights, StreamedWeights

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from shardwise.parallel.skeleton import Recipe
    from shardwise.parallel.weights import Weights

Specs = tuple[tuple[str, Tensor], ...]
"""(name, whole tensor on the meta device), in an order that is the same on every rank."""


@dataclass(frozen=True, kw_only=True)
class Unit:
    """Parameters that are filled and sharded together: one repeated block, or (named "") all that is in none."""

    name: str
    parameters: Specs


@dataclass(frozen=True, kw_only=True)
class Blueprint:
    """A model to be laid out over ranks."""

    module: nn.Module
    """Parameters on the meta device unless `weights` is None."""
    weights: Weights | None
    """None: the module holds its values, equal on every rank."""
    units: tuple[Unit, ...]
    buffers: Specs
    """Buffers whose values `weights` gives; the others are real already."""
    tensor_rules: Mapping[str, str] = field(default_factory=dict)
    """Module name pattern -> how tensor parallelism cuts it; empty without."""


def job_blueprint(
    make_model: Callable[[], nn.Module], *, seed: int, weights: str | None, rank: int, size: int, double: bool
) -> Blueprint:
    """Return the blueprint of a job's model; called on every rank. With `double` everything is in fp64.

    Values come from a file, else by recipe, else from the model that rank 0 builds on its host.
    """
    module, recipes = structure(make_model, seed)
    if double:
        module = module.double()
    parameters, buffers = _specs(module.named_parameters()), _specs(module.named_buffers())
    source: Weights
    if weights is not None:
        source, buffers = _from_file(Path(weights), module, buffers)
    elif recipes is not None:
        source, buffers = DrawnWeights(recipes, seed), ()
    else:
        num_bytes = sum(spec.numel() * spec.element_size() for _, spec in parameters + buffers)
        source = StreamedWeights(lambda: _real_values(make_model, seed), num_bytes=num_bytes, rank=rank, size=size)
    return Blueprint(module=module, weights=source, units=find_units(module), buffers=buffers)


def real_blueprint(module: nn.Module) -> Blueprint:
    """Return the blueprint of a module that holds its values already."""
    return Blueprint(module=module, weights=None, units=find_units(module), buffers=())


def find_units(module: nn.Module) -> tuple[Unit, ...]:
    """Return one unit per repeated block, then the rest; blocks that share a parameter with others are no units."""
    parameters = _specs(module.named_parameters())
    holders: dict[int, set[str]] = {}
    blocks = find_blocks(module)
    for name, parameter in module.named_parameters(remove_duplicate=False):
        holders.setdefault(id(parameter), set()).add(_block_of(name, blocks))
    shared = {block for owners in holders.values() if len(owners) > 1 for block in owners}
    units = [
        Unit(name=block, parameters=tuple((name, spec) for name, spec in parameters if name.startswith(f"{block}.")))
        for block in blocks
        if block not in shared
    ]
    taken = {name for unit in units for name, _ in unit.parameters}
    rest = tuple((name, spec) for name, spec in parameters if name not in taken)
    return (*units, Unit(name="", parameters=rest))


def _block_of(name: str, blocks: Mapping[str, nn.Module]) -> str:
    return next((block for block in blocks if name.startswith(f"{block}.")), "")


def structure(make_model: Callable[[], nn.Module], seed: int) -> tuple[nn.Module, Mapping[str, Recipe] | None]:
    """Build a model with its parameters on the meta device; also the recipes of its weights, where they tell all."""
    torch.manual_seed(seed)
    try:
        module, recipes = skeleton(make_model)
    except (RuntimeError, NotImplementedError, ValueError, TypeError):
        # Some models read their weights while they are built. Then every rank builds a whole one and forgets it.
        torch.manual_seed(seed)
        module, recipes = _checked(make_model()), None
        forgotten = {id(old): nn.Parameter(old.to("meta"), old.requires_grad) for old in module.parameters()}
        for part in module.modules():
            for name, old in part._parameters.items():  # noqa: SLF001 - no setattr hooks; tied ones stay tied
                if old is not None:
                    part._parameters[name] = forgotten[id(old)]  # noqa: SLF001
    return _checked(module), recipes


def _checked(model: object) -> nn.Module:
    if is_mlx(model):
        raise JobError("Job.model made a module of MLX, which engine torch does not train", fix="--set engine=mlx")
    if not isinstance(model, nn.Module):
        raise JobError(f"Job.model made a {type(model).__name__}", fix="return a torch.nn.Module")
    return model


def _real_values(make_model: Callable[[], nn.Module], seed: int) -> dict[str, Tensor]:
    torch.manual_seed(seed)
    model = make_model()
    return dict(model.named_parameters()) | dict(model.named_buffers())


def _from_file(path: Path, module: nn.Module, buffers: Specs) -> tuple[FileWeights, Specs]:
    values = open_weights(path)
    first_name = {id(parameter): name for name, parameter in module.named_parameters()}
    # A tied weight may be saved under any of its names; it is asked for by its first.
    aliases = {name: first_name.get(id(value), name) for name, value in module.state_dict(keep_vars=True).items()}
    extra = sorted(name for name in values if name not in aliases)
    saved = {aliases[name]: name for name in values if name in aliases}
    missing = sorted(set(aliases.values()) - set(saved))
    if missing or extra:
        raise JobError(
            f"Job.weights {path} lacks {missing} and has extra {extra}", fix="name the state dict of this model"
        )
    return FileWeights(values, saved, path), tuple((name, spec) for name, spec in buffers if name in saved)


def _specs(named: object) -> Specs:
    return tuple((name, tensor.detach().to("meta")) for name, tensor in named)  # type: ignore[attr-defined]
