"""Rules of tensor parallelism: which modules are sharded, in which style, and which degrees are valid."""

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
    "column": "outputs are sharded over ranks; a row module follows",
    "column_gathered": "outputs are sharded over ranks and gathered; for output heads",
    "row": "inputs are sharded by a column module; outputs are summed",
    "row_split": "replicated inputs are sharded; outputs are summed",
    "vocab": "an embedding sharded over its vocabulary",
    "sequence": "a norm of a repeated block before column modules, whose input may be sharded by tokens",
    "summed": "replicated parameters between column and row modules, whose gradients are summed over ranks",
    "heads": "a module with an attribute for its number of heads, which is divided by the number of ranks",
}
"""Style -> description. Modules without a rule are replicated on every rank."""

_LINEAR = frozenset({"column", "column_gathered", "row", "row_split"})

SPLIT_FACTORS = frozenset({"split_outputs", "split_inputs"})
"""Styles of the adapter factors that are sharded with the matrix they adapt; not for users' rules."""

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


def find_rules(module: nn.Module, rules: Mapping[str, str] | str | None) -> Mapping[str, str]:
    """Return name pattern -> style for `module`: the job's rules, the model's rules, or transformers' plan.

    In a pattern, `*` matches one component of a dotted name. Raises for rules that do not match the module.
    """
    explicit = as_rules(rules)
    found = _own_rules(module) if explicit is None else dict(explicit)
    if not found:
        raise PlanError(
            f"{type(module).__name__} has no tensor-parallel rules",
            code="support.tp-no-rules",
            fix=f"{_example(module)}run `shardwise verify JOB.py --propose-rules`, or use tp 1",
        )
    names = [name for name, _ in module.named_modules()]
    for pattern, style in found.items():
        if style not in STYLES:
            raise JobError(
                f"tensor rule {pattern!r} has unknown style {style!r}",
                code="job.tensor-rule-style",
                fix=nearest(str(style), STYLES),
            )
        if not any(matches(pattern, name) for name in names):
            raise JobError(
                f"tensor rule {pattern!r} matches no module",
                code="job.tensor-rule-unmatched",
                fix=nearest(pattern, map(_general, names)),
            )
    for name, style in styles_by_name(module, found).items():
        _check_kind(name, module.get_submodule(name), style)
    return found | _adapter_rules(found, names)


def _example(module: nn.Module) -> str:
    """Return advice with example rules for linear modules of this model; empty if it has none."""
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
        if inputs == outputs > widest:  # the second may read the first's output; the widest pair is likely an MLP
            widest, rules = outputs, {first: "column", second: "row"}
    if not rules:
        return ""
    return f"set Job(tensor_rules={json.dumps(rules)}), "


def _adapter_rules(rules: Mapping[str, str], names: Iterable[str]) -> dict[str, str]:
    """Return the rules of adapters: one factor is sharded like the adapted module, the other is "summed".

    With a column module, A x is replicated and B computes each rank's outputs. With a row module, A reads each
    rank's inputs, and the output of B is part of the sum that the row module computes.
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
    if len(expected) != len(components):
        return False
    return all(one in {"*", other} for one, other in zip(expected, components, strict=True))


def matches_any(patterns: Iterable[str], name: str) -> bool:
    """Return whether a dotted name matches one of several patterns."""
    return any(matches(pattern, name) for pattern in patterns)


def styles_by_name(module: nn.Module, rules: Mapping[str, str]) -> dict[str, str]:
    """Return name -> style of every module that a rule matches; raise for two styles of one module."""
    styles: dict[str, str] = {}
    for name, _ in module.named_modules():
        found = {style: pattern for pattern, style in rules.items() if matches(pattern, name)}
        if len(found) > 1:
            raise JobError(
                f"{name} matches tensor rules of different styles: {' and '.join(found.values())}",
                code="job.tensor-rules-overlap",
                fix="remove all but one",
            )
        if found:
            (styles[name],) = found
    return styles


def block_patterns(rules: Mapping[str, str]) -> tuple[str, ...]:
    """Return the patterns of the repeated blocks whose stream sequence parallelism shards."""
    norms = [pattern for pattern, style in rules.items() if style == "sequence" and "*" in pattern]
    return tuple(dict.fromkeys(pattern.partition("*")[0] + "*" for pattern in norms))


def within(patterns: Iterable[str], name: str) -> bool:
    """Return whether a dotted name matches a pattern, or is inside a module that does."""
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
    """Divide a module's number of heads, and their total width, by `degree`."""
    for name, count in _own_counts(module):
        setattr(module, name, count // degree)


def _own_counts(module: nn.Module) -> list[tuple[str, int]]:
    named = vars(module)
    return [(name, named[name]) for name in named if name in _HEADS + _WIDTHS and type(named[name]) is int]


def check_tensor(module: nn.Module, degree: int, rules: Mapping[str, str], *, sequence: bool = False) -> None:
    """Reject a degree that does not divide the sharded dimensions, and name the nearest valid degrees."""
    styles = styles_by_name(module, rules)
    counts = dict(_counts(module, styles))
    for what, count in counts.items():
        if count % degree:
            raise PlanError(
                f"tp={degree} does not divide {what}",
                code="plan.tp-not-divisible",
                fix=_valid_degrees(degree, counts.values()),
            )
    _check_ties(module, styles)
    if sequence:
        _check_sequence(module, rules, styles)


def _own_rules(module: nn.Module) -> dict[str, str]:
    """Return the rules of the outermost submodules that declare any."""
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
    """Convert transformers' plan to rules; entries for variants of the model are skipped."""
    names = [name for name, _ in module.named_modules()] + [name for name, _ in module.named_parameters()]
    rules: dict[str, str] = {}
    for pattern, style in plan.items():
        if not any(matches(pattern, name) for name in names):
            continue
        if style not in _FROM_TRANSFORMERS:
            raise PlanError(
                f"tensor style {style!r} of {type(module).__name__} at {pattern} is not supported",
                code="support.tp-style",
                fix="set Job(tensor_rules=...) without it, or use tp 1",
            )
        rules[pattern] = _FROM_TRANSFORMERS[style]
    rules = _with_embeddings(module, rules)
    return rules | _stream_norms(module, rules)


def _with_embeddings(module: nn.Module, rules: Mapping[str, str]) -> dict[str, str]:
    """Shard embeddings with the heads to which they are tied; replicate both if an embedding cannot be sharded."""
    embeddings = {name: child for name, child in module.named_modules() if isinstance(child, nn.Embedding)}
    replicated = {id(child.weight) for child in embeddings.values() if not can_split_vocabulary(child)}
    kept, tied = dict(rules), set()
    for name, style in styles_by_name(module, rules).items():
        weight = id(getattr(module.get_submodule(name), "weight", None))
        if weight in replicated:
            for pattern in list(kept):
                if matches(pattern, name):
                    del kept[pattern]
        elif style == "column_gathered":
            tied.add(weight)
    for name, child in embeddings.items():
        if id(child.weight) in tied:
            kept[name] = "vocab"
    return kept


def can_split_vocabulary(module: nn.Module) -> bool:
    """Return whether `module` is a plain Embedding whose options do not need all rows."""
    return type(module).forward is nn.Embedding.forward and not (module.max_norm or module.scale_grad_by_freq)


def _stream_norms(module: nn.Module, rules: Mapping[str, str]) -> dict[str, str]:
    """Return "sequence" rules for the norms of pre-norm blocks (Llama's names), if all else has a rule."""
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
    """Reject a style for a module that does not support it."""
    kind = type(module)
    if style in _LINEAR and not is_plain_linear(module):
        raise JobError(
            f"tensor rule {style!r} needs a plain Linear, but {name} is a {kind.__name__}",
            code="job.tensor-rule-not-linear",
            fix="match plain Linear modules only",
        )
    if style == "vocab" and not can_split_vocabulary(module):
        raise JobError(
            f"tensor rule 'vocab' needs a plain Embedding without max_norm and scale_grad_by_freq, but matches {name}",
            code="job.tensor-rule-not-embedding",
            fix="remove it from the tensor rules",
        )


def _counts(module: nn.Module, styles: Mapping[str, str]) -> Iterator[tuple[str, int]]:
    """Yield the sizes that a degree must divide, with descriptions; numbers of heads first, which are clearer."""
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


def _valid_degrees(degree: int, counts: Iterable[int]) -> str:
    largest = math.gcd(*counts)
    valid = [number for number in range(1, largest + 1) if largest % number == 0]
    near = sorted(sorted(valid, key=lambda number: abs(number - degree))[:4])
    *smaller, largest_valid = map(str, near)
    if not smaller:
        return f"use tp {largest_valid}"
    return f"use tp {', '.join(smaller)} or {largest_valid}"


def _check_ties(module: nn.Module, styles: Mapping[str, str]) -> None:
    """Reject rules that shard one shared parameter in two ways."""
    seen: dict[int, tuple[str, int | None]] = {}
    for name, child in module.named_modules():
        for kind, parameter in child.named_parameters(recurse=False):
            split = split_dim(child, styles.get(name), kind)
            first, before = seen.setdefault(id(parameter), (f"{name}.{kind}", split))
            if split != before:
                raise JobError(
                    f"{first} and {name}.{kind} are one parameter, but the tensor rules shard them differently",
                    code="job.tensor-rules-tied",
                    fix='shard both over the vocabulary ("vocab" and "column_gathered"), or neither',
                )


def _check_sequence(module: nn.Module, rules: Mapping[str, str], styles: Mapping[str, str]) -> None:
    """Reject sequence parallelism if the rules do not cover a block."""
    fix = "set sequence_parallel = false, or complete Job(tensor_rules=...)"
    blocks = block_patterns(rules)
    outside = [name for name, style in styles.items() if style == "sequence" and not within(blocks, name)]
    if not blocks or outside:
        where = "no norm of a repeated block"
        if outside:
            where = f"{outside[0]}, which is not in a repeated block"
        raise PlanError(
            f"sequence parallelism needs rules 'sequence' for norms of repeated blocks, got {where}",
            code="job.tensor-rule-sequence",
            fix=fix,
        )
    left = _without_rule(module, rules, blocks)
    if left:
        raise PlanError(
            f"sequence parallelism needs a tensor rule for {left[0]}", code="job.tensor-rule-missing", fix=fix
        )
