"""Pipeline stages: every stage runs the user's own forward, with its own layers real and the others skipped.

No model has to be rewritten as a list of stages. A stage calls the whole forward; the layers before its own are skipped
by the gate (`stage_gate`), which hands the neighbour's output to the first own layer and leaves forward behind the last
one by an exception. The invariant: tensors of other stages are NaN or absent, so that using one fails or is refused by
name, and never trains on a wrong value. Schedules are torch.distributed.pipelining's.
"""

from __future__ import annotations

import copy
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn

from shardwise.errors import JobError, nearest
from shardwise.parallel.stage_gate import Gate, Left, Structure, Ties, find_ties, guard_walks, pack, receive, stand_in
from shardwise.parallel.stage_values import StageValues
from shardwise.torch_private.modules import BatchNormBase, own_buffers, own_modules, own_parameters

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from shardwise.plans.pipeline import StageSplit

_RIVAL = 0.25
"""A second list with this share of the largest one's parameters makes the choice between them the user's."""


def find_layers(module: nn.Module, name: str | None = None) -> str:
    """Return the name of the list of repeated blocks that a pipeline is split along; `name` is the user's choice."""
    lists = {
        path: submodule
        for path, submodule in module.named_modules()
        if isinstance(submodule, nn.ModuleList | nn.Sequential)
    }
    if name is not None:
        if name not in lists:
            raise JobError(
                f"Job.layers is {name!r}, which is no ModuleList or Sequential of the model",
                code="job.layers-not-found",
                fix=nearest(name, lists),
            )
        return name
    sizes: dict[str, int] = {}
    for path, blocks in lists.items():
        if _repeats(blocks):
            sizes[path] = sum(parameter.numel() for parameter in blocks.parameters())
    if not any(sizes.values()):
        raise JobError(
            "the model has no list of repeated blocks to split a pipeline along",
            code="support.pipeline-no-blocks",
            fix=f"name one, Job(layers=...): {', '.join(map(repr, lists))}" if lists else "use pp = 1",
        )
    largest = max(sizes, key=lambda path: sizes[path])
    inside = f"{largest}." if largest else ""
    rivals = [
        path
        for path, size in sizes.items()
        if path != largest and not path.startswith(inside) and size >= _RIVAL * sizes[largest]
    ]
    if rivals:
        raise JobError(
            f"the model has several lists of blocks a pipeline could be split along: {', '.join([largest, *rivals])}",
            code="support.pipeline-several-lists",
            fix=f"name one, Job(layers={largest!r}), or the one that runs first where a later one uses what it made; or"
            " use pp = 1",
        )
    return largest


def count_layers(module: nn.Module, layers: str) -> int:
    """Return how many layers the list named `layers` has."""
    return len(own_modules(module.get_submodule(layers)))  # children() leaves out repeated ones


def _repeats(submodule: nn.Module) -> bool:
    children = list(submodule.children())
    return len(children) > 1 and len({type(child) for child in children}) == 1


def split_stages(
    module: nn.Module,
    split: StageSplit,
    rank: int,
    *,
    layers: str,
    device: torch.device,
    dtype: torch.dtype | None = None,
) -> list[Stage]:
    """Return the stages that `rank` (along pp) runs, in order; takes `module` apart, which may be on the meta device.

    `layers` names the list to split along, `device` is where the stages will run. Of a stage, `named_parameters()`
    gives exactly what it owns, under the names of the whole model: its layers; on the first stage also what the model
    registers before the list, on the last what comes after. Buffers outside the list stay on every stage. A parameter
    tied between the first and the last stage is on both, under its first name.
    `dtype` is what parameters are computed in where that is not their own dtype.
    """
    owners = _owners(module, split, layers)
    ties = find_ties(module, owners, split, layers)
    *others, last = split.stages_of(rank)
    copies = [(stage, _copy_structure(module)) for stage in others]
    fake = partial(stand_in, device=device, dtype=dtype)
    return [
        _make_stage(own, split, stage, layers=layers, owners=owners, ties=ties, fake=fake)
        for stage, own in [*copies, (last, module)]
    ]


def check_stages(module: nn.Module, split: StageSplit, layers: str) -> None:
    """Refuse ties between stages that no pipeline can have; `module` may be on the meta device."""
    find_ties(module, _owners(module, split, layers), split, layers)


def _owners(module: nn.Module, split: StageSplit, layers: str) -> dict[str, int]:
    """Name the stage of every parameter and buffer, under every name it has."""
    keys = list(own_modules(module.get_submodule(layers)))  # a Sequential may have names for keys
    if len(keys) != split.num_layers:
        raise JobError(
            f"{layers or 'the model'} has {len(keys)} layers, the pipeline is split for {split.num_layers}",
            code="plan.pipeline-layer-count",
        )
    prefix = f"{layers}." if layers else ""
    stages = {f"{prefix}{key}": split.stage_of(index) for index, key in enumerate(keys)}
    owners: dict[str, int] = {}
    outside = 0
    for path, submodule in module.named_modules(remove_duplicate=False):
        own = {**own_parameters(submodule), **own_buffers(submodule)}
        for key in (key for key, tensor in own.items() if tensor is not None):
            name = f"{path}.{key}" if path else key
            layer = prefix + name.removeprefix(prefix).partition(".")[0] if name.startswith(prefix) else ""
            if layer in stages:
                outside = split.num_stages - 1
            owners[name] = stages.get(layer, outside)
    return owners


def _copy_structure(module: nn.Module) -> nn.Module:
    """Copy modules and buffers but no parameter: a stage keeps only its own, and those it shares are one on a rank."""
    return copy.deepcopy(module, {id(parameter): parameter for parameter in module.parameters()})


def _make_stage(
    module: nn.Module,
    split: StageSplit,
    index: int,
    *,
    layers: str,
    owners: dict[str, int],
    ties: Ties,
    fake: Callable[[Tensor], Tensor],
) -> Stage:
    gate = Gate(layers, split.layers(index))
    children = own_modules(module.get_submodule(layers))
    absent: list[tuple[str, nn.Module]] = []
    for number, (key, layer) in enumerate(children.items()):
        if number not in split.layers(index) and layer is not None:
            path = f"{layers}.{key}" if layers else key
            children[key] = stub = _stub(layer, gate, number, fake)
            # The layer itself as well: another one may refer to it by an attribute of its own.
            absent += [(path, stub), *layer.named_modules(prefix=path)]
    paths: dict[nn.Module, list[str]] = {}
    for path, submodule in module.named_modules(remove_duplicate=False):
        paths.setdefault(submodule, []).append(path)
    for submodule, (path, *more) in paths.items():
        away = [key for key in own_parameters(submodule) if _is_away([path, *more], key, owners, index)]
        for key in away:
            # A plain attribute: neither optimizers nor casts, shards or state dicts take it for a parameter.
            submodule.__dict__[key] = fake(cast("Tensor", own_parameters(submodule).pop(key)))
        if away:
            submodule.register_forward_pre_hook(lambda *_, path=path: gate.check_foreign(path))
        buffers = own_buffers(submodule)
        if isinstance(submodule, BatchNormBase) and (
            away or any(_is_away([path], key, owners, index) for key in buffers)
        ):
            # Its output is NaN here; torch's own forward would refuse a single row, which a synced one does not.
            submodule.__dict__["forward"] = stand_in
    guard_walks(module, gate, [name for name, owner in owners.items() if owner != index])
    foreign = frozenset(name for name, _ in module.named_buffers() if owners.get(name, index) != index)
    values = _stage_values(module, layers, split.layers(index), absent, is_last=index == split.num_stages - 1)
    return Stage(module, gate, values, index=index, num_stages=split.num_stages, foreign_buffers=foreign, ties=ties)


def _stage_values(
    module: nn.Module, layers: str, own: range, absent: list[tuple[str, nn.Module]], *, is_last: bool
) -> StageValues:
    """Return what watches the values that this stage's layers leave on modules."""
    keys = list(own_modules(module.get_submodule(layers)))
    prefixes = tuple(f"{layers}.{keys[number]}." if layers else f"{keys[number]}." for number in own)
    skipped = {submodule for _, submodule in absent}
    inside: dict[str, nn.Module] = {}
    outside: dict[str, nn.Module] = {}
    for path, submodule in nn.Module.named_modules(module):
        if submodule not in skipped:
            (inside if f"{path}.".startswith(prefixes) else outside)[path] = submodule
    return StageValues(inside, absent, outside, is_last=is_last)


def _is_away(paths: Sequence[str], key: str, owners: Mapping[str, int], index: int) -> bool:
    """Whether a tensor of a module, which may be registered several times, belongs to other stages only."""
    stages = {owners.get(f"{path}.{key}" if path else key, index) for path in paths}
    return index not in stages


def _stub(layer: nn.Module, gate: Gate, number: int, fake: Callable[[Tensor], Tensor]) -> nn.Module:
    """Return an empty layer: of the same class, with all its attributes, since models ask their layers for them.

    Its submodules are plain attributes, which nobody takes for modules of this stage; parameters among them are NaN.
    """
    for submodule in layer.modules():
        own = own_parameters(submodule)
        submodule.__dict__ |= {key: None if value is None else fake(value) for key, value in own.items()}
        own.clear()
    stub = copy.copy(layer)
    nn.Module.__init__(stub)
    stub.__dict__ |= {**own_modules(layer), **own_buffers(layer)}
    stub.forward = lambda *_, **__: gate.skip(number)
    return stub


class Stage(nn.Module):
    """One stage of a pipeline; replaces the user's module: same submodules, same names.

    Called with the tensors that the stage before sent (none on the first), it runs `program`. Returns the tensors to
    send on or, on the last stage, what the program returned.
    """

    program: Callable[[nn.Module], Any]
    """Runs the user's module on one micro-batch; set before each call."""
    incoming: Structure | None = None
    """How the tensors that arrive were arranged in the output of the layer before; set before the first call."""
    outgoing: Structure | None = None
    """The same of what was sent last."""

    def __init__(
        self,
        module: nn.Module,
        gate: Gate,
        values: StageValues,
        *,
        index: int,
        num_stages: int,
        foreign_buffers: frozenset[str],
        ties: Ties,
    ) -> None:
        """`foreign_buffers` are those whose values count on another stage only; `ties` are those of the whole model."""
        self.__dict__["_user_module"] = module  # not as a child: its own children are shared instead
        training = module.training
        super().__init__()
        self.training = training
        self.__dict__ |= {name: module.__dict__[name] for name in ("_modules", "_parameters", "_buffers")}
        self._gate = gate
        self.values: StageValues | None = values
        """Watches what layers leave on modules, until the first step is done; then None."""
        self.index = index
        self.num_stages = num_stages
        self.foreign_buffers = foreign_buffers
        self.model_ties = ties

    @property
    def training(self) -> bool:
        """The user's module decides."""
        return self.user_module.training

    @training.setter
    def training(self, mode: bool) -> None:
        self.user_module.training = mode

    def named_parameters(self, prefix: str = "", *args: Any, **options: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield what this stage owns, each by the first name that the whole model has for it; options as torch's."""
        start = f"{prefix}." if prefix else ""
        for name, parameter in super().named_parameters("", *args, **options):
            yield start + self.model_ties.first_names.get(name, name), parameter

    @property
    def user_module(self) -> nn.Module:
        """The user's module, with the layers of other stages skipped."""
        module: nn.Module = self.__dict__["_user_module"]
        return module

    @property
    def received(self) -> Any:
        """What the stage before sent for the forward pass that is running; None outside of one."""
        return self._gate.received

    @property
    def is_first(self) -> bool:
        """Whether this stage reads the batch alone."""
        return self.index == 0

    @property
    def is_last(self) -> bool:
        """Whether this stage computes the loss."""
        return self.index == self.num_stages - 1

    def connect(self) -> None:
        """Have forward end after this stage's last layer; called once, after all transforms of the layers."""
        layers: Any = self.user_module.get_submodule(self._gate.layers)  # which may be the model itself
        first, last = layers[self._gate.own[0]], layers[self._gate.own[-1]]
        if self.values is not None:
            self.values.connect(first, last)  # before the gate's hook, which leaves
        if not self.is_last:
            last.register_forward_hook(self._gate.leave)

    def forward(self, *received: Tensor) -> Any:
        """Run this stage on one micro-batch."""
        self._gate.open(receive(received), self.incoming)
        if self.values is not None:
            self.values.begin()
        try:
            result = self.program(self.user_module)
            self._check_end()
        except Left as left:
            self._check_start()
            tensors, self.outgoing = pack(left.output, self._gate.name_of(self._gate.own[-1]))
            return tensors
        except AttributeError as error:
            if self.values is not None:
                self.values.explain(error)
            raise
        except RuntimeError as error:
            if "more than one element of the written-to tensor" not in str(error):
                raise
            raise JobError(
                "the model writes into a parameter in its forward pass, and that one is on another pipeline stage",
                code="support.pipeline-parameter-write",
                fix="use pp = 1",
            ) from error
        finally:
            self._gate.close()
            if self.values is not None:
                self.values.end()
        return result

    def refuse_nan(self, given: Sequence[Tensor], sent: Sequence[Tensor]) -> None:
        """Refuse a model that made NaN of what it was given: it used tensors of other stages; called after forward."""
        strangers = self._gate.strangers
        if any(bool(tensor.isnan().any()) for tensor in given):
            return
        if any(bool(tensor.isnan().any()) for tensor in sent):
            used = f" of {strangers[0] or 'the model itself'}" if strangers else ""
            raise JobError(
                f"pipeline stage {self.index} made NaN of finite numbers: it used a parameter{used} of another stage,"
                f" which is NaN here (what is registered before {self._gate.layers} is on the first stage, what comes"
                " after it on the last)",
                code="support.pipeline-foreign-parameter",
                fix="register parameters on the side of the layers where forward uses them, or use pp = 1",
            )

    def _check_start(self) -> None:
        if not self._gate.has_skipped_all:
            raise JobError(
                f"layer {self._gate.name_of(self._gate.own[-1])} ran before all layers in front of it",
                code="support.pipeline-layer-order",
                fix="pipelines need every layer once, in the order of the list; use pp = 1",
            )

    def _check_end(self) -> None:
        if not self.is_last:
            raise JobError(
                f"the forward pass ended without layer {self._gate.name_of(self._gate.own[-1])}",
                code="support.pipeline-layer-skipped",
                fix="pipelines need every layer in every forward; use pp = 1",
            )
        self._check_start()
