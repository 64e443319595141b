"""How activations flow between the modules of a model, seen in one run of a copy, and a rehearsal of cutting them."""

from __future__ import annotations

import copy
from collections import Counter
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from shardwise.errors import JobError
from shardwise.parallel.tensor_rules import divide_heads, is_plain_linear

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

OUTPUT = "(output)"
"""Stands for what the model returns, among the readers of a module."""
PARAMETER = "(parameter)"
"""Stands for a parameter that is used outside the module that owns it alone, among the sources of a module."""

_CLOSE = 1e-3
"""Relative to the largest value: a wrong layout is off by the values themselves, another order of summation by 1e-6."""


@dataclass(frozen=True, kw_only=True)
class Flow:
    """Which modules' outputs each module reads, with no other module that has parameters in between."""

    sources: Mapping[str, frozenset[str]]
    """Module name -> names of those whose outputs reach its input, in the order in which modules ran."""

    def readers(self, name: str) -> frozenset[str]:
        """Names of the modules that read a module's output."""
        return frozenset(reader for reader, sources in self.sources.items() if name in sources)


class Stand:
    """A copy of a model with random weights, to run on an example as often as wanted; the model is left alone."""

    def __init__(self, module: nn.Module, example: Callable[[nn.Module], Any]) -> None:
        self.model = _random_copy(module).eval()
        self._example = example
        self._given: dict[str, list[Tensor]] = {}
        self.flow = self._trace()

    def linears(self) -> dict[str, nn.Module]:
        """Modules that ran and that a rule may cut, by name, in the order in which they ran."""
        modules = dict(self.model.named_modules())
        ran = [(name, modules[name]) for name in self.flow.sources if name in modules]
        return {name: child for name, child in ran if is_plain_linear(child)}

    def survives(self, columns: Iterable[str], rows: Iterable[str], degree: int, *, heads: Iterable[str] = ()) -> bool:
        """Whether each row module gets its part of what it got before, when the column modules hand out theirs.

        `heads` are modules that are told to count the heads of one rank only.
        """
        columns, rows, heads = list(columns), list(rows), list(heads)
        return all(self._survives(columns, rows, degree, part, heads) for part in range(degree))

    def _survives(self, columns: list[str], rows: list[str], degree: int, part: int, heads: list[str]) -> bool:
        cut = _Rehearsal(self._given, degree, part)
        modules = {name: self.model.get_submodule(name) for name in (*columns, *rows, *heads)}
        hooks = [modules[name].register_forward_hook(cut.hand_out_part) for name in columns]
        hooks += [modules[name].register_forward_pre_hook(cut.checker(name), with_kwargs=True) for name in rows]
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
        return cut.held and all(cut.turns[name] == len(self._given[name]) for name in rows)

    def _trace(self) -> Flow:
        """Run the model with every module's output severed from what made it, and see where outputs arrive."""
        owners = {id(parameter): PARAMETER for parameter in self.model.parameters()}
        sources: dict[str, set[str]] = {}
        alive: list[Any] = []  # an id is only good while its tensor lives

        def sever(name: str, args: Any, kwargs: Any, output: Any) -> Any:
            given = _floats((args, kwargs))
            sources.setdefault(name, set()).update(_arriving(given, owners))
            self._given.setdefault(name, []).extend(tensor.detach().clone() for tensor in given[:1])

            def cut(tensor: Tensor) -> Tensor:
                if not tensor.is_floating_point():
                    return tensor
                leaf = tensor.detach().requires_grad_()
                owners[id(leaf)] = name
                alive.append(leaf)
                return leaf.clone()  # models may write into what they get

            return tree_map_only(Tensor, cut, output)

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
    """One run in which column modules hand out one part; rows check what arrives and go on with the whole."""

    given: Mapping[str, list[Tensor]]
    degree: int
    part: int
    held: bool = True
    turns: Counter[str] = field(default_factory=Counter)
    """How often each row module ran."""

    def hand_out_part(self, _module: nn.Module, _args: Any, output: Tensor) -> Tensor:
        return output.chunk(self.degree, -1)[self.part].clone()  # models may write into what they get

    def checker(self, name: str) -> Callable[..., Any]:
        def check(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            whole = self.given[name][self.turns[name]]
            self.turns[name] += 1
            wanted, (found,) = whole.chunk(self.degree, -1)[self.part], _floats((args, kwargs))
            same = found.shape == wanted.shape and bool((found - wanted).abs().max() <= _CLOSE * wanted.abs().max())
            self.held = self.held and same
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
    """Walk back from tensors through autograd's graph to the leaves, and say whose outputs they are."""
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
