"""Propose tensor-parallel rules for a model without rules, from the flow of activations between its modules."""

from __future__ import annotations

import copy
from collections import Counter
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from shardwise.errors import InputError, JobError
from shardwise.parallel.recompute import block_of, find_blocks
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
    """A pair of linear modules or an embedding that can be sharded, with the possible rules, best first."""

    name: str
    """Name pattern of the row-parallel module."""
    options: tuple[Rules, ...]


def propose_rules(
    module: nn.Module, example: Callable[[nn.Module], Any] | None = None, *, degree: int = 2
) -> dict[str, str]:
    """Return proposed tensor rules (name pattern -> style) for a model; empty if no module can be sharded.

    `example` runs a module on a small batch on the CPU (lambda model: model(**batch)); None uses the dummy inputs of
    transformers models. The module is not changed; its parameters may be on the meta device, but not its buffers. The
    rules fit tp=degree and preserve all activations of the run. Only a parity run shows that they preserve gradients.
    """
    return merged(split.options[0] for split in propose_splits(module, example, degree=degree))


def propose_splits(
    module: nn.Module, example: Callable[[nn.Module], Any] | None = None, *, degree: int = 2
) -> tuple[ProposedSplit, ...]:
    """Return the modules that can be sharded, each with its possible rules; see `propose_rules`."""
    traced = FlowTrace(module, example or _dummy_run(module))
    pairs = _find_pairs(traced)
    candidates = [(pair.row, list(_pair_rules(traced, pair, degree))) for pair in pairs]
    candidates.append(("vocabulary", list(_vocabulary_rules(traced, pairs))))
    fitting = []
    for name, options in candidates:
        valid = tuple(rules for rules in options if _fits(module, rules, degree))
        if valid:
            fitting.append(ProposedSplit(name=name, options=valid))
    return tuple(fitting)


def merged(rules: Iterable[Rules]) -> Rules:
    """Return the union of several sets of rules."""
    union: Rules = {}
    for each in rules:
        union |= each
    return union


@dataclass(frozen=True, kw_only=True)
class _Pair:
    """Column-parallel modules and the row-parallel module that reads their outputs, as name patterns."""

    columns: tuple[str, ...]
    row: str
    closed: bool
    """Whether the row module is the only reader of the column outputs and has no other input."""


def _find_pairs(traced: FlowTrace) -> list[_Pair]:
    """Pair linear modules in execution order; a module is in one pair at most, and pairs do not cross blocks."""
    linears = traced.linears()
    blocks = list(find_blocks(traced.model))
    found: dict[str, _Pair | None] = {}
    roles: dict[str, str] = {}
    for name in linears:
        sources = traced.flow.sources[name]
        above = [source for source in linears if source in sources]
        in_blocks = {block_of(each, blocks) for each in (*above, name)}
        if not above or len(in_blocks) > 1:
            continue
        columns = tuple(dict.fromkeys(pattern_of(traced.model, each) for each in above))
        row = pattern_of(traced.model, name)
        column_roles = {roles.get(column) for column in columns}
        if roles.get(row) == "column" or "row" in column_roles or row in columns:
            continue
        roles |= dict.fromkeys(columns, "column") | {row: "row"}
        closed = sources <= linears.keys() and all(traced.flow.consumers(each) == {name} for each in above)
        pair = _Pair(columns=columns, row=row, closed=closed)
        before = found.setdefault(row, pair)
        if before is None or before.columns != columns:
            found[row] = None  # repeated blocks differ
        elif not closed:
            found[row] = pair
    return list(filter(None, found.values()))


def _pair_rules(traced: FlowTrace, pair: _Pair, degree: int) -> Iterator[Rules]:
    """Yield rules for one pair: with sharded activations if a trial run is exact, then with sharded weights only."""
    columns = [name for name in traced.linears() if matches_any(pair.columns, name)]
    rows = [name for name in traced.linears() if matches(pair.row, name)]
    rules = dict.fromkeys(pair.columns, "column") | {pair.row: "row"}
    if pair.closed:
        owner = _common_parent(pair.columns)
        heads = []
        for name, child in traced.model.named_modules():
            if matches(owner, name) and counts_heads(child):
                heads.append(name)
        if traced.survives(columns, rows, degree):
            yield rules
        elif heads and traced.survives(columns, rows, degree, heads=heads):
            yield rules | {owner: "heads"}
    yield dict.fromkeys(pair.columns, "column_gathered") | {pair.row: "row_split"}


def _vocabulary_rules(traced: FlowTrace, pairs: list[_Pair]) -> Iterator[Rules]:
    """Yield rules for the largest embedding and the output head, which are outside the blocks."""
    blocks = find_blocks(traced.model)
    taken: set[str] = set()
    for pair in pairs:
        taken.update((*pair.columns, pair.row))
    outside: dict[str, Any] = {}
    heads: dict[str, Any] = {}
    for name in traced.flow.sources:
        if name == OUTPUT or name in taken or block_of(name, blocks):
            continue
        child: Any = traced.model.get_submodule(name)
        outside[name] = child
        if is_plain_linear(child) and traced.flow.consumers(name) == {OUTPUT}:
            num_outputs, num_inputs = child.weight.shape
            if num_outputs >= num_inputs:
                heads[name] = child
    vocab = dict.fromkeys(_tables(traced.model, outside, heads), "vocab")
    rules = vocab | dict.fromkeys(heads, "column_gathered")
    if rules:
        yield rules
    if vocab and heads:
        yield vocab
        yield dict.fromkeys(heads, "column_gathered")


def _tables(model: nn.Module, outside: dict[str, Any], heads: dict[str, Any]) -> list[str]:
    """Return the names of embeddings to shard: embeddings tied to a head, or the largest one with its ties."""
    # Position embeddings are small, and a batch reads all their rows, so sharding them saves nothing.
    tables = [child for name, child in outside.items() if can_split_vocabulary(child) and "posit" not in name]
    if not tables:
        return []
    chosen = {id(head.weight) for head in heads.values()} & {id(table.weight) for table in tables}
    if not chosen:
        largest = max(reversed(tables), key=lambda table: table.num_embeddings)
        chosen = {id(largest.weight)}
    found = []
    for name, child in model.named_modules():
        if can_split_vocabulary(child) and id(child.weight) in chosen:
            found.append(name)
    return found


def _fits(module: nn.Module, rules: Rules, degree: int) -> bool:
    try:
        check_tensor(module, degree, find_rules(module, rules))
    except InputError:
        return False
    return True


def pattern_of(model: nn.Module, name: str) -> str:
    """Return a module name with a star for each index of a module that has submodules, such as a block."""
    components = name.split(".")
    for depth, component in enumerate(components, 1):
        child = model.get_submodule(".".join(name.split(".")[:depth]))
        if component.isdigit() and next(child.children(), None) is not None:
            components[depth - 1] = "*"
    return ".".join(components)


def _common_parent(patterns: Iterable[str]) -> str:
    """Return the pattern of the innermost module that contains all `patterns`."""
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
            f"{type(module).__name__} must have dummy_inputs if no example is passed",
            code="model.no-example-inputs",
            fix="pass an example, such as lambda model: model(x)",
        )
    return lambda model: model(**dummy)


# The flow of activations between the modules of a model, traced in one run of a copy, and trial runs with sharding.


OUTPUT = "(output)"
"""The model's output, as a consumer of a module's output."""
PARAMETER = "(parameter)"
"""A source of a module's input: a parameter that is used outside the module that owns it."""

_CLOSE = 1e-3
"""Tolerance relative to the largest value; reordered sums differ by 1e-6, wrong values by about 1."""


@dataclass(frozen=True, kw_only=True)
class Flow:
    """The activation flow of a model: which modules read the outputs of which modules with parameters."""

    sources: Mapping[str, frozenset[str]]
    """Module name -> names of the modules whose outputs reach its input, in execution order."""

    def consumers(self, name: str) -> frozenset[str]:
        """Return the names of the modules that read a module's output."""
        return frozenset(consumer for consumer, sources in self.sources.items() if name in sources)


class FlowTrace:
    """A copy of a model with random weights that runs on an example and records its activation flow."""

    def __init__(self, module: nn.Module, example: Callable[[nn.Module], Any]) -> None:
        self.model = _random_copy(module).eval()
        self._example = example
        self._inputs: dict[str, list[Tensor]] = {}
        self.flow = self._trace()

    def linears(self) -> dict[str, nn.Module]:
        """Return the executed linear modules that a rule may shard, by name, in execution order."""
        modules = dict(self.model.named_modules())
        found = {}
        for name in self.flow.sources:
            child = modules.get(name)
            if child is not None and is_plain_linear(child):
                found[name] = child
        return found

    def survives(self, columns: Iterable[str], rows: Iterable[str], degree: int, *, heads: Iterable[str] = ()) -> bool:
        """Return whether each row module receives its shard of the input if the column modules return shards.

        `heads` are modules whose number of heads is divided by `degree`.
        """
        columns, rows, heads = list(columns), list(rows), list(heads)
        return all(self._survives(columns, rows, degree, rank, heads) for rank in range(degree))

    def _survives(self, columns: list[str], rows: list[str], degree: int, rank: int, heads: list[str]) -> bool:
        split = _TrialRun(self._inputs, degree, rank)
        modules = {name: self.model.get_submodule(name) for name in (*columns, *rows, *heads)}
        hooks = [modules[name].register_forward_hook(split.return_shard) for name in columns]
        for name in rows:
            checker = split.checker(name)
            hooks.append(modules[name].register_forward_pre_hook(checker, with_kwargs=True))
        kept = {name: dict(vars(modules[name])) for name in heads}
        try:
            for name in heads:
                divide_heads(modules[name], degree)
            self._example(self.model)
        except Exception:  # noqa: BLE001 - a model may raise any exception on an unexpected shape
            return False
        finally:
            for hook in hooks:
                hook.remove()
            for name, attributes in kept.items():
                vars(modules[name]).update(attributes)
        return split.is_exact and all(split.turns[name] == len(self._inputs[name]) for name in rows)

    def _trace(self) -> Flow:
        """Run the model with every module's output detached, and record which outputs reach which inputs."""
        owners = {id(parameter): PARAMETER for parameter in self.model.parameters()}
        sources: dict[str, set[str]] = {}
        alive: list[Any] = []  # ids stay valid while the tensors exist

        def sever(name: str, args: Any, kwargs: Any, output: Any) -> Any:
            inputs = _floats((args, kwargs))
            sources.setdefault(name, set()).update(_arriving(inputs, owners))
            self._inputs.setdefault(name, []).extend(tensor.detach().clone() for tensor in inputs[:1])

            def split(tensor: Tensor) -> Tensor:
                if not tensor.is_floating_point():
                    return tensor
                leaf = tensor.detach().requires_grad_()
                owners[id(leaf)] = name
                alive.append(leaf)
                return leaf.clone()  # models may change their inputs in place

            return tree_map_only(Tensor, split, output)

        with _hooked(self.model, sever), torch.enable_grad():
            try:
                output = self._example(self.model)
            except Exception as error:
                raise JobError(
                    f"{type(self.model).__name__} failed in a trial run with random weights"
                    f" ({type(error).__name__}: {error})",
                    code="model.trial-run-failed",
                    fix="set Job(tensor_rules={...}) manually",
                ) from error
        sources[OUTPUT] = _arriving(_floats(output), owners)
        return Flow(sources={name: frozenset(found) for name, found in sources.items()})


@dataclass
class _TrialRun:
    """A forward pass in which column modules return shards; row modules check them and use the full input."""

    inputs: Mapping[str, list[Tensor]]
    degree: int
    rank: int
    is_exact: bool = True
    turns: Counter[str] = field(default_factory=Counter)
    """Number of calls of each row module."""

    def return_shard(self, _module: nn.Module, _args: Any, output: Tensor) -> Tensor:
        return output.chunk(self.degree, -1)[self.rank].clone()  # models may change their inputs in place

    def checker(self, name: str) -> Callable[..., Any]:
        def check(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            full = self.inputs[name][self.turns[name]]
            self.turns[name] += 1
            wanted, (found,) = full.chunk(self.degree, -1)[self.rank], _floats((args, kwargs))
            same = found.shape == wanted.shape and bool((found - wanted).abs().max() <= _CLOSE * wanted.abs().max())
            self.is_exact = self.is_exact and same
            return (full,), {}

        return check


def _random_copy(module: nn.Module) -> nn.Module:
    """Copy a module with random parameters on the CPU; shared parameters stay shared."""
    generator = torch.Generator().manual_seed(0)
    fresh = {}
    for parameter in module.parameters():
        value = torch.randn(parameter.shape, generator=generator) / max(1, *parameter.shape[-1:]) ** 0.5
        if parameter.ndim == 1:  # scales of norms, and biases
            value = 1 + value / 4
        fresh[id(parameter)] = nn.Parameter(value.to(parameter.dtype))
    return copy.deepcopy(module, fresh)


@contextmanager
def _hooked(model: nn.Module, hook: Callable[[str, Any, Any, Any], Any]) -> Iterator[None]:
    """Call `hook(name, args, kwargs, output)` after every module that has parameters and no submodules."""
    hooks = []
    for name, child in model.named_modules():
        if next(child.children(), None) is not None or next(child.parameters(recurse=False), None) is None:
            continue

        def after(_: Any, args: Any, kwargs: Any, output: Any, name: str = name) -> Any:
            return hook(name, args, kwargs, output)

        hooks.append(child.register_forward_hook(after, with_kwargs=True))
    try:
        yield
    finally:
        for each in hooks:
            each.remove()


def _floats(values: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor) and leaf.is_floating_point()]


def _arriving(tensors: Iterable[Tensor], owners: Mapping[int, str]) -> set[str]:
    """Return the modules whose outputs are leaves of the autograd graph of `tensors`."""
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
