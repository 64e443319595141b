"""Tensor-parallel rules, which map modules to sharding styles, and checks of the tensor-parallel degree."""

from __future__ import annotations

import json
import math
import re
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from torch import nn

from shardwise.errors import JobError, PlanError, nearest
from shardwise.job.job import as_rules
from shardwise.job.lora import DOWN, UP
from shardwise.parallel.skeleton import joined

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

STYLES = {
    "column": "shards a linear module by outputs, for a row module that follows",
    "column_gathered": "shards a linear module by outputs and all-gathers them, for output heads",
    "row": "shards a linear module by inputs, which a column module has sharded, and sums the outputs",
    "row_split": "shards a linear module and its replicated inputs by inputs, and sums the outputs",
    "vocab": "shards an embedding over its vocabulary",
    "sequence": "marks a norm before column modules in a repeated block, whose input may be sharded by tokens",
    "summed": "sums the gradients of replicated parameters between column and row modules over ranks",
    "heads": "divides the attribute of a module for its number of heads by the number of ranks",
}
"""Style -> description. Modules without a rule are replicated on every rank."""

_LINEAR = frozenset({"column", "column_gathered", "row", "row_split"})

SPLIT_FACTORS = frozenset({"split_outputs", "split_inputs"})
"""Styles of LoRA factors that are sharded with the matrix they adapt; users cannot set them."""

_FROM_TRANSFORMERS = {
    "colwise": "column",
    "colwise_rep": "column_gathered",
    "colwise_gather_output": "column_gathered",
    "rowwise": "row",
    "rowwise_rep": "row_split",
    "rowwise_split_input": "row_split",
    "embedding_rowwise": "vocab",
    "replicated_with_grad_allreduce": "summed",
}

_HEADS = ("num_attention_heads", "num_key_value_heads", "num_heads", "num_kv_heads", "kv_heads", "n_head", "n_heads")

_WIDTHS = ("embed_dim", "hidden_size", "all_head_size", "inner_dim", "d_model", "n_embd", "dim", "width")

_JOB_FIXES = ("set Job(", "run `shardwise verify JOB.py --propose-rules`, which also finds rules of attention")
"""Fixes for a model without tensor rules: the call that takes rules, and how to find rules."""


def find_rules(
    module: nn.Module, rules: Mapping[str, str] | str | None, fixes: tuple[str, str] = _JOB_FIXES
) -> Mapping[str, str]:
    """Return name pattern -> style for `module` from the job's rules, the model's rules, or transformers' tp plan.

    In a pattern, `*` matches one component of a dotted name. Raises JobError for rules that do not match the module.
    """
    explicit = as_rules(rules)
    found = _own_rules(module) if explicit is None else dict(explicit)
    if not found:
        raise PlanError(
            f"{type(module).__name__} has no tensor-parallel rules",
            code="support.tp-no-rules",
            fix=f"{_example(module, fixes[0])}{fixes[1]}, or set tp=1",
        )
    names = [name for name, _ in module.named_modules()]
    for pattern, style in found.items():
        if style not in STYLES:
            raise JobError(
                f"tensor rule {pattern!r} has the unknown style {style!r}",
                code="job.tensor-rule-style",
                fix=nearest(str(style), STYLES),
            )
        if not any(matches(pattern, name) for name in names):
            raise JobError(
                f"tensor rule {pattern!r} matches no module of the model",
                code="job.tensor-rule-unmatched",
                fix=nearest(pattern, map(_general, names)),
            )
    for name, style in styles_by_name(module, found).items():
        _check_kind(name, module.get_submodule(name), style)
    return found | _adapter_rules(found, names)


def _example(module: nn.Module, call: str) -> str:
    """Return a fix with example rules for linear modules of this model; "" if it has no linear module."""
    others = [name for name, child in module.named_modules() if not is_plain_linear(child)]
    linears: dict[str, Any] = {}
    for name, child in module.named_modules():
        pattern = _general(name)
        if is_plain_linear(child):
            is_ambiguous = any(matches(pattern, other) for other in others)
            linears[name if is_ambiguous else pattern] = child
    rules = dict.fromkeys([*linears][:1], "column_gathered")
    widest = 0
    for (first, column), (second, row) in pairwise(linears.items()):
        outputs = column.weight.shape[is_transposed(column)]
        inputs = row.weight.shape[not is_transposed(row)]
        if inputs == outputs > widest:  # `second` may read the output of `first`; the widest pair is likely an MLP
            widest, rules = outputs, {first: "column", second: "row"}
    return f"{call}tensor_rules={json.dumps(rules)}), " if rules else ""


def _adapter_rules(rules: Mapping[str, str], names: Iterable[str]) -> dict[str, str]:
    """Return the rules of LoRA adapters: one factor is sharded like the adapted module, the other is "summed".

    For a column module, A x is replicated and B computes each rank's outputs. For a row module, A reads each rank's
    inputs, and the output of B is part of the sum that the row module computes.
    """
    found: dict[str, str] = {}
    for pattern, style in rules.items():
        if style in _LINEAR and any(matches(f"{pattern}.{UP}", name) for name in names):
            down, up = "summed", "split_outputs"
            if style in {"row", "row_split"}:
                down, up = "split_inputs", "summed"
            found[f"{pattern}.{DOWN}"] = down
            found[f"{pattern}.{UP}"] = up
    return found


def matches(pattern: str, name: str) -> bool:
    """Return whether a dotted name matches a pattern, in which `*` matches one component."""
    expected, components = pattern.split("."), name.split(".")
    has_match = all(one in {"*", other} for one, other in zip(expected, components, strict=False))
    return has_match and len(expected) == len(components)


def matches_any(patterns: Iterable[str], name: str) -> bool:
    """Return whether a dotted name matches one of several patterns."""
    return any(matches(pattern, name) for pattern in patterns)


def styles_by_name(module: nn.Module, rules: Mapping[str, str]) -> dict[str, str]:
    """Return name -> style of every module that a rule matches; raise JobError if a module has two styles."""
    styles: dict[str, str] = {}
    for name, _ in module.named_modules():
        found = {style: pattern for pattern, style in rules.items() if matches(pattern, name)}
        if len(found) > 1:
            raise JobError(
                f"{name} matches tensor rules of different styles: {' and '.join(found.values())}",
                code="job.tensor-rules-overlap",
                fix=f"remove all but one of the rules that match {name}",
            )
        if found:
            (styles[name],) = found
    return styles


def block_patterns(rules: Mapping[str, str]) -> tuple[str, ...]:
    """Return the name patterns of the repeated blocks whose residual stream sequence parallelism shards."""
    norms = [pattern for pattern, style in rules.items() if style == "sequence" and "*" in pattern]
    return tuple(dict.fromkeys(pattern.partition("*")[0] + "*" for pattern in norms))


def within(patterns: Iterable[str], name: str) -> bool:
    """Return whether a dotted name, or the name of a module that contains it, matches one of several patterns."""
    components = name.split(".")
    return any(matches(pattern, ".".join(components[: pattern.count(".") + 1])) for pattern in patterns)


def split_dim(module: nn.Module, style: str | None, kind: str) -> int | None:
    """Return the dimension along which a rule shards parameter `kind` of a module; None if it is replicated."""
    if style in {"vocab", "split_outputs"}:
        return 0
    if style == "split_inputs":
        return 1
    weight_is_transposed = kind == "weight" and is_transposed(module)
    if style in {"column", "column_gathered"}:
        return int(weight_is_transposed)
    if style in {"row", "row_split"} and kind == "weight":
        return int(not weight_is_transposed)
    return None


def is_plain_linear(module: nn.Module) -> bool:
    """Return whether `module` is a Linear with torch's forward, or transformers' Conv1D."""
    return type(module).forward is nn.Linear.forward or is_transposed(module)


def is_transposed(module: nn.Module) -> bool:
    """Return whether `module` is transformers' Conv1D, a linear module whose weight is [inputs, outputs]."""
    return type(module).__name__ == "Conv1D" and hasattr(module, "nf")


def counts_heads(module: nn.Module) -> bool:
    """Return whether a module has an attribute for its number of heads, which style "heads" divides."""
    return any(name in _HEADS for name, _ in _own_counts(module))


def divide_heads(module: nn.Module, degree: int) -> None:
    """Divide a module's attributes for its number of heads and their total width by `degree`."""
    for name, count in _own_counts(module):
        setattr(module, name, count // degree)


def _own_counts(module: nn.Module) -> list[tuple[str, int]]:
    named = vars(module)
    return [(name, named[name]) for name in named if name in _HEADS + _WIDTHS and type(named[name]) is int]


def check_tensor(
    module: nn.Module, degree: int, rules: Mapping[str, str], *, sequence: bool = False, num_ranks: int = 0
) -> None:
    """Raise PlanError if `degree` does not divide the sharded dimensions, with near degrees that fit `num_ranks`."""
    styles = styles_by_name(module, rules)
    counts = dict(_counts(module, styles))
    for what, count in counts.items():
        if count % degree:
            raise PlanError(
                f"tp={degree} does not divide {what}",
                code="plan.tp-not-divisible",
                fix=_valid_degrees(degree, counts.values(), num_ranks),
            )
    _check_ties(module, styles)
    if sequence:
        _check_sequence(module, rules, styles)


def _own_rules(module: nn.Module) -> dict[str, str]:
    """Return the rules that submodules declare; rules inside a submodule that declares rules are ignored."""
    rules: dict[str, str] = {}
    taken: list[str] = []
    for name, child in module.named_modules():
        if any(name.startswith(f"{above}.") or above == "" for above in taken):
            continue
        own = _declared(child)
        if own:
            taken.append(name)
            for pattern, style in own.items():
                rules[joined(name, pattern)] = style
    return rules


def _declared(module: nn.Module) -> dict[str, str]:
    declare = getattr(module, "tensor_rules", None)
    if callable(declare):
        return dict(declare())
    plan = getattr(module, "_tp_plan", None) or getattr(getattr(module, "config", None), "base_model_tp_plan", None)
    return _translate(module, plan) if isinstance(plan, dict) and plan else {}


def _translate(module: nn.Module, plan: Mapping[str, str]) -> dict[str, str]:
    """Convert transformers' tp plan to tensor rules, skipping entries that match no module."""
    names = [name for name, _ in module.named_modules()] + [name for name, _ in module.named_parameters()]
    rules: dict[str, str] = {}
    for pattern, style in plan.items():
        if not any(matches(pattern, name) for name in names):
            continue
        if style not in _FROM_TRANSFORMERS:
            raise PlanError(
                f"tensor style {style!r} of {type(module).__name__} at {pattern} is not supported",
                code="support.tp-style",
                fix="set Job(tensor_rules=...) without this style, or set tp=1",
            )
        rules[pattern] = _FROM_TRANSFORMERS[style]
    rules = _with_embeddings(module, rules)
    return rules | _stream_norms(module, rules)


def _with_embeddings(module: nn.Module, rules: Mapping[str, str]) -> dict[str, str]:
    """Return rules that shard embeddings with their tied heads, or replicate both if an embedding cannot be sharded."""
    embeddings = {name: child for name, child in module.named_modules() if isinstance(child, nn.Embedding)}
    replicated = {id(child.weight) for child in embeddings.values() if not can_split_vocabulary(child)}
    kept, tied = dict(rules), set()
    for name, style in styles_by_name(module, rules).items():
        weight = id(getattr(module.get_submodule(name), "weight", None))
        if weight in replicated:
            kept = {pattern: style for pattern, style in kept.items() if not matches(pattern, name)}
        elif style == "column_gathered":
            tied.add(weight)
    for name, child in embeddings.items():
        if id(child.weight) in tied:
            kept[name] = "vocab"
    return kept


def can_split_vocabulary(module: nn.Module) -> bool:
    """Return whether `module` is a plain Embedding without max_norm and scale_grad_by_freq, which need all rows."""
    return type(module).forward is nn.Embedding.forward and not (module.max_norm or module.scale_grad_by_freq)


def _stream_norms(module: nn.Module, rules: Mapping[str, str]) -> dict[str, str]:
    """Return "sequence" rules for the norms of pre-norm blocks (Llama's names) if all other modules have rules."""
    blocks = {pattern.partition("*")[0] + "*" for pattern in rules if "*" in pattern}
    found: dict[str, str] = {}
    for block in blocks:
        names = _without_rule(module, rules, [block])
        left = {_general(name).removeprefix(f"{block}.") for name in names}
        if left and left <= {"input_layernorm", "post_attention_layernorm"}:
            found |= dict.fromkeys((f"{block}.{norm}" for norm in sorted(left)), "sequence")
    return found


def _without_rule(module: nn.Module, rules: Mapping[str, str], blocks: Iterable[str]) -> list[str]:
    """Return the names of modules inside blocks that have parameters and no rule."""
    covered = [pattern for pattern, style in rules.items() if style in {"sequence", "summed"}]
    found = []
    for name, child in module.named_modules():
        has_own = next(child.parameters(recurse=False), None) is not None
        if has_own and within(blocks, name) and not within(covered, name) and not matches_any(rules, name):
            found.append(name)
    return found


def _general(name: str) -> str:
    return re.sub(r"(?<![^.])\d+(?![^.])", "*", name)


def _check_kind(name: str, module: nn.Module, style: str) -> None:
    """Raise JobError if a module does not support the style of its rule."""
    if style in _LINEAR and not is_plain_linear(module):
        raise JobError(
            f"tensor rule {style!r} requires a plain Linear, but {name} is a {type(module).__name__}",
            code="job.tensor-rule-not-linear",
            fix=f"change the rule for {name}, so that it matches plain Linear modules only",
        )
    if style == "vocab" and not can_split_vocabulary(module):
        raise JobError(
            f"tensor rule 'vocab' requires an Embedding without max_norm and scale_grad_by_freq, but matches {name}",
            code="job.tensor-rule-not-embedding",
            fix=f"remove the rule for {name}",
        )


def _counts(module: nn.Module, styles: Mapping[str, str]) -> Iterator[tuple[str, int]]:
    """Yield (description, size) for all sizes that the degree must divide, numbers of heads first."""
    for name, style in styles.items():
        if style == "column" and "att" in name.lower():
            yield from _heads(module, name)
        elif style == "heads":
            for attribute, count in _own_counts(module.get_submodule(name)):
                yield f"{name}.{attribute}, which is {count}", count
    for name, style in styles.items():
        # Heads and vocabularies may be sharded unevenly: GPT-2's vocabulary of 50,257 has no useful divisor.
        if style in {"column", "row", "row_split"}:
            child: Any = module.get_submodule(name)
            size = int(child.weight.shape[split_dim(child, style, "weight") or 0])
            yield f"the {size} {'outputs' if style == 'column' else 'inputs'} of {name}", size


def _heads(module: nn.Module, name: str) -> Iterator[tuple[str, int]]:
    parent = module.get_submodule(name.rpartition(".")[0])
    config = getattr(parent, "config", None) or getattr(module, "config", None)
    for owner in (config, parent):
        for attribute in _HEADS:
            count = getattr(owner, attribute, None)
            if isinstance(count, int) and not isinstance(count, bool):
                kind = "key and value heads" if "kv" in attribute or "key" in attribute else "heads"
                yield f"the {count} {kind} of {_general(name)}", count


def _valid_degrees(degree: int, counts: Iterable[int], num_ranks: int) -> str:
    largest = math.gcd(*counts)
    valid = [number for number in range(1, largest + 1) if largest % number == 0]
    fitting = [number for number in valid if num_ranks % number == 0]
    other = " with a multiple of that many ranks" if fitting == [1] != valid else ""
    near = sorted(sorted(valid if other else fitting, key=lambda number: abs(number - degree))[:4])
    return f"use tp {' or '.join(', '.join(map(str, near)).rsplit(', ', 1))}{other}"


def _check_ties(module: nn.Module, styles: Mapping[str, str]) -> None:
    """Raise JobError if the rules shard a tied parameter along two different dimensions."""
    seen: dict[int, tuple[str, int | None]] = {}
    for name, child in module.named_modules():
        for kind, parameter in child.named_parameters(recurse=False):
            split = split_dim(child, styles.get(name), kind)
            first, before = seen.setdefault(id(parameter), (f"{name}.{kind}", split))
            if split != before:
                raise JobError(
                    f"{first} and {name}.{kind} are the same parameter, but the tensor rules shard them differently",
                    code="job.tensor-rules-tied",
                    fix='shard both over the vocabulary ("vocab" and "column_gathered"), or remove both rules',
                )


def _check_sequence(module: nn.Module, rules: Mapping[str, str], styles: Mapping[str, str]) -> None:
    """Raise PlanError for sequence parallelism if the rules do not cover all modules of a repeated block."""
    fix = "set sequence_parallel = false, or complete Job(tensor_rules=...)"
    blocks = block_patterns(rules)
    outside = [name for name, style in styles.items() if style == "sequence" and not within(blocks, name)]
    if not blocks or outside:
        where = "no norm of a repeated block"
        if outside:
            where = f"{outside[0]}, which is not in a repeated block"
        raise PlanError(
            f"sequence parallelism requires the rule 'sequence' for norms of repeated blocks, got {where}",
            code="job.tensor-rule-sequence",
            fix=fix,
        )
    left = _without_rule(module, rules, blocks)
    if left:
        raise PlanError(
            f"sequence parallelism requires a tensor rule for {left[0]}", code="job.tensor-rule-missing", fix=fix
        )
