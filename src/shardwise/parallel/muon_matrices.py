"""The matrices of a model that Muon orthogonalizes, and the matrices that a fused weight consists of.

Muon is an optimizer for the matrices of hidden layers. Names and shapes do not identify them: an embedding is a matrix
too, and the fused weight of queries, keys and values is three. So the full model is examined, before it is sharded or
split into pipeline stages; a stage without the output head classifies its parameters like the others. Reference: Jordan
et al. 2024, "Muon: An optimizer for hidden layers in neural networks".
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from shardwise.errors import JobError, nearest
from shardwise.job.lora import is_adapter, is_target
from shardwise.models.transformer import Attention
from shardwise.parallel.lora import add_adapters
from shardwise.parallel.meta_model import structure
from shardwise.parallel.recompute import block_of, find_blocks
from shardwise.parallel.skeleton import joined
from shardwise.parallel.tensor_rules import is_transposed

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from shardwise.job import Job
    from shardwise.job.optimizers import AdjustLr, Muon

_EMBEDDINGS = (nn.Embedding, nn.EmbeddingBag)
_QKV = 3


@dataclass(frozen=True, kw_only=True)
class Matrix:
    """A weight that Muon updates: one matrix, or several matrices fused along the outputs."""

    outputs_dim: int = 0
    """Dimension of the outputs: 0 for a Linear, 1 for transformers' Conv1D."""
    sizes: tuple[int, ...] = ()
    """Outputs of each fused matrix in one group; empty for a weight that is one matrix."""
    num_groups: int = 1
    """Number of groups of outputs, each with `sizes` outputs of every matrix (the heads of grouped-query attention)."""

    def parts(self, weight: Tensor) -> list[Tensor]:
        """Return the matrices of a full weight as views [groups, outputs, inputs]."""
        rows = weight.movedim(self.outputs_dim, 0)
        grouped = rows.unflatten(0, (self.num_groups, -1))
        return list(grouped.split(self.sizes or grouped.shape[1], dim=1))

    def ratios(self, shape: Sequence[int], adjust_lr: AdjustLr) -> list[float]:
        """Return the factor of the learning rate for each matrix of a weight with this full shape."""
        outputs, inputs = shape[self.outputs_dim], shape[1 - self.outputs_dim]
        found = []
        for size in self.sizes or (outputs,):
            rows = size * self.num_groups
            if adjust_lr == "original":
                found.append(math.sqrt(max(1, rows / inputs)))
            else:
                found.append(0.2 * math.sqrt(max(rows, inputs)))
        return found

    def part_indices(self, shape: Sequence[int]) -> Tensor:
        """Return the index of the matrix to which each output of a weight with this full shape belongs."""
        sizes = self.sizes or (shape[self.outputs_dim],)
        group = torch.repeat_interleave(torch.arange(len(sizes)), torch.tensor(sizes))
        return group.repeat(self.num_groups)


def find_matrices(module: nn.Module, settings: Muon) -> dict[str, Matrix]:
    """Return name -> Matrix of the trained parameters that Muon updates; `module` is the full model, on any device.

    These are the weights of linear modules and the input projections of nn.MultiheadAttention, except embeddings and
    weights tied to them, and the output head. `include`, `exclude` and `split` of `settings` name others. Raises
    JobError for patterns that match no such parameter, and for a model without any.
    """
    heads = _output_heads(module)
    embeddings = {id(child.weight) for child in module.modules() if isinstance(child, _EMBEDDINGS)}
    found: dict[str, Matrix] = {}
    matched: set[str] = set()
    for name, owner, kind, parameter in _trained_parameters(module):
        included = _matching(settings.include, name)
        excluded = _matching(settings.exclude, name)
        matched.update(excluded)
        is_output = id(parameter) in embeddings or any(name.startswith(joined(head, "")) for head in heads)
        is_hidden = _is_linear_weight(owner, kind) and not is_output
        if parameter.ndim != 2 or excluded or not (included or is_hidden):
            continue
        matched.update(included)
        splits = _matching(settings.split, name)
        matched.update(splits)
        found[name] = _matrix(module, name, parameter, settings.split[splits[0]] if splits else None)
    names = [name for name, *_ in _trained_parameters(module)]
    _check_patterns(settings, matched, names, found)
    if not found:
        raise JobError(
            f"sw.muon found no matrix of a hidden layer in {type(module).__name__}",
            code="optimizer.muon-no-matrix",
            fix="name parameters by sw.muon(include=...), or use sw.adamw",
        )
    return found


def job_matrices(job: Job, settings: Muon) -> dict[str, Matrix]:
    """Return `find_matrices` of a job's model, with its adapters, which is built on the meta device."""
    module = structure(job.model, job.seed).module
    if job.lora is not None:
        add_adapters(module, job.lora)
    return find_matrices(module, settings)


def _trained_parameters(module: nn.Module) -> Iterator[tuple[str, nn.Module, str, nn.Parameter]]:
    """Yield (name, module, name in the module, parameter) of each trained parameter under its first name."""
    for name, parameter in module.named_parameters():
        owner, _, kind = name.rpartition(".")
        if parameter.requires_grad:
            yield name, module.get_submodule(owner), kind, parameter


def _output_heads(module: nn.Module) -> list[str]:
    """Return the names of output heads: the last linear module outside of repeated blocks, and that of transformers."""
    blocks = find_blocks(module)
    getter = getattr(module, "get_output_embeddings", None)
    declared = getter() if callable(getter) else None
    last, heads = "", []
    for name, child in module.named_modules():
        if child is declared:
            heads.append(name)
        if _is_linear(child) and not block_of(name, blocks) and not is_adapter(f"{name}.weight"):
            last = name
    return [*heads, last] if last else heads


def _is_linear(module: nn.Module) -> bool:
    # Custom classes of linear modules need not derive from nn.Linear; those of torch that do not have no matrix.
    return isinstance(module, nn.Linear) or is_transposed(module) or type(module).__name__.endswith("Linear")


def _is_linear_weight(owner: nn.Module, kind: str) -> bool:
    if isinstance(owner, nn.MultiheadAttention):
        return kind.endswith("_proj_weight")
    return kind == "weight" and _is_linear(owner)


def _matrix(module: nn.Module, name: str, parameter: nn.Parameter, split: int | Sequence[int] | None) -> Matrix:
    """Return the Matrix of a weight, with the split that the user set or that its module is known to have."""
    path, _, kind = name.rpartition(".")
    owner = module.get_submodule(path)
    parent: Any = module.get_submodule(path.rpartition(".")[0])
    outputs_dim = int(is_transposed(owner) and kind == "weight")
    outputs, inputs = parameter.shape[outputs_dim], parameter.shape[1 - outputs_dim]
    if split is not None:
        return Matrix(outputs_dim=outputs_dim, sizes=_sizes(name, split, outputs))
    last = path.rpartition(".")[2]
    if isinstance(parent, Attention) and last == "qkv":
        width = parent.head_width
        sizes = (parent.queries_per_group * width, width, width)
        return Matrix(sizes=sizes, num_groups=outputs // sum(sizes))
    if outputs_dim and last == "c_attn" and outputs % inputs == 0:
        # Queries, keys and values of self-attention, or keys and values of cross-attention.
        return Matrix(outputs_dim=1, sizes=(inputs,) * (outputs // inputs))
    if kind == "in_proj_weight":
        return Matrix(sizes=(outputs // _QKV,) * _QKV)
    return Matrix(outputs_dim=outputs_dim)


def _sizes(name: str, split: int | Sequence[int], outputs: int) -> tuple[int, ...]:
    sizes = tuple(split) if not isinstance(split, int) else (outputs // max(1, split),) * split
    if sum(sizes) != outputs or min(sizes, default=0) < 1:
        raise JobError(
            f"sw.muon(split=...) divides {name} into {split}, but it has {outputs} outputs",
            code="optimizer.muon-split-uneven",
            fix="set the number of equal matrices, or the outputs of each matrix",
        )
    return sizes


def _matching(patterns: Iterable[str], name: str) -> list[str]:
    """Return the patterns that match a parameter, its module, or a module that contains it."""
    found = []
    for pattern in patterns:
        path = name
        while path:
            if is_target(pattern, path):
                found.append(pattern)
                break
            path = path.rpartition(".")[0]
    return found


def _check_patterns(settings: Muon, matched: set[str], names: list[str], found: dict[str, Matrix]) -> None:
    for option, patterns in (("include", settings.include), ("exclude", settings.exclude), ("split", settings.split)):
        for pattern in patterns:
            if pattern not in matched:
                what = "trained parameter" if option == "exclude" else "matrix that Muon updates"
                known = names if option == "exclude" else found
                raise JobError(
                    f"pattern {pattern!r} of sw.muon({option}=...) matches no {what}",
                    code="optimizer.muon-pattern-unmatched",
                    fix=nearest(pattern, known) if known else f"remove the pattern from {option}",
                )
