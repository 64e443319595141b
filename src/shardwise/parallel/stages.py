"""Pipeline stages, which run the user's forward with their own layers and skip the layers of other stages.

Models need not be rewritten as a list of stages. A stage calls the full forward. The gate (`stage_gate`) skips the
layers of earlier stages, passes the received activations to the stage's first layer, and exits forward with an
exception after its last layer. The invariant: tensors of other stages are NaN or absent, so that using them raises an
error instead of training on a wrong value. The schedules are from torch.distributed.pipelining.
"""

from __future__ import annotations

import copy
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn

from shardwise.errors import JobError, nearest
from shardwise.parallel.skeleton import joined
from shardwise.parallel.stage_gate import (
    Gate,
    StageExit,
    Structure,
    Ties,
    find_ties,
    guard_iteration,
    nan_placeholder,
    pack,
    receive,
)
from shardwise.parallel.stage_values import StageValues
from shardwise.torch_private.dispatch import BatchNormBase, own_buffers, own_modules, own_parameters

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from shardwise.plans.pipeline import StageSplit

_RIVAL = 0.25
"""If a second list of blocks has at least this share of the largest list's parameters, the user must choose a list."""


def find_layers(module: nn.Module, name: str | None = None) -> str:
    """Return the name of the block list to split into pipeline stages: `name` if it is set, else the largest list."""
    kinds = nn.ModuleList | nn.Sequential
    lists = {path: submodule for path, submodule in module.named_modules() if isinstance(submodule, kinds)}
    if name is not None:
        if name not in lists:
            raise JobError(
                f"Job.layers must name a ModuleList or Sequential of the model, got {name!r}",
                code="job.layers-not-found",
                fix=nearest(name, lists),
            )
        return name
    sizes: dict[str, int] = {}
    for path, blocks in lists.items():
        if _repeats(blocks):
            sizes[path] = sum(parameter.numel() for parameter in blocks.parameters())
    if not any(sizes.values()):
        fix = "set pp=1"
        if lists:
            fix = f"set Job(layers=...) to one of {', '.join(map(repr, lists))}"
        raise JobError(
            "the model has no list of repeated blocks for a pipeline", code="support.pipeline-no-blocks", fix=fix
        )
    largest = max(sizes, key=lambda path: sizes[path])
    inside = joined(largest, "")
    rivals = []
    for path, size in sizes.items():
        is_inside = path == largest or path.startswith(inside)
        if not is_inside and size >= _RIVAL * sizes[largest]:
            rivals.append(path)
    if rivals:
        raise JobError(
            f"the model has several lists of blocks for a pipeline: {', '.join([largest, *rivals])}",
            code="support.pipeline-several-lists",
            fix=f"set Job(layers={largest!r}), or the list that runs first if others use its outputs, or set pp=1",
        )
    return largest


def count_layers(module: nn.Module, layers: str) -> int:
    """Return the number of layers of the list named `layers`."""
    return len(own_modules(module.get_submodule(layers)))  # children() omits duplicates


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
    """Return the stages of pipeline rank `rank` in order; modifies `module`, which may be on the meta device.

    `layers` names the list to split, and the stages will run on `device`. `named_parameters()` of a stage returns the
    parameters that it owns, under their names in the full model: its layers, on the first stage also the modules
    registered before the list, and on the last stage also the modules after it. Buffers outside the list are on every
    stage. A parameter tied between the first and the last stage is on both, under its first name. `dtype` is the
    compute dtype if it differs from the parameters' dtype.
    """
    owners = _owners(module, split, layers)
    ties = find_ties(module, owners, split, layers)
    *others, last = split.stages_of(rank)
    modules = {stage: _copy_structure(module) for stage in others}
    modules[last] = module
    fake = partial(nan_placeholder, device=device, dtype=dtype)
    stages = []
    for index, own in modules.items():
        stage = _make_stage(own, split, index, layers=layers, owners=owners, ties=ties, fake=fake)
        stages.append(stage)
    return stages


def check_stages(module: nn.Module, split: StageSplit, layers: str) -> None:
    """Raise JobError for tied parameters that a pipeline does not support; `module` may be on the meta device."""
    find_ties(module, _owners(module, split, layers), split, layers)


def _owners(module: nn.Module, split: StageSplit, layers: str) -> dict[str, int]:
    """Return the stage that owns each parameter and buffer, keyed by each of its names."""
    keys = list(own_modules(module.get_submodule(layers)))  # keys of a Sequential may be names
    if len(keys) != split.num_layers:
        raise JobError(
            f"the pipeline split expects {split.num_layers} layers in {layers or 'the model'}, got {len(keys)}",
            code="plan.pipeline-layer-count",
        )
    prefix = joined(layers, "")
    stages = {f"{prefix}{key}": split.stage_of(index) for index, key in enumerate(keys)}
    owners: dict[str, int] = {}
    outside = 0
    for path, submodule in module.named_modules(remove_duplicate=False):
        for key, tensor in {**own_parameters(submodule), **own_buffers(submodule)}.items():
            if tensor is None:
                continue
            name = joined(path, key)
            layer = ""
            if name.startswith(prefix):
                layer = prefix + name.removeprefix(prefix).partition(".")[0]
            if layer in stages:
                outside = split.num_stages - 1
            owners[name] = stages.get(layer, outside)
    return owners


def _copy_structure(module: nn.Module) -> nn.Module:
    """Copy modules and buffers but share parameters, because tied parameters must be one object on a rank."""
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
            path = joined(layers, key)
            children[key] = stub = _stub(layer, gate, number, fake)
            # Include the layer itself, because another module may refer to it by an attribute.
            absent += [(path, stub), *layer.named_modules(prefix=path)]
    paths: dict[nn.Module, list[str]] = {}
    for path, submodule in module.named_modules(remove_duplicate=False):
        paths.setdefault(submodule, []).append(path)
    for submodule, (path, *more) in paths.items():
        away = [key for key in own_parameters(submodule) if _is_away([path, *more], key, owners, index)]
        for key in away:
            # A plain attribute, so that optimizers, casts, sharding and state dicts ignore it.
            submodule.__dict__[key] = fake(cast("Tensor", own_parameters(submodule).pop(key)))
        if away:
            submodule.register_forward_pre_hook(lambda *_, path=path: gate.check_foreign(path))
        away_buffers = [key for key in own_buffers(submodule) if _is_away([path], key, owners, index)]
        if isinstance(submodule, BatchNormBase) and (away or away_buffers):
            # The output is NaN on this stage. torch's forward rejects a single row, which a synchronized norm accepts.
            submodule.__dict__["forward"] = nan_placeholder
    guard_iteration(module, gate, [name for name, owner in owners.items() if owner != index])
    foreign = frozenset(name for name, _ in module.named_buffers() if owners.get(name, index) != index)
    values = _stage_values(module, layers, split.layers(index), absent, is_last=index == split.num_stages - 1)
    return Stage(module, gate, values, index=index, num_stages=split.num_stages, foreign_buffers=foreign, ties=ties)


def _stage_values(
    module: nn.Module, layers: str, own: range, absent: list[tuple[str, nn.Module]], *, is_last: bool
) -> StageValues:
    """Return the StageValues that record the attributes changed by this stage's layers."""
    keys = list(own_modules(module.get_submodule(layers)))
    prefixes = tuple(joined(layers, f"{keys[number]}.") for number in own)
    skipped = {submodule for _, submodule in absent}
    inside: dict[str, nn.Module] = {}
    outside: dict[str, nn.Module] = {}
    for path, submodule in nn.Module.named_modules(module):
        if submodule in skipped:
            continue
        if f"{path}.".startswith(prefixes):
            inside[path] = submodule
        else:
            outside[path] = submodule
    return StageValues(inside, absent, outside, is_last=is_last)


def _is_away(paths: Sequence[str], key: str, owners: Mapping[str, int], index: int) -> bool:
    """Return whether other stages own a tensor under all of its names; it may be registered several times."""
    return all(owners.get(joined(path, key), index) != index for path in paths)


def _stub(layer: nn.Module, gate: Gate, number: int, fake: Callable[[Tensor], Tensor]) -> nn.Module:
    """Return a placeholder for a layer of another stage, of the same class and with the attributes of the layer.

    Its submodules are plain attributes, so that they are not modules of this stage; their parameters are NaN.
    """
    for submodule in layer.modules():
        own = own_parameters(submodule)
        for key, value in own.items():
            submodule.__dict__[key] = None if value is None else fake(value)
        own.clear()
    stub = copy.copy(layer)
    nn.Module.__init__(stub)
    stub.__dict__ |= {**own_modules(layer), **own_buffers(layer)}
    stub.forward = lambda *_, **__: gate.skip(number)
    return stub


class Stage(nn.Module):
    """One stage of a pipeline, which replaces the user's module and has the same submodules and names.

    Its inputs are the tensors that the previous stage sent (none on the first stage). It runs `program` and returns the
    tensors to send or, on the last stage, the result of the program.
    """

    program: Callable[[nn.Module], Any]
    """Callable that runs the user's module on one micro-batch; set before each call."""
    incoming: Structure | None = None
    """The structure of the received tensors in the output of the previous layer; set before the first call."""
    outgoing: Structure | None = None
    """The structure of the most recently sent tensors."""

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
        """Create a stage; other stages own `foreign_buffers`, and `ties` are the tied parameters of the full model."""
        self.__dict__["_user_module"] = module  # not as a child: its children are shared instead
        training = module.training
        super().__init__()
        self.training = training
        self.__dict__ |= {name: module.__dict__[name] for name in ("_modules", "_parameters", "_buffers")}
        self._gate = gate
        self.values: StageValues | None = values
        """Record of attribute accesses in the first step; None afterwards."""
        self.index = index
        self.num_stages = num_stages
        self.foreign_buffers = foreign_buffers
        self.model_ties = ties

    @property
    def training(self) -> bool:
        """Whether the user's module is in training mode."""
        return self.user_module.training

    @training.setter
    def training(self, mode: bool) -> None:
        self.user_module.training = mode

    def named_parameters(self, prefix: str = "", *args: Any, **options: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield the parameters of this stage under their first names in the full model; options as in torch."""
        start = joined(prefix, "")
        for name, parameter in super().named_parameters("", *args, **options):
            yield start + self.model_ties.first_names.get(name, name), parameter

    @property
    def user_module(self) -> nn.Module:
        """The user's module, with the layers of other stages skipped."""
        module: nn.Module = self.__dict__["_user_module"]
        return module

    @property
    def received(self) -> Any:
        """The activations received for the current forward pass; None outside a forward pass."""
        return self._gate.received

    @property
    def is_first(self) -> bool:
        """Whether this is the first stage, which reads the batch and receives no activations."""
        return self.index == 0

    @property
    def is_last(self) -> bool:
        """Whether this is the last stage, which computes the loss."""
        return self.index == self.num_stages - 1

    def connect(self) -> None:
        """Make forward exit after this stage's last layer; call once, after all transforms of the layers."""
        layers: Any = self.user_module.get_submodule(self._gate.layers)  # may be the model itself
        first, last = layers[self._gate.own[0]], layers[self._gate.own[-1]]
        if self.values is not None:
            self.values.connect(first, last)  # before the gate's hook, which exits
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
        except StageExit as exit_:
            self._check_start()
            tensors, self.outgoing = pack(exit_.output, self._gate.name_of(self._gate.own[-1]))
            return tensors
        except AttributeError as error:
            if self.values is not None:
                self.values.explain(error)
            raise
        except RuntimeError as error:
            if "more than one element of the written-to tensor" not in str(error):
                raise
            raise JobError(
                "forward writes to a parameter that is on another pipeline stage",
                code="support.pipeline-parameter-write",
                fix="set pp=1",
            ) from error
        finally:
            self._gate.close()
            if self.values is not None:
                self.values.end()
        return result

    def check_nan(self, inputs: Sequence[Tensor], sent: Sequence[Tensor]) -> None:
        """Raise JobError if this stage computed NaN from finite inputs, by using parameters of other stages."""
        if any(bool(tensor.isnan().any()) for tensor in inputs):
            return
        if any(bool(tensor.isnan().any()) for tensor in sent):
            used = ""
            if self._gate.foreign:
                used = f" of {self._gate.foreign[0] or 'the model itself'}"
            raise JobError(
                f"pipeline stage {self.index} computed NaN from finite inputs: it used a parameter{used} of another"
                f" stage, which is NaN here (modules registered before {self._gate.layers} are on the first stage, and"
                " those after it on the last)",
                code="support.pipeline-foreign-parameter",
                fix="register each parameter before or after the layers, in the order of forward, or set pp=1",
            )

    def _check_start(self) -> None:
        if not self._gate.has_skipped_all:
            raise JobError(
                f"forward called layer {self._gate.name_of(self._gate.own[-1])} before earlier layers of the list",
                code="support.pipeline-layer-order",
                fix="call every layer once, in the order of the list, or set pp=1",
            )

    def _check_end(self) -> None:
        if not self.is_last:
            raise JobError(
                f"forward returned without calling layer {self._gate.name_of(self._gate.own[-1])}",
                code="support.pipeline-layer-skipped",
                fix="call every layer in every forward, or set pp=1",
            )
        self._check_start()
