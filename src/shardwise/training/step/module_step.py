"""A step over a torch module: buffers, parameter names, random streams, whole weights and snapshots."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import contextmanager
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from shardwise.checkpoint.convert.peft import merge_state
from shardwise.job.generators import host_states, seed_generators, set_host_states
from shardwise.parallel.batch_norm import BatchNorm
from shardwise.parallel.collectives import full_state_dict, own_buffers, stages_of, unwrap
from shardwise.parallel.gradsync import local
from shardwise.parallel.lora import adapted as adapted_parts
from shardwise.parallel.stages import Stage
from shardwise.parallel.tensor_rules import is_transposed
from shardwise.torch_private.modules import NormBase

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from torch import nn
    from torch.optim import Optimizer

    from shardwise.parallel.optimizer import Optimized
    from shardwise.training.step.update import Update


class ModuleStep:
    """A step whose model is a torch module, whole, cut, or the list of this rank's stages."""

    model: nn.Module
    optimizer: Optimizer
    optimized: Optimized
    update: Update

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield the name, as in the user's module, and parameter of all layers on this rank's stages."""
        raise NotImplementedError

    def buffers(self) -> dict[str, Tensor]:
        """Return the buffers whose values count on this rank."""
        return dict(own_buffers(self.model))

    def saved_buffers(self) -> dict[str, Tensor]:
        """Return those of them that a state dict has."""
        found: dict[str, Tensor] = {}
        for stage in stages_of(self.model):
            foreign = getattr(stage, "foreign_buffers", ())
            saved = stage.state_dict(keep_vars=True)
            found |= {name: buffer for name, buffer in stage.named_buffers() if name in saved and name not in foreign}
        return found

    def common_buffers(self, *, broadcast: bool) -> dict[str, Tensor]:
        """Return the buffers that ranks hold alike; where DDP broadcasts them, it makes some equal only in forward."""
        norms = [module for module in self.model.modules() if isinstance(module, NormBase)]
        shared = [norm for norm in norms if isinstance(norm, BatchNorm) and norm.group is not None]
        synced = {id(buffer) for norm in shared for buffer in norm.buffers()}
        # Statistics of the rows of one rank differ by design.
        own = {id(buffer) for norm in norms for buffer in norm.buffers()} - synced
        return {
            name: buffer
            for name, buffer in own_buffers(self.model)
            if id(buffer) in synced or not (broadcast or id(buffer) in own)
        }

    def tied(self) -> dict[str, str]:
        """Return the other names of shared parameters, each with the one it is saved under."""
        stages = stages_of(self.model)
        if isinstance(stages[0], Stage):
            return dict(stages[0].model_ties.first_names)  # every stage knows those of all
        kept = {id(parameter): name for name, parameter in self.named_parameters()}
        everywhere = stages[0].named_parameters(remove_duplicate=False)
        return {name: kept[id(parameter)] for name, parameter in everywhere if kept[id(parameter)] != name}

    def whole_weights(self) -> dict[str, Tensor]:
        """Communicate over the world to return the state dict of the user's own model on rank 0, {} elsewhere."""
        return whole_weights(self.model)

    @contextmanager
    def evaluating(self, dp_group: dist.ProcessGroup | None) -> Iterator[None]:
        """Put the model into evaluation, with rank 0's buffers on all; communicates over the data-parallel group.

        Local batch statistics differ by rank, and one model is evaluated, not one per rank.
        """
        module = unwrap(self.model)
        modes = [(part, part.training) for part in module.modules()]
        module.eval()
        if dp_group is not None:
            for buffer in module.buffers():
                dist.broadcast(buffer, group=dp_group, group_src=0)
        try:
            yield
        finally:
            for part, was_training in modes:  # one by one: some may have been frozen in eval mode by the user
                part.training = was_training

    def random_state(self) -> dict[str, Tensor]:
        """Return the states of the generators that a step draws from, by name."""
        states = {"cpu": torch.get_rng_state(), **host_states()}
        if torch.cuda.is_available() and torch.cuda.is_initialized():
            states["cuda"] = torch.cuda.get_rng_state()
        return states

    def set_random_state(self, states: Mapping[str, Tensor]) -> None:
        """Go on drawing where `random_state` was called."""
        torch.set_rng_state(states["cpu"])
        set_host_states(states)
        if "cuda" in states and torch.cuda.is_available():
            torch.cuda.set_rng_state(states["cuda"])

    def seed(self, number: int) -> None:
        """Begin fresh streams of random numbers."""
        seed_generators(number)

    def own_gradients(self) -> dict[str, Tensor]:
        """Return this rank's own part of the summed gradients, while they are not yet used; no communication."""
        found = ((name, parameter.grad) for name, parameter in self.named_parameters())
        return {name: local(gradient) for name, gradient in found if gradient is not None}

    def put_gradients(self, gradients: Mapping[str, Tensor]) -> None:
        """Replace this rank's own gradients before they are used."""
        for name, gradient in self.own_gradients().items():
            gradient.copy_(gradients[name])

    def snapshot(self) -> Callable[[], None]:
        """Keep this moment's values, states and streams, on the host; returns what brings them back."""
        values = [parameter.detach() for _, parameter in self.named_parameters()]
        values += [buffer for _, buffer in self.model.named_buffers()]
        values += self.update.state().values()
        put_back = snapshot(values, self.optimizer)
        streams = self.random_state()

        def restore() -> None:
            put_back()
            self.optimized.refresh()
            self.set_random_state(streams)

        return restore


# What a step holds of a training, under the names of the user's own module: values and optimizer states.


Forms = Mapping[str, tuple[tuple[int, ...], torch.dtype]]
"""Whole shape and dtype of tensors by name."""


class Held(NamedTuple):
    """This rank's tensors: whole ones, and pieces as DTensors."""

    values: dict[str, Tensor]
    """Of parameters, in the dtype they are trained in."""
    states: dict[str, Tensor]
    """Of the optimizer, as PARAMETER/KEY."""
    buffers: Mapping[str, Tensor] = MappingProxyType({})
    """That a state dict has."""
    update: Mapping[str, Tensor] = MappingProxyType({})
    """Of the update (a loss scale), and of what brings replicas together that train on their own, as KEY/PARAMETER."""


def states_of(optimized: Optimized) -> dict[str, Tensor]:
    """Return an optimizer's states as PARAMETER/KEY; no copies, no communication."""
    found = {}
    for name, parameter in optimized.named:
        for key, value in optimized.optimizer.state.get(parameter, {}).items():
            if isinstance(value, Tensor):
                found[f"{name}/{key}"] = value
    return found


def make_states(optimized: Optimized, saved: Forms) -> None:
    """Give the optimizer the states that `saved` names, as PARAMETER/KEY.

    A state shaped like its parameter is sharded as that is; any other (a step count) is whole on every rank. Beside a
    scalar parameter the count is the one that torch's optimizers call "step".
    """
    for name, parameter in optimized.named:
        prefix = f"{name}/"
        state = optimized.optimizer.state[parameter]
        for full, (shape, dtype) in saved.items():
            if full.startswith(prefix):
                key = full.removeprefix(prefix)
                is_like = tuple(parameter.shape) == shape and (bool(shape) or key != "step")
                state[key] = _like(parameter, shape, dtype, None if is_like else optimized.optimizer)


def _like(parameter: nn.Parameter, shape: tuple[int, ...], dtype: torch.dtype, optimizer: Optimizer | None) -> Tensor:
    """Return zeros: without `optimizer` in the form of the parameter, else a count where that optimizer has it."""
    if optimizer is None:
        return torch.zeros_like(parameter, dtype=dtype, requires_grad=False)
    device = torch.device("cpu")
    for group in optimizer.param_groups:
        if counts_on_device(group) and any(each is parameter for each in group["params"]):
            device = parameter.device
    return torch.zeros(shape, dtype=dtype, device=device)


def counts_on_device(group: Mapping[str, object]) -> bool:
    """Whether an optimizer counts its steps where its parameters are: fused ones do, others on the host."""
    return bool(group.get("fused") or group.get("capturable"))


# Whole weights of a torch module, as the user's own model has them, from any strategy; and what its adapters are.


T = TypeVar("T")


def whole_weights(model: nn.Module) -> dict[str, Tensor]:
    """Communicate over the world to return the state dict of the user's own model on rank 0, {} elsewhere.

    Adapters are merged into the weights they stand beside.
    """
    weights = full_state_dict(model)
    for alias, name in _tied(model).items():
        if alias in weights:
            weights[alias] = weights[name]  # one memory, so one copy in the file
    lora = adapter_facts(model)
    return weights if lora is None else merge_state(weights, lora)


def adapter_facts(model: nn.Module) -> dict[str, Any] | None:
    """Communicate over the world to say what the adapters of a model are (Lora.facts), None without; on every rank."""
    found = [item for stage in stages_of(model) for item in adapted_parts(stage)]
    mine = (found[0][1].lora if found else None, [name for name, part in found if is_transposed(part)])
    everyone = from_all(mine)
    lora = next((own for own, _ in everyone if own is not None), None)
    return None if lora is None else lora.facts({name for _, names in everyone for name in names})


def from_all(mine: T) -> list[T]:
    """Return what every rank hands in; communicates over the world."""
    if not dist.is_initialized() or dist.get_backend() == "fake":
        return [mine]
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    return everyone


def _tied(model: nn.Module) -> dict[str, str]:
    """Return the names under which the model has a weight that an earlier name has too."""
    tied = {}
    for stage in stages_of(model):
        if isinstance(stage, Stage):
            return dict(stage.model_ties.first_names)  # of all stages
        first: dict[int, str] = {}
        for name, value in stage.state_dict(keep_vars=True).items():
            original = first.setdefault(id(value), name)
            if original != name:
                tied[name] = original
    return tied


# Snapshots of a training: one moment's tensors, optimizer states and random streams, and the way back to it.


def snapshot(tensors: Sequence[Tensor], optimizer: Optimizer) -> Callable[[], None]:
    """Keep tensors and an optimizer's states on the host; returns what writes them back, and takes out what is new."""
    states = optimizer.state
    known = {parameter: set(state) for parameter, state in states.items()}
    saved, plain = list(tensors), {}
    for parameter, state in states.items():
        saved += [value for value in state.values() if isinstance(value, Tensor)]
        plain[parameter] = {key: value for key, value in state.items() if not isinstance(value, Tensor)}
    pairs = [(local(tensor), on_host(local(tensor))) for tensor in saved]

    @torch.no_grad()
    def restore() -> None:
        for tensor, before in pairs:
            tensor.copy_(before)
        for parameter in list(states):
            if parameter not in known:
                del states[parameter]
                continue
            for key in set(states[parameter]) - known[parameter]:
                del states[parameter][key]
            states[parameter].update(plain[parameter])

    return restore


def on_host(tensor: Tensor) -> Tensor:
    """Return a copy on the host."""
    return tensor.detach().to("cpu", copy=True)
