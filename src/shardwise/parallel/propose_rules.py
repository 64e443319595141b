"""Proposing tensor rules for a model that brings none: by how activations flow between its modules, not by names."""

from __future__ import annotations

import copy
from collections import Counter
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from shardwise.errors import InputError, JobError
from shardwise.parallel.recompute import find_blocks
from shardwise.parallel.tensor_rules import (
    can_split_vocabulary,
    check_tensor,
    counts_heads,
    divide_heads,
    find_rules,
    is_plain_linear,
    matches,
    matches_any,
)
from shardwise.torch_private.dispatch import tree_leaves, tree_map_only

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping


Rules = dict[str, str]


@dataclass(frozen=True, kw_only=True)
class ProposedSplit:
    """One pair or table of a model that can be split, and the ways to do so, best first."""

    name: str
    """Pattern of the module that ends it."""
    ways: tuple[Rules, ...]


def propose_rules(
    module: nn.Module, example: Callable[[nn.Module], Any] | None = None, *, degree: int = 2
) -> dict[str, str]:
    """Return name pattern -> style for a model without rules; empty if nothing in it can be split.

    `example` runs a module on a small batch on the CPU (lambda model: model(**batch)); None takes the dummy inputs that
    models of transformers bring. The module is left alone and may be on the meta device, its buffers real. What is
    returned fits tp=degree and keeps every activation of a run; only a parity run shows that gradients are kept, too.
    """
    return merged(split.ways[0] for split in propose_splits(module, example, degree=degree))


def propose_splits(
    module: nn.Module, example: Callable[[nn.Module], Any] | None = None, *, degree: int = 2
) -> tuple[ProposedSplit, ...]:
    """Return what can be split, each with its ways; as `propose_rules`, which takes the best of each."""
    traced = FlowTrace(module, example or _dummy_run(module))
    pairs = _find_pairs(traced)
    splits = [ProposedSplit(name=pair.row, ways=tuple(_ways(traced, pair, degree))) for pair in pairs]
    splits.append(ProposedSplit(name="vocabulary", ways=tuple(_vocabulary(traced, pairs))))
    fitting = []
    for split in splits:
        ways = tuple(way for way in split.ways if _fits(module, way, degree))
        if ways:
            fitting.append(ProposedSplit(name=split.name, ways=ways))
    return tuple(fitting)


def merged(ways: Iterable[Rules]) -> Rules:
    """Return all rules as one."""
    return {pattern: style for way in ways for pattern, style in way.items()}


@dataclass(frozen=True, kw_only=True)
class _Pair:
    """Patterns of linear modules whose outputs one row module reads."""

    columns: tuple[str, ...]
    row: str
    closed: bool
    """Nothing else reads what the columns hand out, and nothing else enters the row."""


def _find_pairs(traced: FlowTrace) -> list[_Pair]:
    """Pair linears, in the order in which they ran; none is in two pairs, and no pair reaches over two blocks."""
    linears = traced.linears()
    blocks = list(find_blocks(traced.model))
    found: dict[str, _Pair | None] = {}
    roles: dict[str, str] = {}
    for name in linears:
        sources = traced.flow.sources[name]
        above = [source for source in linears if source in sources]
        if not above or len({_block_of(each, blocks) for each in (*above, name)}) > 1:
            continue
        columns = tuple(dict.fromkeys(pattern_of(traced.model, each) for each in above))
        row = pattern_of(traced.model, name)
        if roles.get(row) == "column" or any(roles.get(column) == "row" for column in columns) or row in columns:
            continue
        roles |= dict.fromkeys(columns, "column") | {row: "row"}
        closed = sources <= linears.keys() and all(traced.flow.consumers(each) == {name} for each in above)
        before = found.get(row, _Pair(columns=columns, row=row, closed=closed))
        alike = before is not None and before.columns == columns
        found[row] = _Pair(columns=columns, row=row, closed=closed and before.closed) if before and alike else None
    return [pair for pair in found.values() if pair is not None]


def _ways(traced: FlowTrace, pair: _Pair, degree: int) -> Iterator[Rules]:
    """Yield rules for one pair: activations split too if that was seen to work, else weights alone."""
    columns = [name for name in traced.linears() if matches_any(pair.columns, name)]
    rows = [name for name in traced.linears() if matches(pair.row, name)]
    rules = dict.fromkeys(pair.columns, "column") | {pair.row: "row"}
    if pair.closed:
        owner = _common_parent(pair.columns)
        owners = [name for name, child in traced.model.named_modules() if matches(owner, name) and counts_heads(child)]
        if traced.survives(columns, rows, degree):
            yield rules
        elif owners and traced.survives(columns, rows, degree, heads=owners):
            yield rules | {owner: "heads"}
    yield dict.fromkeys(pair.columns, "column_gathered") | {pair.row: "row_split"}


def _vocabulary(traced: FlowTrace, pairs: list[_Pair]) -> Iterator[Rules]:
    """Yield rules for the largest embedding and the head: those outside blocks, whose output the model returns."""
    blocks = find_blocks(traced.model)
    taken = {pattern for pair in pairs for pattern in (*pair.columns, pair.row)}
    outside: dict[str, Any] = {
        name: traced.model.get_submodule(name)
        for name in traced.flow.sources
        if name != OUTPUT and not _block_of(name, blocks) and name not in taken
    }
    heads = {
        name: child
        for name, child in outside.items()
        if is_plain_linear(child)
        and traced.flow.consumers(name) == {OUTPUT}
        and child.weight.shape[0] >= child.weight.shape[1]
    }
    vocab = dict.fromkeys(_tables(traced.model, outside, heads), "vocab")
    rules = vocab | dict.fromkeys(heads, "column_gathered")
    if rules:
        yield rules
    if vocab and heads:
        yield vocab
        yield dict.fromkeys(heads, "column_gathered")


def _tables(model: nn.Module, outside: dict[str, Any], heads: dict[str, Any]) -> list[str]:
    """Names of the embeddings to split: those tied to a head, else the largest, with all that share its weight."""
    # Positions are as a rule few and read one after the other: to split them saves nothing.
    tables = [child for name, child in outside.items() if can_split_vocabulary(child) and "posit" not in name]
    tied = {id(head.weight) for head in heads.values()} & {id(table.weight) for table in tables}
    largest = {id(table.weight) for table in sorted(tables, key=lambda table: table.num_embeddings)[-1:]}
    named = [(name, child) for name, child in model.named_modules() if can_split_vocabulary(child)]
    return [name for name, child in named if id(child.weight) in (tied or largest)]


def _fits(module: nn.Module, rules: Rules, degree: int) -> bool:
    try:
        check_tensor(module, degree, find_rules(module, rules))
    except InputError:
        return False
    return True


def pattern_of(model: nn.Module, name: str) -> str:
    """Return a name with a star for every number that counts modules with submodules, such as blocks."""
    components = name.split(".")
    for depth, component in enumerate(components, 1):
        child = model.get_submodule(".".join(name.split(".")[:depth]))
        if component.isdigit() and next(child.children(), None) is not None:
            components[depth - 1] = "*"
    return ".".join(components)


def _block_of(name: str, blocks: Iterable[str]) -> str:
    return next((block for block in blocks if name.startswith(f"{block}.")), "")


def _common_parent(patterns: Iterable[str]) -> str:
    """Return the pattern of the module that contains all of them."""
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


# How activations flow between the modules of a model, seen in one run of a copy, and a rehearsal of splitting them.


OUTPUT = "(output)"
"""What the model returns, among the consumers of a module."""
PARAMETER = "(parameter)"
"""Stands for a parameter that is used outside the module that owns it alone, among the sources of a module."""

_CLOSE = 1e-3
"""Relative to the largest value: a wrong layout is off by the values themselves, another order of summation by 1e-6."""


@dataclass(frozen=True, kw_only=True)
class Flow:
    """Which modules' outputs each module reads, with no other module that has parameters in between."""

    sources: Mapping[str, frozenset[str]]
    """Module name -> names of those whose outputs reach its input, in the order in which modules ran."""

    def consumers(self, name: str) -> frozenset[str]:
        """Names of the modules that read a module's output."""
        return frozenset(consumer for consumer, sources in self.sources.items() if name in sources)


class FlowTrace:
    """A copy of a model with random weights, to run on an example as often as wanted; the model is left alone."""

    def __init__(self, module: nn.Module, example: Callable[[nn.Module], Any]) -> None:
        self.model = _random_copy(module).eval()
        self._example = example
        self._given: dict[str, list[Tensor]] = {}
        self.flow = self._trace()

    def linears(self) -> dict[str, nn.Module]:
        """Modules that ran and that a rule may split, by name, in the order in which they ran."""
        modules = dict(self.model.named_modules())
        ran = [(name, modules[name]) for name in self.flow.sources if name in modules]
        return {name: child for name, child in ran if is_plain_linear(child)}

    def survives(self, columns: Iterable[str], rows: Iterable[str], degree: int, *, heads: Iterable[str] = ()) -> bool:
        """Whether each row module gets its shard of what it got before, when the column modules return theirs.

        `heads` are modules that count the heads of one rank only.
        """
        columns, rows, heads = list(columns), list(rows), list(heads)
        return all(self._survives(columns, rows, degree, rank, heads) for rank in range(degree))

    def _survives(self, columns: list[str], rows: list[str], degree: int, rank: int, heads: list[str]) -> bool:
        split = _Rehearsal(self._given, degree, rank)
        modules = {name: self.model.get_submodule(name) for name in (*columns, *rows, *heads)}
        hooks = [modules[name].register_forward_hook(split.return_shard) for name in columns]
        hooks += [modules[name].register_forward_pre_hook(split.checker(name), with_kwargs=True) for name in rows]
        kept = {name: dict(vars(modules[name])) for name in heads}
        try:
            for name in heads:
                divide_heads(modules[name], degree)
            self._example(self.model)
        except Exception:  # noqa: BLE001 - whatever a model raises on a shape that it does not expect
            return False
        finally:
            for hook in hooks:
                hook.remove()
            for name, attributes in kept.items():
                vars(modules[name]).update(attributes)
        return split.is_exact and all(split.turns[name] == len(self._given[name]) for name in rows)

    def _trace(self) -> Flow:
        """Run the model with every module's output severed from what made it, and see where outputs arrive."""
        owners = {id(parameter): PARAMETER for parameter in self.model.parameters()}
        sources: dict[str, set[str]] = {}
        alive: list[Any] = []  # an id is only good while its tensor lives

        def sever(name: str, args: Any, kwargs: Any, output: Any) -> Any:
            given = _floats((args, kwargs))
            sources.setdefault(name, set()).update(_arriving(given, owners))
            self._given.setdefault(name, []).extend(tensor.detach().clone() for tensor in given[:1])

            def split(tensor: Tensor) -> Tensor:
                if not tensor.is_floating_point():
                    return tensor
                leaf = tensor.detach().requires_grad_()
                owners[id(leaf)] = name
                alive.append(leaf)
                return leaf.clone()  # models may write into what they get

            return tree_map_only(Tensor, split, output)

        with _hooked(self.model, sever), torch.enable_grad():
            try:
                output = self._example(self.model)
            except Exception as error:
                raise JobError(
                    f"{type(self.model).__name__} with random weights cannot run one batch"
                    f" ({type(error).__name__}: {error})",
                    code="model.trial-run-failed",
                    fix="write Job(tensor_rules={...}) by hand",
                ) from error
        sources[OUTPUT] = _arriving(_floats(output), owners)
        return Flow(sources={name: frozenset(found) for name, found in sources.items()})


@dataclass
class _Rehearsal:
    """One run in which column modules return one shard; rows check what arrives and continue with the whole."""

    given: Mapping[str, list[Tensor]]
    degree: int
    rank: int
    is_exact: bool = True
    turns: Counter[str] = field(default_factory=Counter)
    """How often each row module ran."""

    def return_shard(self, _module: nn.Module, _args: Any, output: Tensor) -> Tensor:
        return output.chunk(self.degree, -1)[self.rank].clone()  # models may write into what they get

    def checker(self, name: str) -> Callable[..., Any]:
        def check(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            whole = self.given[name][self.turns[name]]
            self.turns[name] += 1
            wanted, (found,) = whole.chunk(self.degree, -1)[self.rank], _floats((args, kwargs))
            same = found.shape == wanted.shape and bool((found - wanted).abs().max() <= _CLOSE * wanted.abs().max())
            self.is_exact = self.is_exact and same
            return (whole,), {}

        return check


def _random_copy(module: nn.Module) -> nn.Module:
    """Copy a module; parameters, also those on the meta device, become random ones on the CPU, shared as before."""
    generator = torch.Generator().manual_seed(0)
    fresh = {}
    for parameter in module.parameters():
        value = torch.randn(parameter.shape, generator=generator) / max(1, *parameter.shape[-1:]) ** 0.5
        if parameter.ndim == 1:  # scales of norms and biases
            value = 1 + value / 4
        fresh[id(parameter)] = nn.Parameter(value.to(parameter.dtype))
    return copy.deepcopy(module, fresh)


@contextmanager
def _hooked(model: nn.Module, hook: Callable[[str, Any, Any, Any], Any]) -> Iterator[None]:
    """Call `hook(name, args, kwargs, output)` after every module that has parameters and no modules of its own."""
    hooks = [
        child.register_forward_hook(
            lambda _, args, kwargs, output, name=name: hook(name, args, kwargs, output), with_kwargs=True
        )
        for name, child in model.named_modules()
        if next(child.children(), None) is None and next(child.parameters(recurse=False), None) is not None
    ]
    try:
        yield
    finally:
        for each in hooks:
            each.remove()


def _floats(values: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor) and leaf.is_floating_point()]


def _arriving(tensors: Iterable[Tensor], owners: Mapping[int, str]) -> set[str]:
    """Walk back from tensors through autograd's graph to the leaves, and name the modules whose outputs they are."""
    found: set[str] = set()
    seen: set[Any] = set()
    waiting = [tensor.grad_fn for tensor in tensors]
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        variable = getattr(node, "variable", None)
        if variable is not None and id(variable) in owners:
            found.add(owners[id(variable)])
        waiting += [following for following, _ in node.next_functions]
    return found
