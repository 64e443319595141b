"""Rules of tensor parallelism: which modules are split, in which style, and which degrees fit; pure decisions."""

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

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

STYLES = {
    "column": "outputs are split over ranks; a row module follows",
    "column_gathered": "outputs are split over ranks and made whole again; for heads",
    "row": "inputs are split over ranks by a column module, outputs are summed",
    "row_split": "whole inputs are split over ranks, outputs are summed",
    "vocab": "an embedding split over its vocabulary",
    "sequence": "a norm of a repeated block that feeds column modules; the stream it reads may be split by tokens",
    "summed": "whole parameters used between column and row, so that each rank sees its own heads alone",
    "heads": "a module that keeps the number of its heads: there are only this rank's, between column and row",
}
"""Style -> what it does. Modules without a rule are whole on every rank."""

_LINEAR = frozenset({"column", "column_gathered", "row", "row_split"})

SPLIT_FACTORS = frozenset({"split_outputs", "split_inputs"})
"""Styles of those factors of adapters that are split with the matrix they adapt; no user names them."""

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


def find_rules(module: nn.Module, given: Mapping[str, str] | str | None) -> Mapping[str, str]:
    """Return name pattern -> style for `module`: the job's rules, the model's own, or transformers' plan.

    In a pattern `*` matches one component of a dotted name. Every rule fits the module, or is refused by name.
    """
    asked = as_rules(given)
    rules = _own_rules(module) if asked is None else dict(asked)
    if not rules:
        raise PlanError(
            f"{type(module).__name__} has no rules for tensor parallelism",
            code="support.tp-no-rules",
            fix=f"{_example(module)}have them proposed (shardwise verify JOB.py --propose-rules), or use tp 1",
        )
    names = [name for name, _ in module.named_modules()]
    for pattern, style in rules.items():
        if style not in STYLES:
            raise JobError(
                f"tensor rule {pattern!r} has style {style!r}",
                code="job.tensor-rule-style",
                fix=nearest(str(style), STYLES),
            )
        if not any(matches(pattern, name) for name in names):
            raise JobError(
                f"tensor rule {pattern!r} matches no module",
                code="job.tensor-rule-unmatched",
                fix=nearest(pattern, map(_general, names)),
            )
    for name, style in styles_by_name(module, rules).items():
        _check_kind(name, module.get_submodule(name), style)
    return rules | _adapter_rules(rules, names)


def _example(module: nn.Module) -> str:
    """Return advice with rules for linear modules of this very model; empty where it has none."""
    others = [name for name, child in module.named_modules() if not is_plain_linear(child)]
    linears: dict[str, Any] = {}
    for name, child in module.named_modules():
        pattern = _general(name)
        if is_plain_linear(child):
            linears[name if any(matches(pattern, other) for other in others) else pattern] = child
    rules = dict.fromkeys([*linears][:1], "column_gathered")
    widest = 0
    for (first, column), (second, row) in pairwise(linears.items()):
        outputs = column.weight.shape[is_transposed(column)]
        inputs = row.weight.shape[not is_transposed(row)]
        if inputs == outputs > widest:  # what one gives may be what the other takes; the widest are those of an MLP
            widest, rules = outputs, {first: "column", second: "row"}
    return f"give Job(tensor_rules={json.dumps(rules)}), " if rules else ""


def _adapter_rules(rules: Mapping[str, str], names: Iterable[str]) -> dict[str, str]:
    """Return how adapters follow the modules they adapt: one factor is split, of the other gradients are summed.

    Beside a column A x is whole and B gives each rank its outputs; beside a row A takes each rank's inputs, and what B
    makes of them is a share of the sum that the row makes anyway.
    """
    found: dict[str, str] = {}
    for pattern, style in rules.items():
        if style in _LINEAR and any(matches(f"{pattern}.{UP}", name) for name in names):
            is_row = style in {"row", "row_split"}
            found[f"{pattern}.{DOWN}"] = "split_inputs" if is_row else "summed"
            found[f"{pattern}.{UP}"] = "summed" if is_row else "split_outputs"
    return found


def matches(pattern: str, name: str) -> bool:
    """Whether a dotted name fits a pattern, in which `*` matches one component."""
    wanted, given = pattern.split("."), name.split(".")
    return len(wanted) == len(given) and all(one in {"*", other} for one, other in zip(wanted, given, strict=True))


def matches_any(patterns: Iterable[str], name: str) -> bool:
    """Whether a dotted name fits one of several patterns."""
    return any(matches(pattern, name) for pattern in patterns)


def styles_by_name(module: nn.Module, rules: Mapping[str, str]) -> dict[str, str]:
    """Return name -> style of every module that a rule names; two styles for one module are refused."""
    styles: dict[str, str] = {}
    for name, _ in module.named_modules():
        found = {style: pattern for pattern, style in rules.items() if matches(pattern, name)}
        if len(found) > 1:
            raise JobError(
                f"{name} is named by tensor rules {' and '.join(found.values())}",
                code="job.tensor-rules-overlap",
                fix="keep one of them",
            )
        if found:
            (styles[name],) = found
    return styles


def block_patterns(rules: Mapping[str, str]) -> tuple[str, ...]:
    """Return the patterns of the repeated blocks whose stream sequence parallelism splits."""
    norms = [pattern for pattern, style in rules.items() if style == "sequence" and "*" in pattern]
    return tuple(dict.fromkeys(pattern.partition("*")[0] + "*" for pattern in norms))


def within(patterns: Iterable[str], name: str) -> bool:
    """Whether a dotted name is a module that a pattern fits, or lies inside one."""
    components = name.split(".")
    return any(matches(pattern, ".".join(components[: pattern.count(".") + 1])) for pattern in patterns)


def split_dim(module: nn.Module, style: str | None, kind: str) -> int | None:
    """Return the dimension along which a rule splits parameter `kind` of a module; None leaves it whole."""
    if style in {"vocab", "split_outputs"}:
        return 0
    if style == "split_inputs":
        return 1
    if style in {"column", "column_gathered"}:
        return 1 if kind == "weight" and is_transposed(module) else 0
    if style in {"row", "row_split"} and kind == "weight":
        return 0 if is_transposed(module) else 1
    return None


def is_plain_linear(module: nn.Module) -> bool:
    """Whether it is a Linear with torch's own forward or transformers' Conv1D, whose arithmetic is known."""
    return type(module).forward is nn.Linear.forward or is_transposed(module)


def is_transposed(module: nn.Module) -> bool:
    """Whether it is transformers' Conv1D, a linear module whose weight is [inputs, outputs]."""
    return type(module).__name__ == "Conv1D" and hasattr(module, "nf")


def counts_heads(module: nn.Module) -> bool:
    """Whether a module keeps the number of its heads in an attribute of its own, where style "heads" divides it."""
    return any(name in _HEADS for name, _ in _own_counts(module))


def divide_heads(module: nn.Module, degree: int) -> None:
    """Have a module count the heads of one of `degree` ranks, and the width that these have together."""
    for name, count in _own_counts(module):
        setattr(module, name, count // degree)


def _own_counts(module: nn.Module) -> list[tuple[str, int]]:
    return [(name, value) for name, value in vars(module).items() if name in _HEADS + _WIDTHS and type(value) is int]


def check_tensor(module: nn.Module, degree: int, rules: Mapping[str, str], *, sequence: bool = False) -> None:
    """Refuse a degree that does not divide what the rules split, naming the nearest ones that do; starts nothing."""
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
    """Collect the rules of the outermost submodules that declare any."""
    rules: dict[str, str] = {}
    taken: list[str] = []
    for name, child in module.named_modules():
        if any(name.startswith(f"{above}.") or above == "" for above in taken):
            continue
        own = _declared(child)
        if own:
            taken.append(name)
            rules.update({f"{name}.{pattern}" if name else pattern: style for pattern, style in own.items()})
    return rules


def _declared(module: nn.Module) -> dict[str, str]:
    declare = getattr(module, "tensor_rules", None)
    if callable(declare):
        return dict(declare())
    plan = getattr(module, "_tp_plan", None) or getattr(getattr(module, "config", None), "base_model_tp_plan", None)
    return _translate(module, plan) if isinstance(plan, dict) and plan else {}


def _translate(module: nn.Module, plan: Mapping[str, str]) -> dict[str, str]:
    """Return transformers' plan as rules of ours; entries for variants that this model is not are left out."""
    names = [name for name, _ in module.named_modules()] + [name for name, _ in module.named_parameters()]
    rules: dict[str, str] = {}
    for pattern, style in plan.items():
        if not any(matches(pattern, name) for name in names):
            continue
        if style not in _FROM_TRANSFORMERS:
            raise PlanError(
                f"{type(module).__name__} asks for tensor style {style!r} at {pattern}, which is not supported",
                code="support.tp-style",
                fix="give Job(tensor_rules=...) that leaves it out, or use tp 1",
            )
        rules[pattern] = _FROM_TRANSFORMERS[style]
    rules = _with_embeddings(module, rules)
    return rules | _stream_norms(module, rules)


def _with_embeddings(module: nn.Module, rules: Mapping[str, str]) -> dict[str, str]:
    """Split an embedding together with the head it is tied to; leave both whole where it cannot be split."""
    embeddings = {name: child for name, child in module.named_modules() if isinstance(child, nn.Embedding)}
    whole = {id(child.weight) for child in embeddings.values() if not can_split_vocabulary(child)}
    kept, tied = dict(rules), set()
    for name, style in styles_by_name(module, rules).items():
        weight = id(getattr(module.get_submodule(name), "weight", None))
        if weight in whole:
            kept = {pattern: own for pattern, own in kept.items() if not matches(pattern, name)}
        elif style == "column_gathered":
            tied.add(weight)
    return kept | {name: "vocab" for name, child in embeddings.items() if id(child.weight) in tied}


def can_split_vocabulary(module: nn.Module) -> bool:
    """Whether it is a plain Embedding: a subclass may compute anything, the two options read all rows."""
    return type(module).forward is nn.Embedding.forward and not (module.max_norm or module.scale_grad_by_freq)


def _stream_norms(module: nn.Module, rules: Mapping[str, str]) -> dict[str, str]:
    """Name the norms of pre-norm blocks (Llama's names), if they are all that the plan leaves out of a block."""
    blocks = {pattern.partition("*")[0] + "*" for pattern in rules if "*" in pattern}
    found: dict[str, str] = {}
    for block in blocks:
        left = {_general(name).removeprefix(f"{block}.") for name in _without_rule(module, rules, [block])}
        if left and left <= {"input_layernorm", "post_attention_layernorm"}:
            found.update({f"{block}.{norm}": "sequence" for norm in sorted(left)})
    return found


def _without_rule(module: nn.Module, rules: Mapping[str, str], blocks: Iterable[str]) -> list[str]:
    """Names of modules inside blocks that own parameters and that no rule covers."""
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
    """Refuse a style on a module whose arithmetic it does not know."""
    kind = type(module)
    if style in _LINEAR and not is_plain_linear(module):
        raise JobError(
            f"tensor rule {style!r} names {name}, a {kind.__name__}",
            code="job.tensor-rule-not-linear",
            fix="name plain Linear modules only",
        )
    if style == "vocab" and not can_split_vocabulary(module):
        raise JobError(
            f"tensor rule 'vocab' names {name}, which is not a plain Embedding without max_norm and scale_grad_by_freq",
            code="job.tensor-rule-not-embedding",
            fix="leave it out of the tensor rules",
        )


def _counts(module: nn.Module, styles: Mapping[str, str]) -> Iterator[tuple[str, int]]:
    """What a degree must divide, as text and as a number; heads first, since they are clearer than widths."""
    for name, style in styles.items():
        if style == "column" and "att" in name.lower():
            yield from _heads(module, name)
        elif style == "heads":
            yield from ((f"{name}.{own}, which is {n}", n) for own, n in _own_counts(module.get_submodule(name)))
    for name, style in styles.items():
        # A head or a vocabulary may be split unevenly: GPT-2's 50,257 tokens divide by nothing useful.
        if style in {"column", "row", "row_split"}:
            child: Any = module.get_submodule(name)
            size = int(child.weight.shape[split_dim(child, style, "weight") or 0])
            yield f"the {size} {'outputs' if style == 'column' else 'inputs'} of {name}", size


def _heads(module: nn.Module, name: str) -> Iterator[tuple[str, int]]:
    parent = module.get_submodule(name.rpartition(".")[0])
    config = getattr(parent, "config", None) or getattr(module, "config", None)
    for holder in (config, parent):
        for attribute in _HEADS:
            count = getattr(holder, attribute, None)
            if isinstance(count, int) and not isinstance(count, bool):
                kind = "key and value heads" if "kv" in attribute or "key" in attribute else "heads"
                yield f"the {count} {kind} of {_general(name)}", count


def _valid_degrees(degree: int, counts: Iterable[int]) -> str:
    largest = math.gcd(*counts)
    valid = [number for number in range(1, largest + 1) if largest % number == 0]
    near = sorted(sorted(valid, key=lambda number: abs(number - degree))[:4])
    return f"use tp {', '.join(map(str, near[:-1]))} or {near[-1]}" if len(near) > 1 else f"use tp {near[0]}"


def _check_ties(module: nn.Module, styles: Mapping[str, str]) -> None:
    """Refuse rules that would split one shared parameter in two ways."""
    seen: dict[int, tuple[str, int | None]] = {}
    for name, child in module.named_modules():
        for kind, parameter in child.named_parameters(recurse=False):
            split = split_dim(child, styles.get(name), kind)
            first, before = seen.setdefault(id(parameter), (f"{name}.{kind}", split))
            if split != before:
                raise JobError(
                    f"{first} is also {name}.{kind}, and the tensor rules split the two differently",
                    code="job.tensor-rules-tied",
                    fix='split both over the vocabulary ("vocab" and "column_gathered"), or neither',
                )


def _check_sequence(module: nn.Module, rules: Mapping[str, str], styles: Mapping[str, str]) -> None:
    """Refuse sequence parallelism where the rules do not cover a block."""
    fix = "set sequence_parallel = false, or complete Job(tensor_rules=...)"
    blocks = block_patterns(rules)
    outside = [name for name, style in styles.items() if style == "sequence" and not within(blocks, name)]
    if not blocks or outside:
        where = f"{outside[0]}, which is in no repeated block" if outside else "no norm of a repeated block"
        raise PlanError(
            f"sequence parallelism: the tensor rules have 'sequence' for {where}",
            code="job.tensor-rule-sequence",
            fix=fix,
        )
    left = _without_rule(module, rules, blocks)
    if left:
        raise PlanError(
            f"sequence parallelism: no tensor rule covers {left[0]}", code="job.tensor-rule-missing", fix=fix
        )
