"""Proposing tensor rules for a model that brings none: by how activations flow between its modules, not by names."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from shardwise.errors import InputError, JobError
from shardwise.parallel.blocks import find_blocks
from shardwise.parallel.module_flow import OUTPUT, Stand
from shardwise.parallel.tensor_rules import (
    can_cut_vocabulary,
    check_tensor,
    counts_heads,
    find_rules,
    is_plain_linear,
    matches,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from torch import nn

Rules = dict[str, str]


@dataclass(frozen=True, kw_only=True)
class Cut:
    """One part of a model that can be cut, and the ways to do so, best first."""

    name: str
    """Pattern of the module that ends it."""
    ways: tuple[Rules, ...]


def propose_rules(
    module: nn.Module, example: Callable[[nn.Module], Any] | None = None, *, degree: int = 2
) -> dict[str, str]:
    """Return name pattern -> style for a model without rules; empty if nothing in it can be cut.

    `example` runs a module on a small batch on the CPU (lambda model: model(**batch)); None takes the dummy inputs that
    models of transformers bring. The module is left alone and may be on the meta device, its buffers real. What is
    returned fits tp=degree and keeps every activation of a run; only a parity run shows that gradients are kept, too.
    """
    return merged(cut.ways[0] for cut in propose_cuts(module, example, degree=degree))


def propose_cuts(
    module: nn.Module, example: Callable[[nn.Module], Any] | None = None, *, degree: int = 2
) -> tuple[Cut, ...]:
    """Return the parts that can be cut, each with its ways; as `propose_rules`, which takes the best of each."""
    stand = Stand(module, example or _dummy_run(module))
    pairs = _find_pairs(stand)
    cuts = [Cut(name=pair.row, ways=tuple(_ways(stand, pair, degree))) for pair in pairs]
    cuts.append(Cut(name="vocabulary", ways=tuple(_vocabulary(stand, pairs))))
    fitting = [Cut(name=cut.name, ways=tuple(way for way in cut.ways if _fits(module, way, degree))) for cut in cuts]
    return tuple(cut for cut in fitting if cut.ways)


def merged(ways: Iterable[Rules]) -> Rules:
    """Return all rules as one."""
    return {pattern: style for way in ways for pattern, style in way.items()}


@dataclass(frozen=True, kw_only=True)
class _Pair:
    """Patterns of linear modules whose outputs meet in one row module."""

    columns: tuple[str, ...]
    row: str
    closed: bool
    """Nothing else reads what the columns hand out, and nothing else enters the row."""


def _find_pairs(stand: Stand) -> list[_Pair]:
    """Pair linears, in the order in which they ran; none is in two pairs, and no pair reaches over two blocks."""
    linears = stand.linears()
    blocks = list(find_blocks(stand.model))
    found: dict[str, _Pair | None] = {}
    roles: dict[str, str] = {}
    for name in linears:
        sources = stand.flow.sources[name]
        above = [source for source in linears if source in sources]
        if not above or len({_block_of(each, blocks) for each in (*above, name)}) > 1:
            continue
        columns = tuple(dict.fromkeys(pattern_of(stand.model, each) for each in above))
        row = pattern_of(stand.model, name)
        if roles.get(row) == "column" or any(roles.get(column) == "row" for column in columns) or row in columns:
            continue
        roles |= dict.fromkeys(columns, "column") | {row: "row"}
        closed = sources <= linears.keys() and all(stand.flow.readers(each) == {name} for each in above)
        before = found.get(row, _Pair(columns=columns, row=row, closed=closed))
        alike = before is not None and before.columns == columns
        found[row] = _Pair(columns=columns, row=row, closed=closed and before.closed) if before and alike else None
    return [pair for pair in found.values() if pair is not None]


def _ways(stand: Stand, pair: _Pair, degree: int) -> Iterator[Rules]:
    """Yield rules for one pair: cut all the way if that was seen to work, else weights cut and activations whole."""
    columns = [name for name in stand.linears() if any(matches(pattern, name) for pattern in pair.columns)]
    rows = [name for name in stand.linears() if matches(pair.row, name)]
    rules = dict.fromkeys(pair.columns, "column") | {pair.row: "row"}
    if pair.closed:
        owner = _common_parent(pair.columns)
        owners = [name for name, child in stand.model.named_modules() if matches(owner, name) and counts_heads(child)]
        if stand.survives(columns, rows, degree):
            yield rules
        elif owners and stand.survives(columns, rows, degree, heads=owners):
            yield rules | {owner: "heads"}
    yield dict.fromkeys(pair.columns, "column_gathered") | {pair.row: "row_split"}


def _vocabulary(stand: Stand, pairs: list[_Pair]) -> Iterator[Rules]:
    """Yield rules for the largest embedding and the head: those outside blocks, whose output the model returns."""
    blocks = find_blocks(stand.model)
    taken = {pattern for pair in pairs for pattern in (*pair.columns, pair.row)}
    outside: dict[str, Any] = {
        name: stand.model.get_submodule(name)
        for name in stand.flow.sources
        if name != OUTPUT and not _block_of(name, blocks) and name not in taken
    }
    heads = {
        name: child
        for name, child in outside.items()
        if is_plain_linear(child)
        and stand.flow.readers(name) == {OUTPUT}
        and child.weight.shape[0] >= child.weight.shape[1]
    }
    vocab = dict.fromkeys(_tables(stand.model, outside, heads), "vocab")
    rules = vocab | dict.fromkeys(heads, "column_gathered")
    if rules:
        yield rules
    if vocab and heads:
        yield vocab
        yield dict.fromkeys(heads, "column_gathered")


def _tables(model: nn.Module, outside: dict[str, Any], heads: dict[str, Any]) -> list[str]:
    """Names of the embeddings to cut: those tied to a head, else the largest, with all that share its weight."""
    # Positions are as a rule few and read one after the other: to cut them saves nothing.
    tables = [child for name, child in outside.items() if can_cut_vocabulary(child) and "posit" not in name]
    tied = {id(head.weight) for head in heads.values()} & {id(table.weight) for table in tables}
    largest = {id(table.weight) for table in sorted(tables, key=lambda table: table.num_embeddings)[-1:]}
    named = [(name, child) for name, child in model.named_modules() if can_cut_vocabulary(child)]
    return [name for name, child in named if id(child.weight) in (tied or largest)]


def _fits(module: nn.Module, rules: Rules, degree: int) -> bool:
    try:
        check_tensor(module, degree, find_rules(module, rules))
    except InputError:
        return False
    return True


def pattern_of(model: nn.Module, name: str) -> str:
    """Return a name with a star for every number that counts modules with parts of their own, such as blocks."""
    parts = name.split(".")
    for depth, part in enumerate(parts, 1):
        child = model.get_submodule(".".join(name.split(".")[:depth]))
        if part.isdigit() and next(child.children(), None) is not None:
            parts[depth - 1] = "*"
    return ".".join(parts)


def _block_of(name: str, blocks: Iterable[str]) -> str:
    return next((block for block in blocks if name.startswith(f"{block}.")), "")


def _common_parent(patterns: Iterable[str]) -> str:
    """Return the pattern of the module that holds all of them."""
    shared: list[str] = []
    for level in zip(*(pattern.split(".")[:-1] for pattern in patterns), strict=False):
        if len(set(level)) > 1:
            break
        shared.append(level[0])
    return ".".join(shared)


def _dummy_run(module: nn.Module) -> Callable[[nn.Module], Any]:
    dummy = getattr(module, "dummy_inputs", None)
    if not isinstance(dummy, dict):
        raise JobError(
            f"{type(module).__name__} brings no inputs to run it on",
            code="model.no-example-inputs",
            fix="give an example: lambda model: model(x)",
        )
    return lambda model: model(**dummy)
